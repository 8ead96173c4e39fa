"""Supervisor: starts worker processes, restarts those that die, and stops them in order.

A handler may crash its process, or have to be ended with it, so the supervisor is a process of its own, which runs no
code of the app. A worker process ends when its standard input is closed, and so with its supervisor. It reports to the
supervisor through a pipe of its own, as its standard output belongs to the handlers.
"""

import contextlib
import logging
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

import msgspec

from millstream.clock import SYSTEM_CLOCK, Backoff, Clock
from millstream.delivery.restarts import CANNOT_CONTINUE, Restart
from millstream.errors import MillstreamError, PipelineFailed, RedisError, Unavailable
from millstream.worker.incarnations import ProcessEnd
from millstream.worker.process.heartbeat import FreezeDetector
from millstream.worker.process.process_reports import ProcessReports
from millstream.worker.static_membership import StaticMembership

logger = logging.getLogger(__name__)

STUCK_CODE = 75
"""Exit code of a process that was ended because a handler hung: try again (sysexits, EX_TEMPFAIL)."""

FINAL_CODE = 78
"""Exit code of a process that cannot continue (sysexits, EX_CONFIG). Not 1: any library may end a process with that."""

SOFTWARE_ERROR_CODE = 70
"""Exit code of a process that ended because of an error of its own (sysexits, EX_SOFTWARE)."""

ORPHAN_MS = 4_000.0
"""How long a process may take to stop after its supervisor died: another process may get its name soon after."""

ORPHAN_END_MS = 8_000.0
"""When such a process ends in any case; in processor time, if a handler holds its interpreter."""

_KILLED_AT_STOP = ProcessEnd(died=False, cause="was killed during a stop")
_OWN_ENDS = {
    STUCK_CODE: "a handler hung",
    FINAL_CODE: CANNOT_CONTINUE,
    SOFTWARE_ERROR_CODE: "an error of its own ended it",
}
"""Codes with which a process ends itself, and why: no message has crashed it."""

_TICK_S = 0.1
_RENEW_S = 5.0
_STOP_MESSAGE = b"stop"
_STDERR = 2
_DRAIN_PIPE_MS = 5_000.0
_LAST_REPORT_S = 1.0
_LAST_CALLS_S = 2.0
_QUIET_STOP_MS = 1_000.0
_SLACK_MS = 5_000.0
_WAITS_MS = (100.0, 5_000.0)
_STEADY_MS = 10_000.0


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one start of a process: its name, its incarnation, and two file descriptors.

    The process writes its reports to `report_to`, and its heartbeat to the memory behind `heartbeat_to`.
    """

    name: str
    incarnation: str
    report_to: int
    heartbeat_to: int


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of one process, and the first line of its standard input."""

    arguments: Sequence[str]
    first_line: bytes = b""


class _Child(msgspec.Struct):
    name: str
    incarnation: str = ""
    freeze_detector: FreezeDetector | None = None
    is_frozen: bool = False
    process: subprocess.Popen[bytes] | None = None
    started_ms: float = 0.0
    ended_ms: float | None = None
    due_ms: float = 0.0
    backoff: Backoff = msgspec.field(default_factory=lambda: Backoff(*_WAITS_MS))
    has_worked: bool = False
    listener: threading.Thread | None = None
    drained_by_ms: float = math.inf
    """When it is killed unless it has ended by then, as an operator drains it."""

    @property
    def is_drained(self) -> bool:
        """An operator drains it: it ends, and is not started again."""
        return self.drained_by_ms < math.inf

    def close_freeze_detector(self) -> None:
        if self.freeze_detector is not None:
            self.freeze_detector.close()
            self.freeze_detector = None


class Supervisor:
    """Runs `program(launch)` for each name in `names`, and restarts it when it ends, until the supervisor is stopped.

    `on_line` is called with the process's name and each line of JSON that the process writes to `launch.report_to`. It
    returns whether the line shows that the process has committed anything; an error it raises ends all processes. A
    process that ends by a signal or with any code is restarted, at once if it has committed anything or ran for long,
    else with back-off; but FINAL_CODE ends all. A process frozen for `frozen_after_ms` is killed. The end of each
    process is recorded under its incarnation. A worker that an operator drains is stopped, and not started again.

    * `reports`: receives the starts and ends of processes, and what their lines have in the field `report`
    """

    def __init__(
        self,
        names: StaticMembership,
        program: Callable[[Launch], Program],
        *,
        stop_ms: float,
        frozen_after_ms: float,
        on_line: Callable[[str, Any], bool],
        reports: ProcessReports | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._names = names
        self._program = program
        self._stop_ms = stop_ms
        self._frozen_after_ms = frozen_after_ms
        self._on_line = on_line
        self._reports = reports
        self._clock = clock
        self._children: list[_Child] = []
        self._start_count = 0
        # Recorded in order by the thread that holds the names; `_check` and `_stop` add to them.
        self._ends: list[tuple[str, ProcessEnd]] = []
        self._restarts: list[Restart] = []
        self._drained: list[str] = []
        self._to_drain: frozenset[str] = frozenset()
        self._has_ended = threading.Event()
        self._is_killed = self._is_over = False
        self._failure: Exception | None = None

    def run(self, stopping: threading.Event) -> None:
        """Keep the processes alive until `stopping`, or until all workers are drained.

        Raises PipelineFailed if one of them cannot continue, StaleOwner, and errors of `on_line`.
        """
        self._children = [_Child(name) for name in self._names.names]
        if self._reports is not None:
            self._reports.expect(self._names.names)
        holding = threading.Thread(target=self._hold_names, name="millstream-worker-names", daemon=True)
        holding.start()
        try:
            while self._children and not stopping.wait(_TICK_S):
                if self._failure is not None:
                    raise self._failure
                for child in [*self._children]:
                    self._check(child)
        finally:
            self._stop()
            self._is_over = True
            self._has_ended.set()
            holding.join(_LAST_CALLS_S)
            if holding.is_alive():
                logger.warning("cannot release the worker names: Redis does not answer; they expire in some seconds")

    def kill(self) -> None:
        """Kill the processes at once; other workers run their messages again."""
        self._is_killed = True
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.kill()

    def _hold_names(self) -> None:
        """Renew the names and record ends until all processes have ended, then release the names.

        In a thread of its own: a Redis that hangs delays neither a stop nor the restart of a process.
        """
        while not self._is_over:
            self._has_ended.clear()
            try:
                # Also during a stop: another process must not get the name of one that still runs.
                self._to_drain = self._names.renew()
            except Unavailable as error:
                logger.debug("cannot renew the worker names, Redis is unavailable: %s; retrying", error)
            except Exception as error:  # noqa: BLE001 - `run` raises it; this thread goes on to release the names
                self._failure = self._failure or error
            self._record_ends()
            if not self._is_over:
                self._has_ended.wait(_RENEW_S)
        self._record_ends()
        try:
            self._names.release()
        except MillstreamError as error:
            logger.warning("cannot release the worker names: %s; they expire in some seconds", error)

    def _check(self, child: _Child) -> None:
        now_ms = self._clock.monotonic_ms()
        if child.name in self._to_drain and not child.is_drained:
            self._begin_drain(child, now_ms)
        if child.is_drained:
            self._continue_drain(child, now_ms)
        elif child.process is None:
            if now_ms >= child.due_ms:
                self._start(child)
        elif (code := child.process.poll()) is None:
            self._kill_if_frozen(child, child.process, now_ms)
        elif not self._is_killed and self._is_pipe_drained(child, now_ms):  # `_stop` records a kill, which is no crash
            self._on_ended(child, child.process, code)

    def _on_ended(self, child: _Child, process: subprocess.Popen[bytes], code: int) -> None:
        """Record how a process has ended by itself, and when the next one starts. Raises PipelineFailed if none may."""
        now_ms = self._clock.monotonic_ms()
        if process.stdin is not None:
            process.stdin.close()
        child.process = None
        child.close_freeze_detector()
        end = self._end_of(child, code)
        if self._reports is not None:
            self._reports.on_ended(child.name, end.cause)
        self._restarts.append(Restart(worker=child.name, incarnation=child.incarnation, cause=end.cause))
        self._record_end(child, end)
        if code == FINAL_CODE:
            raise PipelineFailed(f"worker {child.name} cannot continue; see its error above")
        if child.has_worked or now_ms - child.started_ms > _STEADY_MS:
            child.backoff.reset()
        wait_ms = child.backoff.next_ms()
        child.due_ms = now_ms + wait_ms
        logger.warning("worker %s %s; restarting in %.1f s", child.name, end.cause, wait_ms / 1000)

    def _begin_drain(self, child: _Child, now_ms: float) -> None:
        logger.warning(
            "worker %s: an operator drains it; it finishes its running messages, and is not restarted", child.name
        )
        child.drained_by_ms = now_ms + self._stop_ms + _SLACK_MS
        if child.process is not None:
            _order_stop(child.process)

    def _continue_drain(self, child: _Child, now_ms: float) -> None:
        """Let go of a drained worker once its process has ended, or kill that at its deadline. Its name becomes free."""
        if child.process is not None:
            if child.process.poll() is not None:
                is_over = self._is_pipe_drained(child, now_ms)
            else:
                self._kill_if_frozen(child, child.process, now_ms)
                is_over = now_ms > child.drained_by_ms
            if not is_over:
                return
            self._finish_stop(child, child.process)
            child.process = None
        logger.warning("worker %s has ended: an operator drained it; its name is free", child.name)
        self._children.remove(child)
        if self._reports is not None:
            self._reports.on_drained(child.name)
        self._drained.append(child.name)
        self._has_ended.set()

    def _kill_if_frozen(self, child: _Child, process: subprocess.Popen[bytes], now_ms: float) -> None:
        if (
            child.freeze_detector is not None
            and not child.is_frozen
            and child.freeze_detector.is_frozen(process.pid, now_ms)
        ):
            child.is_frozen = True
            logger.warning(
                "worker %s is frozen: a handler has held Python's interpreter (the GIL) for %.1f s; killing its process, "
                "other workers get its messages. Make the handler call code that releases the GIL, or raise --claim "
                "(and --frozen-after, if it is given)",
                child.name,
                self._frozen_after_ms / 1000,
            )
            process.kill()

    def _end_of(self, child: _Child, code: int) -> ProcessEnd:
        return ProcessEnd(died=code not in _OWN_ENDS, cause=self._describe_end(child, code))

    def _describe_end(self, child: _Child, code: int) -> str:
        if child.is_frozen or code == -signal.SIGPROF:
            held_s = self._frozen_after_ms / 1000
            return f"was killed, as a handler had held Python's interpreter (the GIL) for {held_s:.1f} s"
        if code in _OWN_ENDS:
            return f"ended with code {code}, as {_OWN_ENDS[code]}: see its log"
        return describe_end(code)

    def _record_end(self, child: _Child, end: ProcessEnd) -> None:
        self._ends.append((child.incarnation, end))
        self._has_ended.set()

    def _record_ends(self) -> None:
        """Record ends and restarts in Redis that are not recorded yet, and release the names of drained workers.

        Until an end is recorded, it counts against no message.
        """
        try:
            while self._ends:
                self._names.record_end(*self._ends[0])
                del self._ends[0]
            while self._restarts:
                self._names.record_restart(self._restarts[0])
                del self._restarts[0]
            while self._drained and not self._ends:  # as long as the name is held, its worker may live
                self._names.release_name(self._drained[0])
                del self._drained[0]
        except RedisError as error:
            logger.debug("cannot record how a worker ended: %s; retrying", error)

    def _is_pipe_drained(self, child: _Child, now_ms: float) -> bool:
        """Return whether all reports of an ended process are read. Waits briefly: a child of it may hold the pipe."""
        if child.ended_ms is None:
            child.ended_ms = now_ms
        is_over = child.listener is None or not child.listener.is_alive()
        return is_over or now_ms - child.ended_ms > _DRAIN_PIPE_MS

    def _start(self, child: _Child) -> None:
        child.started_ms = self._clock.monotonic_ms()
        child.ended_ms = None
        child.has_worked = child.is_frozen = False
        child.incarnation = f"{self._names.token}-{self._start_count}"
        self._start_count += 1
        try:
            lines = self._spawn(child)
        except OSError as error:  # no memory, or too many processes or files: the others go on
            child.close_freeze_detector()
            wait_ms = child.backoff.next_ms()
            child.due_ms = child.started_ms + wait_ms
            logger.warning("cannot start worker %s: %s; retrying in %.1f s", child.name, error, wait_ms / 1000)
            if self._reports is not None:
                self._reports.on_ended(child.name, f"could not be started: {error}")
            return
        if self._reports is not None:
            self._reports.on_started(child.name)
        child.listener = threading.Thread(target=self._read_pipe, args=(child, lines), daemon=True)
        child.listener.start()

    def _spawn(self, child: _Child) -> IO[bytes]:
        """Start a process; return the end of its pipe from which its lines are read. Raises OSError."""
        child.freeze_detector = FreezeDetector(self._frozen_after_ms)
        read_end, write_end = os.pipe()
        lines = os.fdopen(read_end, "rb")
        launch = Launch(
            name=child.name,
            incarnation=child.incarnation,
            report_to=write_end,
            heartbeat_to=child.freeze_detector.descriptor,
        )
        try:
            program = self._program(launch)
            child.process = subprocess.Popen(
                program.arguments,
                stdin=subprocess.PIPE,
                stdout=_STDERR,
                pass_fds=(write_end, launch.heartbeat_to),
                start_new_session=True,
                bufsize=0,
            )
        except OSError:
            lines.close()
            raise
        finally:
            os.close(write_end)
        if child.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already: `_check` restarts it
                child.process.stdin.write(program.first_line + b"\n")
        return lines

    def _read_pipe(self, child: _Child, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # the process died in mid-line
                if self._failure is None:
                    try:
                        child.has_worked |= self._on_line(child.name, self._without_report(child.name, line))
                    except Exception as error:  # noqa: BLE001 - `run` raises it; the pipe must not fill up meanwhile
                        self._failure = error

    def _without_report(self, name: str, text: bytes) -> Any:
        """A line of a process, decoded. Its report goes to `reports`."""
        line = msgspec.json.decode(text)
        report = line.pop("report", None)
        if report is not None and self._reports is not None:
            self._reports.on_report(name, line["pid"], report)
        return line

    def _stop(self) -> None:
        if self._reports is not None:
            self._reports.on_stopping()
        running = [(child, child.process) for child in self._children if child.process is not None]
        for _, process in running:
            _order_stop(process)
        began_ms, is_logged = self._clock.monotonic_ms(), False
        while any(process.poll() is None for _, process in running):
            waited_ms = self._clock.monotonic_ms() - began_ms
            if waited_ms >= self._stop_ms + _SLACK_MS:
                break
            if waited_ms >= _QUIET_STOP_MS and not (is_logged or self._is_killed):
                is_logged = True
                seconds = self._stop_ms / 1000
                logger.warning(
                    "stopping: worker processes have %.0f s for running messages; a second signal kills them", seconds
                )
            self._clock.sleep_ms(1000 * _TICK_S)
        for child, process in running:
            self._finish_stop(child, process)
        if self._is_killed:
            logger.warning("worker processes killed: second signal; other workers process their running messages again")

    def _finish_stop(self, child: _Child, process: subprocess.Popen[bytes]) -> None:
        """Record how a process that had to stop has ended, and read its last reports; kill it if it has not ended."""
        hangs = process.poll() is None
        if hangs:
            logger.warning("worker process %d did not stop in time; killing it", process.pid)
            process.kill()
            process.wait()
        if hangs or self._is_killed:
            self._record_end(child, _KILLED_AT_STOP)
        elif process.returncode:
            self._record_end(child, self._end_of(child, process.returncode))
        if child.listener is not None:
            child.listener.join(_LAST_REPORT_S)  # not for longer: a child of the process may hold the pipe
        child.close_freeze_detector()


def _order_stop(process: subprocess.Popen[bytes]) -> None:
    """Let a process stop in order. It may have ended by itself, or have the order already."""
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(_STOP_MESSAGE)


def describe_end(code: int) -> str:
    """Return how a process with this exit code of `subprocess` ended."""
    return f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def exit_with_parent(stopping: threading.Event, source: IO[bytes], *, on_orphaned: Callable[[], None]) -> None:
    """Set `stopping` when the supervisor orders a stop, or its end of the pipe closes, as when it dies.

    If it died, `on_orphaned` is called first, and the process ends within some seconds in any case.
    """

    def watch() -> None:
        if not source.read():
            threading.Timer(ORPHAN_END_MS / 1000, os._exit, (STUCK_CODE,)).start()
            on_orphaned()
        stopping.set()

    threading.Thread(target=watch, daemon=True).start()
