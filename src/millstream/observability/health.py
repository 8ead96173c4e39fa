"""Health: liveness and readiness by progress.

A worker that runs but no longer consumes passes every check of its process. So it is healthy only while Redis
answers its reads and the runs of its handlers end.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError

_MARGIN_MS = 30_000.0


class Progress:
    """The progress of one handler's loop. Any thread may report; see `Health.progress`."""

    def __init__(self, *, read_within_ms: float, run_within_ms: float, clock: Clock) -> None:
        self._read_within_ms = read_within_ms
        self._run_within_ms = run_within_ms
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._ever_read = False
        # Before the first event, time counts from the start.
        self._read_ms = self._ended_ms = clock.monotonic_ms()
        self._error_ms, self._error = 0.0, ""

    def on_read(self) -> None:
        """Redis has answered a read, even if with no entries. A paused loop reports its status queries here."""
        with self._lock:
            self._ever_read = True
            self._read_ms = self._clock.monotonic_ms()

    def on_run_started(self, n: int = 1) -> None:
        """`n` runs of the handler have started. Messages that wait for their key or for a retry do not count."""
        with self._lock:
            if not self._running:
                self._ended_ms = self._clock.monotonic_ms()
            self._running += n

    def on_run_ended(self, n: int = 1) -> None:
        """`n` runs have ended, successfully or not, and their results are committed or given up."""
        with self._lock:
            self._running = max(0, self._running - n)
            self._ended_ms = self._clock.monotonic_ms()

    def on_redis_error(self, error: Exception) -> None:
        """Redis cannot answer a read, or store the results of runs, for now."""
        with self._lock:
            self._error_ms, self._error = self._clock.monotonic_ms(), str(error)

    @contextmanager
    def running(self, n: int = 1) -> Iterator[None]:
        """`on_run_started` and `on_run_ended` around a block."""
        self.on_run_started(n)
        try:
            yield
        finally:
            self.on_run_ended(n)

    def failures(self, *, stopping: bool) -> Iterator[str]:
        """The reasons why it is not healthy; empty if it is. While stopping, reads are not required."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            silent_ms, stuck_ms, running = now_ms - self._read_ms, now_ms - self._ended_ms, self._running
            cause = f"; the last error of Redis: {self._error}" if self._error else ""
            cause_ms = now_ms - self._error_ms
        if silent_ms > self._read_within_ms and not stopping:
            yield f"Redis has not answered a read for {silent_ms / 1000:.1f} s{cause if cause_ms <= silent_ms else ''}"
        if running and stuck_ms > self._run_within_ms:
            yield (
                f"no run has ended for {stuck_ms / 1000:.1f} s, with {running} in progress"
                f"{cause if cause_ms <= stuck_ms else ''}"
            )

    @property
    def ever_read(self) -> bool:
        """True once Redis has answered a read."""
        return self._ever_read

    def figures(self) -> dict[str, float]:
        """The figures of the health page: running messages, and seconds since the last read and end of a run."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            return {
                "running": self._running,
                "seconds_since_read": round((now_ms - self._read_ms) / 1000, 1),
                "seconds_since_run_ended": round((now_ms - self._ended_ms) / 1000, 1),
            }


class Health:
    """The health of a process: each of its handlers is checked separately, so no busy handler hides a stuck one.

    * `read_within_ms`: maximum age of a healthy handler's last answered read, in milliseconds

    Raises ConfigError for a limit that is not positive.
    """

    def __init__(self, *, read_within_ms: float = 30_000.0, clock: Clock = SYSTEM_CLOCK) -> None:
        if read_within_ms <= 0:
            raise ConfigError(f"Health(read_within_ms={read_within_ms}): give a positive number of milliseconds")
        self._read_within_ms = read_within_ms
        self._clock = clock
        self._handlers: dict[str, Progress] = {}
        self._stopping = False

    def progress(self, handler: str, *, run_within_ms: float) -> Progress:
        """The progress of `handler` (`app.name`), to which its loop reports.

        `run_within_ms` is the handler's time limit, in milliseconds. While messages are running, the handler is not
        healthy if no run has ended for 30 s longer than that.
        """
        found = Progress(
            read_within_ms=self._read_within_ms, run_within_ms=run_within_ms + _MARGIN_MS, clock=self._clock
        )
        self._handlers = {**self._handlers, handler: found}
        return found

    def on_stopping(self) -> None:
        """Mark the process as stopping: it is not ready, and needs no reads to be healthy."""
        self._stopping = True

    def failures(self) -> list[str]:
        """The reasons why the process is not healthy; empty if it is."""
        return [
            f"{name}: {failure}"
            for name, progress in self._handlers.items()
            for failure in progress.failures(stopping=self._stopping)
        ]

    def readiness_failures(self) -> list[str]:
        """The reasons why the process is not ready; empty if it is."""
        reasons = self.failures()
        reasons += [f"{name}: no read yet" for name, progress in self._handlers.items() if not progress.ever_read]
        if not self._handlers:
            reasons.append("no handler has started")
        if self._stopping:
            reasons.append("it is stopping")
        return reasons

    def page(self, reasons: list[str]) -> bytes:
        """The health page in JSON: the status, its reasons and the figures of each handler."""
        figures = {name: progress.figures() for name, progress in self._handlers.items()}
        status = "failing" if reasons else "ok"
        return msgspec.json.encode({"status": status, "reasons": reasons, "handlers": figures})
