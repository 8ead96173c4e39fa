"""Both engines, as the contract wants to run them."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import SparkSession

from millstream import App
from millstream.errors import HandlerStuck
from millstream.handlers import Handler
from millstream.reliable import Delivery
from millstream.spark.runner import Runner, RunSettings
from millstream.worker import ReadingLoop, WorkerPolicy
from tests.contract.process import POLICY

_LOOK_S = 0.02
_STOP_S = 60.0


def run_in_thread(work: Callable[[], None], stop: Callable[[], None], until: Callable[[], bool]) -> None:
    """Run `work` until `until`, then `stop` it. Raises what ended it before its time."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not until():
            time.sleep(_LOOK_S)
    finally:
        stop()
        thread.join(_STOP_S)
    assert not thread.is_alive(), "it did not stop within a minute"
    if failures:
        raise failures[0]


class Loops:
    """A worker in this process: a reading loop for each handler, made anew when its handler is stuck."""

    def __init__(self, policy: WorkerPolicy = POLICY) -> None:
        self._policy = policy
        self.leftovers: list[Delivery] = []

    def __call__(self, app: App, url: str, until: Callable[[], bool]) -> None:
        stopping = threading.Event()
        loops: dict[str, ReadingLoop] = {}
        failures: list[BaseException] = []

        def work(handler: Handler) -> None:
            while not stopping.is_set():
                loop = loops[handler.name] = ReadingLoop(handler, url, consumer="w1", policy=self._policy)
                try:
                    self.leftovers += loop.run()
                    return
                except HandlerStuck:
                    continue  # as a supervisor starts the process again
                except BaseException as error:  # noqa: BLE001 - raised below
                    failures.append(error)
                    return

        threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in app.handlers.values()]
        for thread in threads:
            thread.start()
        try:
            while not until() and not failures:
                time.sleep(_LOOK_S)
        finally:
            stopping.set()
            for loop in list(loops.values()):
                loop.stop()
            for thread in threads:
                thread.join(_STOP_S)
        assert not any(thread.is_alive() for thread in threads), "a loop did not stop within a minute"
        if failures:
            raise failures[0]


class Processes:
    """A worker process for all handlers, started again whenever it dies; they must be those of the contract's cases."""

    def __init__(self) -> None:
        self.starts = 0

    def __call__(self, app: App, url: str, until: Callable[[], bool]) -> None:
        process = self._start(app, url)
        try:
            while not until():
                if process.poll() is not None:
                    process = self._start(app, url)
                time.sleep(_LOOK_S)
        finally:
            process.terminate()
            process.wait(_STOP_S)

    def _start(self, app: App, url: str) -> subprocess.Popen[bytes]:
        self.starts += 1
        command = [sys.executable, "-m", "tests.contract.process", url, *app.handlers]
        return subprocess.Popen(command, cwd=Path(__file__).parents[2])


@dataclass(eq=False)
class Pipelines:
    """Pipelines on the session `spark`, with their checkpoints in `folder`."""

    spark: SparkSession
    folder: Path
    events: list[object] = field(default_factory=list)

    def __call__(self, app: App, url: str, until: Callable[[], bool]) -> None:
        settings = RunSettings(url=url, checkpoint=str(self.folder))
        runner = Runner(app, self.spark, settings, on_event=self.events.append)
        run_in_thread(runner.run, runner.stop, until)
