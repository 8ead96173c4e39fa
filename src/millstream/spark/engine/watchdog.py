"""Watchdog timer: kills a Python worker whose handler never returns, from outside the interpreter.

Compiled code that holds the interpreter lock, such as a regular expression with endless backtracking, blocks every
thread and every signal handler of Python. A kernel timer needs neither (POSIX timer_create).
"""

import ctypes
import functools
import os
import signal
import time

_CLOCK_MONOTONIC, _SIGEV_SIGNAL = 1, 0
_MAX_GRACE_MS, _MIN_GRACE_MS = 30_000.0, 2_000.0
_RENEW_S = 0.5


class _SignalEvent(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 64),
    ]


class _TimerSpec(ctypes.Structure):
    _fields_ = [
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    ]


class Watchdog:
    """Kills this process if it is armed and not re-armed or disarmed in time. No-op where the system has no such timer.

    Setting the timer costs as much as a few messages do, so an `arm` within half a second of the last one is skipped:
    before `renew_at_s`, in monotonic time. A forked child has no watchdog timer.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(None, signal.SIGKILL, _SIGEV_SIGNAL, b"")
        create = getattr(self._libc, "timer_create", None)
        self.renew_at_s = float("-inf")
        self._armed = False
        self._usable = create is not None and not create(
            _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        )

    def arm(self, limit_ms: float, *, more_ms: float = 0.0) -> None:
        """Kill this process once an attempt with this time limit has no time left, unless armed again or disarmed first.

        That is in `hard_limit_ms` and `more_ms`, or up to 500 milliseconds later.
        """
        now_s = time.monotonic()
        if now_s >= self.renew_at_s:
            self.renew_at_s = now_s + _RENEW_S
            self._set_timer((hard_limit_ms(limit_ms) + more_ms) / 1000 + _RENEW_S)

    def disarm(self) -> None:
        """Stop the timer."""
        if self._armed:
            self.renew_at_s = float("-inf")
            self._set_timer(0.0)

    def _set_timer(self, seconds: float) -> None:
        self._armed = seconds > 0
        if self._usable:
            whole = int(seconds)
            spec = _TimerSpec(0, 0, whole, int((seconds - whole) * 1e9))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)


def hard_limit_ms(limit_ms: float) -> float:
    """Milliseconds after which the watchdog timer kills the process of an attempt whose time limit is `limit_ms`.

    Long enough for every time limit that can be enforced to be enforced first.
    """
    return limit_ms + min(max(limit_ms, _MIN_GRACE_MS), _MAX_GRACE_MS)


def watchdog() -> Watchdog:
    """The watchdog timer of this process."""
    return _watchdog_of(os.getpid())


@functools.cache
def _watchdog_of(_pid: int) -> Watchdog:
    return Watchdog()
