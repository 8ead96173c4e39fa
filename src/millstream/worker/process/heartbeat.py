"""The heartbeat of a worker process, and the watchdog that its supervisor has on it.

A handler in C code that keeps Python's interpreter to itself (the GIL: a runaway regular expression, say) stops all
threads of its process, those included that extend leases and keep time limits. So whoever ends such a process must be
outside of the interpreter: the supervisor, or, should that be dead, a timer of the kernel.
"""

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
_LEAST_COMPUTED, _LEAST_BLOCKED = 0.25, 0.5
_LOOK_AFTER_MS = 500.0
_LATE_MS = 1_000.0
_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_STOPPED = {"T", "t"}


class Heartbeat:
    """Counts up in memory that the supervisor sees, in a thread of its own, as long as threads of this process get to run.

    Where none has for `cpu_limit_ms` milliseconds of computing, the kernel ends the process (SIGPROF; setitimer(2),
    ITIMER_PROF): a process that is stopped, or gets no processor, is left alone. A profiler that uses that signal comes first.
    """

    def __init__(self, descriptor: int, *, cpu_limit_ms: float) -> None:
        self._memory = mmap.mmap(descriptor, _COUNTER.size)
        self._cpu_limit_s = cpu_limit_ms / 1000

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._beat, name="millstream-heartbeat", daemon=True).start()

    def _beat(self) -> None:
        count, pause = 0, threading.Event()
        while not pause.wait(_BEAT_S):
            count += 1
            _COUNTER.pack_into(self._memory, 0, count)
            if signal.getsignal(signal.SIGPROF) is signal.SIG_DFL:
                signal.setitimer(signal.ITIMER_PROF, self._cpu_limit_s)


class Watchdog:
    """Tells when a process is frozen: for `limit_ms` milliseconds it had no heartbeat, though it could have had.

    While it is stopped (SIGSTOP) it could not; nor if it waits for a disk or gets no processor all that time. It is watched
    from its first heartbeat on. Where the system does not show what a process does (/proc), silence alone counts.
    """

    def __init__(self, limit_ms: float) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._file.truncate(_COUNTER.size)
        self._memory = mmap.mmap(self._file.fileno(), _COUNTER.size)
        self._limit_ms = limit_ms
        self._count = 0
        self._asked_ms = self._silent_ms = self._blocked_ms = 0.0
        self._computed_ms: float | None = None

    @property
    def descriptor(self) -> int:
        """Of the memory, to be passed to the process."""
        return self._file.fileno()

    def is_frozen(self, pid: int, now_ms: float) -> bool:
        """Whether the process is frozen. To be asked several times a second, by a monotonic clock."""
        (count,) = _COUNTER.unpack_from(self._memory, 0)
        passed_ms, self._asked_ms = now_ms - self._asked_ms, now_ms
        # Who asks late has stood still, perhaps with all of the machine.
        if count != self._count or not count or passed_ms > _LATE_MS:
            self._count, self._silent_ms, self._blocked_ms, self._computed_ms = count, 0.0, 0.0, None
            return False
        if self._silent_ms < _LOOK_AFTER_MS:
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
        if states <= {"S"}:  # one thread has the interpreter, and sleeps
            self._blocked_ms += passed_ms
        enough = max(
            (computed_ms - self._computed_ms) / (_LEAST_COMPUTED * self._limit_ms),
            self._blocked_ms / (_LEAST_BLOCKED * self._limit_ms),
        )
        return self._silent_ms >= self._limit_ms and enough >= 1

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        self._file.close()


def _threads(pid: int) -> tuple[set[str], float]:
    """The states of a process's threads, and how long they have computed in all, in milliseconds (proc(5), stat)."""
    states, ticks = set(), 0
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has just ended
            fields = stat.read_text().rpartition(")")[2].split()
            states.add(fields[0])
            ticks += int(fields[11]) + int(fields[12])
    return states, ticks * _TICK_MS
