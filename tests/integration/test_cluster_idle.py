"""What the idle streams of a worker cost a Redis Cluster, where no command can block on several of them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from queue import SimpleQueue
from threading import Event

import pytest

from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseRelease
from millstream.delivery.reliable_stream import ReliableStream
from millstream.redis_client.client import Client
from millstream.testing.topologies import Cluster
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.entry_fetcher import EntryFetcher
from millstream.worker.fetching.key_fetcher import KeyFetcher
from millstream.worker.fetching.key_router import KeyRouter
from millstream.worker.fetching.ready_streams_fetcher import ReadyStreamsFetcher
from millstream.worker.policy import WorkerPolicy
from tests.support.clocks import ManualClock
from tests.support.command_stats import commands_run
from tests.support.deployments import lent_cluster
from tests.support.workers import make, make_context

pytestmark = [pytest.mark.worker, pytest.mark.keys]

NAMES = [f"s{number}" for number in range(30)]
HOUR_MS = 3_600_000


@pytest.fixture
def deployment(request: pytest.FixtureRequest) -> Cluster:
    return lent_cluster(request)


@pytest.fixture
def client(deployment: Cluster) -> Iterator[Client]:
    with Client(deployment.url) as made:
        yield made


def all_run(deployment: Cluster) -> Counter[str]:
    """Return how often the nodes have run each command."""
    return sum((commands_run(node.call) for node in deployment.nodes), Counter[str]())


def context_of(client: Client, *, block_ms: int = 1, clock: ManualClock | None = None) -> WorkerContext:
    """Return the context of a worker that sweeps once an hour."""
    handler = make(lambda message: None, key="k", pattern="s*", into=None)
    policy = WorkerPolicy(block_ms=block_ms, sweep_ms=HOUR_MS)
    return replace(make_context(client, handler, clock=clock or ManualClock()), policy=policy)


def join(client: Client, name: str, consumer: str = "w") -> KeyedStream:
    stream = KeyedStream(
        client, name, queue_of=lambda entry_id, pairs: b"ka", app="app", handler="handle", consumer=consumer
    )
    stream.join()
    return stream


def lease_elsewhere(client: Client, name: str) -> KeyLease:
    """Add a message whose key another worker leases for an hour."""
    other = join(client, name, "other")
    client.execute("XADD", name, "*", "k", "a")
    assert other.enqueue_new(count=10, max_pending=10) == 1
    (lease,) = other.lease_keys(queues=1, entries=1, run=1, lease_ms=HOUR_MS, now_ms=0).leases
    return lease


class Waits(Event):
    """An event that records the waits for it, in milliseconds, and does not wait; `during`: what happens in some of them."""

    def __init__(self, during: Mapping[int, Callable[[], object]] | None = None, *, most: int = 100) -> None:
        super().__init__()
        self.found_ms: list[float] = []
        self._during = during or {}
        self._most = most

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.found_ms.append(round(timeout * 1000))
        self._during.get(len(self.found_ms), bool)()
        if len(self.found_ms) == self._most:
            self.set()
        return self.is_set()


class Fetching:
    """A fetcher of many streams that workers share; the clock stands still between its fetches."""

    def __init__(self, client: Client) -> None:
        self.clock = ManualClock()
        self.context = context_of(client, clock=self.clock)
        ready: SimpleQueue[str] = SimpleQueue()
        for name in NAMES:
            ready.put(name)
        self.fetcher = ReadyStreamsFetcher(
            self.context, {name: join(client, name) for name in NAMES}, ready_streams=ready
        )

    def fetch(self, times: int) -> None:
        """Fetch so many times, a tenth of a second after each other."""
        for _ in range(times):
            self.clock.now_ms += 100
            self.fetcher.fetch(10, Event())

    def in_flight(self) -> list[str]:
        return [one.stream.stream for one in self.context.in_flight.deliveries]


def test_streams_whose_keys_others_have_leased_are_not_polled_on_a_cluster(deployment: Cluster, client: Client) -> None:
    leases = {name: lease_elsewhere(client, name) for name in NAMES}
    fetching = Fetching(client)
    fetching.fetch(10)  # until each stream is known to be leased elsewhere
    before = all_run(deployment)["exists"]
    fetching.fetch(20)
    assert all_run(deployment)["exists"] - before < len(NAMES), "one or two a second, in any case"
    assert fetching.in_flight() == []
    leases["s7"].stream.release_leases([LeaseRelease(leases["s7"], "requeue")])
    fetching.fetch(3)
    assert fetching.in_flight() == ["s7"]
    fetching.fetcher.close()


def test_a_key_that_another_worker_returns_is_fetched_where_a_cluster_refuses_key_tracking(
    deployment: Cluster, client: Client
) -> None:
    leases = {name: lease_elsewhere(client, name) for name in NAMES}
    for node in deployment.nodes:
        node.call("ACL", "SETUSER", "limited", "reset", "on", ">secret", "+@all", "~*", "-client|tracking")
    with Client(client.url.replace("://", "://limited:secret@", 1)) as user:
        fetching = Fetching(user)
        fetching.fetch(10)
        assert fetching.in_flight() == []
        leases["s7"].stream.release_leases([LeaseRelease(leases["s7"], "requeue")])
        fetching.fetch(5)
        assert fetching.in_flight() == ["s7"]
        fetching.fetcher.close()
    for node in deployment.nodes:
        node.call("ACL", "DELUSER", "limited")


def test_a_fetcher_without_keys_reads_several_idle_streams_more_and_more_rarely(client: Client) -> None:
    streams = {name: ReliableStream(client, name, app="app", handler="handle", consumer="w") for name in NAMES[:3]}
    for one in streams.values():
        one.join()
    context, waits = context_of(client), Waits()
    fetcher = EntryFetcher(context, streams)
    while len(waits.found_ms) < 5:
        fetcher.fetch(100, waits)
    assert waits.found_ms == [20, 40, 80, 100, 100]
    client.execute("XADD", "s1", "*", "n", 1)
    while len(waits.found_ms) < 6:
        fetcher.fetch(100, waits)
    assert [one.stream.stream for one in context.in_flight.deliveries] == ["s1"]
    assert waits.found_ms[5] == 20


def test_a_fetcher_of_keys_leases_on_several_idle_streams_only_where_there_is_something(
    deployment: Cluster, client: Client
) -> None:
    context, waits = context_of(client, block_ms=1_000), Waits()
    fetcher = KeyFetcher(context, {name: join(client, name) for name in NAMES[:3]})
    fetcher.fetch(10, waits)
    before = all_run(deployment)
    for _ in range(4):
        fetcher.fetch(10, waits)
    assert waits.found_ms == [20, 40, 80, 100, 100]
    assert (all_run(deployment) - before)["evalsha"] == 0
    lease = lease_elsewhere(client, "s1")
    lease.stream.release_leases([LeaseRelease(lease, "requeue")])
    fetcher.fetch(10, waits)
    fetcher.fetch(10, waits)
    assert [one.stream.stream for one in context.in_flight.deliveries] == ["s1"]
    fetcher.fetch(10, waits)
    assert waits.found_ms[-1] == 20


def test_a_router_reads_several_idle_streams_more_and_more_rarely(client: Client) -> None:
    context, joined = context_of(client), {name: join(client, name) for name in NAMES[:3]}
    router = KeyRouter(context, client, joined, None)
    for name in joined:
        router.add(join(client, name))
    waits = Waits({6: lambda: client.execute("XADD", "s1", "*", "k", "a")}, most=8)
    router.run(waits)
    assert waits.found_ms == [20, 40, 80, 100, 100, 100, 20, 40]
    assert client.execute("LLEN", context.keys_of("s1").ready) == 1
