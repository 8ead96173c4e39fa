"""Reads that Redis executes while the entries of the last read are added to flight."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from millstream.delivery.commit_store import CommitStore, reservation_size
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import GroupMissing, Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.proxy import Proxy
from millstream.worker import WorkerPolicy
from millstream.worker.fetching.entry_fetcher import EntryFetcher
from millstream.worker.in_flight import InFlight
from tests.support.command_stats import commands_run
from tests.support.waiting import eventually
from tests.support.workers import KEYS, double, fill, make, make_context

pytestmark = [pytest.mark.worker]

BATCH = WorkerPolicy().batch
BUDGET = 8_000_000


class Bench:
    """A fetcher of the stream `in`, with a backlog of several batches. It has read one entry, and so knows a size."""

    def __init__(self, client: Client, *, backlog: int = 5 * BATCH, policy: WorkerPolicy | None = None, **options: Any):
        self.client = client
        self.in_flight = InFlight(policy or WorkerPolicy(), 2 * BATCH)  # with room for all that is prefetched
        self.stream = ReliableStream(client, "in", app="app", handler="handle", consumer="w")
        self.stream.join()
        self.fetcher = EntryFetcher(
            make_context(client, make(double, **options), in_flight=self.in_flight), {"in": self.stream}
        )
        fill(client, backlog)
        self.fetch(1)

    def fetch(self, room: int = BATCH) -> None:
        self.fetcher.fetch(room, threading.Event())

    @property
    def delivered(self) -> int:
        """How many entries Redis has delivered to the worker."""
        return int(self.client.execute("XPENDING", "in", KEYS.group)[0])

    def before_next_read(self, action: Callable[[], object]) -> None:
        """Call `action` after the next reply, and before the read that follows it."""
        has_room = self.fetcher._has_room_for_batch

        def acting(fetched: int, max_bytes: int) -> bool:
            self.fetcher._has_room_for_batch = has_room  # type: ignore[method-assign]
            action()
            return has_room(fetched, max_bytes)

        self.fetcher._has_room_for_batch = acting  # type: ignore[method-assign]

    def when_adding(self, action: Callable[[], object]) -> None:
        """Call `action` before the entries of the next reply are added to flight."""
        add = self.in_flight.add

        def acting(deliveries: Iterable[Delivery], now_ms: float) -> None:
            self.in_flight.add = add  # type: ignore[method-assign]
            action()
            add(list(deliveries), now_ms)

        self.in_flight.add = acting  # type: ignore[method-assign]


def test_redis_executes_the_next_read_while_entries_are_added(client: Client) -> None:
    bench = Bench(client)
    pending = ("XPENDING", "in", KEYS.group)
    with Client(client.url) as other:
        bench.when_adding(lambda: eventually(lambda: other.execute(*pending)[0] == 1 + 2 * BATCH, "the next read"))
        bench.fetch()
    assert bench.delivered == len(bench.in_flight) == 1 + 3 * BATCH
    stored = [entry_id for entry_id, _ in client.execute("XRANGE", "in", "-", "+")]
    assert [one.id for one in bench.in_flight.deliveries] == stored[: 1 + 3 * BATCH]


def stop(bench: Bench) -> None:
    bench.in_flight.stop_fetching()


def close_gate(bench: Bench) -> None:
    bench.in_flight.close_gate()


def pause(bench: Bench) -> None:
    with Client(bench.client.url) as other:
        CommitStore(other, app="app", handler="handle").set_paused(["in"], paused=True)
    bench.stream.refresh()


@pytest.mark.parametrize("end", [stop, close_gate, pause])
def test_what_redis_has_delivered_is_in_flight_once_reads_have_to_end(
    client: Client, end: Callable[[Bench], None]
) -> None:
    bench = Bench(client)
    bench.when_adding(lambda: end(bench))
    bench.fetch()
    assert bench.delivered == len(bench.in_flight) == 1 + 2 * BATCH


def test_entries_of_a_reply_that_is_lost_are_pending_and_those_before_it_in_flight_once(
    millstream_server: EmbeddedServer, client: Client
) -> None:
    with Proxy(millstream_server.port) as proxy, Client(proxy.url) as unlucky:
        bench = Bench(unlucky)
        bench.before_next_read(lambda: proxy.cut_after("EVALSHA"))
        with pytest.raises(Unavailable):
            bench.fetch()
        assert bench.fetcher._loop_metrics.read == len(bench.in_flight)
        delivered = client.execute("XPENDING", "in", KEYS.group)[0]
        assert (len(bench.in_flight), delivered) == (1 + BATCH, 1 + 2 * BATCH)
        known = bench.in_flight.entry_ids("in")
        rest = bench.stream.claim_idle(excluding=known, own=True, count=10 * BATCH)
        assert (len(rest), known & {one.id for one in rest}) == (BATCH, set())


def test_redis_has_executed_the_next_read_when_entries_could_not_be_added(
    millstream_server: EmbeddedServer, client: Client
) -> None:
    def freeze_for_a_while() -> None:
        proxy.freeze()
        threading.Timer(0.1, proxy.resume).start()

    def refuse() -> None:
        raise Unavailable("no answer")

    with Proxy(millstream_server.port) as proxy, Client(proxy.url) as slow:
        bench = Bench(slow)
        bench.before_next_read(freeze_for_a_while)
        bench.when_adding(refuse)
        with pytest.raises(Unavailable, match="no answer"):
            bench.fetch()
        assert client.execute("XPENDING", "in", KEYS.group)[0] == 1 + 2 * BATCH


def test_two_replies_together_keep_within_the_budget(client: Client) -> None:
    bench = Bench(client, backlog=1, policy=WorkerPolicy(prefetch_bytes=BUDGET))
    sizes = [3_900] * BATCH + [100_000] * 200
    client.pipeline([("XADD", "in", "*", "n", b"x" * size) for size in sizes])
    bench.fetch()
    assert len(bench.in_flight) > 1 + BATCH, "it has read ahead"
    assert bench.in_flight.bytes <= BUDGET


def test_a_read_that_has_no_room_for_a_batch_is_not_sent_ahead(client: Client) -> None:
    few = Bench(client, policy=WorkerPolicy(prefetch=2 * BATCH + BATCH // 2))
    few.fetch()
    assert len(few.in_flight) == 1 + 2 * BATCH
    client.execute("FLUSHALL")
    small = Bench(client, backlog=1, policy=WorkerPolicy(prefetch_bytes=8 * BATCH + 100))
    client.pipeline([("XADD", "in", "*", "n", "22") for _ in range(4 * BATCH)])
    small.fetch()
    assert len(small.in_flight) == 1 + 2 * BATCH


def test_a_fetch_leaves_the_limit_of_entries_in_flight_as_it_is(client: Client) -> None:
    bench = Bench(client)
    bench.in_flight._limit = 4
    while not bench.in_flight.buffer.empty():  # the runners have nothing to do
        bench.in_flight.buffer.get()
    bench.fetch(3)
    assert (len(bench.in_flight), bench.in_flight._limit) == (4, 4)


def test_the_last_of_several_reads_tells_whether_there_is_more(client: Client) -> None:
    bench = Bench(client, backlog=1 + BATCH + BATCH // 2)
    reads = commands_run(client.execute)["evalsha"]
    bench.fetch()
    assert len(bench.in_flight) == 1 + BATCH + BATCH // 2
    assert commands_run(client.execute)["evalsha"] == reads + 2
    assert not bench.in_flight._has_backlog


def test_a_stream_with_a_rate_is_not_read_ahead(client: Client) -> None:
    bench = Bench(client, rate=1_000)
    before = len(bench.in_flight)
    bench.fetch()
    assert 0 < len(bench.in_flight) - before <= reservation_size(1_000)


def test_a_lost_group_is_reported_with_all_delivered_entries_in_flight(client: Client) -> None:
    bench = Bench(client)
    client.execute("XGROUP", "DESTROY", "in", KEYS.group)
    with pytest.raises(GroupMissing):
        bench.fetch()
    assert len(bench.in_flight) == 1
