"""Drivers and Spark's Python workers are killed while tenants are at their limit or rate: neither is ever exceeded."""

import os
import random
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.drivers import APPS, Driver
from tests.support.killed_drivers import KilledDriver
from tests.support.limited_keys import PacedTaskExpectations, TaskExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures

pytestmark = [
    *(pytest.mark.spark, pytest.mark.keys, pytest.mark.drivers, pytest.mark.faults),
    pytest.mark.skipif(not os.environ.get("MILLSTREAM_SOAK"), reason="a Spark of its own, started often: make soak"),
]

KILLS = 50
CORES = 4
"""More than a tenant may use at once."""


def test_a_limit_is_never_exceeded_while_drivers_and_tasks_are_killed(
    fresh_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, print_figures: PrintFigures
) -> None:
    monkeypatch.setenv("MILLSTREAM_TEST_FOLDER", str(tmp_path))
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = TaskExpectations(fresh_client, tmp_path, app="tenants")
    expectations.publish_more()
    with Driver(f"{APPS}/worker_app.py:tenants", url=fresh_client.url, folder=tmp_path) as driver:
        nemesis = KilledDriver(driver, chance, cores=(CORES,))
        nemesis.run(KILLS, expectations.publish_more, expectations.end_permits)
        eventually(expectations.drained, f"the last message; seed {seed}", log=driver.errors)
        report = expectations.check_at_once(nemesis.alive_ms, driver.errors)
        assert driver.stop() == 0
    limited = sum(one["limited"] for one in driver.events if one["event"] == "batch")
    starts, most = driver.starts, report.most_at_once
    print_figures(report, kills=nemesis.killed, driver_starts=starts, seed=seed, most_at_once=most, limited=limited)


def test_a_rate_is_never_exceeded_while_drivers_and_tasks_are_killed(
    fresh_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, print_figures: PrintFigures
) -> None:
    monkeypatch.setenv("MILLSTREAM_TEST_FOLDER", str(tmp_path))
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = PacedTaskExpectations(fresh_client, tmp_path, app="paced")
    expectations.publish_more()
    with Driver(f"{APPS}/worker_app.py:paced", url=fresh_client.url, folder=tmp_path) as driver:
        nemesis = KilledDriver(driver, chance, cores=(CORES,))
        nemesis.run(KILLS, expectations.publish_more)
        eventually(expectations.drained, f"the last message; seed {seed}", log=driver.errors)
        report = expectations.check_keys(overlap=False, log=driver.errors)
        assert driver.stop() == 0
    starts, permits = driver.starts, expectations.check_rate()
    print_figures(report, kills=nemesis.killed, driver_starts=starts, seed=seed, permits=permits)
