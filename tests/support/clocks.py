"""A clock in the hands of a test."""


class HandClock:
    """It stands still until it is moved, or moves by `passes` milliseconds each time when it is looked at."""

    def __init__(self, now_ms: float = 0.0) -> None:
        self.now_ms = now_ms
        self.passes = 0.0

    def monotonic_ms(self) -> float:
        """Where the test put it."""
        self.now_ms += self.passes
        return self.now_ms

    def sleep_ms(self, duration_ms: float) -> None:
        """Move on at once."""
        self.now_ms += duration_ms
