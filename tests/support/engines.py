"""Both engines as in production, for the contract suite."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import SparkSession

from millstream import App
from millstream.spark.run.supervisor import RunSettings, Supervisor
from tests.support.commandline import PROGRAM
from tests.support.pipelines import in_background
from tests.support.quick_programs import Program
from tests.support.waiting import FAIL_SAFE_S, eventually

ROOT = Path(__file__).parents[2]


@dataclass(eq=False)
class WorkerEngine:
    """Runs `millstream worker` for handlers of `worker_app`; its stderr goes to a file in the folder.

    Claims expire, and stops end, as late as in production: no machine leaves a process without processor time so long.
    """

    folder: Path

    def __call__(self, app: App, url: str, until: Callable[[], bool]) -> None:
        command = [*PROGRAM, "worker", "tests.contract.worker_app:app", "--url", url, "--json"]
        for name in app.handlers:
            command += ["--only", name]
        log = self.folder / "worker.log"
        with log.open("a") as out, Program(command, cwd=ROOT, stdout=out, stderr=out) as process:

            def is_over() -> bool:
                if until():
                    return True
                assert process.poll() is None, log.read_text()
                return False

            try:
                eventually(is_over, "the workers to be done", log=log.read_text)
            finally:
                process.terminate()
                code = process.wait(FAIL_SAFE_S)
        assert code == 0, log.read_text()


@dataclass(eq=False)
class SparkEngine:
    """Runs a `Supervisor` on the session `spark`, with its checkpoints in the folder."""

    spark: SparkSession
    folder: Path
    events: list[object] = field(default_factory=list)

    def __call__(self, app: App, url: str, until: Callable[[], bool]) -> None:
        settings = RunSettings(url=url, checkpoint=str(self.folder))
        supervisor = Supervisor(app, self.spark, settings, on_event=self.events.append)
        with in_background(supervisor) as background:
            eventually(lambda: until() or not background.is_alive(), "the pipelines to be done")
