"""ProcessReports: the metrics and the health of all worker processes of a supervisor, as they report them.

A process that hangs, or is being restarted, cannot answer for itself, so the supervisor answers for all of them.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.observability import metrics as m
from millstream.observability.health import Health
from millstream.observability.merged_metrics import MergedMetrics
from millstream.observability.metrics import Recorder, Snapshot, init_series

_SILENT_MS = 30_000.0
_MAX_START_MS = 600_000.0


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """The health of one process: why it is not healthy, why it is not ready, and the page that says so."""

    failures: list[str]
    readiness_failures: list[str]
    page: msgspec.Raw


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process's report to its supervisor, for the pages of health and metrics."""

    metrics: Snapshot
    health: HealthReport


def make_report(recorder: Recorder, health: Health) -> ProcessReport:
    """The report of this process."""
    failures = health.failures()
    return ProcessReport(
        metrics=recorder.snapshot(),
        health=HealthReport(
            failures=failures,
            readiness_failures=health.readiness_failures(),
            page=msgspec.Raw(health.page(failures)),
        ),
    )


class _Worker(msgspec.Struct):
    """One worker by name. `ended`: how its last process ended, until the next one is started."""

    ended: str | None = None
    is_drained: bool = False
    has_run: bool = False
    started_ms: float = 0.0
    reported_ms: float | None = None
    health: Mapping[str, Any] = msgspec.field(default_factory=dict)


class ProcessReports:
    """The reports of worker processes by name: their metrics, and their health as one.

    They are healthy while each process runs, goes on reporting, and reports itself healthy; ready when each has
    reported itself ready. A process that has just been started is healthy, and not ready. Any thread may use it.

    * `recorder`: receives what the supervisor itself knows of the processes
    * `zeros`: the report of a process that has done nothing yet
    """

    def __init__(self, recorder: Recorder, zeros: Snapshot, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._recorder = recorder
        self._zeros = zeros
        self._metrics = MergedMetrics()
        self._stopping = False
        self._workers: dict[str, _Worker] = {}

    def expect(self, names: Sequence[str]) -> None:
        """Expect a process of each of these names."""
        for name in names:
            init_series(self._recorder, m.WORKER_RESTARTS, worker=name)
            self._recorder.set(m.WORKER_UP, 0, worker=name)
            self._metrics.begin(name, self._zeros)
        with self._lock:
            self._workers = {name: _Worker() for name in names}

    def on_started(self, name: str) -> None:
        """A process of this name was started."""
        with self._lock:
            worker = self._workers[name]
            if worker.has_run:
                self._recorder.count(m.WORKER_RESTARTS, worker=name)
            worker.ended, worker.has_run, worker.reported_ms, worker.health = None, True, None, {}
            worker.started_ms = self._clock.monotonic_ms()

    def on_ended(self, name: str, how: str) -> None:
        """The process of this name has ended."""
        with self._lock:
            self._end(name, how)

    def on_drained(self, name: str) -> None:
        """An operator has drained the worker of this name: its process has ended, and none follows."""
        with self._lock:
            self._workers[name].is_drained = True
            self._end(name, "was drained")
            self._recorder.remove(m.WORKER_UP, worker=name)

    def on_stopping(self) -> None:
        """The supervisor stops: it is not ready, and is healthy without reports of its processes."""
        self._stopping = True

    def on_report(self, name: str, process_id: int, report: Mapping[str, Any]) -> None:
        """A report of `make_report` has come, as decoded JSON. One of a drained worker came late: it has no effect."""
        with self._lock:
            worker = self._workers[name]
            if worker.is_drained:
                return
            self._metrics.update(name, process_id, report["metrics"])
            worker.health, worker.reported_ms = report["health"], self._clock.monotonic_ms()
            self._recorder.set(m.WORKER_UP, 1, worker=name)

    def failures(self) -> list[str]:
        """The reasons why the processes are not healthy; empty if they are."""
        with self._lock:
            return [f"worker {name}: {why}" for name, one in self._workers.items() for why in self._failures(one)]

    def readiness_failures(self) -> list[str]:
        """The reasons why they are not ready; empty if they are."""
        with self._lock:
            reasons = [
                f"worker {name}: {why}"
                for name, one in self._workers.items()
                for why in (*self._failures(one, "readiness_failures"), *self._starting(one))
            ]
            if not self._workers:
                reasons.append("no worker has started: waiting for Redis")
        return [*reasons, "it is stopping"] if self._stopping else reasons

    def page(self, reasons: list[str]) -> bytes:
        """The health page in JSON: the status, its reasons and the page of each process."""
        with self._lock:
            pages = {name: one.health.get("page") for name, one in self._workers.items()}
        status = "failing" if reasons else "ok"
        return msgspec.json.encode({"status": status, "reasons": reasons, "workers": pages})

    def collect(self) -> Iterator[Any]:
        """The metric families of all processes, for prometheus_client."""
        with self._lock:
            for name, one in self._workers.items():
                if one.ended is None and self._silent_ms(one) > _SILENT_MS:  # stopped, say; a report sets it to 1 again
                    self._recorder.set(m.WORKER_UP, 0, worker=name)
        return self._metrics.collect()

    def _end(self, name: str, how: str) -> None:
        self._workers[name].ended = how
        self._recorder.set(m.WORKER_UP, 0, worker=name)
        self._metrics.end(name)

    def _failures(self, worker: _Worker, kind: str = "failures") -> Iterator[str]:
        if worker.ended is not None:
            if not (self._stopping or worker.is_drained):
                yield f"it {worker.ended}; it is being restarted"
            return
        yield from worker.health.get(kind, ())
        silent_ms = self._silent_ms(worker)
        if self._stopping:
            return
        if silent_ms > _SILENT_MS:
            yield f"it has not reported for {silent_ms / 1000:.1f} s"
        starting_ms = self._clock.monotonic_ms() - worker.started_ms
        if worker.has_run and worker.reported_ms is None and starting_ms > _MAX_START_MS:
            yield f"it has not reported since its start, {starting_ms / 1000:.0f} s ago"

    def _silent_ms(self, worker: _Worker) -> float:
        return 0.0 if worker.reported_ms is None else self._clock.monotonic_ms() - worker.reported_ms

    def _starting(self, worker: _Worker) -> Iterator[str]:
        if worker.ended is None and worker.reported_ms is None:
            yield "it is starting"
