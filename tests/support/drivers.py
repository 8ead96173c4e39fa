"""Driver: a `millstream run` process that a test may kill, with its events and logs."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Self

import psutil

from tests.support.commandline import PROGRAM
from tests.support.json_reference import check_events
from tests.support.processes import await_end, descendants
from tests.support.quick_programs import Program
from tests.support.waiting import FAIL_SAFE_S

APPS = Path(__file__).parent / "apps"


class Driver:
    """Runs `app` against `url`; each start uses the same checkpoint. A context manager that kills what still runs."""

    def __init__(self, app: str, *, url: str, folder: Path, options: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self._command = [*PROGRAM, "run", app, "--url", url, "--json"]
        self._command += ["--checkpoint", str(folder / "checkpoint"), *options]
        self.options = options
        self._process: subprocess.Popen[str] | None = None
        self._listener = threading.Thread()
        self.starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._process is not None and self.alive:
            self.kill()
        if error is None:
            check_events("run", self.events)

    def start(self, *options: str) -> None:
        """Start the process, with further options; its stderr goes to a file in the folder."""
        self.starts += 1
        with (self.folder / "stderr.log").open("a") as errors:
            self._process = Program(
                [*self._command, *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "MILLSTREAM_TEST_ARM": str(self.folder)},
                cwd=self.folder,
            )
        self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._listener.start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if line.endswith("}\n"):  # a process killed in mid-line leaves an incomplete line
                    self.events.append(json.loads(line))

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def alive(self) -> bool:
        """True while the driver process runs."""
        return self.process.poll() is None

    def errors(self) -> str:
        """The end of its stderr."""
        return (self.folder / "stderr.log").read_text()[-3000:]

    def descendants(self) -> list[psutil.Process]:
        """The driver's descendants: the JVM and its Python workers."""
        return descendants(self.process)

    def java(self) -> psutil.Process:
        """Spark's Java process, once the run has started."""
        return next(one for one in self.descendants() if one.name() == "java")

    def workers(self) -> list[psutil.Process]:
        """The Python workers that run tasks: children of Spark's Python daemon."""
        found = []
        for process in self.descendants():
            try:
                both = (process, process.parent() or process)
                if all("daemon pyspark." in " ".join(one.cmdline()) for one in both):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self) -> None:
        """SIGKILL the driver, and check that all its descendants end by themselves."""
        orphans = self.descendants()
        self.process.kill()
        self.process.wait()
        await_end(orphans)
        self._listener.join(FAIL_SAFE_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the process a signal; return its exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait for the process to end by itself; return its exit code."""
        code = self.process.wait(FAIL_SAFE_S)
        self._listener.join(FAIL_SAFE_S)
        return code

    def has_emitted(self, event: str) -> bool:
        """Whether the driver has emitted this event."""
        return any(one["event"] == event for one in self.events)
