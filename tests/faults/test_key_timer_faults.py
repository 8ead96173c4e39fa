"""Workers are killed while keys have timers: none comes early, none is forgotten, lost or doubled, and none comes after all."""

import os
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from millstream.delivery import DelayedMessages
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD
from tests.support.fields import text_fields
from tests.support.keyed_workers import KeyedExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import CLAIM_S, PrintFigures, RunningWorkers

pytestmark = [pytest.mark.keys, pytest.mark.faults]

KILLS = 50 if os.environ.get("MILLSTREAM_SOAK") else 10
KEYS = 8
TURNS = 4
"""How many messages of a key have different timers: see `work_timed`."""


class TimedExpectations(KeyedExpectations):
    """Expectations of the app `timed`: those of any keyed handler, also of the messages that timers have added."""

    def publish_more(self) -> None:
        """See Expectations."""
        self.publish_keys(3 * TURNS * KEYS, KEYS, ms=1)

    def drained(self) -> bool:
        """Return whether no timer is left, and nothing is pending or left to read."""
        return not self._ask("ZCARD", "millstream:{in}:in:due") and super().drained()

    def add_timers(self) -> Counter[str]:
        """Expect the messages that timers have added; return what set them."""
        found: Counter[str] = Counter()
        for entry_id, pairs in self.client.execute("XRANGE", "in", "-", "+"):
            if pairs[0] == REDRIVE_FIELD:
                fields = text_fields(pairs)
                self.enqueued.append(entry_id.decode())
                self.key_of[entry_id.decode()] = fields["key"].encode()
                found[fields["of"]] += 1
        return found


def test_timers_come_once_and_never_early_or_not_at_all_while_workers_are_killed(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = TimedExpectations(fresh_client, tmp_path, app="timed")
    with RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "2", app="timed", claim_s=CLAIM_S) as workers:
        for number in range(KILLS):
            expectations.publish_more()
            time.sleep(chance.random() / 2)  # a kill at any point
            if number % TURNS == TURNS - 1:
                workers.supervisor.kill()
                workers.supervisor.wait()
                workers.start()
            with suppress(psutil.NoSuchProcess):
                workers.victim(expectations).kill()
        expectations.publish_keys(KEYS, KEYS)  # cancels the last timers that have to be
        eventually(expectations.drained, "the last timer", log=workers.log)
        rung = expectations.add_timers()
        report = expectations.check_keys(overlap=False, log=workers.log)
    wanted = due_times(fresh_client)
    assert rung == Counter(dict.fromkeys(wanted, 1)), "each timer comes once, and none that was replaced or canceled"
    early = [
        row["of"] for row in expectations.outputs() if "of" in row and EntryId.parse(row["id"]).ms < wanted[row["of"]]
    ]
    assert early == []
    assert DelayedMessages(fresh_client).count("in") == 0
    assert fresh_client.execute("EXISTS", "millstream:{in}:in:delayed") == 0
    print_figures(report, kills=KILLS, seed=seed, timers=len(wanted))


def due_times(client: Client) -> dict[str, int]:
    """Return when each timer that must come is due, by the message that set it: its output has the time of the commit."""
    found: dict[str, int] = {}
    for entry_id, pairs in client.execute("XRANGE", "out", "-", "+"):
        row = text_fields(pairs)
        if "delay_ms" in row:
            found[row["id"]] = EntryId.parse(entry_id).ms + int(row["delay_ms"])
    return found
