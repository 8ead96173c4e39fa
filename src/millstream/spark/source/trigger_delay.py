"""TriggerDelay: delays small batches, for minOffsetsPerTrigger and maxTriggerDelay."""

from millstream.clock import Clock


class TriggerDelay:
    """Delays a batch of fewer than `min_entries` entries until `max_delay_ms` after the last one; None delays nothing.

    The first batch of a process is never delayed (Spark's Kafka source, minOffsetsPerTrigger).
    """

    def __init__(self, min_entries: int | None, max_delay_ms: float, *, clock: Clock) -> None:
        self._min_entries = min_entries
        self._max_delay_ms = max_delay_ms
        self._clock = clock
        self._due_ms = float("-inf")

    def remaining_ms(self, waiting: int) -> float:
        """The remaining delay of a batch of `waiting` entries, in milliseconds; 0 if it may begin."""
        if self._min_entries is None or not 0 < waiting < self._min_entries:
            return 0.0
        return max(0.0, self._due_ms - self._clock.monotonic_ms())

    def on_batch(self) -> None:
        """Record that a batch begins now."""
        self._due_ms = self._clock.monotonic_ms() + self._max_delay_ms
