"""`Retry(then="cancel")` in the engine's task: batches, repeated batches, deferred keys, and workers that take over."""

from typing import Any

import pytest

from millstream import Retry
from millstream.delivery.commit_store import CommitStore
from millstream.handlers.handler import Handler
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.spark.key_blocks import read_chunks
from millstream.testing.invariants import check_invariants
from tests.support.keyed_fixtures import keyed, lease_one
from tests.support.task_fixtures import Row, TaskFixture

pytestmark = [pytest.mark.spark, pytest.mark.keys]

KEYS = HandlerKeys("app", "handle", "in")
MANY = 1_000_000


class Cancellation(TaskFixture):
    """A bench whose entries are in the stream as well; each batch begins a run."""

    def store(self, handler: Handler) -> CommitStore:
        store = CommitStore(self.client, app="app", handler="handle", token=self.token, keyed=True)
        self.token = store.new_token(["in"])
        store = store.with_token(self.token)
        store.begin_run(["in"])
        return store

    def run(self, handler: Handler, rows: list[Row], *, advance: bool = True) -> dict[str, Any]:
        store = self.store(handler)
        report = self.process(handler, self.rows(*rows))
        if advance:
            store.advance_committed({"in": EntryId(max(n for n, _, _ in rows), 0)})
        return report

    def letters(self) -> list[tuple[str, str, int]]:
        return [(letter.id, letter.reason, letter.attempts) for letter in self.dead()]


@pytest.fixture
def bench(client: Client) -> Cancellation:
    return Cancellation(client)


def canceling(bench: Cancellation, **retry: Any) -> Handler:
    return bench.handler(retry=Retry(**{"attempts": 2, "delay_ms": 1, "then": "cancel", **retry}))


def test_the_rest_of_a_key_is_canceled_in_this_batch_and_the_next_up_to_what_was_published(bench: Cancellation) -> None:
    handler = canceling(bench)
    first = bench.add(1, 2, 3, keys="ABA", fail=9)
    second = bench.add(4, 5, keys="AB", fail=0)
    assert bench.run(handler, first)["dead"] == 2
    third = bench.add(6, 7, keys="AB")
    bench.run(handler, second)
    bench.run(handler, third)
    assert bench.outputs() == [2, 5, 6, 7]
    assert bench.letters() == [("1-0", "failed", 2), ("3-0", "canceled", 0), ("4-0", "canceled", 0)]
    assert {n for _, n, _ in bench.seen} == {1, 2, 5, 6, 7}


def test_a_repeated_batch_cancels_nothing_twice_and_runs_no_canceled_message(bench: Cancellation) -> None:
    handler = canceling(bench)
    rows = bench.add(1, 2, 3, 4, keys="AAAA", fail=9)
    bench.run(handler, rows[:2], advance=False)  # it dies before it has seen the others
    bench.run(handler, rows, advance=False)
    assert bench.run(handler, rows)["committed"] == 0
    assert [entry for entry, _, _ in bench.letters()] == ["1-0", "2-0", "3-0", "4-0"]
    assert {n for _, n, _ in bench.seen} == {1}


def test_another_execution_that_had_loaded_the_key_before_is_refused_and_then_cancels(bench: Cancellation) -> None:
    handler = canceling(bench)
    rows = bench.add(1, 2, keys="AA", fail=9)
    bench.store(handler)
    slow = bench.task(handler)
    (chunk,) = read_chunks([bench.rows(*rows)])
    runs = slow._loader.split_into_runs(chunk)
    slow._load(runs, again=False)
    bench.process(handler, bench.rows(*rows[:1]))
    assert slow._buffer.refused == {}
    slow._load(runs, again=True)
    assert [entry.id_text for entry in runs[0].entries] == [b"2-0"]
    cancellation = runs[0].cancellation
    assert cancellation is not None
    assert (cancellation.canceled_by, cancellation.covers(EntryId(2, 0))) == ("1-0", True)


def test_deferred_messages_of_a_key_are_canceled_in_its_queue(bench: Cancellation) -> None:
    handler = canceling(bench, delay_ms=2_000, jitter=0)
    bench.run(handler, bench.add(1, 2, 3, keys="AAB", fail=9))
    bench.run(handler, bench.add(4, keys="A"))
    assert bench.outputs() == [3]
    bench.client.execute("ZADD", KEYS.backoff, "XX", 1, "kA")
    bench.process_deferred(handler)
    assert bench.letters() == [("1-0", "failed", 2), ("2-0", "canceled", 0), ("4-0", "canceled", 0)]
    assert check_invariants(bench.client, KEYS, "in") == []
    bench.run(handler, bench.add(5, keys="A"))
    assert (bench.outputs(), bench.client.execute("EXISTS", KEYS.crashes)) == ([3, 5], 0)


def test_workers_that_take_over_continue_the_cancellation(bench: Cancellation) -> None:
    bench.run(canceling(bench), bench.add(1, 2, 3, keys="AAA", fail=9)[:1])
    worker = keyed(bench.client)
    worker.enqueue_new(count=10, max_pending=MANY)
    lease = lease_one(worker)
    assert lease.cancellation is not None
    assert [lease.cancellation.covers(EntryId.parse(one.id)) for one in lease.queued] == [True, True]


def test_spark_that_takes_over_continues_the_cancellation(bench: Cancellation) -> None:
    handler = canceling(bench)
    rows = bench.add(1, 2, 3, keys="AAA", fail=9)
    worker = keyed(bench.client)
    worker.enqueue_new(count=10, max_pending=MANY)
    lease = lease_one(worker, run=1)
    unit = worker.key_effects_of(lease, list(lease.queued))
    unit.cancels = "1-0"
    assert worker.commit([unit]) == []
    bench.run(handler, rows[1:])
    assert ([entry for entry, _, _ in bench.letters()], bench.seen) == (["2-0", "3-0"], [])
