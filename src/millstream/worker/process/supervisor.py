"""Keeps worker processes alive: starts them, starts again those that die, ends them in order.

A handler may crash its process, or have to be ended with it; so the one that watches is another process, which runs
nothing of the app's. The processes end when their standard input does, that is, with their supervisor. What they tell
it goes through a pipe of its own, as their standard output belongs to the handlers.
"""

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import MillstreamError, PipelineFailed, RedisError, StaleOwner, Unavailable
from millstream.worker.incarnations import ProcessEnd
from millstream.worker.process.heartbeat import Watchdog
from millstream.worker.static_membership import StaticMembership

logger = logging.getLogger(__name__)

STUCK_CODE = 75
"""Exit code of a process that must be ended because a handler hangs: try again (sysexits, EX_TEMPFAIL)."""

FINAL_CODE = 78
"""Exit code of a process that cannot go on (sysexits, EX_CONFIG). Not 1: any library may end the process with that."""

MISTAKE_CODE = 70
"""Exit code of a process that ends because of a mistake of its own (sysexits, EX_SOFTWARE)."""

ORPHAN_MS = 4_000.0
"""How long the stop of a process may take whose supervisor has died: another may have its name, soon after."""

ORPHAN_END_MS = 8_000.0
"""After how long such a process ends, whatever it does; of computing, if a handler has stopped its threads."""

_TOLD_TO_END = ProcessEnd(died=False, cause="was told to stop, and killed")
_LIVED_ON = (STUCK_CODE, FINAL_CODE, MISTAKE_CODE)  # a process that ends itself so has not died of a message

_TICK_S = 0.1
_RENEW_MS = 5_000.0
_ORDER = b"stop"
_STDERR = 2
_LAST_WORDS_MS = 5_000.0
_SLACK_MS = 5_000.0
_WAITS_MS = (100.0, 5_000.0)
_STEADY_MS = 10_000.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a process is told when it is started: its name, its incarnation, and two file descriptors.

    It writes what it tells to `lines`, and has its heartbeat in the memory behind `heartbeat`.
    """

    name: str
    incarnation: str
    lines: int
    heartbeat: int


@dataclass(slots=True)
class _Child:
    name: str
    incarnation: str = ""
    watchdog: Watchdog | None = None
    is_frozen: bool = False
    process: subprocess.Popen[bytes] | None = None
    started_ms: float = 0.0
    ended_ms: float | None = None
    due_ms: float = 0.0
    wait_ms: float = 0.0
    has_worked: bool = False
    listener: threading.Thread | None = None

    def forget_watchdog(self) -> None:
        if self.watchdog is not None:
            self.watchdog.close()
            self.watchdog = None


class Supervisor:
    """Runs `command(launch)` for each name that `names` holds, again and again, until it is stopped.

    `on_line` is given each line of JSON that the process writes to `launch.lines`, and the process's name, and returns
    whether the line shows that the process has done any work; what it raises ends all. A process that ends by a signal or
    with any code is started again, at once if it has done any work or lived for long, else with back-off; but FINAL_CODE
    ends all. One that is frozen for `frozen_after_ms` is killed. How each ended is noted under its incarnation.
    """

    def __init__(
        self,
        names: StaticMembership,
        command: Callable[[Launch], Sequence[str]],
        *,
        stop_ms: float,
        frozen_after_ms: float,
        on_line: Callable[[str, Any], bool],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._names = names
        self._command = command
        self._stop_ms = stop_ms
        self._frozen_after_ms = frozen_after_ms
        self._on_line = on_line
        self._clock = clock
        self._children: list[_Child] = []
        self._started = 0
        self._ends: dict[str, ProcessEnd] = {}
        self._is_killed = False
        self._renew_due_ms = 0.0
        self._failure: Exception | None = None

    def run(self, stopping: threading.Event) -> None:
        """Keep the processes alive until `stopping`.

        Raises PipelineFailed if one cannot go on, StaleOwner, and what `on_line` has raised.
        """
        self._children = [_Child(name) for name in self._names.held]
        try:
            while not stopping.wait(_TICK_S):
                if self._failure is not None:
                    raise self._failure
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
        self._is_killed = True
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.kill()

    def _renew(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._renew_due_ms:
            self._renew_due_ms = now_ms + _RENEW_MS
            try:
                self._names.renew()
                self._note_ends()
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
            self._watch(child, child.process, now_ms)
            return
        if not self._is_heard_out(child, now_ms):
            return
        if child.process.stdin is not None:
            child.process.stdin.close()
        child.process = None
        child.forget_watchdog()
        how = self._how_it_ended(child, code)
        self._note_end(child, ProcessEnd(died=code not in _LIVED_ON, cause=how))
        if code == FINAL_CODE:
            raise PipelineFailed(f"worker {child.name} cannot go on; the reason is above")
        if child.has_worked or now_ms - child.started_ms > _STEADY_MS:
            child.wait_ms = 0.0
        child.wait_ms = min(max(2 * child.wait_ms, _WAITS_MS[0]), _WAITS_MS[1])
        child.due_ms = now_ms + child.wait_ms
        logger.warning("worker %s %s and starts again in %.1f s", child.name, how, child.wait_ms / 1000)

    def _watch(self, child: _Child, process: subprocess.Popen[bytes], now_ms: float) -> None:
        if child.watchdog is not None and not child.is_frozen and child.watchdog.is_frozen(process.pid, now_ms):
            child.is_frozen = True
            logger.warning(
                "worker %s is frozen: a handler has held Python's interpreter (the GIL) for %.1f s; its process is killed "
                "and its messages go to others. Have the handler call code that lets go of it, or raise --claim-s",
                child.name, self._frozen_after_ms / 1000,
            )  # fmt: skip
            process.kill()

    def _how_it_ended(self, child: _Child, code: int) -> str:
        if child.is_frozen or code == -signal.SIGPROF:
            return f"was killed, as a handler had held Python's interpreter (the GIL) for {self._frozen_after_ms / 1000:.1f} s"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def _note_end(self, child: _Child, end: ProcessEnd) -> None:
        self._ends[child.incarnation] = end
        self._note_ends()

    def _note_ends(self) -> None:
        """Note in Redis what is not noted yet. Until then, no message is blamed for it."""
        try:
            for incarnation, end in list(self._ends.items()):
                self._names.note_end(incarnation, end)
                del self._ends[incarnation]
        except RedisError as error:
            logger.debug("how a worker ended is noted when Redis is back: %s", error)

    def _is_heard_out(self, child: _Child, now_ms: float) -> bool:
        """Whether all is read that an ended process told; not awaited for long, as its own children may hold the pipe."""
        if child.ended_ms is None:
            child.ended_ms = now_ms
        is_over = child.listener is None or not child.listener.is_alive()
        return is_over or now_ms - child.ended_ms > _LAST_WORDS_MS

    def _start(self, child: _Child) -> None:
        child.started_ms = self._clock.monotonic_ms()
        child.ended_ms = None
        child.has_worked = child.is_frozen = False
        child.incarnation = f"{self._names.token}-{self._started}"
        self._started += 1
        child.watchdog = Watchdog(self._frozen_after_ms)
        mine, its = os.pipe()
        launch = Launch(name=child.name, incarnation=child.incarnation, lines=its, heartbeat=child.watchdog.descriptor)
        try:
            child.process = subprocess.Popen(
                self._command(launch), stdin=subprocess.PIPE, stdout=_STDERR, pass_fds=(its, launch.heartbeat),
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(its)
        child.listener = threading.Thread(target=self._listen, args=(child, os.fdopen(mine, "rb")), daemon=True)
        child.listener.start()

    def _listen(self, child: _Child, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                if self._failure is None:
                    try:
                        child.has_worked |= self._on_line(child.name, msgspec.json.decode(line))
                    except Exception as error:  # noqa: BLE001 - `run` raises it; the process must not stop at a full pipe
                        self._failure = error

    def _stop(self) -> None:
        self._note_ends()
        running = [(child, child.process) for child in self._children if child.process is not None]
        for _, process in running:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # it has ended by itself
                    process.stdin.write(_ORDER)
                    process.stdin.close()
        deadline_ms = self._clock.monotonic_ms() + self._stop_ms + _SLACK_MS
        while any(process.poll() is None for _, process in running) and self._clock.monotonic_ms() < deadline_ms:
            with contextlib.suppress(StaleOwner):
                self._renew()  # what still runs must not meet another of its name
            self._clock.sleep_ms(1000 * _TICK_S)
        for child, process in running:
            hangs = process.poll() is None
            if hangs:
                logger.warning("worker process %d does not end and is killed", process.pid)
                process.kill()
                process.wait()
            if hangs or self._is_killed:
                self._note_end(child, _TOLD_TO_END)
            child.forget_watchdog()


def exit_with_parent(stopping: threading.Event, source: IO[bytes], *, on_orphaned: Callable[[], None]) -> None:
    """Set `stopping` when the supervisor says so, or closes the pipe, as its death does.

    If it died, `on_orphaned` is called before, and the process ends within some seconds, whatever it does.
    """

    def watch() -> None:
        if not source.read():
            threading.Timer(ORPHAN_END_MS / 1000, os._exit, (STUCK_CODE,)).start()
            on_orphaned()
        stopping.set()

    threading.Thread(target=watch, daemon=True).start()
