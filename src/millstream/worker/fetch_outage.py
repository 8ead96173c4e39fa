"""FetchOutage: counts and logs that Redis refuses the fetches of a worker."""

import logging

from millstream.clock import Clock
from millstream.errors import OutOfMemory, Unavailable
from millstream.worker.loop_metrics import LoopMetrics

logger = logging.getLogger(__name__)


class FetchOutage:
    """The time between a fetch that Redis refused and the next that it answers.

    Used by the fetcher, but for `is_short_of_memory`.
    """

    def __init__(self, label: str, loop_metrics: LoopMetrics, clock: Clock) -> None:
        self._label = label
        self._loop_metrics = loop_metrics
        self._clock = clock
        self._since_ms: float | None = None
        self._is_short_of_memory = False

    @property
    def is_short_of_memory(self) -> bool:
        """Whether Redis has refused a fetch for lack of memory, and answered none since: only that is logged here."""
        return self._is_short_of_memory

    def on_refused(self, error: Unavailable) -> None:
        """Note that a fetch was refused."""
        self._loop_metrics.on_redis_error(error)
        if self._since_ms is None:
            self._since_ms = self._clock.monotonic_ms()
        if isinstance(error, OutOfMemory) and not self._is_short_of_memory:
            self._is_short_of_memory = True  # Redis answers other commands, so no other part logs it
            logger.warning("%s cannot fetch messages: %s; retrying", self._label, error)

    def on_fetched(self) -> None:
        """Note that a fetch was answered."""
        if self._since_ms is None:
            return
        self._loop_metrics.count_reconnect()
        if self._is_short_of_memory:
            waited_ms = self._clock.monotonic_ms() - self._since_ms
            logger.warning("%s resumes: Redis answers its fetches again after %.1f s", self._label, waited_ms / 1000)
        self._since_ms, self._is_short_of_memory = None, False
