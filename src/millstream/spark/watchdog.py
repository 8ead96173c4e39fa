"""Ends a Python worker whose handler never comes back, from outside the interpreter.

Compiled code that keeps the interpreter's lock, such as a regular expression that backtracks without end, keeps every
thread and every signal handler of Python from running. A timer of the kernel needs neither (POSIX timer_create).
"""

import ctypes
import functools
import os
import signal

_CLOCK_MONOTONIC, _SIGEV_SIGNAL = 1, 0
_MOST_GRACE_MS, _LEAST_GRACE_MS = 30_000.0, 2_000.0


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

    A forked child has no watchdog.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(None, signal.SIGKILL, _SIGEV_SIGNAL, b"")
        create = getattr(self._libc, "timer_create", None)
        self._usable = create is not None and not create(
            _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        )

    def expect(self, within_ms: float) -> None:
        """Kill this process in so many milliseconds, unless told otherwise."""
        seconds, rest_ms = divmod(within_ms, 1000)
        self._set(_TimerSpec(0, 0, int(seconds), int(rest_ms * 1_000_000) or 1))

    def rest(self) -> None:
        """Expect nothing."""
        self._set(_NOTHING)

    def _set(self, spec: _TimerSpec) -> None:
        if self._usable:
            self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)


_NOTHING = _TimerSpec(0, 0, 0, 0)


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
