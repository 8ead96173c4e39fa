"""Drivers and Spark's Python workers are killed while keys have timers: none comes early, none is lost or doubled."""

import os
import random
import time
from pathlib import Path

import psutil
import pytest

from millstream.redis_client.client import Client
from tests.support.drivers import APPS, Driver
from tests.support.timed_keys import KEYS, TURNS, TimedExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures

pytestmark = [pytest.mark.spark, pytest.mark.keys, pytest.mark.drivers, pytest.mark.faults]

KILLS = 50 if os.environ.get("MILLSTREAM_SOAK") else 2
DRIVER_EVERY = 3
"""The first of so many kills is that of the driver."""


class DriverExpectations(TimedExpectations):
    """Expectations of the app `timed` on Spark, where messages in a batch are not pending."""

    def publish_more(self) -> None:
        """See Expectations. The messages take longer than what Spark needs for a batch, so most kills hit one that runs."""
        self.publish_keys(3 * TURNS * KEYS, KEYS, ms=5)

    def drained(self) -> bool:
        """Return whether no timer is left, and all batches have ended."""
        found = self.look()
        return not found.timers and not found.pending and found.committed == found.last


def start(driver: Driver) -> None:
    """Start it, with one core and with two by turns."""
    driver.start("--spark-master", f"local[{1 + driver.starts % 2},4]")


def written(driver: Driver) -> int:
    """Return how much the handlers have recorded of their runs: a commit would only show when a task has ended."""
    return sum(one.stat().st_size for one in driver.folder.glob("events.*"))


def publish_and_await_runs(expectations: DriverExpectations, driver: Driver) -> None:
    """Publish some more, and wait until a task runs messages."""
    before = written(driver)
    expectations.publish_more()
    eventually(lambda: written(driver) > before, "a run since the last kill", log=driver.errors)


def kill_worker(driver: Driver, chance: random.Random) -> None:
    """Kill one of the Python workers that run tasks."""

    def is_killed() -> bool:
        try:
            chance.choice(driver.workers()).kill()
        except (psutil.NoSuchProcess, IndexError):  # it has ended meanwhile, or there is none yet
            return False
        return True

    eventually(is_killed, "a Python worker to kill", log=driver.errors)


def test_timers_come_once_and_never_early_or_not_at_all_while_drivers_and_tasks_are_killed(
    fresh_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, print_figures: PrintFigures
) -> None:
    monkeypatch.setenv("MILLSTREAM_TEST_FOLDER", str(tmp_path))
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = DriverExpectations(fresh_client, tmp_path, app="timed")
    expectations.publish_more()
    options = ("--max-per-batch", "100")
    with Driver(f"{APPS}/worker_app.py:timed", url=fresh_client.url, folder=tmp_path, options=options) as driver:
        start(driver)
        for number in range(KILLS):
            publish_and_await_runs(expectations, driver)
            time.sleep(chance.random() / 3)  # a kill at any point
            if number % DRIVER_EVERY == 0:
                driver.kill()
                start(driver)
            else:
                kill_worker(driver, chance)
        expectations.publish_last()
        eventually(expectations.drained, f"the last timer; seed {seed}", log=driver.errors)
        added = expectations.add_timers()
        report = expectations.check_keys(overlap=False, log=driver.errors)
        assert driver.stop() == 0
    timers = expectations.check_timers(added)
    print_figures(report, kills=KILLS, driver_starts=driver.starts, seed=seed, timers=timers)
