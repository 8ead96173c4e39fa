"""Drivers and Spark's Python workers are killed while keys have timers: none comes early, none is lost or doubled."""

import os
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.killed_drivers import killed_driver
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
    expectations = DriverExpectations(fresh_client, tmp_path, app="timed")
    with killed_driver(expectations, "timed", KILLS) as nemesis:
        driver = nemesis.driver
        expectations.publish_last()
        eventually(expectations.drained, f"the last timer; seed {nemesis.seed}", log=driver.errors)
        report = expectations.check_timers(driver.errors)
    figures = {"seed": nemesis.seed, "timers": report.timers_came}
    print_figures(report, kills=nemesis.killed, driver_starts=driver.starts, **figures)
