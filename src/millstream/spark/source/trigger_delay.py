"""Holds small batches back: until enough entries wait, or for as long as it may take."""

from millstream.clock import Clock


class TriggerDelay:
    """Lets a batch of fewer than `least` entries begin only `most_ms` after the last one; None holds nothing back.

    The first batch of a process is never held back (Spark's Kafka source, minOffsetsPerTrigger).
    """

    def __init__(self, least: int | None, most_ms: float, *, clock: Clock) -> None:
        self._least = least
        self._most_ms = most_ms
        self._clock = clock
        self._due_ms = float("-inf")

    def left_ms(self, waiting: int) -> float:
        """How much longer a batch of `waiting` entries is held back, in milliseconds; 0 if it may begin."""
        if self._least is None or not 0 < waiting < self._least:
            return 0.0
        return max(0.0, self._due_ms - self._clock.monotonic_ms())

    def began(self) -> None:
        """A batch begins now."""
        self._due_ms = self._clock.monotonic_ms() + self._most_ms
