"""Head-of-line blocking that order per key avoids: messages that are done while an earlier one of another key is not."""

import pytest

from millstream import Message, Retry
from millstream.delivery.commit_store import CommitStore
from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.spark.run.query_metrics import report_batch
from tests.support.keyed_fixtures import lease_keys, routed, unit_of
from tests.support.task_fixtures import TaskFixture
from tests.support.waiting import eventually
from tests.support.workers import double, make, working

pytestmark = [pytest.mark.keys]


def test_messages_of_a_key_that_are_done_behind_a_parked_message_of_another_key_are_counted(client: Client) -> None:
    def handle(message: Message) -> None:
        if message.key == b"stuck":
            raise RuntimeError("no")

    recorder = Recorder()
    handler = make(handle, key="key", retry=Retry(attempts=1, then="park"))
    client.pipeline(
        [("XADD", "in", "*", "n", n, "key", key) for n, key in enumerate(("first", "stuck", "a", "a", "b"))]
    )
    with working(client, handler, metrics=recorder) as loop:
        eventually(lambda: loop.loop_metrics.parked == 1 and loop.loop_metrics.committed == 4)
    assert recorder.value(m.HEAD_OF_LINE_AVOIDED, handler="app.handle") == 3


def test_messages_without_a_key_are_in_no_order_and_do_not_count(client: Client) -> None:
    recorder = Recorder()
    client.pipeline([("XADD", "in", "*", "n", n) for n in range(20)])
    with working(client, make(double), metrics=recorder) as loop:
        eventually(lambda: loop.loop_metrics.committed == 20)
    assert recorder.value(m.HEAD_OF_LINE_AVOIDED, handler="app.handle") == 0


def test_a_commit_knows_which_of_its_messages_come_after_one_that_is_not_done(client: Client) -> None:
    worker = routed(client, "ABAAB")
    a, b = lease_keys(worker).leases
    unit = unit_of(a, 3)
    assert worker.commit([unit]) == []
    assert (unit.message_count, unit.count_unblocked()) == (3, 2)
    unit = unit_of(b, 2)
    assert worker.commit([unit]) == []
    assert unit.count_unblocked() == 0


def test_messages_that_one_call_commits_do_not_count_against_each_other(client: Client) -> None:
    worker = routed(client, "BAA")
    b, a = lease_keys(worker).leases
    units = [unit_of(a, 2), unit_of(b)]
    assert worker.commit(units) == []
    assert [unit.count_unblocked() for unit in units] == [0, 0]


def test_a_refused_commit_is_still_named_beside_the_lowest_pending_entry(client: Client) -> None:
    worker = routed(client, "ABC")
    _, b, c = lease_keys(worker).leases
    stale = worker.key_effects_of(b, [c.queued[0]])
    units = [stale, unit_of(c)]
    assert worker.commit(units) == [stale]
    assert units[1].count_unblocked() == 1


def test_a_commit_that_is_repeated_as_its_reply_was_lost_counts_what_is_still_not_done(client: Client) -> None:
    worker = routed(client, "AB")
    _, b = lease_keys(worker).leases
    for _ in range(2):
        unit = unit_of(b)
        assert worker.commit([unit], call_number="life-1") == []
        assert unit.count_unblocked() == 1


@pytest.mark.spark
def test_on_spark_messages_that_are_done_behind_a_deferred_one_are_counted(client: Client) -> None:
    bench = TaskFixture(client)
    handler = bench.handler(retry=Retry(attempts=1, then="park"))
    store = CommitStore(client, app="app", handler="handle", keyed=True)
    bench.token = store.new_token(["in"])
    store.with_token(bench.token).begin_run(["in"])
    first = bench.process(handler, bench.rows(*bench.add(1, 2, keys="BA", fail=9)))
    assert (first["committed"], first["deferred"], first["head_of_line_avoided"]) == (1, 1, 0)
    then = bench.process(handler, bench.rows(*bench.add(3, 4, 5, keys="BCA", fail=9)))
    assert (then["committed"], then["deferred"], then["head_of_line_avoided"]) == (2, 1, 2)
    recorder = Recorder()
    report_batch(recorder, "app.handle", then)
    assert recorder.value(m.HEAD_OF_LINE_AVOIDED, handler="app.handle") == 2
