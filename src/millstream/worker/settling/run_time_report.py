"""RunTimeReport: reports to Redis how long the runs of a handler took on this worker, for operators."""

import logging
from collections.abc import Sequence

from millstream.clock import Every
from millstream.delivery.run_times import HELD_MS, RunTimes, report_run_times
from millstream.errors import RedisError
from millstream.worker.context import WorkerContext

logger = logging.getLogger(__name__)

_REPEATS = 6


class RunTimeReport:
    """Reports several times within `HELD_MS`, while runs end. Used by one thread."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._due = Every(HELD_MS / _REPEATS)
        self._since_ms = context.clock.monotonic_ms()
        self._committed = self._retried = 0
        self._reported: RunTimes | None = None

    def report_if_due(self) -> None:
        """Report the runs that have ended since the last report, if it is time. A worker goes on without the report."""
        now_ms = self._context.clock.monotonic_ms()
        if not self._due.is_due(now_ms):
            return
        took_ms = sorted(self._context.loop_metrics.take_run_times())
        if took_ms:
            self._replace(self._summary(took_ms, now_ms))
        self._since_ms = now_ms

    def end(self) -> None:
        """Remove the report, as the worker ends."""
        if self._reported is not None:
            self._replace(None)

    def _summary(self, took_ms: Sequence[float], now_ms: float) -> RunTimes:
        counted, committed, retried = self._context.loop_metrics, self._committed, self._retried
        self._committed, self._retried = counted.committed, counted.retried
        return RunTimes(
            worker=self._context.consumer,
            over_ms=round(now_ms - self._since_ms),
            committed=self._committed - committed,
            retried=self._retried - retried,
            p50_ms=round(_quantile(took_ms, 0.50), 3),
            p99_ms=round(_quantile(took_ms, 0.99), 3),
            longest_ms=round(took_ms[-1], 3),
        )

    def _replace(self, found: RunTimes | None) -> None:
        handler = self._context.handler
        try:
            report_run_times(self._context.client, handler.app, handler.name, found, earlier=self._reported)
            self._reported = found
        except RedisError as error:
            logger.debug("cannot report the run times of %s: %s; trying again", handler.label, error)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the values is, nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
