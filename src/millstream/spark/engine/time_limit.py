"""AttemptTimeLimit: runs plain handlers in the Python worker's main thread, each attempt under its time limit.

A thread per attempt would cost more than most handlers do, and could not be stopped. A timer signal interrupts even a
sleep or a blocking read (POSIX setitimer); only compiled code that never returns to Python delays it. The watchdog
kills a process that runs such code.
"""

import asyncio
import signal
import threading
from collections.abc import Callable

from millstream.handlers.attempt import Ended, TimeLimit
from millstream.spark.engine.watchdog import hard_limit_ms, watchdog

_MIN_REPEAT_S = 1.0


class AttemptTimeLimit:
    """Interrupts an attempt that exceeds its time limit. Created outside a process's main thread, it sets no limit."""

    def __init__(self) -> None:
        self._armed = False
        self._watchdog = watchdog()
        self._usable = threading.current_thread() is threading.main_thread()
        if self._usable:
            signal.signal(signal.SIGALRM, self._ring)

    def guard(self, work: Callable[[], Ended], limit_ms: float) -> Ended:
        """Return what `work` returns; raise TimeLimit in it after `limit_ms` milliseconds."""
        loop = asyncio._get_running_loop()
        try:
            # A plain handler may run an event loop of its own, and asyncio.run refuses to start inside another.
            asyncio._set_running_loop(None)
            self._arm(limit_ms / 1000)
            self._watchdog.expect(hard_limit_ms(limit_ms))
            try:
                return work()
            finally:
                self._armed = False
        finally:
            self._armed = False  # again: the alarm may have fired just before the first assignment
            self._arm(0)
            asyncio._set_running_loop(loop)

    def rest(self) -> None:
        """Disarm the watchdog: no attempt runs now. Call it before anything that may take long."""
        self._watchdog.rest()

    def _arm(self, seconds: float) -> None:
        if self._usable:
            self._armed = seconds > 0
            # The alarm repeats: a handler may swallow the first one.
            signal.setitimer(signal.ITIMER_REAL, seconds, max(seconds, _MIN_REPEAT_S) if seconds else 0)

    def _ring(self, _signal: int, _frame: object) -> None:
        if self._armed:
            raise TimeLimit
