"""Spark's Python workers and drivers are killed while they cancel the rest of keys: nothing is lost, doubled or run after all."""

import os
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.canceled_keys import CancelingExpectations
from tests.support.killed_drivers import killed_driver
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures

pytestmark = [
    *(pytest.mark.spark, pytest.mark.keys, pytest.mark.drivers, pytest.mark.faults),
    pytest.mark.skipif(not os.environ.get("MILLSTREAM_SOAK"), reason="a Spark of its own, started often: make soak"),
]

KILLS = 50
KEYS, EACH = 12, 40


def test_kills_on_spark_leave_each_key_with_its_dead_message_and_all_after_it_canceled_in_order(
    fresh_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, print_figures: PrintFigures
) -> None:
    monkeypatch.setenv("MILLSTREAM_TEST_FOLDER", str(tmp_path))
    expectations = CancelingExpectations(fresh_client, tmp_path, keys=KEYS, each=EACH)
    with killed_driver(expectations, "canceling", KILLS) as nemesis:
        driver, seed = nemesis.driver, nemesis.seed
        eventually(expectations.is_done_on_spark, f"the drain; seed {seed}", log=driver.errors)
        later = expectations.publish_later()
        eventually(expectations.is_done_on_spark, f"the drain of later messages; seed {seed}", log=driver.errors)
    report = expectations.check_effects(later)
    print_figures(report, kills=nemesis.killed, driver_starts=driver.starts, seed=seed)
