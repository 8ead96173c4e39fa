"""What the idle streams of a handler without a key cost Redis."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from millstream.delivery.reliable_stream import ReliableStream
from millstream.redis_client.client import Client
from millstream.worker import WorkerPolicy
from millstream.worker.in_flight import InFlight
from millstream.worker.ordering.unordered import Unordered
from millstream.worker.settling.idle_claims import IdleClaimer
from tests.support.clocks import ManualClock
from tests.support.waiting import eventually
from tests.support.workers import QUICK, double, make, make_context, working

pytestmark = [pytest.mark.worker]

STREAMS = 200
TEN_DAYS_MS = 864_000_000
"""Longer than any worker may hold an entry."""
CALM = replace(QUICK, sweep_ms=500, block_ms=1_000, threads=1)


def calls(client: Client, command: str) -> int:
    """Return how often the server has run a command."""
    stats = client.execute("INFO", "commandstats").decode()
    return int((stats.partition(f"cmdstat_{command}:calls=")[2] or "0").partition(",")[0])


def trips(client: Client) -> int:
    """Return how often the server has read from a connection."""
    stats = client.execute("INFO", "stats").decode()
    return int(stats.partition("total_reads_processed:")[2].partition("\r")[0])


def join(client: Client, consumer: str, number: int) -> ReliableStream:
    stream = ReliableStream(client, f"in{number}", app="app", handler="handle", consumer=consumer, into="out")
    stream.join()
    return stream


def add_empty_streams(client: Client) -> None:
    for number in range(STREAMS):
        client.pipeline([("XADD", f"in{number}", "*", "n", number), ("XTRIM", f"in{number}", "MAXLEN", 0)])


def wait_until_blocked(client: Client) -> None:
    eventually(lambda: b"blocked_clients:1\r" in client.execute("INFO", "clients"), "a read that blocks")


def test_a_message_in_one_of_many_streams_costs_no_reads_of_the_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of all streams, two at a time, after each message would be 200 reads for each."""
    monkeypatch.setattr("millstream.worker.fetching.entry_fetcher._FRESH_MS", 3_600_000.0)
    add_empty_streams(client)
    messages = 40
    with working(client, make(double, pattern="in*"), policy=CALM):
        eventually(lambda: client.execute("XINFO", "GROUPS", f"in{STREAMS - 1}"))
        wait_until_blocked(client)
        before = calls(client, "xreadgroup")
        for number in range(messages):
            client.execute("XADD", f"in{number}", "*", "n", number)
            eventually(lambda: client.execute("XLEN", "out") == number + 1)  # noqa: B023 - it is over by then
            wait_until_blocked(client)
        assert calls(client, "xreadgroup") - before < messages * STREAMS / 10


def test_a_round_trip_asks_many_streams_for_idle_entries_and_all_of_these_are_claimed(client: Client) -> None:
    add_empty_streams(client)
    streams = {f"in{number}": join(client, "w", number) for number in range(STREAMS)}
    context = make_context(client, make(double, pattern="in*"), in_flight=InFlight(WorkerPolicy(), 16))
    claimer = IdleClaimer(context, streams)

    def asks_all_at_once() -> bool:
        before, asked = trips(client), calls(client, "xpending")
        assert not claimer.claim_idle()
        return calls(client, "xpending") - asked == STREAMS and trips(client) - before < STREAMS / 10

    eventually(asks_all_at_once, "a few round trips")  # a thread of another test may still use a client of its own

    for number in (7, 150):
        client.execute("XADD", f"in{number}", "*", "n", number)
        gone = join(client, "gone", number)
        gone.nack([one.id for one in gone.fetch(count=1)])
    assert not claimer.claim_idle()
    assert {one.stream.stream for one in context.in_flight.deliveries} == {"in7", "in150"}
    client.execute("XGROUP", "DESTROY", "in3", streams["in3"].group)
    assert not claimer.claim_idle()
    assert client.execute("XINFO", "GROUPS", "in3"), "it has joined again"


class Maintained:
    """A worker's membership in all streams, and its maintenance, once each time a test says so; its clock stands still."""

    def __init__(self, client: Client, *, streams: int = STREAMS, trim: bool = False) -> None:
        self.client = client
        self.clock = ManualClock()
        context = make_context(
            client, make(double, pattern="in*"), in_flight=InFlight(WorkerPolicy(), 16), clock=self.clock
        )
        self.context = replace(context, policy=replace(context.policy, trim=trim))
        self.ordering = Unordered(self.context)
        for number in range(streams):
            self.ordering.join(f"in{number}")

    def maintain(self) -> int:
        """Do maintenance once; return how many round trips that took."""
        found, exchange = 0, Client._exchange

        def counted(client: Client, *args: Any) -> Any:
            nonlocal found
            found += client is self.client
            return exchange(client, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Client, "_exchange", counted)
            self.ordering.maintenance.run_once()
        return found

    def commit(self, number: int, *, added: int = 1) -> None:
        """Add messages to a stream, and commit the first of them."""
        self.client.pipeline([("XADD", f"in{number}", "*", "n", n) for n in range(added)])
        stream = self.ordering.streams[f"in{number}"]
        found = stream.fetch(count=added)
        assert stream.ack(found[0]) == []
        self.context.loop_metrics.count_committed(found[:1], [], 0.0)

    def take_checkpoints(self) -> set[str]:
        """Return the streams of which a checkpoint was written since the last call."""
        names = [f"in{number}" for number in range(STREAMS)]
        asked = [("HDEL", self.context.keys_of(name).meta, "checkpoint_at") for name in names]
        return {name for name, removed in zip(names, self.client.pipeline(asked), strict=True) if removed}


@pytest.fixture
def maintained(client: Client) -> Iterator[Maintained]:
    add_empty_streams(client)
    worker = Maintained(client)
    yield worker
    worker.ordering.maintenance._changed.close()


def test_only_streams_with_commits_since_their_last_checkpoint_are_asked_for_another(maintained: Maintained) -> None:
    maintained.maintain()
    assert len(maintained.take_checkpoints()) == STREAMS, "other workers may have ended before they wrote one"
    maintained.commit(7)
    maintained.commit(150)
    assert maintained.maintain() < STREAMS / 10
    assert maintained.take_checkpoints() == {"in7", "in150"}
    maintained.maintain()
    assert maintained.take_checkpoints() == set()


def test_a_checkpoint_that_is_refused_or_fails_is_written_later_though_nothing_was_committed_meanwhile(
    maintained: Maintained, monkeypatch: pytest.MonkeyPatch
) -> None:
    maintained.maintain()
    maintained.take_checkpoints()
    with monkeypatch.context() as patch:
        patch.setattr("millstream.delivery.commit_store._MAX_INCOMPLETE", 0)
        maintained.commit(7, added=2)
        maintained.maintain()
        assert maintained.take_checkpoints() == set(), "too many entries are pending"
    maintained.client.execute("XGROUP", "DESTROY", "in7", maintained.context.keys_of("in7").group)
    maintained.maintain()
    assert maintained.client.execute("XINFO", "GROUPS", "in7"), "it has joined again"
    assert maintained.take_checkpoints() == {"in7"}


def test_a_round_trip_asks_many_streams_for_entries_of_stuck_workers_and_all_of_these_are_claimed(
    maintained: Maintained,
) -> None:
    maintained.maintain()
    for number in (7, 150):
        maintained.client.execute("XADD", f"in{number}", "*", "n", number)
        assert len(join(maintained.client, "stuck", number).fetch(count=1)) == 1
    maintained.clock.now_ms += maintained.context.policy.claim_ms  # the next maintenance renews
    asked = calls(maintained.client, "xpending")
    assert maintained.maintain() < STREAMS / 10
    assert STREAMS <= calls(maintained.client, "xpending") - asked <= STREAMS + 10, "a few are asked for a checkpoint"
    assert not maintained.context.in_flight.deliveries
    maintained.clock.now_ms += TEN_DAYS_MS
    maintained.maintain()
    assert {one.stream.stream for one in maintained.context.in_flight.deliveries} == {"in7", "in150"}


def test_a_stream_whose_group_is_lost_is_joined_again_by_the_search_for_stuck_workers(maintained: Maintained) -> None:
    maintained.maintain()
    maintained.client.execute("XGROUP", "DESTROY", "in3", maintained.context.keys_of("in3").group)
    maintained.clock.now_ms += maintained.context.policy.claim_ms
    maintained.maintain()
    assert maintained.client.execute("XINFO", "GROUPS", "in3")


def test_entries_that_a_checkpoint_acknowledges_are_trimmed_although_nothing_is_committed_later(client: Client) -> None:
    worker = Maintained(client, streams=1, trim=True)
    first, *_ = client.pipeline([("XADD", "in0", "*", "n", n) for n in range(300)])
    stream = worker.ordering.streams["in0"]
    found = stream.fetch(count=300)
    assert stream.ack(*found) == []
    worker.context.loop_metrics.count_committed(found, [], 0.0)
    client.execute(
        "XCLAIM", "in0", stream.group, "gone", 0, first, "FORCE"
    )  # as by a worker that has missed the commit
    worker.maintain()
    assert client.execute("XRANGE", "in0", first, first) == []
