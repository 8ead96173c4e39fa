"""A `millstream run` in a process of its own that a test may kill, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import FAIL_SAFE_S

APPS = Path(__file__).parent / "apps"


class Driver:
    """Runs `app` against `url`; restarted with the same checkpoint after each death."""

    def __init__(self, app: str, *, url: str, folder: Path, options: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self._command = [sys.executable, "-m", "millstream.cli.main", "run", app, "--url", url, "--json"]
        self._command += ["--checkpoint", str(folder / "checkpoint"), *options]
        self.options = options
        self._process: subprocess.Popen[str] | None = None
        self._listener = threading.Thread()
        self.starts = 0

    def start(self, *options: str) -> None:
        """Start it, with further options; its stderr is kept in the folder."""
        self.starts += 1
        with (self.folder / "stderr.log").open("a") as errors:
            self._process = subprocess.Popen(
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
                if line.endswith("}\n"):  # a process killed in mid-line leaves half of one
                    self.events.append(json.loads(line))

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def alive(self) -> bool:
        """True while the driver's own process runs."""
        return self.process.poll() is None

    def errors(self) -> str:
        """The end of what it said on stderr."""
        return (self.folder / "stderr.log").read_text()[-3000:]

    def family(self) -> list[psutil.Process]:
        """The driver's descendants: the JVM and its Python workers."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> list[psutil.Process]:
        """The Python workers that run tasks: children of Spark's Python daemon."""
        found = []
        for process in self.family():
            try:
                if "pyspark.daemon" in " ".join(process.cmdline()) and "pyspark.daemon" in " ".join(
                    (process.parent() or process).cmdline()
                ):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self) -> None:
        """SIGKILL the driver, and see that all that it started ends by itself."""
        orphans = self.family()
        self.process.kill()
        self.process.wait()
        _, left = psutil.wait_procs(orphans, timeout=FAIL_SAFE_S)
        assert not left, f"outlived their driver: {left}"
        self._listener.join(FAIL_SAFE_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal; return the exit code."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait until it has ended by itself; return the exit code."""
        code = self.process.wait(FAIL_SAFE_S)
        self._listener.join(FAIL_SAFE_S)
        return code

    def has_told(self, event: str) -> bool:
        """Whether there was such an event."""
        return any(one["event"] == event for one in self.events)
