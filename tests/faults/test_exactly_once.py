"""Exactly once under fire: drivers, Python workers and Redis are killed all through a pipeline, and nothing shows.

Redis also refuses writes for lack of memory. The pipeline waits, says so, and goes on.
"""

import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import msgspec
import psutil
import pytest

from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.resp import Command
from millstream.testing.history import check_outputs
from tests.support.drivers import APPS, Driver
from tests.support.fields import text_fields
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.drivers, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
MESSAGES = 200_000 if SOAK else 2_000
KILLS = 50 if SOAK else 3
BATCH = MESSAGES // (KILLS * (4 if SOAK else 2))
ACCOUNTS = 400 if SOAK else 100
KEYS = HandlerKeys("bank", "book", "bookings")
OUTPUTS = {KEYS: "{bookings}.balances", HandlerKeys("bank", "book_lists", "bookings"): "{bookings}.lists"}
"""Of a handler that takes one message, and of one that takes lists of a key."""
EXACT_POINTS = (
    "between-load-and-commit",
    "between-commit-and-end-of-task",
    "between-last-task-and-commit-log",
)


@dataclass
class Expected:
    """What must come out, worked out without the product."""

    sequences: dict[bytes, list[str]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    states: dict[bytes, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: {"count": 0, "balance": 0}))


class Bookings:
    """What is published, chunk by chunk, so that there is always work left where a process is to die at it."""

    def __init__(self, client: Client, chance: random.Random) -> None:
        self.expected = Expected()
        self.published = 0
        self._client = client
        self._chance = chance
        self._numbers: dict[bytes, int] = defaultdict(int)

    def publish(self, *more: Command) -> None:
        """Add the next chunk to the stream, and run `more` in the same step."""
        rows = [self._row(index) for index in range(self.published, min(self.published + BATCH, MESSAGES))]
        commands = [
            ("XADD", "bookings", "*", "account", a, "n", n, "amount", m, *(("poison", p) if p else ()))
            for a, n, m, p in rows
        ]
        *_, replies = self._client.pipeline([("MULTI",), *commands, *more, ("EXEC",)])
        assert isinstance(replies, list), replies
        for entry_id, row in zip(replies, rows, strict=False):
            self._expect(entry_id.decode(), *row)
        self.published += len(rows)

    def publish_beyond(self, count: int) -> None:
        """Publish more than `count` in all, or all that there is."""
        while self.published <= count and self.published < MESSAGES:
            self.publish()

    def _row(self, index: int) -> tuple[bytes, int, int, str | None]:
        account = b"acc-%d" % self._chance.randrange(ACCOUNTS)
        self._numbers[account] += 1
        poison = "crash" if index == MESSAGES // 3 else {0: "reject", 1: "flaky"}.get(index % 997)
        return account, self._numbers[account], self._chance.randrange(-100, 100), poison

    def _expect(self, entry_id: str, account: bytes, n: int, amount: int, poison: str | None) -> None:
        if poison in ("reject", "crash"):
            self.expected.dead[entry_id] = "rejected" if poison == "reject" else "crashed"
            return
        state = self.expected.states[account]
        state["count"] += 1
        state["balance"] += amount
        self.expected.sequences[account].append(entry_id)
        self.expected.outputs[entry_id] = {"account": account.decode(), "n": str(n), "id": entry_id} | {
            name: str(value) for name, value in state.items()
        }


def read_stream(client: Client, stream: str) -> Iterator[tuple[bytes, list[bytes]]]:
    """All entries of a stream."""
    after = "-"
    while entries := client.execute("XRANGE", stream, after, "+", "COUNT", 5000):
        yield from entries
        after = "(" + entries[-1][0].decode()


def committed(client: Client, keys: HandlerKeys = KEYS) -> int:
    return int(client.execute("HGET", keys.meta, "committed") or 0)


def wait_for_commits(client: Client, goal: int, driver: Driver) -> None:
    eventually(lambda: committed(client) >= goal, f"{goal} commits", log=driver.errors)


class Outages:
    """Takes Redis away from a running pipeline, until this has said that it waits. Each method is one kind of outage."""

    def __init__(self, server: EmbeddedServer, client: Client, driver: Driver, bookings: Bookings) -> None:
        self._server = server
        self._client = client
        self._bookings = bookings
        self._driver = driver

    def kill(self) -> None:
        said = self._said("Redis is unavailable: ")
        self._server.kill()
        self._wait_for_more("Redis is unavailable: ", said)
        self._server.start()
        self._client.retry_while_unavailable(lambda: self._client.execute("PING"), what="test")

    def fill(self) -> None:
        """Give it too little memory: nothing is committed, however often it is tried."""
        said = self._said("maxmemory")
        self._bookings.publish(("CONFIG", "SET", "maxmemory", "1"))  # at once: else it could all be committed by then
        self._wait_for_more("maxmemory", said)
        stuck_at, refused = committed(self._client), self._refused()
        eventually(lambda: self._refused() >= refused + 5, "more writes to be refused", log=self._driver.errors)
        assert committed(self._client) == stuck_at < self._bookings.published
        self._client.execute("CONFIG", "SET", "maxmemory", "0")

    def _wait_for_more(self, word: str, said: int) -> None:
        eventually(lambda: self._said(word) > said, f"a word about it: {word}", log=self._driver.errors)

    def _said(self, word: str) -> int:
        return (self._driver.folder / "stderr.log").read_text(errors="replace").count(word)

    def _refused(self) -> int:
        """How many writes Redis has refused for lack of memory."""
        found = re.search(rb"errorstat_OOM:count=(\d+)", self._client.execute("INFO", "errorstats"))
        return int(found[1]) if found else 0


class Assassin:
    """Kills, alternately, at exact points and at random ones, and keeps a list of what it hit."""

    def __init__(self, driver: Driver, chance: random.Random, bookings: Bookings) -> None:
        self._driver = driver
        self._chance = chance
        self._bookings = bookings
        self.log: list[str] = []

    def kill_once(self, number: int) -> None:
        """Kill once. The first kills go to the exact points, further ones to them and to chance alternately."""
        plan = (*EXACT_POINTS, "driver", "worker")
        point = plan[number % len(plan)]
        if point in EXACT_POINTS:
            self._arm(point)
        elif point == "driver":
            self._bookings.publish()
            time.sleep(self._chance.random())
            self._driver.kill()
            self._restart()
        else:
            self._bookings.publish()
            self._kill_worker()
        self.log.append(point)

    def _arm(self, point: str) -> None:
        before = self._hits(point)  # counted first: a process may be there as soon as it is armed
        (self._driver.folder / point).touch()
        self._bookings.publish()
        eventually(lambda: self._hits(point) > before, f"no process reached {point}", log=self._driver.errors)
        if point == EXACT_POINTS[2]:  # this one is the driver's own
            self._driver.ended()
            self._restart()

    def _restart(self) -> None:
        """Each time with another number of cores."""
        self._driver.start("--spark-master", f"local[{1 + self._driver.starts % 3},4]")

    def _hits(self, point: str) -> int:
        return len(list(self._driver.folder.glob(f"hit.{point}.*")))

    def _kill_worker(self) -> None:
        eventually(self._driver.workers, "no Python worker to kill", log=self._driver.errors)
        try:
            self._chance.choice(self._driver.workers()).kill()
        except (psutil.NoSuchProcess, IndexError):
            self._kill_worker()


def test_killing_drivers_workers_and_redis_all_through_a_run_applies_everything_once_and_in_order(
    millstream_fresh_server: EmbeddedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    server = millstream_fresh_server
    with Client(server.url) as client:
        bookings = Bookings(client, chance)
        bookings.publish()
        with Driver(
            f"{APPS}/killer_app.py:app",
            url=server.url,
            folder=tmp_path,
            options=("--max-per-batch", str(BATCH)),
        ) as driver:
            driver.start()
            assassin, outages = Assassin(driver, chance, bookings), Outages(server, client, driver, bookings)
            kinds = (outages.kill, outages.kill, outages.fill) if SOAK else (outages.kill, outages.fill)
            for number, outage in zip_longest(range(KILLS), kinds):
                goal = max(1, number * MESSAGES // (KILLS + 2))  # enough is left to publish for the kills
                bookings.publish_beyond(goal)
                wait_for_commits(client, goal, driver)
                if outage is not None:
                    outage()
                assassin.kill_once(number)
            bookings.publish_beyond(MESSAGES)
            last = client.execute("XREVRANGE", "bookings", "+", "-", "COUNT", 1)[0][0]
            eventually(
                lambda: all(client.execute("HGET", keys.meta, "committed_id") == last for keys in OUTPUTS),
                f"the end of the stream; kills: {assassin.log}, seed {seed}",
                log=driver.errors,
            )
            assert driver.stop() == 0
        with capsys.disabled():
            print(f"\nseed {seed}; kills at: {', '.join(assassin.log)}; driver starts: {driver.starts}")  # noqa: T201
        assert set(EXACT_POINTS) <= set(assassin.log)
        for keys, output in OUTPUTS.items():
            verify(client, bookings.expected, keys, output)


def verify(client: Client, expected: Expected, keys: HandlerKeys, output: str) -> None:
    """Compare all that a handler has in Redis with what is expected."""
    rows = [text_fields(items) for _, items in read_stream(client, output)]
    letters = [DeadLetter.parse(*entry) for entry in read_stream(client, keys.dead_letters)]
    report = check_outputs(
        {**expected.sequences, b"": list(expected.dead)},
        [(row["account"].encode(), row["id"]) for row in rows],
        [letter.id for letter in letters],
    )
    report.raise_if_bad()
    assert {row["id"]: row for row in rows} == expected.outputs
    assert {letter.id: letter.reason for letter in letters} == expected.dead
    found = client.execute("HGETALL", keys.state)
    states = {found[i]: msgspec.msgpack.decode(found[i + 1]) for i in range(0, len(found), 2)}
    assert states == dict(expected.states)
    assert committed(client, keys) == MESSAGES
    assert client.execute("EXISTS", keys.offsets, keys.crashes) == 0
