"""Workers are killed while keys have timers: none comes early, none is forgotten, lost or doubled, and none comes after all."""

import os
import random
import time
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.timed_keys import TURNS, TimedExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import CLAIM_S, PrintFigures, RunningWorkers, kill_random

pytestmark = [pytest.mark.keys, pytest.mark.faults]

KILLS = 50 if os.environ.get("MILLSTREAM_SOAK") else 5


def test_timers_come_once_and_never_early_or_not_at_all_while_workers_are_killed(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = TimedExpectations(fresh_client, tmp_path, app="timed")
    killed = 0
    with RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "2", app="timed", claim_s=CLAIM_S) as workers:
        while killed < KILLS:
            if killed % TURNS == TURNS - 1:
                time.sleep(chance.random() / 2)
                workers.replace_supervisor()
            workers.at_work(expectations)
            expectations.publish_more()
            time.sleep(chance.random() / 5)  # a kill at any point of the work and of the timers
            killed += kill_random(chance, [workers])
        expectations.publish_last()
        eventually(expectations.drained, "the last timer", log=workers.log)
        report = expectations.check_timers(workers.log)
    print_figures(report, kills=killed, seed=seed, timers=report.timers_came)
