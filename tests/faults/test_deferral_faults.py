"""Deferral on Spark under fire: tasks and drivers are killed while keys are parked, back off and are blocked."""

import os
import random
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from millstream.admin.key_queues import list_queues
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from millstream.testing.history import check_outputs
from millstream.testing.invariants import check_invariants
from tests.support.commandline import call
from tests.support.drivers import APPS, Driver
from tests.support.fields import text_fields
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.keys, pytest.mark.drivers, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
ROUNDS = 2 if SOAK else 1
BATCH_POINTS = ("before-advance", "before-defer", "after-advance", "after-defer") if SOAK else ()
QUEUE_POINTS = ("queue-committed", "queue-loaded", "queue-run") if SOAK else ()
"""Where drivers die, besides the one that runs what is unparked."""
MESSAGES, MORE, BATCH = (1_200, 200, 400) if SOAK else (150, 50, 150)
ACCOUNTS = 50 if SOAK else 15
STUCK, LATE = (5, 3) if SOAK else (2, 2)
"""Accounts with a message that fails until it is mended, and with some that fail once."""
BLOCKED = {"ready", "backing off"}
PARKING, BLOCKING = (HandlerKeys("bank", name, "bookings") for name in ("park", "block"))


class Bookings:
    """What was published, and so is expected."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._numbers: dict[bytes, int] = defaultdict(int)
        self.ids: dict[bytes, list[str]] = defaultdict(list)
        self.stuck_at: dict[bytes, int] = {}

    def publish(self, count: int, chance: random.Random) -> None:
        """Each message is another account's. Those of the first accounts are poisoned at some time; others now and then."""
        rows = []
        for _ in range(count):
            number = chance.randrange(ACCOUNTS)
            account = b"acc-%d" % number
            n = self._numbers[account] = self._numbers[account] + 1
            poison = ""
            if number < STUCK and n == 3:
                poison, self.stuck_at[account] = "stuck", n
            elif STUCK <= number < STUCK + LATE and n % 10 == 2:
                poison = "late"
            rows.append((account, ("account", account, "n", n, *(("poison", poison) if poison else ()))))
        ids = self.client.pipeline([("XADD", "bookings", "*", *items) for _, items in rows])
        for (account, _), entry_id in zip(rows, ids, strict=True):
            self.ids[account].append(entry_id.decode())

    def waiting(self, keys: HandlerKeys) -> dict[str, list[str]]:
        """The entries of each key queue that has any."""
        ids = {
            queue.name: self.client.execute("LRANGE", keys.queue(queue.name), 0, -1)
            for queue in list_queues(self.client, keys)
        }
        return {name.decode()[1:]: [one.decode() for one in found] for name, found in ids.items()}

    def stuck(self) -> dict[str, list[str]]:
        """What has to wait while nothing is mended."""
        return {account.decode(): self.ids[account][n - 1 :] for account, n in self.stuck_at.items()}

    def verify(self, keys: HandlerKeys) -> None:
        """All is done once, in order, with the state that it leaves; nothing waits."""
        rows = [
            text_fields(items) for _, items in self.client.execute("XRANGE", f"{{bookings}}.{keys.handler}", "-", "+")
        ]
        check_outputs(dict(self.ids), [(row["account"].encode(), row["id"]) for row in rows]).raise_if_bad()
        found = self.client.execute("HGETALL", keys.state)
        states = {found[i]: msgspec.msgpack.decode(found[i + 1]) for i in range(0, len(found), 2)}
        sums = {account: (len(ids), len(ids) * (len(ids) + 1) // 2) for account, ids in self.ids.items()}
        assert {account: (state["count"], state["sum"]) for account, state in states.items()} == sums
        assert all(state.keys() == {"count", "sum"} for state in states.values())
        assert (
            self.client.execute("EXISTS", keys.parked, keys.ready, keys.backoff, keys.crashes, keys.dead_letters) == 0
        )
        assert check_invariants(self.client, keys, "bookings") == []


def start(driver: Driver) -> None:
    """Start it, with one core and with two by turns."""
    driver.start("--spark-master", f"local[{1 + driver.starts % 2},4]")


def arm(driver: Driver, point: str, what: str) -> None:
    """Have the `process` that reaches the point die, or the `driver` with it."""
    (driver.folder / f"hit.{point}").unlink(missing_ok=True)
    (driver.folder / f"new.{point}").write_text(what)
    (driver.folder / f"new.{point}").rename(driver.folder / point)


def eventually_hit(driver: Driver, point: str) -> None:
    """Wait until a process has reached a point at which it dies."""
    eventually((driver.folder / f"hit.{point}").exists, f"no process reached {point}", log=driver.errors)


def eventually_killed(driver: Driver, point: str) -> None:
    """Wait until the driver has died at a point."""
    eventually_hit(driver, point)
    driver.ended()


def eventually_at_end(client: Client, driver: Driver, seed: int) -> None:
    """Wait until the batches of both handlers have all that was published."""
    last = client.execute("XREVRANGE", "bookings", "+", "-", "COUNT", 1)[0][0]

    def are_there() -> bool:
        return all(client.execute("HGET", keys.meta, "committed_id") == last for keys in (PARKING, BLOCKING))

    eventually(are_there, f"the end; seed {seed}", log=driver.errors)


def test_killing_tasks_and_drivers_loses_and_doubles_nothing_and_runs_no_parked_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    with EmbeddedServer() as server, Client(server.url) as client:
        bookings = Bookings(client)
        bookings.publish(MESSAGES, chance)
        with Driver(
            f"{APPS}/deferral_app.py:app",
            url=server.url,
            folder=tmp_path,
            options=("--max-per-batch", str(BATCH)),
        ) as driver:
            arm(driver, "after-defer", "process")
            start(driver)
            eventually_hit(driver, "after-defer")
            for point in (*BATCH_POINTS, *QUEUE_POINTS) * ROUNDS:
                arm(driver, point, "driver")
                bookings.publish(MORE, chance)
                eventually_killed(driver, point)
                start(driver)
            eventually_at_end(client, driver, seed)
            for keys, states in ((PARKING, {"parked"}), (BLOCKING, BLOCKED)):
                check_what_waits(bookings, keys, states, driver)
            (tmp_path / "mended.park").touch()
            others = unpark_and_kill(client, bookings, driver)
            bookings.publish(MORE, chance)
            start(driver)
            eventually_at_end(client, driver, seed)
            eventually(lambda: bookings.waiting(PARKING).keys() == set(others), "the first goes on", log=driver.errors)
            parked = {account: bookings.stuck()[account] for account in others}
            assert bookings.waiting(PARKING) == parked, "no operator has unparked them"
            check_what_waits(bookings, BLOCKING, BLOCKED, driver)
            for account in others:
                assert call("key", "unpark", "bank.park", account, url=client.url).code == 0
            (tmp_path / "mended.block").touch()
            eventually(lambda: not list_queues(client, BLOCKING), "blocked keys go on by themselves", log=driver.errors)
            eventually(lambda: not list_queues(client, PARKING), "unparked keys go on", log=driver.errors)
            assert driver.stop() == 0
        with capsys.disabled():
            print(f"\nseed {seed}; driver starts: {driver.starts}")  # noqa: T201
        for keys in (PARKING, BLOCKING):
            bookings.verify(keys)


def check_what_waits(bookings: Bookings, keys: HandlerKeys, states: set[str], driver: Driver) -> None:
    """Of the stuck keys all, from the failure on, in order; parked or to be tried again. Of others nothing."""
    eventually(
        lambda: bookings.waiting(keys).keys() == bookings.stuck().keys(),
        f"{keys.handler}: the stuck keys alone wait",
        log=driver.errors,
    )
    eventually(
        lambda: {queue.state for queue in list_queues(bookings.client, keys)} <= states,
        f"{keys.handler}: they wait as {states}",
        log=driver.errors,
    )
    assert bookings.waiting(keys) == bookings.stuck()
    if keys is PARKING:
        assert check_invariants(bookings.client, keys, "bookings") == []


def unpark_and_kill(client: Client, bookings: Bookings, driver: Driver) -> list[str]:
    """Unpark a stuck key; the driver dies in the middle of the job that runs it. Returns the keys that are still parked."""
    first, *others = bookings.stuck()
    arm(driver, "queue-committed", "driver")
    assert call("key", "unpark", "bank.park", first, url=client.url).code == 0
    eventually_killed(driver, "queue-committed")
    assert bookings.waiting(PARKING).keys() >= set(others)
    return others
