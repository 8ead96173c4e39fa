"""Clock: the only source of time and sleep, so that tests can replace it."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that can also wait."""

    def monotonic_ms(self) -> float:
        """Milliseconds since an arbitrary fixed point; never decreases."""

    def sleep_ms(self, duration_ms: float) -> None:
        """Sleep for `duration_ms` milliseconds."""


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic_ms(self) -> float:
        """Milliseconds of `time.monotonic`."""
        return time.monotonic() * 1000.0

    def sleep_ms(self, duration_ms: float) -> None:
        """Sleep with `time.sleep`."""
        time.sleep(duration_ms / 1000.0)


SYSTEM_CLOCK = SystemClock()
