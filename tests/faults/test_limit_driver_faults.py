"""Drivers and Spark's Python workers are killed while tenants are at their limit or rate: neither is ever exceeded."""

import os
from pathlib import Path
from typing import Any

import pytest

from millstream.redis_client.client import Client
from tests.support.killed_drivers import killed_driver
from tests.support.limited_keys import PacedTaskExpectations, TaskExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures

pytestmark = [
    *(pytest.mark.spark, pytest.mark.keys, pytest.mark.drivers, pytest.mark.faults),
    pytest.mark.skipif(not os.environ.get("MILLSTREAM_SOAK"), reason="a Spark of its own, started often: make soak"),
]

KILLS = 50
ENGINE: dict[str, Any] = {"options": (), "cores": (4,)}
"""More cores than a tenant may use at once, and batches of any size."""


def test_a_limit_is_never_exceeded_while_drivers_and_tasks_are_killed(
    fresh_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, print_figures: PrintFigures
) -> None:
    monkeypatch.setenv("MILLSTREAM_TEST_FOLDER", str(tmp_path))
    expectations = TaskExpectations(fresh_client, tmp_path, app="tenants")
    with killed_driver(expectations, "tenants", KILLS, meanwhile=expectations.end_permits, **ENGINE) as nemesis:
        driver = nemesis.driver
        eventually(expectations.drained, f"the last message; seed {nemesis.seed}", log=driver.errors)
        report = expectations.check_at_once(nemesis.alive_ms, driver.errors)
    limited = sum(one["limited"] for one in driver.events if one["event"] == "batch")
    figures = {"seed": nemesis.seed, "most_at_once": report.most_at_once, "limited": limited}
    print_figures(report, kills=nemesis.killed, driver_starts=driver.starts, **figures)


def test_a_rate_is_never_exceeded_while_drivers_and_tasks_are_killed(
    fresh_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, print_figures: PrintFigures
) -> None:
    monkeypatch.setenv("MILLSTREAM_TEST_FOLDER", str(tmp_path))
    expectations = PacedTaskExpectations(fresh_client, tmp_path, app="paced")
    with killed_driver(expectations, "paced", KILLS, **ENGINE) as nemesis:
        driver = nemesis.driver
        eventually(expectations.drained, f"the last message; seed {nemesis.seed}", log=driver.errors)
        report = expectations.check_keys(overlap=False, log=driver.errors)
    figures = {"seed": nemesis.seed, "permits": expectations.check_rate()}
    print_figures(report, kills=nemesis.killed, driver_starts=driver.starts, **figures)
