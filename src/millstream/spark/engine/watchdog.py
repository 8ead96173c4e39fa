"""Ends a Python worker whose handler never comes back, from outside the interpreter.

Compiled code that keeps the interpreter's lock, such as a regular expression that backtracks without end, keeps every
thread and every signal handler of Python from running. A timer of the kernel needs neither (POSIX timer_create).
"""

import ctypes
import functools
import os
import signal
import time

_CLOCK_MONOTONIC, _SIGEV_SIGNAL = 1, 0
_MOST_GRACE_MS, _LEAST_GRACE_MS = 30_000.0, 2_000.0
_RENEWED_S = 0.5


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
    """Kills this process when it is not told in time that what it guards goes on. No-op where the system has no such timer.

    To tell it costs as much as a few messages do, so what begins soon after something else is not told of. A forked child has
    no watchdog.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(None, signal.SIGKILL, _SIGEV_SIGNAL, b"")
        create = getattr(self._libc, "timer_create", None)
        self._renew_at_s = float("-inf")
        self._armed = False
        self._usable = create is not None and not create(
            _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        )

    def expect(self, within_ms: float) -> None:
        """Kill this process in so many milliseconds, or half a second later, unless told otherwise."""
        now_s = time.monotonic()
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + _RENEWED_S
            self._set(within_ms / 1000 + _RENEWED_S)

    def rest(self) -> None:
        """Expect nothing."""
        if self._armed:
            self._renew_at_s = float("-inf")
            self._set(0.0)

    def _set(self, seconds: float) -> None:
        self._armed = seconds > 0
        if self._usable:
            whole = int(seconds)
            spec = _TimerSpec(0, 0, whole, int((seconds - whole) * 1e9))
            self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)


def hard_limit_ms(limit_ms: float) -> float:
    """How long an attempt may take whose time limit is `limit_ms`, before its process is killed: so long that a time limit
    which can be kept has been."""
    return limit_ms + min(max(limit_ms, _LEAST_GRACE_MS), _MOST_GRACE_MS)


def watchdog() -> Watchdog:
    """The watchdog of this process."""
    return _watchdog_of(os.getpid())


@functools.cache
def _watchdog_of(_pid: int) -> Watchdog:
    return Watchdog()
