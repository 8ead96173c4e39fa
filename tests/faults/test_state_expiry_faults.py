"""Workers are killed while states expire: each message runs on the state that there is, and on none that has expired."""

import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from millstream.model import EntryId
from millstream.redis_client.client import Client
from tests.support.apps.worker_app import STATE_TTL_MS
from tests.support.keyed_workers import KeyedExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import CLAIM_S, PrintFigures, RunningWorkers, kill_random
from tests.support.workers import now_ms

pytestmark = [pytest.mark.keys, pytest.mark.worker, pytest.mark.faults]

KILLS = 50 if os.environ.get("MILLSTREAM_SOAK") else 5
KEYS = 8


class ExpiringExpectations(KeyedExpectations):
    """Expectations of the app `expiring`, whose states end; by the server's clock, which times all entries."""

    begun_anew = continued = 0

    def publish_more(self) -> None:
        """See Expectations."""
        self.publish_keys(6 * KEYS, KEYS, ms=2)

    def states_have_expired(self) -> bool:
        """Return whether all states have expired since the last commit."""
        last = self.client.execute("XREVRANGE", "out", "+", "-", "COUNT", 1)[0][0]
        return now_ms(self.client) >= EntryId.parse(last).ms + STATE_TTL_MS + 1

    def check_states(self, outputs: Sequence[Mapping[str, str]]) -> None:
        """Check the count of each message against that of the one before it in its key.

        It goes on if the message was committed before the state expired, and begins anew if the message was published
        after the millisecond of that. Between the two the message may have begun before or after.
        """
        entries = self.client.execute("XRANGE", "out", "-", "+")
        last: dict[str, tuple[int, int]] = {}
        for row, (entry_id, _) in zip(outputs, entries, strict=True):
            committed_ms, count = EntryId.parse(entry_id).ms, int(row["count"])
            before, expires_ms = last.get(row["key"], (0, 0))
            if EntryId.parse(row["id"]).ms > expires_ms:
                assert count == 1, f"on a state that had expired at {expires_ms}: {row}"
                self.begun_anew += before > 0
            elif committed_ms < expires_ms:
                assert count == before + 1, f"the state lasts until {expires_ms}: {row}"
                self.continued += 1
            else:
                assert count in (1, before + 1), row
            last[row["key"]] = count, committed_ms + STATE_TTL_MS


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
