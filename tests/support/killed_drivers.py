"""A driver whose processes are killed, now a Python worker, now the driver itself, while its tasks run messages."""

import random
import time
from collections.abc import Callable

import psutil

from millstream.clock import SYSTEM_CLOCK
from tests.support.drivers import Driver
from tests.support.processes import await_end
from tests.support.waiting import eventually

DRIVER_EVERY = 3
"""Of so many kills the second one is that of the driver: a test with one kill starts Spark once."""


class KilledDriver:
    """Kills the driver and its Python workers. `cores`: those of its first start, its second, and so on, in turn.

    `alive_ms`: Python worker -> when it was last seen alive, before a kill of it or of another one.
    """

    def __init__(self, driver: Driver, chance: random.Random, *, cores: tuple[int, ...]) -> None:
        self.killed = 0
        self.alive_ms: dict[str, float] = {}
        self._driver = driver
        self._chance = chance
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
        cores = self._cores[self._driver.starts % len(self._cores)]
        self._driver.start("--spark-master", f"local[{cores},4]")

    def _await_runs(self, publish: Callable[[], None], meanwhile: Callable[[], None]) -> None:
        """Publish some more, and wait until a task runs messages."""
        before = self._written()
        publish()

        def is_running() -> bool:
            meanwhile()
            return self._written() > before

        eventually(is_running, "a run since the last kill", log=self._driver.errors)

    def _written(self) -> int:
        # What the handlers have recorded of their runs: a commit would only show when a task has ended.
        return sum(one.stat().st_size for one in self._driver.folder.glob("events.*"))

    def _kill(self) -> None:
        """Kill a Python worker, or the driver, and wait until all that is killed has ended."""
        if self.killed % DRIVER_EVERY == 1:
            self._living_workers()
            self._driver.kill()
            self._start()
        else:
            await_end(eventually(self._kill_worker, "a Python worker to kill", log=self._driver.errors))
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
        found = self._driver.workers()
        self.alive_ms |= {str(one.pid): now_ms for one in found}
        return found
