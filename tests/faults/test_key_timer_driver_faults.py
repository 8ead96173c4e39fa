"""Drivers and Spark's Python workers are killed while keys have timers: none comes early, none is lost or doubled."""

import os
import random
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.drivers import APPS, Driver
from tests.support.killed_drivers import KilledDriver
from tests.support.timed_keys import KEYS, TURNS, TimedExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures

pytestmark = [pytest.mark.spark, pytest.mark.keys, pytest.mark.drivers, pytest.mark.faults]

KILLS = 50 if os.environ.get("MILLSTREAM_SOAK") else 2


class DriverExpectations(TimedExpectations):
    """Expectations of the app `timed` on Spark, where messages in a batch are not pending."""

    def publish_more(self) -> None:
        """See Expectations. The messages take longer than what Spark needs for a batch, so most kills hit one that runs."""
        self.publish_keys(3 * TURNS * KEYS, KEYS, ms=5)

    def drained(self) -> bool:
        """Return whether no timer is left, and all batches have ended."""
        found = self.look()
        return not found.timers and not found.pending and found.committed == found.last


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
        nemesis = KilledDriver(driver, chance, cores=(1, 2))
        nemesis.run(KILLS, expectations.publish_more)
        expectations.publish_last()
        eventually(expectations.drained, f"the last timer; seed {seed}", log=driver.errors)
        report = expectations.check_timers(driver.errors)
        assert driver.stop() == 0
    starts, timers = driver.starts, report.timers_came
    print_figures(report, kills=nemesis.killed, driver_starts=starts, seed=seed, timers=timers)
