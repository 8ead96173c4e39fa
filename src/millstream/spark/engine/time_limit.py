"""AttemptTimeLimit: runs plain handlers in the Python worker's main thread, each attempt under its time limit.

A thread per attempt would cost more than most handlers do, and could not be stopped. A timer signal interrupts even a
sleep or a blocking read (POSIX setitimer); only compiled code that never returns to Python delays it. The watchdog
timer kills a process that runs such code.
"""

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from millstream.handlers.attempt import RunResult
from millstream.handlers.time_limit import TimeLimit
from millstream.spark.engine.watchdog import watchdog

_MIN_REPEAT_S = 1.0
_MIN_WAIT_S = 0.001


class AttemptTimeLimit:
    """Interrupts an attempt that exceeds its time limit. Created outside a process's main thread, it sets no limit.

    `armed`: an attempt runs; the caller of `begin` sets it to False, and once more if TimeLimit is raised meanwhile.

    Setting the timer costs as much as a cheap handler does, so attempts share one: when it fires before the limit of the
    attempt that runs then, it is set anew for the rest.
    """

    def __init__(self) -> None:
        self.armed = False
        self._deadline_s = self._fires_at_s = math.inf
        self._limit_s = math.inf
        self._watchdog = watchdog()
        self._usable = threading.current_thread() is threading.main_thread()
        if self._usable:
            signal.signal(signal.SIGALRM, self._on_alarm)

    @contextmanager
    def outside_loop(self) -> Iterator["AttemptTimeLimit"]:
        """Leave the event loop, which nothing else may need within the block, and return this time limit.

        A plain handler may run an event loop of its own, and asyncio.run refuses to start inside another.
        """
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            yield self
        finally:
            asyncio._set_running_loop(loop)

    def guard(self, work: Callable[..., RunResult], limit_ms: float, /, *arguments: Any) -> RunResult:
        """Return what `work` returns; raise TimeLimit in it after `limit_ms` milliseconds. Call it outside the loop."""
        try:
            self.begin(limit_ms)
            try:
                return work(*arguments)
            finally:
                self.armed = False
        finally:
            self.armed = False  # again: the alarm may have fired just before the first assignment

    def disarm(self) -> None:
        """Stop this timer and the watchdog timer: no attempt runs now. Call it before any step that may take long."""
        if self._fires_at_s < math.inf:
            self._set_timer(0)
            self._fires_at_s = math.inf
        self._watchdog.disarm()

    def begin(self, limit_ms: float, /) -> None:
        """From now on, as long as this is `armed`, raise TimeLimit after `limit_ms` milliseconds."""
        now_s, limit_s = time.monotonic(), limit_ms / 1000
        self._limit_s = limit_s
        self._deadline_s = deadline_s = now_s + limit_s
        self.armed = True  # before the check: a timer that fires from here on is set anew
        # One that should have fired by now was stopped by a handler, which may use the signal itself.
        if not now_s < self._fires_at_s <= deadline_s:
            self._fires_at_s = deadline_s
            self._set_timer(limit_s)
        if now_s >= self._watchdog.renew_at_s:
            self._watchdog.arm(limit_ms)

    def _set_timer(self, seconds: float) -> None:
        if self._usable:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def _on_alarm(self, _signal: int, _frame: object) -> None:
        self._fires_at_s = math.inf
        if not self.armed:
            return
        now_s = time.monotonic()
        left_s = self._deadline_s - now_s
        is_over = left_s <= 0
        # The alarm repeats: a handler may swallow the first one.
        wait_s = max(self._limit_s, _MIN_REPEAT_S) if is_over else max(left_s, _MIN_WAIT_S)
        self._set_timer(wait_s)
        self._fires_at_s = now_s + wait_s
        if is_over:
            raise TimeLimit
