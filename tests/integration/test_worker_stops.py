"""How a worker stops where something is in its way: a Redis that hangs, an error, a limit of threads."""

import threading
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from millstream import Message
from millstream.admin.doctor import diagnose
from millstream.admin.inspection import inspect
from millstream.delivery.long_runs import read_long_runs
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import AccessDenied, ConfigError
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import WAITING, ServiceKeys
from millstream.redis_client.key_tracking import KeyTracker
from millstream.redis_client.pipelining import server_time_ms
from millstream.testing.proxy import Proxy
from millstream.worker import ReadingLoop
from tests.support.clocks import ManualClock
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, QUICK, double, ending, fill, make, working

pytestmark = [pytest.mark.worker]

HOUR_MS = 3_600_000


@pytest.mark.parametrize("key", [None, "n"])
def test_a_worker_that_has_stopped_is_not_alive_and_what_it_ran_waits(
    client: Client, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    begun, over = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        begun.set()
        over.wait(FAIL_SAFE_S)

    monkeypatch.setattr("millstream.worker.settling.hang_detector.LONG_MS", 0.0)
    monkeypatch.setattr("millstream.worker.loop._LAST_CALLS_MS", 1_000.0 * FAIL_SAFE_S)
    client.execute("XADD", "in", f"{server_time_ms(client) - 60_000}-0", "n", 1)
    # One in flight: no read is under way that would make the consumer again.
    with working(client, make(handle, key=key), policy=replace(QUICK, prefetch=1, stop_ms=0)) as loop:
        try:
            eventually(begun.is_set)
            eventually(lambda: [one.worker for one in read_long_runs(client, ["app"])] == ["w1"], "its report")
            loop.stop()
            eventually(loop.ended.is_set, "the end of the stop")
        finally:
            over.set()
    assert len(loop.leftovers) == 1
    (report,) = inspect(client).handlers
    assert (report.workers, report.lag, report.in_flight) == ((), 1, 0)
    assert [one.name for one in Group(client, "in", KEYS.group).consumers()] == [WAITING]
    found = {one.check: one for one in diagnose(client).findings}
    assert found["waiting"].what.startswith("app.handle: 1 entry waits, the oldest for ")
    assert found.keys().isdisjoint({"long-runs", "idle-entries", "dead-consumers"})


@pytest.mark.parametrize("key", [None, "n"])
def test_a_stop_ends_while_redis_hangs_and_returns_what_it_could_not_commit(
    client: Client, millstream_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    begun, hangs = threading.Semaphore(0), threading.Event()

    def handle(message: Message) -> None:
        begun.release()
        hangs.wait(FAIL_SAFE_S)

    # No call ends by itself before the test does.
    defaults: Any = Client.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "timeout_ms", HOUR_MS)
    with Proxy(millstream_server.port) as proxy, Client(proxy.url) as far:
        with working(far, make(handle, key=key), policy=replace(QUICK, threads=1, stop_ms=500)) as loop:
            fill(client, 2)
            begun.acquire()
            eventually(lambda: len(loop._in_flight) == 2, "both entries in flight")
            proxy.freeze()
            hangs.set()
            eventually(lambda: any(one.finished for one in loop._in_flight.deliveries), "a run that has ended")
            loop.stop()
            eventually(loop.ended.is_set, "the end of the stop")
        proxy.resume()
    assert len(loop.leftovers) >= 1


def test_a_worker_that_cannot_begin_leaves_its_service_and_closes_its_connections(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pattern: str) -> list[str]:
        raise ConfigError("no scan for you")

    loop = ReadingLoop(make(double, pattern="in*", order="stream"), client.url, consumer="w1")
    monkeypatch.setattr(loop._scan_client, "scan_streams", refuse)
    with pytest.raises(ConfigError, match="no scan"):
        loop.run()
    assert client.execute("ZCARD", ServiceKeys.of_handler("app.handle").alive) == 0
    assert [one._connections for one in (loop._client, loop._scan_client)] == [{}, {}]


@pytest.mark.parametrize(
    "trackers", [{"pattern": "in*"}, {"pattern": "in*", "key": "n"}], ids=["maintenance and delays", "keys, too"]
)
def test_a_worker_closes_the_connections_by_which_redis_reports_changes(
    client: Client, monkeypatch: pytest.MonkeyPatch, trackers: dict[str, str]
) -> None:
    opened: list[KeyTracker] = []
    make_tracker = KeyTracker.__init__

    def record(tracker: KeyTracker, of: Client) -> None:
        opened.append(tracker)  # which keeps it from being closed as garbage
        make_tracker(tracker, of)

    monkeypatch.setattr(KeyTracker, "__init__", record)
    for number in range(10):
        client.execute("XADD", f"in:{number}", "*", "n", 1)
    count = 4 if "key" in trackers else 2
    with working(client, make(double, **trackers)):
        eventually(lambda: [bool(one._connections) for one in opened] == [True] * count, "the connections")
    assert [one._connections for one in opened] == [{}] * count


def test_claims_are_renewed_until_the_last_run_has_ended_whatever_ends_the_worker(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over, renewed = threading.Event(), threading.Event(), threading.Semaphore(0)

    def handle(message: Message) -> None:
        begun.set()
        over.wait(FAIL_SAFE_S)

    fill(client, 1)
    policy = replace(QUICK, claim_ms=1_000)
    with ending(AccessDenied, client, make(handle), policy=policy) as loop:
        eventually(begun.is_set)
        maintenance: Any = loop._ordering.maintenance
        renew = maintenance._renewer.renew

        def renew_and_count(stream: ReliableStream) -> None:
            renew(stream)
            renewed.release()

        def refuse() -> None:
            maintenance._renewer.renew = renew_and_count
            raise AccessDenied("NOPERM")

        monkeypatch.setattr(maintenance, "run_once", refuse)
        try:
            assert renewed.acquire(timeout=FAIL_SAFE_S)
            assert renewed.acquire(timeout=FAIL_SAFE_S)
            assert not loop.ended.is_set()
        finally:
            over.set()


def test_a_further_stop_only_brings_the_deadline_forward(client: Client) -> None:
    loop = ReadingLoop(make(double), client.url, consumer="w1", policy=replace(QUICK, stop_ms=100), clock=ManualClock())
    assert loop.deadline_ms == inf
    for deadline_ms, expected_ms in ((300, 300), (400, 300), (200, 200), (None, 200)):
        loop.stop(deadline_ms)
        assert loop.deadline_ms == expected_ms
