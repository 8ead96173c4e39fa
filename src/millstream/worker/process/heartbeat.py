"""Heartbeat of a worker process, and the supervisor's detector of frozen processes.

A handler in C code that holds Python's interpreter (the GIL: a runaway regular expression, say) stops all threads of
its process, also those that renew leases and enforce time limits. Only something outside of the interpreter can end
such a process: the supervisor or, if that is dead, the kernel.
"""

import ctypes
import mmap
import os
import signal
import struct
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

_BEAT_S = 0.1
_COUNTER = struct.Struct("<Q")
_COMPUTED_SHARE, _BLOCKED_SHARE = 0.25, 0.5
_INSPECT_AFTER_MS = 500.0
_LATE_MS = 1_000.0
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_STOPPED = {"T", "t"}
_SET_PARENT_DEATH_SIGNAL = 1
_PARENT_DIED: int | None = getattr(signal, "SIGSTKFLT", None)

ORPHAN_ALARM_S = int(_PARENT_DIED or 0)
"""After so many seconds the kernel ends a process whose supervisor died, if it has not ended; 0: it never does."""


class Heartbeat:
    """Increments a counter in memory shared with the supervisor, in its own thread, while threads of this process run.

    After `cpu_limit_ms` milliseconds of processor time without a beat, the kernel ends the process (SIGPROF;
    setitimer(2), ITIMER_PROF): a process that is stopped, or gets no processor, is not ended. A profiler that uses that
    signal has priority. A process whose supervisor died ends, however its handlers hold the interpreter; see
    `ORPHAN_ALARM_S`.
    """

    def __init__(self, descriptor: int, *, cpu_limit_ms: float) -> None:
        self._memory = mmap.mmap(descriptor, _COUNTER.size)
        self._cpu_limit_s = cpu_limit_ms / 1000
        self._count = 0

    def start(self) -> None:
        """Beat once, and start the heartbeat thread."""
        _end_with_parent()
        self._beat()  # here, as the first message may hold the interpreter before the thread has run at all
        threading.Thread(target=self._keep_beating, name="millstream-heartbeat", daemon=True).start()

    def _keep_beating(self) -> None:
        pause = threading.Event()
        while not pause.wait(_BEAT_S):
            self._beat()

    def _beat(self) -> None:
        self._count += 1
        _COUNTER.pack_into(self._memory, 0, self._count)
        if signal.getsignal(signal.SIGPROF) is signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_PROF, self._cpu_limit_s)


def _end_with_parent() -> None:
    """Make the kernel end this process some time after the thread that started it has ended.

    It sends a signal then (prctl(2), PR_SET_PDEATHSIG) that has no other use on Linux. Its handler is alarm(2) itself,
    which runs without the interpreter: it is called with the number of the signal, which is a number of seconds here.
    A timer of our own could not tell a frozen process from one that was stopped for as long, and would end both.
    """
    libc = ctypes.CDLL(None)
    if _PARENT_DIED is None or not hasattr(libc, "prctl"):
        return
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(_PARENT_DIED, ctypes.cast(libc.alarm, ctypes.c_void_p))
    libc.prctl(_SET_PARENT_DEATH_SIGNAL, _PARENT_DIED)


class FreezeDetector:
    """Detects a frozen process: for `limit_ms` milliseconds it had no heartbeat, though it could have had.

    A process that is stopped (SIGSTOP), waits for a disk or gets no processor all that time is not frozen. It is
    watched from its first heartbeat on. Where the system does not show the state of threads (/proc), silence alone
    counts.
    """

    def __init__(self, limit_ms: float) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._file.truncate(_COUNTER.size)
        self._memory = mmap.mmap(self._file.fileno(), _COUNTER.size)
        self._limit_ms = limit_ms
        self._count = 0
        self._checked_ms = self._silent_ms = self._blocked_ms = 0.0
        self._computed_ms: float | None = None

    @property
    def descriptor(self) -> int:
        """File descriptor of the shared memory, to be passed to the process."""
        return self._file.fileno()

    def is_frozen(self, pid: int, now_ms: float) -> bool:
        """Return whether the process is frozen. Call it several times a second, with a monotonic clock."""
        (count,) = _COUNTER.unpack_from(self._memory, 0)
        passed_ms, self._checked_ms = now_ms - self._checked_ms, now_ms
        # A late call means that the supervisor itself was not scheduled, and perhaps the whole machine.
        if count != self._count or not count or passed_ms > _LATE_MS:
            self._count, self._silent_ms, self._blocked_ms, self._computed_ms = count, 0.0, 0.0, None
            return False
        if self._silent_ms < _INSPECT_AFTER_MS:
            self._silent_ms += passed_ms
            return False
        return self._looks_frozen(pid, passed_ms)

    def _looks_frozen(self, pid: int, passed_ms: float) -> bool:
        states, computed_ms = _threads(pid)
        if self._computed_ms is None:
            self._computed_ms = computed_ms
        if states & _STOPPED:
            return False
        self._silent_ms += passed_ms
        if states <= {"S"}:  # one thread holds the interpreter, and sleeps
            self._blocked_ms += passed_ms
        enough = max(
            (computed_ms - self._computed_ms) / (_COMPUTED_SHARE * self._limit_ms),
            self._blocked_ms / (_BLOCKED_SHARE * self._limit_ms),
        )
        return self._silent_ms >= self._limit_ms and enough >= 1

    def close(self) -> None:
        """Close the shared memory."""
        self._memory.close()
        self._file.close()


def _threads(pid: int) -> tuple[set[str], float]:
    """Return the states of a process's threads, and their processor time in total, in milliseconds (proc(5), stat)."""
    states, ticks = set(), 0
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has just ended
            fields = stat.read_text().rpartition(")")[2].split()
            states.add(fields[0])
            ticks += int(fields[11]) + int(fields[12])
    return states, ticks * _TICK_MS
