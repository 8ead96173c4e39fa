"""Any interleaving of producers, growths that are killed and workers with old layouts: each key in order, once."""

import os
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millstream.admin.key_queues import park, unpark
from millstream.delivery.keyed_stream import KeyLease, LeaseRelease
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from tests.support.partition_fixtures import (
    BASE,
    Publisher,
    Worker,
    check_all,
    growth_killed_after,
    keys_of,
    outcome,
)

pytestmark = [pytest.mark.keys]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
EXAMPLES, STEPS = (1_000, 120) if SOAK else (30, 60)
KEYS = "ABCDEFGH"
PLACES = st.integers(0, 7)
TWO = st.integers(0, 1)


class Machine(RuleBasedStateMachine):
    """Two producers, two workers, each with the layout that it saw last, and people."""

    url: str

    @initialize()
    def begin(self) -> None:
        self.client = Client(self.url)
        self.client.execute("FLUSHALL")
        self.sent: dict[str, list[int]] = defaultdict(list)
        self.producers = [Publisher(self.client), Publisher(self.client)]
        self.workers = [Worker(self.client, "w0"), Worker(self.client, "w1")]
        self.leases: list[KeyLease] = []
        self.parked: list[tuple[int, bytes]] = []
        self.late: list[list[object]] = []

    @rule(index=TWO, keys=st.text(KEYS, min_size=1, max_size=6))
    def publish(self, index: int, keys: str) -> None:
        self.producers[index].publish(self.sent, keys)

    @rule(more=st.integers(1, 3), steps=st.integers(0, 12))
    def grow(self, more: int, steps: int) -> None:
        layout = Partitions(self.client, BASE).require()
        count = max(layout.count, layout.growing_to or 0) + more
        if count <= 8:
            growth_killed_after(self.client, steps, count)

    @rule(index=TWO)
    def refresh(self, index: int) -> None:
        self.workers[index].refresh()

    @rule(index=TWO, place=PLACES, count=st.integers(1, 5))
    def route(self, index: int, place: int, count: int) -> None:
        self.workers[index].route(place, count)

    @rule(index=TWO, place=PLACES, run=st.integers(1, 3))
    def lease_keys(self, index: int, place: int, run: int) -> None:
        self.leases += self.workers[index].lease_keys(place, run=run)

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 7), how=st.sampled_from(["finish", "finish", "return", "backoff"]))
    def end(self, number: int, how: str) -> None:
        lease = self.leases.pop(number % len(self.leases))
        if how == "finish":
            self.workers[0].finish(lease)
        else:
            lease.stream.release_leases([LeaseRelease(lease, how, 1 if how == "backoff" else "")])  # type: ignore[arg-type]

    @rule(index=TWO, clears=st.booleans())
    def move(self, index: int, clears: bool) -> None:
        """A round; without `clears`, its worker dies when it has put states down and not removed them where they were."""
        moves = self.workers[index].moves
        if not clears:
            moves._delete_imported = lambda partition: None  # type: ignore[method-assign]
        self.workers[index].move()
        moves.__dict__.pop("_delete_imported", None)

    @rule(index=TWO, place=PLACES)
    def read_for_a_move(self, index: int, place: int) -> None:
        """A worker reads all that a round of a partition needs, and comes with it later."""
        worker = self.workers[index]
        if place not in worker.streams:
            return
        moves = worker.moves
        real = moves._run

        def run(calls: list[object]) -> list[object]:
            if calls and calls[0][0].name == "partitions/import_keys":  # type: ignore[index]
                self.late.append(list(calls))
                return [0]
            return real(calls)  # type: ignore[arg-type]

        moves._run = run  # type: ignore[method-assign, assignment]
        moves._delete_imported = lambda partition: None  # type: ignore[method-assign]
        moves._refreshed_ms = float("-inf")
        moves.import_keys([place])
        del moves._run, moves._delete_imported

    @precondition(lambda self: self.late)
    @rule(number=st.integers(0, 7))
    def arrive_late(self, number: int) -> None:
        self.workers[0].moves._run(self.late.pop(number % len(self.late)))  # type: ignore[arg-type]

    @rule(place=PLACES, key=st.sampled_from(KEYS))
    def park(self, place: int, key: str) -> None:
        layout = Partitions(self.client, BASE).require()
        queue = b"k" + key.encode()
        if place in self.workers[0].streams and park(self.client, keys_of(layout, place), queue, "mine"):
            self.parked.append((place, queue))

    @precondition(lambda self: self.parked)
    @rule(number=st.integers(0, 7))
    def unpark(self, number: int) -> None:
        place, queue = self.parked.pop(number % len(self.parked))
        unpark(self.client, keys_of(Partitions(self.client, BASE).require(), place), queue)

    @invariant()
    def each_key_is_in_order(self) -> None:
        for key, numbers in outcome(self.client).items():
            assert numbers == self.sent[key][: len(numbers)], key

    def teardown(self) -> None:
        while self.parked:
            self.unpark(0)
        for lease in self.leases:
            self.workers[0].finish(lease)
        self.producers[0].publish(self.sent, KEYS)
        for worker in self.workers:
            worker.refresh()
        for _ in range(3):
            for worker in self.workers:
                worker.work(until_idle=4)
        assert self.workers[0].moves.undrained() == []
        while self.late:
            self.arrive_late(0)
        for worker in self.workers:
            worker.work(until_idle=4)
        assert outcome(self.client) == {key: numbers for key, numbers in self.sent.items() if numbers}
        assert check_all(self.client) == []
        self.client.close()


def test_no_interleaving_loses_doubles_or_reorders_a_message(millstream_url: str) -> None:
    machine = type("PartitionMachine", (Machine,), {"url": millstream_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
