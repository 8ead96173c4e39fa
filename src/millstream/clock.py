"""Clock: the only source of time and sleep, so that tests can replace it; back-off; and limits of frequency."""

import time
from math import inf
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

_MAX_DOUBLINGS = 60


def wait_after(failures: int, first_ms: float, longest_ms: float) -> float:
    """Return the wait after so many failures in a row, in milliseconds: `first_ms` after one, then twice the one before.

    At most `longest_ms`.
    """
    return min(first_ms * 2.0 ** min(failures - 1, _MAX_DOUBLINGS), longest_ms)


class Backoff:
    """Waits between retries, in milliseconds: `first_ms`, then twice the one before, at most `longest_ms`.

    With `at_once` there is no wait before the first retry.
    """

    def __init__(self, first_ms: float, longest_ms: float, *, at_once: bool = False) -> None:
        self._first_ms, self._longest_ms = first_ms, longest_ms
        self._begins_ms = self.upcoming_ms = 0.0 if at_once else first_ms
        """`upcoming_ms`: the wait that `next_ms` will return."""
        self.has_begun = False
        """True if there was a wait since the last `reset`."""

    def next_ms(self) -> float:
        """Return the next wait."""
        wait_ms, self.has_begun = self.upcoming_ms, True
        self.upcoming_ms = min(max(2 * wait_ms, self._first_ms), self._longest_ms)
        return wait_ms

    def reset(self) -> None:
        """Start again at `first_ms`, since the retried operation has succeeded."""
        self.upcoming_ms, self.has_begun = self._begins_ms, False


class Every:
    """Limits an action, such as a warning, to once per `interval_ms` milliseconds."""

    def __init__(self, interval_ms: float) -> None:
        self._interval_ms = interval_ms
        self._due_ms = -inf

    def is_due(self, now_ms: float) -> bool:
        """Return True if the interval since the last True is over; the next one begins then. `now_ms`: monotonic."""
        if now_ms < self._due_ms:
            return False
        self._due_ms = now_ms + self._interval_ms
        return True

    def reset(self) -> None:
        """Make the action due at once."""
        self._due_ms = -inf
