"""Workers are killed while states expire: each message runs on the state that there is, and on none that has expired."""

import os
import random
import time
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.expiring_keys import KEYS, ExpiringExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import CLAIM_S, PrintFigures, RunningWorkers, kill_random

pytestmark = [pytest.mark.keys, pytest.mark.worker, pytest.mark.faults]

KILLS = 50 if os.environ.get("MILLSTREAM_SOAK") else 5


def test_workers_that_are_killed_lose_no_state_before_its_time_and_keep_none_beyond_it(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = ExpiringExpectations(fresh_client, tmp_path, app="expiring")
    killed = 0
    with RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "2", app="expiring", claim_s=CLAIM_S) as workers:
        while killed < KILLS:
            workers.at_work(expectations)
            expectations.publish_more()
            time.sleep(chance.random() / 5)  # a kill at any point of the work
            killed += kill_random(chance, [workers])
            if killed % 2:
                eventually(expectations.drained, "the last message", log=workers.log)
                eventually(expectations.states_have_expired, "the end of all states")
        expectations.publish_more()
        report = expectations.check_keys(overlap=False, log=workers.log)
    assert expectations.begun_anew >= KEYS
    print_figures(report, kills=killed, seed=seed, begun_anew=expectations.begun_anew, continued=expectations.continued)
