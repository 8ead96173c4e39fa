"""Workers are killed while they cancel the rest of keys: nothing is lost, doubled, out of order, or run after all."""

import os
import random
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest

from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.testing.history import Event, Report, check
from millstream.testing.invariants import check_invariants
from tests.support.keyed_workers import KeyedExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures, RunningWorkers, kill, random_process

pytestmark = [pytest.mark.keys, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
KILLS, KEYS, EACH = (200, 400, 120) if SOAK else (8, 16, 40)
FAILS = (3, 20)
"""The messages of a key that fail, by their number in the key: the second one is canceled before it can."""

_PUBLISH = """
local ids = {}
for n = 0, ARGV[2] - 1 do
  local deed = (n == tonumber(ARGV[3]) or n == tonumber(ARGV[4])) and 'fail' or ''
  ids[#ids + 1] = redis.call('XADD', KEYS[1], '*', 'key', ARGV[1], 'n', n, 'do', deed)
end
return ids
"""


def test_kills_at_any_point_leave_each_key_with_its_dead_message_and_all_after_it_canceled_in_order(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    expectations = KeyedExpectations(fresh_client, tmp_path, app="canceling")
    by_key = publish(expectations)
    killed = during = 0
    with RunningWorkers(fresh_client.url, tmp_path, processes=3, app="canceling") as workers:
        workers.ready()
        while killed < KILLS:
            if expectations.drained():
                for key, waves in publish(expectations).items():
                    by_key[key] += waves
            progress = partial(has_progressed, expectations, expectations.effect_count())
            eventually(progress, "effects since the last kill", log=workers.log)
            time.sleep(chance.uniform(0.0, 0.05))
            during += is_canceling(expectations)
            if victim := random_process(chance, [workers]):
                kill(victim)
                killed += 1
        eventually(expectations.drained, "the drain", log=workers.log)
        later = expectations.publish_keys(KEYS, KEYS)
        eventually(expectations.drained, "the drain of later messages", log=workers.log)
    report = check_effects(expectations, by_key)
    assert {row["id"] for row in expectations.outputs()} >= set(later), "later messages run"
    assert fresh_client.execute("EXISTS", expectations.keys.canceled) == 0
    assert check_invariants(fresh_client, expectations.keys, "in") == []
    letters = expectations.dead_letters()
    print_figures(report, seed=seed, killed=killed, during=during, letters=len(letters))


def publish(expectations: KeyedExpectations) -> dict[str, list[list[str]]]:
    """Publish so many messages of each key, of which some fail; return the ids of each key, as one wave."""
    found: dict[str, list[str]] = defaultdict(list)
    for key in (f"k{number}" for number in range(KEYS)):
        # In one step: no message of a key may be published after the dead letter of an earlier one.
        for one in expectations.client.execute("EVAL", _PUBLISH, 1, "in", key, EACH, *FAILS):
            found[key].append(one.decode())
            expectations.key_of[one.decode()] = key.encode()
        expectations.enqueued += found[key]
    return {key: [ids] for key, ids in found.items()}


def has_progressed(expectations: KeyedExpectations, done: int) -> bool:
    """Return whether there are more than `done` effects, or nothing is left to do."""
    return expectations.effect_count() > done or expectations.drained()


def is_canceling(expectations: KeyedExpectations) -> bool:
    """Return whether messages of a key are canceled and have no dead letter yet, or might have."""
    return bool(expectations.client.execute("EXISTS", expectations.keys.canceled))


def check_effects(expectations: KeyedExpectations, by_key: dict[str, list[list[str]]]) -> Report:
    """Check each key: outputs up to its first message that fails, then dead letters in order, without a run."""
    letters = expectations.dead_letters()
    outputs = expectations.outputs()
    effects = [
        Event(kind="committed", stream="in", id=row["id"], key=row["key"].encode(), handler="work", position=at)
        for at, row in enumerate(outputs)
    ]
    effects += [Event(kind="dead", stream="in", id=one.id, key=one.key, handler="work") for one in letters]
    enqueued = [
        Event(kind="enqueued", stream="in", id=one, key=expectations.key_of[one]) for one in expectations.enqueued
    ]
    runs = expectations.runs()
    report = check([*enqueued, *runs, *effects], handlers={"in": ["work"]}, overlap=False)
    report.raise_if_bad()
    reasons = {one.id: one.reason for one in letters}
    ran = {event.id for event in runs}
    for waves in by_key.values():
        for wave in waves:
            first = next(at for at, one in enumerate(wave) if one in reasons)
            assert first <= FAILS[0], "the message that fails is a dead letter"
            # One that became a dead letter since its workers died may have ended in them, and those behind it have run.
            may_have_run = reasons[wave[first]] == "crashed"
            assert may_have_run or not ran & {*wave[first + 1 :]}, "a cancelled message was run"
            assert [reasons.get(one) for one in wave[first + 1 :]] == ["canceled"] * (EACH - first - 1)
    for key in by_key:
        order = [EntryId.parse(one.id) for one in letters if one.key == key.encode()]
        assert order == sorted(order), "the dead letters of a key are in stream order"
    return report
