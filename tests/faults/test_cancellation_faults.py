"""Workers are killed while they cancel the rest of keys: nothing is lost, doubled, out of order, or run after all."""

import os
import random
import time
from functools import partial
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.canceled_keys import CancelingExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures, RunningWorkers, kill_random

pytestmark = [pytest.mark.keys, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
KILLS, KEYS, EACH = (200, 400, 120) if SOAK else (8, 16, 40)


def test_kills_at_any_point_leave_each_key_with_its_dead_message_and_all_after_it_canceled_in_order(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    expectations = CancelingExpectations(fresh_client, tmp_path, keys=KEYS, each=EACH)
    expectations.publish_more()
    killed = during = 0
    with RunningWorkers(fresh_client.url, tmp_path, processes=3, app="canceling") as workers:
        workers.ready()
        while killed < KILLS:
            if expectations.drained():
                expectations.publish_more()
            progress = partial(has_progressed, expectations, expectations.effect_count())
            eventually(progress, "effects since the last kill", log=workers.log)
            time.sleep(chance.uniform(0.0, 0.05))
            is_canceling = expectations.is_canceling()
            if kill_random(chance, [workers]):
                killed += 1
                during += is_canceling
        eventually(expectations.drained, "the drain", log=workers.log)
        later = expectations.publish_later()
        eventually(expectations.drained, "the drain of later messages", log=workers.log)
    report = expectations.check_effects(later)
    assert not expectations.is_canceling()
    print_figures(report, seed=seed, killed=killed, during=during)


def has_progressed(expectations: CancelingExpectations, done: int) -> bool:
    """Return whether there are more than `done` effects, or nothing is left to do."""
    return expectations.effect_count() > done or expectations.drained()
