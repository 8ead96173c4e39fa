"""Workers of a handler with a key on many streams: what idle streams cost, and that nothing of them is missed."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from millstream.delivery.keyed_stream import KeyedStream
from millstream.delivery.pause import Pause
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import ready_streams_key
from millstream.redis_client.key_tracking import KeyTracker
from millstream.worker.fetching.ready_streams_fetcher import ReadyStreams
from millstream.worker.ordering.by_key import ByKey
from millstream.worker.policy import WorkerPolicy
from tests.support.clocks import ManualClock
from tests.support.command_stats import commands_run
from tests.support.workers import make, make_context

pytestmark = [pytest.mark.worker, pytest.mark.keys]

STREAMS = [f"s{number}" for number in range(60)]
HOUR_MS = 3_600_000


class IdleWorker:
    """The parts of a worker that has joined `STREAMS`, each of which runs when a test says so; the clock stands still."""

    def __init__(self, client: Client, *, as_user: Client | None = None) -> None:
        self.client = client
        self.clock = ManualClock()
        handler = make(lambda message: None, key="k", pattern="s*")
        policy = WorkerPolicy(block_ms=1, sweep_ms=50)
        self.context = replace(make_context(as_user or client, handler, clock=self.clock), policy=policy)
        self.ordering = ByKey(self.context)
        client.pipeline([("XGROUP", "CREATE", name, "other", "$", "MKSTREAM") for name in STREAMS])
        for name in STREAMS:
            self.ordering.join(name)
        self.maintain()
        for _ in range(30):  # until each stream is known to be idle
            self.fetch()

    def maintain(self) -> Counter[str]:
        """Do maintenance once; return which commands that took."""
        before = commands_run(self.client.execute)
        self.ordering.maintenance.run_once()
        return commands_run(self.client.execute) - before

    def fetch(self) -> Counter[str]:
        """Let the time of a sweep pass, and fetch once; return which commands that took."""
        self.clock.now_ms += self.context.policy.sweep_ms
        before = commands_run(self.client.execute)
        self.ordering.fetcher.fetch(10, threading.Event())
        return commands_run(self.client.execute) - before

    def in_flight(self) -> list[str]:
        """The streams of the messages that it has fetched."""
        return [one.stream.stream for one in self.context.in_flight.deliveries]


@pytest.fixture
def worker(client: Client) -> Iterator[IdleWorker]:
    made = IdleWorker(client)
    yield made
    made.ordering.close()


def enqueue(client: Client, name: str) -> None:
    """Add a message, and route it as a worker does that ends before it can report the stream as ready."""
    client.execute("XADD", name, "*", "k", "a")
    stream = KeyedStream(
        client, name, queue_of=lambda entry_id, pairs: b"ka", app="app", handler="handle", consumer="other"
    )
    stream.join()
    assert stream.enqueue_new(count=10, max_pending=10) == 1


def test_maintenance_asks_again_only_for_streams_that_have_changed(worker: IdleWorker) -> None:
    worker.maintain()
    assert worker.maintain()["hmget"] == 0
    worker.client.execute("HSET", worker.context.keys_of("s7").meta, "committed", 1)
    assert worker.maintain()["hmget"] == 1
    assert worker.maintain()["hmget"] == 0


def test_a_pause_of_one_idle_stream_among_many_is_noticed_and_so_is_its_end(worker: IdleWorker) -> None:
    stream = worker.ordering.streams["s7"]
    stream.store_pause(Pause(at_ms=1))
    worker.maintain()
    assert stream.pause is not None
    assert worker.maintain()["hmget"] == 1, "a pause may end by itself"
    worker.client.execute("HDEL", worker.context.keys_of("s7").meta, "paused")
    worker.maintain()
    assert stream.pause is None


def test_the_fetcher_queries_no_idle_stream_that_has_not_changed(worker: IdleWorker) -> None:
    worker.clock.now_ms += 1_000
    worker.fetch()
    found = [worker.fetch()["exists"] for _ in range(40)]
    assert max(found) <= 1, "one of sixty each second, in any case"
    assert sum(found) <= 3


def test_a_message_is_fetched_although_the_worker_that_routed_it_has_reported_nothing(worker: IdleWorker) -> None:
    enqueue(worker.client, "s41")
    worker.fetch()
    worker.fetch()
    assert worker.in_flight() == ["s41"]


def test_a_message_that_no_hint_reports_is_fetched_while_there_are_always_hints_of_others(worker: IdleWorker) -> None:
    enqueue(worker.client, "s41")
    for _ in range(3):
        worker.client.execute("RPUSH", ready_streams_key("app", "handle"), "s1")
        worker.fetch()
    assert worker.in_flight() == ["s41"]


def test_hints_that_no_worker_takes_expire(worker: IdleWorker) -> None:
    ready = ReadyStreams(worker.client, worker.context.handler)
    ready.put("s1")
    ready.publish()
    assert worker.client.execute("LRANGE", ready.key, 0, -1) == [b"s1"]
    assert 0 < worker.client.execute("PTTL", ready.key) <= HOUR_MS


def test_a_message_is_fetched_even_if_key_tracking_reports_nothing(
    worker: IdleWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeyTracker, KeyTracker.changed.__name__, lambda tracker: set())
    enqueue(worker.client, "s41")
    for _ in range(60 + 1):  # a sixtieth each second
        worker.clock.now_ms += 1_000
        worker.fetch()
        worker.fetch()
    assert worker.in_flight() == ["s41"]


def test_where_the_server_refuses_key_tracking_idle_streams_are_polled_400_a_second(client: Client) -> None:
    client.execute("ACL", "SETUSER", "limited", "reset", "on", ">secret", "+@all", "~*", "-client|tracking")
    with Client(client.url.replace("redis://", "redis://limited:secret@", 1)) as user:
        worker = IdleWorker(client, as_user=user)
        worker.fetch()
        rounds = 30
        queried = sum(worker.fetch()["exists"] for _ in range(rounds))
        seconds = rounds * worker.context.policy.sweep_ms / 1000
        assert 300 * seconds <= queried <= 400 * seconds + len(STREAMS)
        enqueue(client, "s41")
        for _ in range(5):
            worker.fetch()
        assert worker.in_flight() == ["s41"]
        assert worker.maintain()["hmget"] == len(STREAMS)
        worker.ordering.close()
    client.execute("ACL", "DELUSER", "limited")
