"""Clocks that a test moves."""

from collections.abc import Callable

from millstream.clock import SystemClock


class ManualClock:
    """It stands still until a test moves it, and moves by `step_ms` milliseconds each time it is read."""

    def __init__(self, now_ms: float = 0.0) -> None:
        self.now_ms = now_ms
        self.step_ms = 0.0

    def monotonic_ms(self) -> float:
        """Where the test put it."""
        self.now_ms += self.step_ms
        return self.now_ms

    def sleep_ms(self, duration_ms: float) -> None:
        """Move on at once."""
        self.now_ms += duration_ms


class LeapClock(SystemClock):
    """The machine's clock, that a test lets leap ahead: long times end at once, and only when they are to."""

    def __init__(self) -> None:
        self._ahead_ms = 0.0

    def monotonic_ms(self) -> float:
        """The machine's time, and all leaps."""
        return super().monotonic_ms() + self._ahead_ms

    def leap(self, duration_ms: float) -> None:
        """Be so much later from now on."""
        self._ahead_ms += duration_ms


class ScriptedTime(ManualClock):
    """The module `time` of a command: each sleep does the next thing of a list, and Ctrl-C is pressed after the last one."""

    def __init__(self, *things: Callable[[], object]) -> None:
        super().__init__()
        self._things = iter(things)
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        """See time.monotonic."""
        return self.monotonic_ms() / 1000

    def time(self) -> float:
        """See time.time."""
        return self.monotonic()

    def sleep(self, seconds: float) -> None:
        """Do the next thing."""
        self.slept_s.append(seconds)
        self.sleep_ms(seconds * 1000)
        thing = next(self._things, None)
        if thing is None:
            raise KeyboardInterrupt
        thing()
