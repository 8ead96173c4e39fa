"""Bytes of messages in flight on a worker: never more than its budget, however many and large the messages are."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import pytest

from millstream import Message, Retry
from millstream.handlers.handler import Handler
from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.worker import ReadingLoop
from millstream.worker.incarnations import ProcessEnd, record_end
from tests.support.clocks import ManualClock
from tests.support.waiting import eventually
from tests.support.workers import KEYS, LONG_AGO_MS, QUICK, fill, make, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]

SIZE = 250_000
BUDGET = 10 * SIZE + SIZE // 2
POLICY = replace(QUICK, prefetch_bytes=BUDGET)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, many streams": {"pattern": "in*"},
    "keyed": {"key": "key"},
    "keyed, many streams": {"key": "key", "pattern": "in*"},
    "stream": {"pattern": "in*", "order": "stream"},
}


class GatedHandler:
    """A handler that waits for a permit, and could run a hundred messages at once."""

    def __init__(self, **options: Any) -> None:
        self.goes_on = threading.Event()
        self.options = options

    @property
    def handler(self) -> Handler:
        """The handler function."""

        async def work(message: Message) -> dict[str, Any]:
            while not self.goes_on.is_set():  # noqa: ASYNC110 - it is set in another thread
                await asyncio.sleep(0.01)
            return {"n": message.text("n")}

        return make(work, time_limit_ms=86_400_000, concurrency=100, **self.options)


@pytest.fixture(params=KINDS)
def gated(request: pytest.FixtureRequest) -> Iterator[GatedHandler]:
    found = GatedHandler(**KINDS[request.param])
    yield found
    found.goes_on.set()


def streams_of(gated: GatedHandler, count: int) -> list[str]:
    return [f"in{number}" for number in range(count)] if "pattern" in gated.options else ["in"]


def publish(client: Client, count: int, streams: list[str], size: int = SIZE) -> None:
    client.pipeline(
        [
            ("XADD", streams[n % len(streams)], "*", "n", n, "key", f"k{n % 30}", "payload", b"x" * size)
            for n in range(count)
        ]
    )


def test_no_more_bytes_are_in_flight_than_the_budget_and_all_messages_are_processed(
    client: Client, gated: GatedHandler
) -> None:
    recorder = Recorder()
    publish(client, 40, streams_of(gated, 10))
    with working(client, gated.handler, policy=POLICY, metrics=recorder) as loop:
        eventually(lambda: recorder.value(m.BUDGET_REACHED, handler="app.handle"), "a budget that is used up")
        assert 9 * SIZE <= loop._in_flight.bytes <= BUDGET + SIZE
        most = loop._in_flight.bytes
        gated.goes_on.set()
        while loop.loop_metrics.committed < 40:
            most = max(most, loop._in_flight.bytes)
            eventually(lambda: True)
        assert most <= BUDGET + SIZE
        eventually(lambda: loop._in_flight.bytes == 0)
        eventually(lambda: recorder.value(m.IN_FLIGHT_BYTES, handler="app.handle") == 0)


def test_messages_that_suddenly_become_large_do_not_exceed_the_budget(client: Client, gated: GatedHandler) -> None:
    streams = streams_of(gated, 20)
    gated.goes_on.set()
    with working(client, gated.handler, policy=POLICY) as loop:
        publish(client, 1_000, streams, size=10)
        eventually(lambda: loop.loop_metrics.committed == 1_000)
        gated.goes_on.clear()
        publish(client, 60, streams)
        eventually(lambda: loop._in_flight.at_budget or loop._in_flight.bytes > BUDGET, "a budget that is used up")
        # Entries of unknown size may exceed the budget by a few only.
        assert loop._in_flight.bytes <= BUDGET + 10 * SIZE
        gated.goes_on.set()
        eventually(lambda: loop.loop_metrics.committed == 1_060)


class Fetching:
    """A loop whose fetcher reads 20 streams, a step at a time; no read that might wait does, unless its clock stands still."""

    streams: Final = tuple(f"in{number}" for number in range(20))

    def __init__(self, client: Client) -> None:
        publish(client, 20, [*self.streams], size=10)
        handler, self._clock = make(lambda message: None, pattern="in*"), ManualClock()
        self.loop = ReadingLoop(handler, client.url, consumer="w", policy=POLICY, clock=self._clock)
        self.loop._discover()
        self._over = threading.Event()
        self._over.set()  # it waits for nothing

    def fetch(self, steps: int, *, passed_ms: int = 200) -> int:
        """Do so many steps, each this time after the one before; return how many entries are in flight."""
        for _ in range(steps):
            self._clock.now_ms += passed_ms
            self.loop._ordering.fetcher.fetch(POLICY.batch, self._over)
        return len(self.loop._in_flight)

    def remove_all(self) -> None:
        self.loop._in_flight.remove(self.loop._in_flight.deliveries)

    def close(self) -> None:
        self.loop._ordering.close()
        for one in (self.loop._client, self.loop._blocking_client, self.loop._scan_client):
            one.close()


@pytest.fixture
def fetching(client: Client) -> Iterator[Fetching]:
    with closing(Fetching(client)) as found:
        yield found


def test_streams_with_large_messages_at_the_same_time_are_read_as_far_as_there_is_room(
    client: Client, fetching: Fetching
) -> None:
    assert fetching.fetch(50) == 20
    publish(client, 5, [*fetching.streams])
    assert fetching.fetch(50) == 25
    publish(client, 20, [*fetching.streams])
    counts = [fetching.fetch(1)]
    while counts[-1]:
        assert fetching.loop._in_flight.bytes <= BUDGET + SIZE
        fetching.remove_all()
        counts.append(fetching.fetch(50))
    assert sum(counts) == 45, "what found no room is read later"


def test_a_read_of_all_streams_is_not_repeated_where_an_entry_of_each_has_no_room(
    client: Client, fetching: Fetching
) -> None:
    assert fetching.fetch(50) == 20
    fetching.remove_all()
    assert fetching.fetch(3) == 0
    publish(client, 1, [*fetching.streams])
    assert fetching.fetch(1, passed_ms=0) == 1  # it waits for all of them, and one comes
    publish(client, 60, [*fetching.streams])
    for _ in range(4):
        fetching.fetch(1, passed_ms=0)
        assert fetching.loop._in_flight.bytes <= BUDGET + SIZE


def test_a_message_that_is_larger_than_the_budget_is_in_flight_alone(
    client: Client, gated: GatedHandler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    publish(client, 6, streams_of(gated, 2), size=2 * BUDGET)
    with working(client, gated.handler, policy=POLICY) as loop:
        eventually(lambda: "fetching resumes as they finish" in caplog.text, "the warning")
        assert len(loop._in_flight) == 1
        gated.goes_on.set()
        eventually(lambda: loop.loop_metrics.committed == 6)
    assert caplog.text.count("fetching resumes as they finish") == 1
    assert "--prefetch-mb" in caplog.text


@pytest.mark.parametrize(("key", "suspect_size"), [("key", 6 * SIZE), (None, 12 * SIZE)])
def test_a_suspect_that_waits_leaves_its_room_to_other_messages(
    client: Client, key: str | None, suspect_size: int
) -> None:
    def handle(message: Message) -> dict[str, Any]:
        return {"n": message.text("n")}

    day_ms = 86_400_000
    handler = make(handle, key=key, retry=Retry(attempts=4, delay_ms=day_ms, max_delay_ms=day_ms))
    with working(client, handler):  # makes the group
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    publish(client, 1, ["in"], size=suspect_size)
    ((suspect, _),) = client.execute("XRANGE", "in", "-", "+")
    client.execute("HSET", KEYS.crashes, suspect, 0, suspect + b"a", "token-7 w9", suspect + b"l", 3)
    record_end(client, "app", "token-7", ProcessEnd(died=True, cause="was ended by SIGSEGV"))
    if key is None:
        client.execute("XREADGROUP", "GROUP", KEYS.group, "w9", "STREAMS", "in", ">")
        idle = ("IDLE", LONG_AGO_MS, "RETRYCOUNT", 3, "JUSTID")
        client.execute("XCLAIM", "in", KEYS.group, "w9", 0, suspect, *idle)
    with working(client, handler, policy=POLICY) as loop:
        eventually(lambda: client.execute("HGET", KEYS.crashes, suspect) == b"1", "the wait of the suspect")
        for n in range(3):
            client.execute("XADD", "in", "*", "n", n, "key", "other", "payload", b"x" * 8 * SIZE)
        eventually(lambda: loop.loop_metrics.committed == 3)
        eventually(lambda: len(loop._in_flight) == 1, "the suspect alone in flight")
        assert loop._in_flight.bytes > suspect_size


@pytest.mark.parametrize("own", [True, False])
def test_recovered_and_claimed_entries_keep_to_the_budget(client: Client, own: bool) -> None:
    gated = GatedHandler()
    fill(client, 1)
    with working(client, make(lambda message: None)) as loop:  # makes the group
        eventually(lambda: loop.loop_metrics.committed == 1)
    publish(client, 40, ["in"])
    name = "w1" if own else "gone"
    client.execute("XREADGROUP", "GROUP", KEYS.group, name, "STREAMS", "in", ">")
    ids = [one for one, *_ in client.execute("XPENDING", "in", KEYS.group, "-", "+", 100)]
    client.execute("XCLAIM", "in", KEYS.group, name, 0, *ids, "IDLE", LONG_AGO_MS, "RETRYCOUNT", 1, "JUSTID")
    with working(client, gated.handler, policy=POLICY) as loop:
        eventually(lambda: loop._in_flight.at_budget)
        assert 9 * SIZE <= loop._in_flight.bytes <= BUDGET + SIZE
        gated.goes_on.set()
        eventually(lambda: loop.loop_metrics.committed == 40)
