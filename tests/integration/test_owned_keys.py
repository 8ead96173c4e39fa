"""How a worker routes streams that only it works on: by key tracking, many in one round trip."""

import threading
from contextlib import suppress
from math import inf
from queue import SimpleQueue
from typing import Any

import pytest

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.keyed_stream import READ_BYTES, KeyedStream
from millstream.errors import OutOfMemory, Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_tracking import KeyTracker
from millstream.worker.fetching.tracked_key_router import TrackedKeyRouter
from tests.support.clocks import ManualClock
from tests.support.command_stats import scripts_run
from tests.support.deployments import lent_cluster
from tests.support.waiting import eventually
from tests.support.workers import make, make_context

pytestmark = [pytest.mark.worker, pytest.mark.keys]


def fill(client: Client, streams: int, first: int = 0) -> None:
    """Add an entry to each stream."""
    client.pipeline([("XADD", f"s:{s}", "*", "n", first) for s in range(streams)])


class Routing:
    """A router of streams of its own, without periodic checks, run step by step."""

    def __init__(self, client: Client, streams: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self.client = Client(client.url)
        self.woken: SimpleQueue[str] = SimpleQueue()
        self.names = [f"s:{number}" for number in range(streams)]
        joined: dict[str, KeyedStream] = {}
        context = make_context(self.client, make(lambda message: None, key="n"), clock=clock)
        self.router = TrackedKeyRouter(context, self.client, joined, ready_streams=self.woken)
        self.router._check_due_ms = inf
        for name in self.names:
            stream = KeyedStream(
                self.client, name, queue_of=lambda entry_id, pairs: b"kall", app="app", handler="handle", consumer="w"
            )
            stream.join()
            joined[name] = stream
            self.router.add(stream)

    def woken_by(self, steps: int) -> set[str]:
        while steps:
            steps -= 1
            with suppress(Unavailable):
                self.router._collect(threading.Event())
                self.router._route_batch()
        return {self.woken.get() for _ in range(self.woken.qsize())}


def test_large_entries_of_many_streams_are_read_a_few_at_a_time(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    routing = Routing(client, 50)
    routing.woken_by(3)
    client.pipeline([("XADD", name, "*", "payload", b"x" * 60_000) for name in routing.names for _ in range(40)])
    read = routing.router._tracker.read
    trips: list[int] = []

    def weighed(commands: Any) -> Any:
        found = dict(read(commands))
        trips.append(sum(len(part) for _, entries in found.values() for _, pairs in entries for part in pairs))
        return found.items()

    monkeypatch.setattr(routing.router._tracker, KeyTracker.read.__name__, weighed)
    assert routing.woken_by(60) == set(routing.names)
    assert sum(trips) == 50 * 40 * 60_007
    assert max(trips) <= READ_BYTES, "also in the first read, when no size is known yet"


@pytest.mark.parametrize("on_cluster", [False, True])
def test_a_stream_whose_read_was_unavailable_is_read_again_soon_although_it_is_not_tracked(
    client: Client, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, on_cluster: bool
) -> None:
    clock = ManualClock()
    with Client(lent_cluster(request).url if on_cluster else client.url) as user:
        routing = Routing(user, 3, clock)
        routing.woken_by(3)
        clock.now_ms += 1_000  # the pause after all streams have been read
        tracker, is_refused = routing.router._tracker, threading.Event()
        read = tracker.read

        def refused(commands: Any) -> Any:
            monkeypatch.undo()
            is_refused.set()
            yield from read({name: command for name, command in commands.items() if name != "s:1"})
            yield "s:1", Unavailable("its server is away")

        monkeypatch.setattr(tracker, KeyTracker.read.__name__, refused)
        user.execute("XDEL", "s:1", user.execute("XADD", "s:1", "*", "n", 0))
        assert routing.woken_by(2) == set()
        assert is_refused.is_set()
        user.execute("XADD", "s:1", "*", "n", 1)
        clock.now_ms += routing.router._policy.sweep_ms
        assert routing.woken_by(2) == {"s:1"}


def test_new_entries_are_enqueued_without_a_sweep_after_redis_has_lost_everything(client: Client) -> None:
    fill(client, 3)
    routing = Routing(client, 3)
    assert routing.woken_by(9) == set(routing.names)
    client.pipeline([("MULTI",), ("FLUSHALL",), *(("XADD", name, "*", "n", 0) for name in routing.names), ("EXEC",)])
    assert routing.woken_by(9) == set(routing.names)
    assert all(one.pending_count == 1 for one in routing.router.streams.values())


def test_entries_that_a_call_with_a_lost_reply_enqueued_are_found_without_a_sweep(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, 3)
    routing = Routing(client, 3)
    routing.woken_by(9)
    send = routing.client.pipeline

    def lose(commands: Any) -> Any:
        monkeypatch.undo()
        send(commands)
        raise Unavailable("the answer is lost")

    monkeypatch.setattr(routing.client, "pipeline", lose)
    fill(client, 3, first=1)
    assert routing.woken_by(9) == set(routing.names)


def test_streams_that_cannot_be_enqueued_for_now_do_not_delay_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, 150)
    routing = Routing(client, 150)

    def refuse(**options: Any) -> int:
        raise OutOfMemory("no room")

    for name in routing.names[:100]:
        monkeypatch.setattr(routing.router.streams[name], "enqueue_new", refuse)
    assert routing.woken_by(9) == set(routing.names[100:])


def test_a_redis_that_can_track_few_keys_is_not_polled_all_the_time(
    millstream_fresh_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(millstream_fresh_server.url) as client:
        client.execute("CONFIG", "SET", "tracking-table-max-keys", 250)
        clock = ManualClock()
        routing = Routing(client, 500, clock)
        over = threading.Event()
        over.set()  # it does not wait for the machine's clock

        def step(for_ms: float) -> bool:
            clock.now_ms += for_ms
            routing.router._collect(over)
            routing.router._route_batch()
            return True

        eventually(lambda: step(50) and "tracking-table-max-keys" in caplog.text)
        before = scripts_run(client)
        for _ in range(91):
            step(11)  # no pause is a multiple of it: 1,001 ms
        asked_each_second = scripts_run(client) - before
        fill(client, 500)
        eventually(lambda: step(50) and routing.woken.qsize() >= 500)
        assert asked_each_second < 10_000
        assert caplog.text.count("tracking-table-max-keys") == 1
