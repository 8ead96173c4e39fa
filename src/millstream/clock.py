"""The one place where time comes from, so that tests can bring their own."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that can also wait."""

    def monotonic_ms(self) -> float:
        """Milliseconds since some fixed point; never goes back."""

    def sleep_ms(self, duration_ms: float) -> None:
        """Wait for `duration_ms` milliseconds."""


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic_ms(self) -> float:
        """Milliseconds of `time.monotonic`."""
        return time.monotonic() * 1000.0

    def sleep_ms(self, duration_ms: float) -> None:
        """Wait with `time.sleep`."""
        time.sleep(duration_ms / 1000.0)


SYSTEM_CLOCK = SystemClock()
