"""The sink under fire: tasks, commits and drivers are killed at every step, and each row is published once."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from millstream.client import Client
from millstream.server import EmbeddedServer

pytestmark = [pytest.mark.sink, pytest.mark.drivers, pytest.mark.faults, pytest.mark.spark]

ROOT = Path(__file__).parents[2]
SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
ROWS = 200_000 if SOAK else 20_000
TASKS = ("before-staging", "half-staged", "staged")
COMMITS = ("before-commit", "asked", "sealed", "decided", "half-published", "published")
DRIVERS = COMMITS if SOAK else ("half-published",)


class Copying:
    """A driver that copies `in`; each one begins with another number of cores. `options` are the source's."""

    def __init__(self, url: str, folder: Path, **options: str) -> None:
        self._url = url
        self._folder = folder
        self._options = json.dumps(options)
        self._starts = 0

    @contextmanager
    def running(self, rows: int) -> Iterator[subprocess.Popen[bytes]]:
        """One driver, and what it starts; all of it is gone in the end."""
        self._starts += 1
        master = f"local[{1 + self._starts % 3},4]"
        arguments = [self._url, str(self._folder / "checkpoint"), master, str(rows), self._options]
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        with (self._folder / "stderr.log").open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.apps.sink_driver", *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MILLSTREAM_TEST_ARM": str(self._folder)},
                stderr=errors,
                cwd=self._folder,
            )
        try:
            yield process
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.kill()
            process.wait()
            for member in family:
                if member.is_running():
                    member.kill()

    def arm(self, point: str, what: str) -> None:
        """Have `what` die where it reaches the point."""
        (self._folder / point).write_text(what)

    def hits(self) -> list[str]:
        """The points that were reached, in their order."""
        found = sorted(self._folder.glob("hit.*"), key=lambda path: path.suffix)
        return [path.name.split(".")[1] for path in found]

    def said(self) -> str:
        """The end of what drivers said."""
        return (self._folder / "stderr.log").read_text()[-3_000:]


def published(client: Client, stream: str) -> list[int]:
    return [int(items[1]) for _, items in client.execute("XRANGE", stream, "-", "+")]


def test_kills_at_every_step_of_tasks_commits_and_drivers_publish_each_row_once_and_batch_after_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EmbeddedServer() as server, Client(server.url) as client:
        for start in range(0, ROWS, 5_000):
            client.pipeline([("XADD", "in", "*", "n", n) for n in range(start, start + 5_000)])
        copying = Copying(server.url, tmp_path)
        batch = ROWS // 10
        for point in DRIVERS:
            copying.arm(point, "driver")
            with copying.running(batch) as process:
                process.wait(240)
            assert point in copying.hits(), copying.said()
        for point in (*TASKS, *COMMITS):
            copying.arm(point, "process")
        with copying.running(batch) as process:
            assert process.wait(400) == 0, copying.said()
        assert Counter(copying.hits()) == Counter((*DRIVERS, *TASKS, *COMMITS)), copying.said()
        with capsys.disabled():
            print(f"\nkills at: {', '.join(copying.hits())}")  # noqa: T201
        for place in range(3):
            found = published(client, f"out{place}")
            assert sorted(found) == [n for n in range(ROWS) if n % 3 == place]
            batches = [n // batch for n in found]
            assert batches == sorted(batches)
        left = client.execute("KEYS", "millstream:*:sink:*")
        assert all(client.execute("TTL", key) > 0 for key in left), "what dead tasks leave behind expires"
        (record,) = client.execute("KEYS", "millstream:{sink:*}:record")
        assert client.execute("HEXISTS", record, "state") == 0
