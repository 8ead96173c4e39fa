"""Both engines as in production, for the contract suite."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import SparkSession

from millstream import App
from millstream.spark.run.supervisor import RunSettings, Supervisor
from tests.support.waiting import FAIL_SAFE_S

ROOT = Path(__file__).parents[2]
_POLL_S = 0.02


@dataclass(eq=False)
class WorkerCommand:
    """Runs `millstream worker` for handlers of `worker_app`; its stderr goes to a file in the folder."""

    folder: Path

    def __call__(self, app: App, url: str, until: Callable[[], bool]) -> None:
        command = [sys.executable, "-m", "millstream.cli.main", "worker", "tests.contract.worker_app:app"]
        command += ["--url", url, "--claim", "3", "--stop-timeout", "2", "--json"]
        for name in app.handlers:
            command += ["--only", name]
        log = self.folder / "worker.log"
        with log.open("a") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out) as process:
            try:
                while not until():
                    assert process.poll() is None, log.read_text()
                    time.sleep(_POLL_S)
            finally:
                process.terminate()
                code = process.wait(FAIL_SAFE_S)
        assert code == 0, log.read_text()


@dataclass(eq=False)
class Pipelines:
    """Runs a `Supervisor` on the session `spark`, with its checkpoints in the folder."""

    spark: SparkSession
    folder: Path
    events: list[object] = field(default_factory=list)

    def __call__(self, app: App, url: str, until: Callable[[], bool]) -> None:
        settings = RunSettings(url=url, checkpoint=str(self.folder))
        supervisor = Supervisor(app, self.spark, settings, on_event=self.events.append)
        failures: list[BaseException] = []

        def run() -> None:
            try:
                supervisor.run()
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            while thread.is_alive() and not until():
                time.sleep(_POLL_S)
        finally:
            supervisor.stop()
            thread.join(FAIL_SAFE_S)
        assert not thread.is_alive(), "the supervisor did not stop"
        if failures:
            raise failures[0]
