"""Spark's Python workers and drivers are killed while they cancel the rest of keys: nothing is lost, doubled or run after all."""

import os
import random
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.canceled_keys import CancelingExpectations
from tests.support.drivers import APPS, Driver
from tests.support.killed_drivers import KilledDriver
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
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = CancelingExpectations(fresh_client, tmp_path, keys=KEYS, each=EACH)
    expectations.publish_more()
    options = ("--max-per-batch", "100")
    with Driver(f"{APPS}/worker_app.py:canceling", url=fresh_client.url, folder=tmp_path, options=options) as driver:
        nemesis = KilledDriver(driver, chance, cores=(1, 2))
        nemesis.run(KILLS, expectations.publish_more)
        eventually(expectations.is_done_on_spark, f"the drain; seed {seed}", log=driver.errors)
        later = expectations.publish_later()
        eventually(expectations.is_done_on_spark, f"the drain of later messages; seed {seed}", log=driver.errors)
        assert driver.stop() == 0
    report = expectations.check_effects(later)
    print_figures(report, kills=nemesis.killed, driver_starts=driver.starts, seed=seed)
