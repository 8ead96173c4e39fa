"""Workers are killed while tenants are at their limit: it is never exceeded, and nothing is lost, doubled or overtaken."""

import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from millstream.clock import SYSTEM_CLOCK
from millstream.redis_client.client import Client
from millstream.testing.history import Event
from tests.support.keyed_workers import KeyedExpectations
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures, RunningWorkers, kill, random_process

pytestmark = [pytest.mark.keys, pytest.mark.faults]

KILLS = 50 if os.environ.get("MILLSTREAM_SOAK") else 5
KEYS, TENANTS, AT_ONCE = 24, 3, 2


@dataclass(frozen=True)
class Run:
    """One run of a message of a tenant, in milliseconds of the monotonic clock."""

    id: str
    tenant: int
    began_ms: float
    ended_ms: float


class LimitedExpectations(KeyedExpectations):
    """Expectations of the app `tenants`: those of any keyed handler, and that its limit was never exceeded."""

    def publish_more(self) -> None:
        """See Expectations."""
        ids = self._publish(
            2 * KEYS, lambda n: ["key", f"k{n % KEYS}", "tenant", f"t{n % TENANTS}", "ms", 1 + n % 7 * 3]
        )
        self.key_of |= {one: f"k{n % KEYS}".encode() for n, one in enumerate(ids)}

    def end_permits(self) -> None:
        """Check that the permits of killed workers have ended with their leases; remove them as their expiry would."""
        for key in self._ask("KEYS", f"{self.keys.base}:permits:*"):
            for holder, queue in zip(*[iter(self._ask("HGETALL", key))] * 2, strict=True):
                assert self._ask("HGET", self.keys.owners, queue) != holder.rpartition(b" ")[0]
            self._ask("DEL", key)

    def runs_of_tenants(self, killed_ms: Mapping[str, float]) -> list[Run]:
        """The runs, but for those whose lease was lost in them: another process began the message again meanwhile.

        A run without an end lasted until its process was killed, or, if the end of that is not known, no time.
        """
        began: dict[tuple[str, str], Event] = {}
        runs: list[Run] = []
        for event in sorted(self.runs(), key=lambda one: one.at or 0.0):
            run = event.id, event.worker
            if event.kind == "started":
                runs += self._run(began.pop(run, None), None, killed_ms)
                began[run] = event
            else:
                runs += self._run(began.pop(run), event.at, killed_ms)
        for event in began.values():
            runs += self._run(event, None, killed_ms)
        starts: dict[str, list[float]] = defaultdict(list)
        for one in runs:
            starts[one.id].append(one.began_ms)
        return [one for one in runs if not any(one.began_ms < at < one.ended_ms for at in starts[one.id])]

    def _run(self, event: Event | None, ended_ms: float | None, killed_ms: Mapping[str, float]) -> Iterator[Run]:
        if event is not None:
            assert event.at is not None
            end_ms = killed_ms.get(event.worker, event.at) if ended_ms is None else ended_ms
            yield Run(event.id, int(self.key_of[event.id][1:]) % TENANTS, event.at, end_ms)


def most_at_once(runs: Sequence[Run]) -> dict[int, int]:
    """How many runs of each tenant overlapped at most."""
    most: dict[int, int] = defaultdict(int)
    now: dict[int, int] = defaultdict(int)
    for _, change, tenant in sorted(
        [(r.ended_ms, -1, r.tenant) for r in runs] + [(r.began_ms, 1, r.tenant) for r in runs]
    ):
        now[tenant] += change
        most[tenant] = max(most[tenant], now[tenant])
    return dict(most)


def test_a_limit_is_never_exceeded_while_workers_are_killed(
    fresh_client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    expectations = LimitedExpectations(fresh_client, tmp_path, app="tenants")
    killed_ms: dict[str, float] = {}
    # No lease expires: the other runs of a tenant would go on beside that of a process without processor time.
    with RunningWorkers(fresh_client.url, tmp_path, "--stop-timeout", "2", app="tenants", claim_s=60) as workers:
        for number in range(KILLS):
            if number % 4 == 3:
                time.sleep(chance.random() / 2)
                workers.replace_supervisor()
            workers.at_work(expectations)
            expectations.publish_more()
            time.sleep(chance.random() / 5)  # a kill at any point of the work
            if victim := random_process(chance, [workers]):
                killed_ms[str(victim.pid)] = SYSTEM_CLOCK.monotonic_ms()
                kill(victim)
        eventually(expectations.drained, "the last message", log=workers.log)
        expectations.end_permits()
        report = expectations.check_keys(overlap=False, log=workers.log)
    most = most_at_once(expectations.runs_of_tenants(killed_ms))
    assert most.keys() == set(range(TENANTS))
    assert max(most.values()) <= AT_ONCE
    print_figures(report, kills=KILLS, seed=seed, most_at_once=max(most.values()))


def test_runs_of_a_tenant_that_overlap_are_counted() -> None:
    runs = [Run("1-0", 0, 0, 10), Run("2-0", 0, 5, 12), Run("3-0", 0, 10, 11), Run("4-0", 1, 0, 1)]
    assert most_at_once(runs) == {0: 2, 1: 1}
