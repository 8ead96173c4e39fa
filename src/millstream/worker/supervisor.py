"""Keeps worker processes alive: starts them, starts again those that die, ends them in order.

A handler may crash its process, or have to be ended with it; so the one that watches is another process, which runs
nothing of the app's. The processes end when their standard input does, that is, with their supervisor.
"""

import contextlib
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import MillstreamError, PipelineFailed, StaleOwner, Unavailable
from millstream.worker.names import Names

logger = logging.getLogger(__name__)

STUCK_CODE = 75
"""Exit code of a process that must be ended because a handler hangs: try again (sysexits, EX_TEMPFAIL)."""

FINAL_CODE = 78
"""Exit code of a process that cannot go on (sysexits, EX_CONFIG). Not 1: any library may end the process with that."""

_TICK_S = 0.1
_RENEW_MS = 5_000.0
_SLACK_MS = 5_000.0
_WAITS_MS = (100.0, 5_000.0)
_STEADY_MS = 10_000.0


@dataclass(slots=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes] | None = None
    started_ms: float = 0.0
    due_ms: float = 0.0
    wait_ms: float = 0.0


class Supervisor:
    """Runs `command(name)` for each name that `names` holds, again and again, until it is stopped.

    `on_line` is given each line of JSON that a process writes to its standard output, and its name. A process that ends
    by a signal or with any code is started again, at once at first, then with back-off; but FINAL_CODE ends all.
    """

    def __init__(
        self,
        names: Names,
        command: Callable[[str], Sequence[str]],
        *,
        stop_ms: float,
        on_line: Callable[[str, Any], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._names = names
        self._command = command
        self._stop_ms = stop_ms
        self._on_line = on_line
        self._clock = clock
        self._children: list[_Child] = []
        self._renew_due_ms = 0.0

    def run(self, stopping: threading.Event) -> None:
        """Keep the processes alive until `stopping`. Raises PipelineFailed if one cannot go on, and StaleOwner."""
        self._children = [_Child(name) for name in self._names.held]
        try:
            while not stopping.wait(_TICK_S):
                self._renew()
                for child in self._children:
                    self._tend(child)
        finally:
            self._stop()
            try:
                self._names.release()
            except MillstreamError as error:
                logger.warning("the names of the workers are free in some seconds only: %s", error)

    def kill(self) -> None:
        """End the processes now: what they run others do again."""
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.kill()

    def _renew(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._renew_due_ms:
            self._renew_due_ms = now_ms + _RENEW_MS
            try:
                self._names.renew()
            except Unavailable as error:
                logger.debug("the names are renewed when Redis is back: %s", error)

    def _tend(self, child: _Child) -> None:
        now_ms = self._clock.monotonic_ms()
        if child.process is None:
            if now_ms >= child.due_ms:
                self._start(child)
            return
        code = child.process.poll()
        if code is None:
            return
        child.process = None
        if code == FINAL_CODE:
            raise PipelineFailed(f"worker {child.name} cannot go on; the reason is above")
        if now_ms - child.started_ms > _STEADY_MS:
            child.wait_ms = 0.0
        child.wait_ms = min(max(2 * child.wait_ms, _WAITS_MS[0]), _WAITS_MS[1])
        child.due_ms = now_ms + child.wait_ms
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        logger.warning("worker %s %s and starts again in %.1f s", child.name, how, child.wait_ms / 1000)

    def _start(self, child: _Child) -> None:
        child.started_ms = self._clock.monotonic_ms()
        child.process = subprocess.Popen(
            self._command(child.name), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        out = child.process.stdout
        assert out is not None
        threading.Thread(target=self._listen, args=(child.name, out), daemon=True).start()

    def _listen(self, name: str, out: IO[bytes]) -> None:
        with out:
            for line in out:
                try:
                    self._on_line(name, msgspec.json.decode(line))
                except msgspec.DecodeError:
                    sys.stderr.buffer.write(line)  # the handler's own prints
                    sys.stderr.flush()

    def _stop(self) -> None:
        running = [child.process for child in self._children if child.process is not None]
        for process in running:
            if process.stdin is not None:
                process.stdin.close()
        deadline_ms = self._clock.monotonic_ms() + self._stop_ms + _SLACK_MS
        while any(process.poll() is None for process in running) and self._clock.monotonic_ms() < deadline_ms:
            with contextlib.suppress(StaleOwner):
                self._renew()  # what still runs must not meet another of its name
            self._clock.sleep_ms(1000 * _TICK_S)
        for process in running:
            if process.poll() is None:
                logger.warning("worker process %d does not end and is killed", process.pid)
                process.kill()
                process.wait()


def exit_with_parent(stopping: threading.Event, source: IO[bytes]) -> None:
    """Set `stopping` when the supervisor closes the pipe, which its death does as well."""

    def watch() -> None:
        source.read()
        stopping.set()

    threading.Thread(target=watch, daemon=True).start()
