"""One port for several processes: their metrics side by side, which never go back, and their health as one."""

import json
import os
from typing import Any

import msgspec
import pytest

from millstream.observability import metrics as m
from millstream.observability.health import Health
from millstream.observability.metrics import Recorder
from millstream.observability.metrics_and_health_server import HealthServer
from millstream.worker.process.process_reports import ProcessReports, make_report
from tests.support.clocks import ManualClock
from tests.support.service_process import get

pytestmark = [pytest.mark.worker]

READ = "millstream_messages_read_total"


class Process:
    """A worker process as its supervisor sees it."""

    def __init__(self, clock: ManualClock) -> None:
        self.recorder = Recorder()
        self.health = Health(clock=clock)
        self.progress = self.health.progress("shop.pay", run_within_ms=1_000)

    def work(self, count: int) -> None:
        self.progress.on_read()
        self.recorder.count(m.READ, count, handler="shop.pay")
        self.recorder.observe(m.HANDLER_SECONDS, 0.001, handler="shop.pay")
        self.recorder.set(m.IN_FLIGHT, count, handler="shop.pay")

    def report(self) -> Any:
        return json.loads(msgspec.json.encode(make_report(self.recorder, self.health)))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000_000.0)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def reports(clock: ManualClock, recorder: Recorder) -> ProcessReports:
    zeros = Recorder()
    m.init_series(zeros, m.READ, m.HANDLER_SECONDS, handler="shop.pay")
    found = ProcessReports(recorder, zeros.snapshot(), clock=clock)
    found.expect(["w-0", "w-1"])
    for name in ("w-0", "w-1"):
        found.on_started(name)
    return found


def values(reports: ProcessReports, name: str) -> dict[str, float]:
    """The values of a metric by worker."""
    samples = [one for family in reports.collect() for one in family.samples if one.name == name]
    return {one.labels["worker"]: one.value for one in samples}


def test_a_process_that_reports_nothing_for_ten_minutes_after_its_start_is_unhealthy(
    reports: ProcessReports, clock: ManualClock
) -> None:
    reports.on_started("w-0")
    clock.now_ms += 600_000
    assert reports.failures() == []
    clock.now_ms += 1_000
    (failure,) = (one for one in reports.failures() if "w-0" in one)
    assert failure == "worker w-0: it has not reported since its start, 601 s ago"


def test_counters_are_there_at_0_before_any_process_has_reported(reports: ProcessReports) -> None:
    assert values(reports, READ) == values(reports, "millstream_handler_seconds_count") == {"w-0": 0, "w-1": 0}


def test_the_death_of_a_process_keeps_its_counters_and_removes_its_gauges(
    reports: ProcessReports, clock: ManualClock
) -> None:
    first, second = Process(clock), Process(clock)
    first.work(5)
    reports.on_report("w-0", 11, first.report())
    reports.on_report("w-0", 11, first.report())
    assert values(reports, READ) == {"w-0": 5, "w-1": 0}
    reports.on_ended("w-0", "ended with code 9")
    assert values(reports, READ) == {"w-0": 5, "w-1": 0}
    assert values(reports, m.IN_FLIGHT.name) == {}
    reports.on_started("w-0")
    second.work(2)
    reports.on_report("w-0", 12, second.report())
    assert values(reports, READ) == {"w-0": 7, "w-1": 0}
    assert values(reports, "millstream_handler_seconds_count")["w-0"] == 2
    assert values(reports, "millstream_handler_seconds_sum")["w-0"] == pytest.approx(0.002)
    assert values(reports, m.IN_FLIGHT.name) == {"w-0": 2}


def test_readiness_requires_a_read_of_each_process_and_names_a_restarted_one(
    reports: ProcessReports, clock: ManualClock, recorder: Recorder
) -> None:
    one, other = Process(clock), Process(clock)
    assert reports.readiness_failures() == ["worker w-0: it is starting", "worker w-1: it is starting"]
    assert reports.failures() == []
    one.work(1)
    reports.on_report("w-0", 11, one.report())
    reports.on_report("w-1", 12, other.report())
    assert reports.readiness_failures() == ["worker w-1: shop.pay: no read yet"]
    other.work(1)
    reports.on_report("w-1", 12, other.report())
    assert reports.readiness_failures() == []
    reports.on_ended("w-1", "was ended by SIGKILL")
    assert reports.failures() == ["worker w-1: it was ended by SIGKILL; it is being restarted"]
    assert (recorder.value(m.WORKER_UP, worker="w-1"), recorder.value(m.WORKER_RESTARTS, worker="w-1")) == (0, 0)
    reports.on_started("w-1")
    assert reports.failures() == []
    assert recorder.value(m.WORKER_RESTARTS, worker="w-1") == 1
    assert reports.readiness_failures() == ["worker w-1: it is starting"]


def test_an_unhealthy_or_silent_process_makes_the_supervisor_unhealthy_unless_it_is_stopping(
    reports: ProcessReports, recorder: Recorder, clock: ManualClock
) -> None:
    process = Process(clock)
    process.work(1)
    clock.sleep_ms(30_001)
    reports.on_report("w-0", 11, process.report())
    assert reports.failures() == ["worker w-0: shop.pay: Redis has not answered a read for 30.0 s"]
    process.work(1)
    reports.on_report("w-0", 11, process.report())
    clock.sleep_ms(30_001)
    assert reports.failures() == ["worker w-0: it has not reported for 30.0 s"]
    list(reports.collect())
    assert recorder.value(m.WORKER_UP, worker="w-0") == 0, "as of a process that was stopped"
    process.work(1)
    reports.on_report("w-0", 11, process.report())
    assert recorder.value(m.WORKER_UP, worker="w-0") == 1
    clock.sleep_ms(30_001)
    reports.on_stopping()
    assert reports.failures() == []
    assert reports.readiness_failures()[-1] == "it is stopping"


def test_the_pages_show_the_supervisor_and_its_processes_with_each_metric_family_once(
    reports: ProcessReports, clock: ManualClock, recorder: Recorder
) -> None:
    process = Process(clock)
    process.work(3)
    recorder.count(m.READ, 1, handler="the supervisor's own")

    reports.on_report("w-0", os.getpid(), process.report())
    with HealthServer(reports, [recorder, reports]) as server:
        text = get(f"{server.url}/metrics").text
        page = get(f"{server.url}/readyz")
    assert f'{READ}{{handler="shop.pay",worker="w-0"}} 3.0' in text
    assert 'process_cpu_seconds_total{worker="w-0"}' in text
    assert text.count(f"# TYPE {READ} ") == text.count("# TYPE process_cpu_seconds_total ") == 1
    assert page.status_code == 503
    assert page.json()["workers"]["w-0"]["handlers"]["shop.pay"]["running"] == 0


def test_a_drained_worker_is_neither_missed_nor_awaited(reports: ProcessReports, recorder: Recorder) -> None:
    process = Process(ManualClock())
    for name in ("w-0", "w-1"):
        reports.on_report(name, 1, process.report())
    reports.on_drained("w-0")
    assert reports.failures() == []
    assert [one for one in reports.readiness_failures() if "w-0" in one] == []
    assert [key for key, _ in recorder.snapshot()[m.WORKER_UP.name]] == [("w-1",)]


def test_a_report_that_comes_after_the_drain_of_its_worker_has_no_effect(
    reports: ProcessReports, clock: ManualClock, recorder: Recorder
) -> None:
    process = Process(clock)
    process.work(5)
    reports.on_report("w-0", 11, process.report())
    reports.on_drained("w-0")
    process.work(2)
    reports.on_report("w-0", 11, process.report())
    assert [key for key, _ in recorder.snapshot()[m.WORKER_UP.name]] == [("w-1",)]
    assert values(reports, READ)["w-0"] == 5
    assert values(reports, m.IN_FLIGHT.name) == {}
    assert json.loads(reports.page([]))["workers"]["w-0"]["handlers"]["shop.pay"]["running"] == 0
