"""Pipeline: `millstream run` as a child process that the demo watches, kills and stops, with its descendants.

Spark starts a JVM, which starts Python workers in process groups of their own, so descendants are found by parent id
in /proc, not by group. A killed process may leave descendants behind; the demo waits for them, and kills late ones.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from millstream.clock import SYSTEM_CLOCK
from millstream.errors import ConfigError, PipelineFailed

_PROC = Path("/proc")
_STOP_MS = 30_000
_GONE_MS = 15_000
_LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Process:
    """An entry of the process table; `started` distinguishes it from a later process with the same id."""

    pid: int
    parent: int
    started: int
    cpu_ticks: int
    command: str


class RunProcess:
    """A `millstream run` process for `target`; each start appends its log to `log_path`.

    `batches` counts finished batches over all starts; `consuming` is True once a query has started.
    """

    def __init__(self, target: str, *, url: str, checkpoint: Path, log_path: Path) -> None:
        command = [sys.executable, "-m", "millstream.cli.main", "run", target, "--json"]
        self._command = [*command, "--url", url, "--checkpoint", str(checkpoint)]
        self.log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None
        self.batches = 0
        self.consuming = False

    def start(self) -> None:
        """Start the process. The previous one must have ended."""
        with self.log_path.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal reaches only the demo, which stops this process in order.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._listener.start()

    def _listen(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                # A killed process may leave an incomplete line.
                with suppress(ValueError):
                    event = json.loads(line)["event"]
                    self.batches += event == "batch"
                    self.consuming |= event == "started"

    def check(self) -> None:
        """Raise PipelineFailed, with the end of its log, if the process has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            tail = self.log_path.read_text("utf-8", "replace").splitlines()[-_LOG_TAIL_LINES:]
            text = "\n  ".join(tail) or "(nothing)"
            raise PipelineFailed(
                f"millstream run ended with code {self._process.returncode}; the end of {self.log_path}:\n  {text}"
            )

    def kill_worker(self) -> int | None:
        """Kill the Python worker with the most CPU time; return its process id, or None while there is none."""
        family = self._descendants()
        # Workers are forks of a daemon and keep its command line; daemons of other modules serve the source.
        daemons = {process.pid for process in family if "daemon pyspark.worker" in process.command}
        workers = [process for process in family if process.parent in daemons]
        if not workers:
            return None
        busiest = max(workers, key=lambda process: process.cpu_ticks)
        with suppress(ProcessLookupError):
            os.kill(busiest.pid, signal.SIGKILL)
        return busiest.pid

    def kill_driver(self) -> list[int]:
        """Kill the driver, Python and JVM, and wait for its workers to end; return the process ids."""
        assert self._process is not None
        family = self._descendants()
        driver = [self._process.pid, *(p.pid for p in family if p.parent == self._process.pid)]
        for pid in driver:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._await_exit(family)
        return driver

    def stop(self) -> None:
        """Stop the process with SIGTERM; after half a minute, kill it and its descendants."""
        if self._process is None:
            return
        family = self._descendants()
        self._process.terminate()
        try:
            self._process.wait(_STOP_MS / 1000)
        except subprocess.TimeoutExpired:
            family = self._descendants()
            self._process.kill()
        self._await_exit(family)

    def _descendants(self) -> list[Process]:
        assert self._process is not None
        return descendants(self._process.pid)

    def _await_exit(self, family: Sequence[Process]) -> None:
        """Wait for the process and its former `family` to end; after 15 s, kill the remaining ones."""
        assert self._process is not None
        self._process.wait()
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + _GONE_MS
        while left := _living(family):
            if SYSTEM_CLOCK.monotonic_ms() > deadline_ms:
                for process in left:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
            SYSTEM_CLOCK.sleep_ms(50)
        if self._listener is not None:
            self._listener.join()
        self._process = None


def descendants(pid: int) -> list[Process]:
    """Return all descendants of the process `pid`. Raises ConfigError without /proc."""
    children: dict[int, list[Process]] = {}
    for process in _process_table():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    parents = [pid]
    while parents:
        family = children.get(parents.pop(), [])
        found += family
        parents += [process.pid for process in family]
    return found


def _living(family: Sequence[Process]) -> list[Process]:
    now = {(process.pid, process.started) for process in _process_table()}
    return [process for process in family if (process.pid, process.started) in now]


def _process_table() -> list[Process]:
    if not (_PROC / "self" / "stat").exists():
        raise ConfigError("the demo finds Spark's processes in /proc, which this system lacks; run it on Linux")
    found = (_read_process(folder) for folder in _PROC.iterdir() if folder.name.isdigit())
    return [process for process in found if process is not None]


def _read_process(folder: Path) -> Process | None:
    """Read one process; None if it has ended, also if its parent has not waited for it yet (a zombie, proc(5))."""
    try:
        stat = (folder / "stat").read_text("utf-8", "replace")
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return None
    # The program's name is in brackets and may contain any character, brackets too (proc(5)).
    state, parent, *rest = stat.rpartition(")")[2].split()
    if state in "ZX":
        return None
    return Process(int(folder.name), int(parent), int(rest[17]), int(rest[9]) + int(rest[10]), command)
