"""Workers of a handler of lists with a key are killed: each message has one effect, in order, on the right state."""

import os
import random
import time
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.keyed_workers import KeyedExpectations
from tests.support.worker_processes import CLAIM_S, PrintFigures, RunningWorkers, kill_random, watched

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
KILLS = 200 if SOAK else 4
APPS = pytest.mark.parametrize("app", ["listed", pytest.param("gathered", id="gathered: lists that wait for more")])
pytestmark = [pytest.mark.keys, pytest.mark.faults]


@APPS
def test_workers_that_are_killed_in_the_middle_of_lists_keep_every_key_in_order_and_lose_and_double_nothing(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures, app: str
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = KeyedExpectations(fresh_client, tmp_path, app=app)
    killed = 0
    with (
        RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "2", app=app, claim_s=CLAIM_S) as workers,
        watched(expectations) as watch,
    ):
        while killed < KILLS:
            if killed % 4 == 3:
                time.sleep(chance.random() / 2)
                workers.replace_supervisor()
            workers.at_work(expectations)
            expectations.publish_keys(200, 8, ms=chance.choice((1, 5, 20)))
            time.sleep(chance.random() / 2)  # a kill at any point of the wait for more and of the work
            killed += kill_random(chance, [workers])
        report = expectations.check_keys(overlap=False, log=workers.log)
    print_figures(report, watch, kills=killed, seed=seed)


def test_a_message_that_kills_its_worker_in_the_middle_of_a_list_dies_alone(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    expectations = KeyedExpectations(fresh_client, tmp_path, app="listed")
    expectations.publish_key("k1", 9)
    dead = expectations.publish_key("k1", 1, do="exit-1")
    expectations.publish_key("k1", 9)
    expectations.publish_keys(300, 20)
    with RunningWorkers(fresh_client.url, tmp_path, app="listed") as workers, watched(expectations) as watch:
        report = expectations.check_keys(dead=dict.fromkeys(dead, "crashed"), log=workers.log)
    print_figures(report, watch, crashes=workers.log().count("restarting in"))
