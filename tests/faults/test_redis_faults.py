"""Redis dies, fills up and forgets under a running pipeline: it waits, says so, and goes on; nothing is lost or doubled."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.replies import mapping_of
from tests.support.drivers import APPS, Driver
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.drivers, pytest.mark.faults]
KEYS = HandlerKeys("bank", "book", "bookings")
MESSAGES = 2_000
BATCH = MESSAGES // 8


class Bank:
    """The bank's pipeline over a server of the test's own."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.server = server
        self.client = Client(server.url)
        self.driver = Driver(
            f"{APPS}/killer_app.py:app", url=server.url, folder=folder, options=("--max-per-batch", str(BATCH))
        )

    def publish(self, count: int) -> None:
        for start in range(0, count, 1000):
            rows = [
                ("XADD", "bookings", "*", "account", f"a{n % 50}", "n", n, "amount", 1)
                for n in range(start, start + 1000)
            ]
            self.client.pipeline(rows)

    def committed(self) -> int:
        return int(
            self.client.retry_while_unavailable(
                lambda: self.client.execute("HGET", KEYS.meta, "committed"), what="test"
            )
            or 0
        )

    def wait_for(self, goal: int) -> None:
        eventually(lambda: self.committed() >= goal, f"{goal} commits", log=self.driver.errors)

    def check(self, count: int) -> None:
        """Every booking has exactly one output, in order, and the balances are right."""
        self.wait_for(count)
        outputs: dict[bytes, list[int]] = {}
        for _, items in self.client.execute("XRANGE", "{bookings}.balances", "-", "+"):
            fields = mapping_of(items)
            outputs.setdefault(fields[b"account"], []).append(int(fields[b"n"]))
            assert int(fields[b"balance"]) == len(outputs[fields[b"account"]])
        assert outputs == {f"a{k}".encode(): list(range(k, count, 50)) for k in range(50)}
        assert self.committed() == count


@pytest.fixture
def bank(millstream_fresh_server: EmbeddedServer, tmp_path: Path) -> Iterator[Bank]:
    bank = Bank(millstream_fresh_server, tmp_path)
    bank.publish(MESSAGES)
    with bank.client, bank.driver:
        bank.driver.start()
        yield bank


def test_a_redis_that_is_killed_or_without_memory_costs_no_message_and_no_attempts(bank: Bank) -> None:
    for goal in (MESSAGES // 8, MESSAGES // 4):
        bank.wait_for(goal)
        bank.server.kill()
        eventually(lambda: "is waiting for Redis" in bank.driver.errors(), "a word about it", log=bank.driver.errors)
        time.sleep(1)  # so that it is missed for a while, the second time as well
        bank.server.start()

    bank.wait_for(MESSAGES // 2)
    bank.client.execute("CONFIG", "SET", "maxmemory", "1")
    eventually(lambda: "maxmemory" in bank.driver.errors(), "a word about it", log=bank.driver.errors)
    stuck_at = bank.committed()
    time.sleep(1)
    assert bank.committed() == stuck_at < MESSAGES
    bank.client.execute("CONFIG", "SET", "maxmemory", "0")
    bank.check(MESSAGES)
    assert bank.client.execute("EXISTS", KEYS.dead_letters) == 0
    assert bank.driver.stop() == 0
