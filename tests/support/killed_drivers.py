"""A driver whose processes are killed, now a Python worker, now the driver itself, while its tasks run messages."""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from millstream.clock import SYSTEM_CLOCK
from tests.support.drivers import APPS, Driver
from tests.support.keyed_workers import KeyedExpectations
from tests.support.processes import await_end
from tests.support.waiting import eventually

DRIVER_EVERY = 3
"""Of so many kills the second one is that of the driver: a test with one kill starts Spark once."""


@contextmanager
def killed_driver(
    expectations: KeyedExpectations,
    app: str,
    kills: int,
    *,
    options: tuple[str, ...] = ("--max-per-batch", "100"),
    cores: tuple[int, ...] = (1, 2),
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator["KilledDriver"]:
    """The driver of an app of `worker_app` after so many kills, which ends in order after the block; see KilledDriver.

    Its app writes what it has run to MILLSTREAM_TEST_FOLDER.
    """
    folder = Path(os.environ["MILLSTREAM_TEST_FOLDER"])
    expectations.publish_more()
    with Driver(f"{APPS}/worker_app.py:{app}", url=expectations.client.url, folder=folder, options=options) as driver:
        nemesis = KilledDriver(driver, cores=cores)
        nemesis.run(kills, expectations.publish_more, meanwhile)
        yield nemesis
        assert driver.stop() == 0


class KilledDriver:
    """Kills the driver and its Python workers. `cores`: those of its first start, its second, and so on, in turn.

    `seed`: of the points of the kills. `alive_ms`: Python worker -> when it was last seen alive, before a kill of it or of another one.
    """

    def __init__(self, driver: Driver, *, cores: tuple[int, ...]) -> None:
        self.killed = 0
        self.alive_ms: dict[str, float] = {}
        self.driver = driver
        self.seed = random.SystemRandom().randrange(1 << 32)
        self._chance = random.Random(self.seed)
        self._cores = cores

    def run(self, kills: int, publish: Callable[[], None], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Start the driver, and kill so often, each time at any point once a task runs messages."""
        self._start()
        while self.killed < kills:
            self._await_runs(publish, meanwhile)
            time.sleep(self._chance.random() / 3)
            self._kill()

    def _start(self) -> None:
        """Start the driver."""
        cores = self._cores[self.driver.starts % len(self._cores)]
        self.driver.start("--spark-master", f"local[{cores},4]")

    def _await_runs(self, publish: Callable[[], None], meanwhile: Callable[[], None]) -> None:
        """Publish some more, and wait until a task runs messages."""
        before = self._written()
        publish()

        def is_running() -> bool:
            meanwhile()
            return self._written() > before

        eventually(is_running, "a run since the last kill", log=self.driver.errors)

    def _written(self) -> int:
        # What the handlers have recorded of their runs: a commit would only show when a task has ended.
        return sum(one.stat().st_size for one in self.driver.folder.glob("events.*"))

    def _kill(self) -> None:
        """Kill a Python worker, or the driver, and wait until all that is killed has ended."""
        if self.killed % DRIVER_EVERY == 1:
            self._living_workers()
            self.driver.kill()
            self._start()
        else:
            await_end(eventually(self._kill_worker, "a Python worker to kill", log=self.driver.errors))
        self.killed += 1

    def _kill_worker(self) -> list[psutil.Process]:
        try:
            victim = self._chance.choice(self._living_workers())
            victim.kill()
        except (psutil.NoSuchProcess, IndexError):  # it has ended meanwhile, or there is none yet
            return []
        return [victim]

    def _living_workers(self) -> list[psutil.Process]:
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        found = self.driver.workers()
        self.alive_ms |= {str(one.pid): now_ms for one in found}
        return found
