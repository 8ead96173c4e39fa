"""A driver that copies a stream through source and sink, and is killed where a test says."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import kill_with_descendants
from tests.support.quick_programs import Program
from tests.support.waiting import FAIL_SAFE_S

ROOT = Path(__file__).parents[2]


class Copying:
    """A driver that copies `in` and `shared`; each one begins with another number of cores."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._starts = 0

    @contextmanager
    def _running(self, rows: int) -> Iterator[subprocess.Popen[bytes]]:
        """One driver, and what it starts; all of it is gone in the end."""
        self._starts += 1
        master = f"local[{1 + self._starts % 3},4]"
        arguments = [self._url, str(self._folder / "checkpoint"), master, str(rows)]
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        with (self._folder / "stderr.log").open("ab") as errors:
            process: subprocess.Popen[bytes] = Program(
                [sys.executable, "-m", "tests.support.apps.sink_driver", *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MILLSTREAM_TEST_ARM": str(self._folder)},
                stderr=errors,
                cwd=self._folder,
            )
        try:
            yield process
        finally:
            kill_with_descendants(process)

    def run(self, rows: int) -> int:
        """Wait until one driver has ended by itself; return its exit code."""
        with self._running(rows) as process:
            return process.wait(FAIL_SAFE_S)

    def arm(self, point: str, what: str) -> None:
        """Have `what` die where it reaches the point."""
        (self._folder / point).write_text(what)

    def hits(self) -> list[str]:
        """The points that were reached, in their order."""
        found = sorted(self._folder.glob("hit.*"), key=lambda path: path.suffix)
        return [path.name.split(".")[1] for path in found]

    def output(self) -> str:
        """The end of what drivers said."""
        return (self._folder / "stderr.log").read_text()[-3_000:]
