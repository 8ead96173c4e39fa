"""Workers are killed: states of an earlier version are upcast once, and each state expires after the last commit."""

import os
import random
import time
from pathlib import Path

import msgspec
import pytest

from millstream.admin.inspection import state_expiry
from millstream.redis_client.client import Client
from millstream.redis_client.pipelining import server_time_ms
from tests.support.keyed_workers import KeyedExpectations
from tests.support.worker_processes import CLAIM_S, PrintFigures, RunningWorkers, kill_random, watched

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
KILLS = 100 if SOAK else 3
KEYS = 20
HOUR_MS = 3_600_000
pytestmark = [pytest.mark.keys, pytest.mark.faults]


def test_each_state_is_upcast_once_and_expires_an_hour_after_its_last_commit_though_workers_are_killed(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = KeyedExpectations(fresh_client, tmp_path, app="kept")
    state_key, began_ms = expectations.keys.state, server_time_ms(fresh_client)
    killed = 0
    earlier = msgspec.msgpack.encode({"seen": 0})
    fresh_client.execute("HSET", state_key, *(part for n in range(KEYS) for part in (f"k{n}", earlier)))
    with (
        RunningWorkers(fresh_client.url, tmp_path, app="kept", claim_s=CLAIM_S) as workers,
        watched(expectations) as watch,
    ):
        while killed < KILLS:
            workers.at_work(expectations)
            expectations.publish_keys(200, KEYS, ms=chance.choice((1, 5)))
            time.sleep(chance.random() / 2)
            killed += kill_random(chance, [workers])
        report = expectations.check_keys(overlap=False, log=workers.log)
    counts = {row["key"]: int(row["count"]) for row in expectations.outputs()}
    assert len(counts) == KEYS
    for key, count in counts.items():
        assert expectations.stored_state(key) == (2, {"count": count})
        expires_ms = state_expiry(fresh_client, expectations.keys, key.encode())
        assert expires_ms is not None
        assert began_ms + HOUR_MS <= expires_ms <= server_time_ms(fresh_client) + HOUR_MS
    print_figures(report, watch, kills=killed, seed=seed)
