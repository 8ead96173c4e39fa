"""Health over real HTTP: it means progress, says why not, and a stuck handler hides behind no busy one."""

import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from millstream.errors import ConfigError, OutOfMemory, ServerError
from millstream.observability import metrics
from millstream.observability.health import Health
from millstream.observability.metrics import Recorder
from millstream.observability.metrics_and_health_server import HealthServer
from millstream.worker.loop_metrics import LoopMetrics
from tests.support.clocks import ManualClock
from tests.support.service_process import get
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.worker]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000_000.0)


@pytest.fixture
def health(clock: ManualClock) -> Health:
    return Health(read_within_ms=30_000, clock=clock)


@pytest.fixture
def server(health: Health) -> Iterator[HealthServer]:
    with HealthServer(health, Recorder()) as server:
        yield server


def ask(server: HealthServer, page: str) -> tuple[int, list[str]]:
    """The status and the reasons that a page gives."""
    answer = get(f"{server.url}{page}")
    body = answer.json()
    assert (body["status"] == "ok") == (answer.status_code == 200) == (not body["reasons"])
    return answer.status_code, body["reasons"]


def test_a_worker_that_polls_an_empty_stream_is_healthy_for_ever(
    server: HealthServer, health: Health, clock: ManualClock
) -> None:
    progress = health.progress("shop.total", run_within_ms=1_000)
    for _ in range(10):
        clock.sleep_ms(29_000)
        progress.on_read()
    assert ask(server, "/healthz") == ask(server, "/readyz") == (200, [])


def test_a_live_process_that_no_longer_reads_is_not_healthy_until_it_reads_again(
    server: HealthServer, health: Health, clock: ManualClock
) -> None:
    progress = health.progress("shop.total", run_within_ms=1_000)
    progress.on_read()
    clock.sleep_ms(30_001)
    silent = "shop.total: Redis has not answered a read for 30.0 s"
    assert ask(server, "/healthz") == ask(server, "/readyz") == (503, [silent])
    progress.on_read()
    assert ask(server, "/healthz") == (200, [])


def test_a_worker_is_not_healthy_while_none_of_its_runs_ends_although_it_reads(
    server: HealthServer, health: Health, clock: ManualClock
) -> None:
    progress = health.progress("shop.total", run_within_ms=5_000)
    clock.sleep_ms(500_000)  # an idle time before the work does not count
    progress.on_run_started(2)
    clock.sleep_ms(35_000)
    progress.on_read()
    assert ask(server, "/healthz") == (200, [])
    clock.sleep_ms(1)
    assert ask(server, "/healthz") == (503, ["shop.total: no run has ended for 35.0 s, with 2 in progress"])
    progress.on_run_ended()
    assert ask(server, "/healthz") == (200, [])
    clock.sleep_ms(35_001)
    progress.on_read()
    assert ask(server, "/healthz") == (503, ["shop.total: no run has ended for 35.0 s, with 1 in progress"])
    progress.on_run_ended()
    assert ask(server, "/healthz") == (200, [])


def test_a_run_that_raises_has_ended(health: Health, clock: ManualClock) -> None:
    progress = health.progress("shop.total", run_within_ms=1_000)
    with pytest.raises(LookupError), progress.running():
        raise LookupError
    clock.sleep_ms(40_000)
    progress.on_read()
    assert health.failures() == []


def test_a_stuck_handler_does_not_hide_behind_a_busy_one(
    server: HealthServer, health: Health, clock: ManualClock
) -> None:
    stuck = health.progress("shop.stuck", run_within_ms=1_000)
    busy = health.progress("shop.busy", run_within_ms=1_000)
    stuck.on_run_started()
    for _ in range(4):
        clock.sleep_ms(10_000)
        stuck.on_read()
        busy.on_read()
        with busy.running(100):
            pass
    assert ask(server, "/healthz") == (503, ["shop.stuck: no run has ended for 40.0 s, with 1 in progress"])


def test_a_worker_is_ready_only_after_its_first_read(server: HealthServer, health: Health) -> None:
    assert ask(server, "/healthz") == (200, [])
    assert ask(server, "/readyz") == (503, ["no handler has started"])
    progress = health.progress("shop.total", run_within_ms=1_000)
    assert ask(server, "/healthz") == (200, [])
    assert ask(server, "/readyz") == (503, ["shop.total: no read yet"])
    progress.on_read()
    assert ask(server, "/readyz") == (200, [])


def test_a_worker_that_never_gets_to_read_is_not_healthy(
    server: HealthServer, health: Health, clock: ManualClock
) -> None:
    health.progress("shop.total", run_within_ms=1_000)
    clock.sleep_ms(30_001)
    assert ask(server, "/healthz")[0] == 503


def test_a_stopping_worker_is_not_ready_but_healthy_while_its_work_goes_on(
    server: HealthServer, health: Health, clock: ManualClock
) -> None:
    progress = health.progress("shop.total", run_within_ms=100_000)
    progress.on_read()
    progress.on_run_started()
    health.on_stopping()
    clock.sleep_ms(120_000)
    assert ask(server, "/healthz") == (200, [])
    assert ask(server, "/readyz") == (503, ["it is stopping"])
    clock.sleep_ms(20_000)
    assert ask(server, "/healthz")[0] == 503


def test_the_page_shows_the_progress_of_each_handler(server: HealthServer, health: Health, clock: ManualClock) -> None:
    progress = health.progress("shop.total", run_within_ms=1_000)
    progress.on_run_started(3)
    clock.sleep_ms(1_500)
    progress.on_read()
    clock.sleep_ms(500)
    answer = get(f"{server.url}/healthz")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["handlers"] == {
        "shop.total": {"running": 3, "seconds_since_read": 0.5, "seconds_since_run_ended": 2.0}
    }


def test_metrics_are_served_with_those_of_the_process(health: Health) -> None:
    recorder = Recorder()
    with HealthServer(health, recorder) as server:
        recorder.count(metrics.READ, 7, handler="shop.total")
        text = get(f"{server.url}/metrics").raise_for_status().text
    assert 'millstream_messages_read_total{handler="shop.total"} 7.0' in text
    assert "process_resident_memory_bytes" in text


def test_without_a_recorder_there_is_no_metrics_page(health: Health) -> None:
    with HealthServer(health) as server:
        assert get(f"{server.url}/metrics").status_code == 404


def test_other_pages_and_methods_are_refused(server: HealthServer) -> None:
    assert get(f"{server.url}/").status_code == 404
    assert httpx.post(f"{server.url}/healthz", timeout=FAIL_SAFE_S, trust_env=False).status_code == 405


def test_a_silent_client_does_not_delay_other_clients(server: HealthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.observability.metrics_and_health_server._CLIENT_TIMEOUT_S", 10 * FAIL_SAFE_S)
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))):
        assert get(f"{server.url}/healthz").status_code == 200


def test_the_server_listens_on_loopback_alone_and_ends_when_closed(health: Health) -> None:
    before = threading.active_count()
    server = HealthServer(health)
    assert server.url.startswith("http://127.0.0.1:")
    ask(server, "/healthz")
    server.close()
    with pytest.raises(httpx.ConnectError):
        get(f"{server.url}/healthz")
    eventually(lambda: threading.active_count() <= before)


def test_a_port_in_use_is_reported_in_one_clear_line(server: HealthServer, health: Health) -> None:
    taken = int(server.url.rpartition(":")[2])
    with pytest.raises(ServerError, match=f"127.0.0.1:{taken} .*choose another port"):
        HealthServer(health, port=taken)


def test_a_limit_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="positive"):
        Health(read_within_ms=0)


def test_a_failed_read_does_not_make_an_idle_worker_unhealthy(health: Health, clock: ManualClock) -> None:
    report = LoopMetrics("a.b", time_limit_ms=1_000, health=health)
    report.on_poll_wanted()
    report.on_redis_error(OutOfMemory("maxmemory is reached"))
    clock.now_ms += 31_000
    report.on_reply()
    silent = "a.b: Redis has not answered a read for 31.0 s"
    assert health.failures() == [f"{silent}; the last error of Redis: maxmemory is reached"]
    report.on_idle()
    report.on_reply()
    assert health.failures() == []
    report.on_poll_wanted()
    clock.now_ms += 31_000
    assert health.failures() == [silent], "that error is from before the last answer"
