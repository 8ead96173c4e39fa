"""Loop metrics: the counts of a reading loop for operators, its metrics, and its progress for health checks."""

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import get_args

from millstream.clock import SYSTEM_CLOCK, Every
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import OutOfMemory, Unavailable
from millstream.handlers.dead_letter import Reason
from millstream.observability import metrics as m
from millstream.observability.health import Health, Progress
from millstream.observability.metrics import NO_METRICS, Metrics, init_series

_OF_HANDLERS = (
    m.READ,
    m.COMMITTED,
    m.HEAD_OF_LINE_AVOIDED,
    m.RETRIED,
    m.LIMITED,
    m.PARKED,
    m.RELEASED,
    m.CLAIMED,
    m.TRIMMED,
    m.REFUSED,
    m.BUDGET_REACHED,
    m.HANDLER_SECONDS,
    m.COMMIT_SECONDS,
    m.AGE_SECONDS,
)
"""The counters and histograms that have the label `handler` only."""
_GAUGES = (m.IN_FLIGHT, m.IN_FLIGHT_BYTES, m.QUEUED, m.RUNNING, m.LONGEST_RUN, m.WAITING_FOR_RATE)
"""The gauges that are 0 at the start."""

logger = logging.getLogger(__name__)

_WARN_EVERY_MS = 600_000.0
_RUN_TIMES_KEPT = 2_000
"""Enough for a p99; more of them would say the same."""
_REDIS_ERRORS = (Unavailable, OutOfMemory)


class LoopMetrics:
    """Counts of messages since the loop started, also reported to `metrics` and, if given, to `health`.

    `refused` are commits refused because another worker, or a run on Spark, has those messages. `trimmed` are entries
    that were removed from their stream before they were processed.
    """

    def __init__(
        self, handler: str, *, time_limit_ms: float, metrics: Metrics = NO_METRICS, health: Health | None = None
    ):
        self.read = self.claimed = self.committed = self.dead = self.skipped = 0
        self.retried = self.refused = self.released = self.trimmed = self.parked = 0
        self._run_times_ms = deque[float](maxlen=_RUN_TIMES_KEPT)
        self._is_poll_wanted = self._at_budget = self._waits_for_rate = False
        self._full_warning = Every(_WARN_EVERY_MS)
        self._handler = handler
        self.metrics = self._metrics = metrics
        self._progress: Progress | None = health.progress(handler, run_within_ms=time_limit_ms) if health else None
        init_series(metrics, *_OF_HANDLERS, handler=handler)
        for gauge in _GAUGES:
            metrics.set(gauge, 0, handler=handler)
        for reason in get_args(Reason):
            init_series(metrics, m.DEAD_LETTERED, handler=handler, reason=reason)
        init_series(metrics, m.DELAYED_MOVED, m.RECONNECTS)
        for error in _REDIS_ERRORS:
            init_series(metrics, m.REDIS_ERRORS, error=error.__name__)

    def counts(self) -> dict[str, int]:
        """Return all counts by name."""
        names = (
            "read",
            "claimed",
            "committed",
            "processed",
            "dead",
            "retried",
            "refused",
            "released",
            "trimmed",
            "parked",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def processed(self) -> int:
        """How many messages were committed, and not as dead letters."""
        return self.committed - self.dead

    @property
    def done(self) -> int:
        """How many entries were committed, with those that are for another handler alone."""
        return self.committed + self.skipped

    def on_poll_wanted(self) -> None:
        """Note that a read is wanted: from now on only the answer to a read shows that the loop is healthy."""
        self._is_poll_wanted = True

    def on_idle(self) -> None:
        """Note that nothing is to be read for now."""
        self._is_poll_wanted = False

    def on_reply(self) -> None:
        """Note a reply to another command. While nothing is to be read, it shows that the loop is healthy."""
        if not self._is_poll_wanted:
            self._report_alive()

    def on_polled(self, found: int) -> None:
        """Note a reply to a read, with so many entries."""
        self._is_poll_wanted = False
        self.read += found
        self._report_alive()
        if found:
            self._metrics.count(m.READ, found, handler=self._handler)

    def _report_alive(self) -> None:
        if self._progress is not None:
            self._progress.on_read()
            self._metrics.set(m.LAST_POLL, time.time(), handler=self._handler)

    def on_run_started(self) -> None:
        """Note that a run of the handler started."""
        if self._progress is not None:
            self._progress.on_run_started()

    def on_runs_settled(self, count: int) -> None:
        """Note that so many runs are committed, retried or dead-lettered."""
        if self._progress is not None:
            self._progress.on_run_ended(count)

    def count_claimed(self, count: int) -> None:
        """Count entries claimed from other workers, or recovered after a restart of this one."""
        self.claimed += count
        if count:
            self._metrics.count(m.CLAIMED, count, handler=self._handler)

    def observe_run_times(self, took_ms: Sequence[float]) -> None:
        """Observe how long the handler ran, on each of some messages; of a sample without a metrics backend."""
        self._run_times_ms.extend(took_ms)
        if self._metrics is not NO_METRICS:
            self._metrics.observe_all(m.HANDLER_SECONDS, [ms / 1000 for ms in took_ms], handler=self._handler)

    def take_run_times(self) -> list[float]:
        """Return how long runs took that were observed since the last call, in milliseconds; at most the last 2,000."""
        taken, self._run_times_ms = self._run_times_ms, deque(maxlen=_RUN_TIMES_KEPT)
        return list(taken)

    def count_retried(self, count: int) -> None:
        """Count failed runs that will be repeated."""
        self.retried += count
        if count:
            self._metrics.count(m.RETRIED, count, handler=self._handler)

    def count_limited(self, count: int) -> None:
        """Count messages that were refused a permit of the handler's limit."""
        if count:
            self._metrics.count(m.LIMITED, count, handler=self._handler)

    def count_parked(self, count: int) -> None:
        """Count keys parked until an operator acts, as a message of theirs failed for the last time."""
        self.parked += count
        if count:
            self._metrics.count(m.PARKED, count, handler=self._handler)

    def count_committed(
        self,
        deliveries: Sequence[Delivery],
        dead: Sequence[str],
        took_s: float,
        *,
        skipped: int = 0,
        head_of_line_avoided: int = 0,
    ) -> None:
        """Count committed messages; `dead`: the reasons of those among them that were dead-lettered.

        * `skipped`: how many of them are for another handler alone, and do not count
        * `head_of_line_avoided`: how many of them did not wait for an earlier message of another key
        """
        self.committed += len(deliveries) - skipped
        self.skipped += skipped
        self.dead += len(dead)
        if self._metrics is NO_METRICS:
            return
        self._metrics.count(m.COMMITTED, len(deliveries) - skipped, handler=self._handler)
        if head_of_line_avoided:
            self._metrics.count(m.HEAD_OF_LINE_AVOIDED, head_of_line_avoided, handler=self._handler)
        for reason, count in Counter(dead).items():
            self._metrics.count(m.DEAD_LETTERED, count, handler=self._handler, reason=reason)
        self._metrics.observe(m.COMMIT_SECONDS, took_s, handler=self._handler)
        now = time.time()
        ages = [max(0.0, now - int(one.id.partition(b"-")[0]) / 1000) for one in deliveries]
        self._metrics.observe_all(m.AGE_SECONDS, ages, handler=self._handler)

    def count_refused(self, count: int) -> None:
        """Count refused commits."""
        self.refused += count
        self._metrics.count(m.REFUSED, count, handler=self._handler)

    def count_released(self, count: int) -> None:
        """Count messages released uncommitted: the loop stops, its breaker opened, or others may start them earlier."""
        self.released += count
        if count:
            self._metrics.count(m.RELEASED, count, handler=self._handler)

    def set_in_flight(self, *, in_flight: int, buffered: int) -> None:
        """Set how many messages are in flight and buffered."""
        self._metrics.set(m.IN_FLIGHT, in_flight, handler=self._handler)
        self._metrics.set(m.QUEUED, buffered, handler=self._handler)

    def set_runs(self, runs: Sequence[Delivery], now_ms: float) -> None:
        """Set how many messages run, and how long the longest of them has been running; `now_ms`: of the loop's clock."""
        longest_ms = max((now_ms - one.state_since_ms for one in runs), default=0.0)
        self._metrics.set(m.RUNNING, len(runs), handler=self._handler)
        self._metrics.set(m.LONGEST_RUN, max(0.0, longest_ms) / 1000, handler=self._handler)

    def set_run_limit(self, limit: int) -> None:
        """Set how many messages may run at once."""
        self._metrics.set(m.RUNNING_LIMIT, limit, handler=self._handler)

    def set_waiting_for_rate(self, waits: bool) -> None:
        """Set whether reads of a stream wait for the handler's rate. Called before every read."""
        if waits != self._waits_for_rate:
            self._waits_for_rate = waits
            self._metrics.set(m.WAITING_FOR_RATE, waits, handler=self._handler)

    def set_bytes_in_flight(self, size: int, budget: int, *, at_budget: bool) -> None:
        """Set the bytes in flight; `at_budget`: whether the budget allows no further fetch."""
        if self.has_backend:
            self._metrics.set(m.IN_FLIGHT_BYTES, size, handler=self._handler)
        if at_budget and not self._at_budget:
            self._metrics.count(m.BUDGET_REACHED, handler=self._handler)
            if self._full_warning.is_due(SYSTEM_CLOCK.monotonic_ms()):
                logger.warning(
                    "prefetch of %s is full: %.1f MB of messages in flight, of at most %.1f; fetching resumes as they "
                    "finish. If the handler could run more at once, and memory allows, raise --prefetch-mb "
                    "(WorkerPolicy.prefetch_bytes)",
                    self._handler,
                    size / 2**20,
                    budget / 2**20,
                )
        self._at_budget = at_budget

    @property
    def has_backend(self) -> bool:
        """True if a metrics backend is configured."""
        return self._metrics is not NO_METRICS

    def count_trimmed(self, count: int) -> None:
        """Count entries that were removed from their stream while they were pending."""
        self.trimmed += count
        self._metrics.count(m.TRIMMED, count, handler=self._handler)

    def count_delayed_moved(self, count: int) -> None:
        """Count delayed messages that came due and were moved to their streams."""
        if count:
            self._metrics.count(m.DELAYED_MOVED, count)

    def on_redis_error(self, error: Exception) -> None:
        """Count an error of Redis: unavailable, or out of memory. The health page names it while no read succeeds."""
        if self._progress is not None:
            self._progress.on_redis_error(error)
        self._metrics.count(m.REDIS_ERRORS, error=type(error).__name__)

    def count_reconnect(self) -> None:
        """Count a recovery after Redis was unavailable."""
        self._metrics.count(m.RECONNECTS)
