"""The protocol of key queues under any order of steps, on a real Redis: what holds after each, and that nothing is lost."""

import logging
import os
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millstream.admin.key_queues import park, skip, unpark
from millstream.delivery.effects import Effects
from millstream.delivery.keyed_stream import KeyLease, LeaseRelease
from millstream.errors import ConfigError, GroupMissing
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.keyed_fixtures import (
    HOUR_MS,
    KEYS,
    drain,
    expire,
    keyed,
    lease_keys,
    outputs,
    publish,
    queue_of,
    run_on_spark,
    unit_of,
    violations,
)

pytestmark = [pytest.mark.keys]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
EXAMPLES, STEPS = (3_000, 80) if SOAK else (40, 40)

QUEUES = st.sampled_from(["kA", "kB", "kC"]).map(str.encode)
WORKERS = st.integers(0, 2)
ANY = st.integers(0, 1_000)
FEW = st.integers(1, 4)


class KeyedMachine(RuleBasedStateMachine):
    """Three names of workers, which die and begin anew; outsiders, people and Spark. Time is what the rules say it is."""

    client: ClassVar[Client]

    @initialize()
    def begin(self) -> None:
        self.client.execute("FLUSHALL")
        self.workers = [keyed(self.client, f"w{n}") for n in range(3)]
        self.published: dict[int, bytes] = {}
        self.leases: list[KeyLease] = []  # all there ever were: their holders may be asleep, and wake
        self.newest: dict[bytes, int] = {}
        self.known: dict[str, list[KeyLease]] = {}
        self.skipped: set[int] = set()
        self.deleted: set[int] = set()
        self.on_spark = self.was_on_spark = self.disturbed = False
        self.last_commit: dict[str, tuple[str, list[Effects], list[bytes]]] = {}

    # What producers and workers do

    @rule(letters=st.text("AABBC-", min_size=1, max_size=4))
    def publish(self, letters: str) -> None:
        first = len(self.published) + 1
        publish(self.client, letters, first=first)
        for n, letter in enumerate(letters, first):
            pairs = [] if letter == "-" else [b"k", letter.encode()]
            self.published[n] = queue_of(b"%d-0" % n, pairs)

    def is_with_workers(self) -> bool:
        return not self.on_spark

    @precondition(is_with_workers)
    @rule(index=WORKERS, count=FEW, most=st.sampled_from([3, 100]))
    def route(self, index: int, count: int, most: int) -> None:
        self.workers[index].enqueue_new(count=count, max_pending=most)

    @precondition(is_with_workers)
    @rule(index=WORKERS, queues=FEW, run=st.integers(1, 3), reply_arrives=st.sampled_from([True, True, True, False]))
    def lease_keys(self, index: int, queues: int, run: int, reply_arrives: bool) -> None:
        worker = self.workers[index]
        for lease in lease_keys(worker, queues=queues, run=run).leases:
            assert lease.fence > self.newest.get(lease.queue, 0)
            self.newest[lease.queue] = lease.fence
            assert [one.id for one in lease.queued] == self.client.execute(
                "LRANGE", KEYS.queue(lease.queue), 0, len(lease.queued) - 1
            )
            if reply_arrives:
                self.leases.append(lease)
                self.known.setdefault(worker.consumer, []).append(lease)

    def a_lease(self, which: int) -> KeyLease | None:
        found = [one for one in self.leases if one.queued]
        return found[which % len(found)] if found else None

    @precondition(is_with_workers)
    @rule(which=ANY, count=FEW, over=st.booleans())
    def commit(self, which: int, count: int, over: bool) -> None:
        lease = self.a_lease(which)
        if lease is None:
            return
        count = min(count, len(lease.queued))
        unit = unit_of(lease, count)
        if over:
            unit.unfinished = lease.in_flight_count - count
        call = lease.stream.new_call_number()
        refused = lease.stream.commit([unit], call_number=call)
        self.last_commit[lease.stream.consumer] = (
            call,
            [unit],
            [one.offset_field for one in refused],
        )
        if not refused:
            assert lease.fence == self.newest[lease.queue], "an older token has committed"
            for _ in range(count):
                lease.queued.popleft()
            lease.in_flight_count -= count

    @precondition(is_with_workers)
    @rule(which=ANY, chosen=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def commit_what_is_not_first(self, which: int, chosen: list[int]) -> None:
        lease = self.a_lease(which)
        if lease is None or max(chosen) >= len(lease.queued) or chosen == list(range(len(chosen))):
            return
        unit = lease.stream.key_effects_of(lease, [lease.queued[n] for n in chosen])
        assert lease.stream.commit([unit]) == [unit]

    @precondition(is_with_workers)
    @rule(index=WORKERS)
    def repeat_the_last_commit(self, index: int) -> None:
        worker = self.workers[index]
        if worker.consumer in self.last_commit:
            call, units, refused = self.last_commit[worker.consumer]
            before = outputs(self.client)
            again = worker.commit(units, call_number=call)
            assert [one.offset_field for one in again] == refused
            assert outputs(self.client) == before

    @precondition(is_with_workers)
    @rule(which=ANY)
    def extend(self, which: int) -> None:
        lease = self.a_lease(which)
        if lease is not None and not lease.stream.renew_leases([lease], HOUR_MS, 0):
            assert lease.fence == self.newest[lease.queue]

    @precondition(is_with_workers)
    @rule(which=ANY, how=st.sampled_from(["requeue", "return", "backoff", "park"]), failed=st.none() | FEW)
    def release(self, which: int, how: Any, failed: int | None) -> None:
        lease = self.a_lease(which)
        if lease is not None:
            lease.stream.release_leases([LeaseRelease(lease, how, HOUR_MS if how == "backoff" else "why", failed)])

    # What befalls them

    @rule(queue=st.none() | QUEUES)
    def time_passes(self, queue: bytes | None) -> None:
        expire(self.client, queue)

    @precondition(is_with_workers)
    @rule(index=WORKERS, recovers=st.booleans())
    def die_and_begin_anew(self, index: int, recovers: bool) -> None:
        name = self.workers[index].consumer
        self.workers[index] = keyed(self.client, name)
        self.known[name] = []
        self.last_commit.pop(name, None)
        if recovers:
            self.workers[index].recover_leases([], run=10)
            assert all(name.encode() not in token.split() for token in self.client.execute("HVALS", KEYS.owners))

    @precondition(is_with_workers)
    @rule(index=WORKERS)
    def recover(self, index: int) -> None:
        worker = self.workers[index]
        worker.recover_leases(self.known.get(worker.consumer, []), run=10)

    @rule(fence=st.sampled_from([0, 1, 10**15]))
    def a_failover_sets_the_fence_back(self, fence: int) -> None:
        self.client.execute("HSET", KEYS.meta, "fence", fence)

    # People

    @precondition(is_with_workers)
    @rule(queue=QUEUES)
    def park(self, queue: bytes) -> None:
        park(self.client, KEYS, queue, "by hand")

    @precondition(is_with_workers)
    @rule(queue=QUEUES)
    def unpark(self, queue: bytes) -> None:
        unpark(self.client, KEYS, queue)

    @precondition(is_with_workers)
    @rule(queue=QUEUES)
    def skip(self, queue: bytes) -> None:
        self.mend_the_group()
        skipped = skip(self.client, KEYS, queue, error="by hand")
        if skipped is not None:
            self.skipped.add(int(skipped.partition("-")[0]))

    def mend_the_group(self) -> None:
        if not self.client.execute("EXISTS", "in") or not self.client.execute("XINFO", "GROUPS", "in"):
            self.workers[0].join()

    # Outsiders

    @rule(which=ANY)
    def an_outsider_deletes_an_entry(self, which: int) -> None:
        if self.published:
            n = 1 + which % len(self.published)
            self.client.execute("XDEL", "in", f"{n}-0")
            self.deleted.add(n)
            self.disturbed = True

    @rule(
        deed=st.sampled_from(
            [
                ("XACK", "in", KEYS.group, *(f"{n}-0" for n in range(1, 99))),
                ("XGROUP", "DESTROY", "in", KEYS.group),
                ("XGROUP", "DELCONSUMER", "in", KEYS.group, "waiting"),
                ("XGROUP", "DELCONSUMER", "in", KEYS.group, "w1"),
                ("XGROUP", "SETID", "in", KEYS.group, "0"),
                ("XGROUP", "SETID", "in", KEYS.group, "3-0"),
                ("XGROUP", "SETID", "in", KEYS.group, "$"),
                ("XREADGROUP", "GROUP", KEYS.group, "outsider", "STREAMS", "in", ">"),
                ("XAUTOCLAIM", "in", KEYS.group, "outsider", 0, "0"),
            ]
        )
    )
    def an_outsider_meddles(self, deed: tuple[str, ...]) -> None:
        self.mend_the_group()
        self.client.execute(*deed)
        self.disturbed = True

    # Spark

    @rule(most=st.integers(0, 6), advance=st.booleans())
    def spark_takes_over(self, most: int, advance: bool) -> None:
        parked = not self.on_spark and any(
            self.client.execute("EXISTS", KEYS.queue(queue)) for queue in self.client.execute("HKEYS", KEYS.parked)
        )
        try:
            run_on_spark(self.client, most, advance=advance)
        except ConfigError:
            assert parked
            return
        assert not parked
        self.on_spark = self.was_on_spark = True
        self.disturbed = False
        self.last_commit.clear()

    @precondition(lambda self: self.on_spark)
    @rule(index=WORKERS)
    def workers_take_over(self, index: int) -> None:
        self.workers[index].join()
        self.on_spark = False

    # What holds after each step

    @invariant()
    def the_key_queues_are_sound(self) -> None:
        if self.on_spark:
            assert self.client.execute("EXISTS", KEYS.owners, KEYS.ready, KEYS.leases, KEYS.backoff, KEYS.parked) == 0
            return
        try:
            wrong = [one for one in violations(self.workers[0]) if "under the fence" not in one]
        except GroupMissing:  # until a worker notices
            assert self.disturbed
            return
        if self.disturbed:  # the pending list is what others have made of it
            wrong = [one for one in wrong if "pending" not in one]
        if self.was_on_spark:  # which forgets counts when a batch has ended
            wrong = [one for one in wrong if not one.startswith("crash counts of")]
        assert wrong == []

    @invariant()
    def what_is_committed_is_in_order_and_once(self) -> None:
        committed = outputs(self.client)
        for queue, some in committed.items():
            assert some == sorted(set(some)), f"{queue} was committed as {some}"
            assert all(self.published[n] == queue.encode() for n in some)
        assert not {n for some in committed.values() for n in some} & self.skipped

    def teardown(self) -> None:
        if not hasattr(self, "published"):
            return
        last = keyed(self.client, "last")
        for queue in self.client.execute("HKEYS", KEYS.parked):
            unpark(self.client, KEYS, queue)
        expire(self.client)
        drain(last, max_pending=5)
        self.what_is_committed_is_in_order_and_once()
        committed = {n for some in outputs(self.client).values() for n in some}
        assert self.published.keys() - committed - self.skipped - self.deleted == set(), "messages were lost"
        left = {key.rpartition(b":")[2].decode() for key in self.client.execute("KEYS", "millstream:*")}
        of_spark = {"crashes", "offsets", "incomplete"} if self.was_on_spark else set()
        assert left <= {"meta", "dead", "notify", "last"} | of_spark
        assert lease_keys(last).leases == []


def test_any_order_of_steps_keeps_messages_in_order_and_loses_none(
    millstream_fresh_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    with Client(millstream_fresh_server.url) as client:
        KeyedMachine.client = client
        run_state_machine_as_test(
            KeyedMachine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
