"""RunTimeReport: reports to Redis how long the runs of a handler took on this worker, for operators."""

import logging
from collections.abc import Sequence

from millstream.delivery.run_times import HELD_MS, RunTimes, report_run_times
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.worker.context import WorkerContext

logger = logging.getLogger(__name__)

_REPORT_MS = HELD_MS / 6
_TIMEOUT_MS = 1_000


class RunTimeReport:
    """Reports several times within `HELD_MS`, while runs end. Used by one thread.

    It has a client of its own: the report may be on another server than the streams, and one that hangs must not hold up
    commits and renewals.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._client = Client(context.url, timeout_ms=_TIMEOUT_MS, clock=context.clock)
        self._since_ms = context.clock.monotonic_ms()
        self._due_ms = self._since_ms
        self._committed = self._retried = 0
        self._reported: RunTimes | None = None

    def report_if_due(self) -> None:
        """Report the runs that have ended since the last report, if it is time. A worker goes on without the report."""
        now_ms = self._context.clock.monotonic_ms()
        if now_ms < self._due_ms:
            return
        found = self._summary(sorted(self._context.loop_metrics.take_run_times()), now_ms)
        self._since_ms, self._due_ms = now_ms, now_ms + _REPORT_MS
        if found is not None:
            self._replace(found)

    def end(self) -> None:
        """Remove the report, as the worker ends."""
        if self._reported is not None:
            self._replace(None)
        self._client.close()

    def _summary(self, took_ms: Sequence[float], now_ms: float) -> RunTimes | None:
        """What has happened since the last report; None for nothing."""
        counted, committed, retried = self._context.loop_metrics, self._committed, self._retried
        self._committed, self._retried = counted.committed, counted.retried
        if not took_ms and (self._committed, self._retried) == (committed, retried):
            return None
        return RunTimes(
            worker=self._context.consumer,
            over_ms=round(now_ms - self._since_ms),
            committed=self._committed - committed,
            retried=self._retried - retried,
            p50_ms=_quantile(took_ms, 0.50),
            p99_ms=_quantile(took_ms, 0.99),
            longest_ms=_quantile(took_ms, 1),
        )

    def _replace(self, found: RunTimes | None) -> None:
        handler = self._context.handler
        try:
            report_run_times(self._client, handler.app, handler.name, found, earlier=self._reported)
            self._reported = found
        except RedisError as error:
            self._due_ms = self._context.clock.monotonic_ms() + HELD_MS
            logger.debug("cannot report the run times of %s: %s; trying again", handler.label, error)


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which that share of the values is, nearest rank; None if there are none."""
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None
