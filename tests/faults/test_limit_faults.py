"""Workers are killed while tenants are at their limit: it is never exceeded, and nothing is lost, doubled or overtaken."""

import os
import random
import time
from pathlib import Path

import pytest

from millstream.clock import SYSTEM_CLOCK
from millstream.redis_client.client import Client
from tests.support.limited_keys import LimitedExpectations, PacedExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures, RunningWorkers, kill, kill_random, random_process

pytestmark = [pytest.mark.keys, pytest.mark.faults]

KILLS = 50 if os.environ.get("MILLSTREAM_SOAK") else 5


def check_that_permits_have_ended(expectations: LimitedExpectations) -> None:
    """Check that the permits of killed workers have ended with their leases; remove them as their expiry would."""
    for key, holder, queue in list(expectations.permits()):
        owner = expectations.client.execute("HGET", expectations.keys.owners, queue)
        assert owner != holder.rpartition(b" ")[0]
        expectations.client.execute("DEL", key)


def test_a_limit_is_never_exceeded_while_workers_are_killed(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = LimitedExpectations(fresh_client, tmp_path, app="tenants")
    killed_ms: dict[str, float] = {}
    killed = 0
    # No lease expires: the other runs of a tenant would go on beside that of a process without processor time.
    with RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "2", app="tenants", claim_s=60) as workers:
        while killed < KILLS:
            if killed % 4 == 3:
                time.sleep(chance.random() / 2)
                workers.replace_supervisor()
            workers.at_work(expectations)
            expectations.publish_more()
            time.sleep(chance.random() / 5)  # a kill at any point of the work
            alive_ms = SYSTEM_CLOCK.monotonic_ms()
            victim = random_process(chance, [workers])
            if victim is not None and kill(victim):
                killed_ms[str(victim.pid)] = alive_ms
                killed += 1
        eventually(expectations.drained, "the last message", log=workers.log)
        check_that_permits_have_ended(expectations)
        report = expectations.check_at_once(killed_ms, workers.log)
    print_figures(report, kills=killed, seed=seed, most_at_once=report.most_at_once)


def test_a_rate_is_never_exceeded_in_any_period_while_workers_are_killed(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = PacedExpectations(fresh_client, tmp_path, app="paced")
    killed = 0
    with RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "2", app="paced", claim_s=60) as workers:
        while killed < KILLS:
            workers.at_work(expectations)
            expectations.publish_more()
            time.sleep(chance.random() / 5)  # a kill at any point of the work and of the waits
            killed += kill_random(chance, [workers])
        report = expectations.check_keys(overlap=False, log=workers.log)
    print_figures(report, kills=killed, seed=seed, permits=expectations.check_rate())
