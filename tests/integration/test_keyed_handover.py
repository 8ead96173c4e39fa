"""Hand-over between workers of keys, workers without keys and Spark: nothing is lost, doubled or out of order."""

from collections.abc import Callable

import pytest

from millstream.admin.handler_figures import read_figures
from millstream.admin.key_queues import park, skip, unpark
from millstream.clock import SYSTEM_CLOCK
from millstream.delivery.effects import Effects
from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseRelease
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import ConfigError, StaleOwner
from millstream.handlers.encoding import pack_output
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from tests.support.keyed_fixtures import (
    KEYS,
    MANY,
    commit,
    drain,
    expected,
    keyed,
    lease_keys,
    lease_one,
    outputs,
    publish,
    queued_ids,
    run_on_spark,
    spark,
    unit_of,
    violations,
)

pytestmark = [pytest.mark.keys]


def unkeyed(client: Client) -> ReliableStream:
    stream = ReliableStream(client, "in", app="app", handler="handle", consumer="u1", into="out")
    stream.join()
    return stream


def finish(stream: ReliableStream, deliveries: list[Delivery]) -> None:
    units = []
    for one in deliveries:
        units.append(stream.effects_of(one))
        units[-1].add_outputs([pack_output({"line": b"i" + one.id, "id": one.id, "fence": 0})])
    assert stream.commit(units) == []


def numbers(client: Client) -> list[int]:
    return sorted(n for some in outputs(client).values() for n in some)


def some_of_two_queues(client: Client) -> tuple[KeyedStream, KeyLease]:
    """A: 1 committed, 3 leased, 5 not; B: 2 and 4 wait; 6 and on are not routed."""
    publish(client, "ABABABAB")
    worker = keyed(client)
    worker.enqueue_new(count=5, max_pending=MANY)
    lease = lease_one(worker, run=2)
    assert commit(lease)
    return worker, lease


def test_spark_continues_where_keyed_workers_stopped_and_they_where_spark_stopped(client: Client) -> None:
    _, lease = some_of_two_queues(client)
    position = spark(client).begin_run(["in"])["in"]
    assert (position.committed_id, position.takeover_offset) == (EntryId(1, 0), EntryId(5, 0))
    assert sorted(client.execute("HKEYS", KEYS.incomplete)) == [b"2-0", b"3-0", b"4-0", b"5-0"]
    assert client.execute("EXISTS", KEYS.ready, KEYS.owners, KEYS.leases, KEYS.queue(b"kA"), KEYS.queue(b"kB")) == 0
    run_on_spark(client, 3)
    again = keyed(client, "w2")
    drain(again)
    assert outputs(client) == expected("ABABABAB")
    assert (client.execute("EXISTS", KEYS.incomplete, KEYS.offsets), violations(again)) == (0, [])
    assert not commit(lease)


def test_what_workers_had_read_counts_as_waiting_from_the_moment_when_spark_takes_over(client: Client) -> None:
    """`millstream auto` decides by that, and no entry beyond what the group shows is trimmed."""
    some_of_two_queues(client)
    spark(client).begin_run(["in"])
    assert read_figures(client, [KEYS], SYSTEM_CLOCK).waiting == 7
    (group,) = client.execute("XINFO", "GROUPS", "in")
    assert mapping_of(group)[b"last-delivered-id"] == b"1-0"


def test_a_group_at_what_is_committed_keeps_its_count_of_entries_as_the_loss_of_later_ones_is_found_by_it(
    client: Client,
) -> None:
    for n in range(8):
        client.execute("XADD", "in", f"{n + 1}-0", "k", "A")
    worker = unkeyed(client)
    for delivery in worker.fetch(count=MANY):
        assert worker.ack(delivery) == []
    for _ in range(2):
        client.execute("XADD", "in", "MAXLEN", "1", "*", "k", "A")
    spark(client).begin_run(["in"])
    (group,) = client.execute("XINFO", "GROUPS", "in")
    assert (mapping_of(group)[b"last-delivered-id"], mapping_of(group)[b"entries-read"]) == (b"8-0", 8)


@pytest.mark.parametrize(
    "late",
    [
        lambda worker, lease: worker.enqueue_new(count=1, max_pending=MANY),
        lambda worker, lease: lease_keys(worker),
        lambda worker, lease: worker.renew_leases([lease], 1, 0),
        lambda worker, lease: worker.commit([unit_of(lease)]),
        lambda worker, lease: worker.release_leases([LeaseRelease(lease, "requeue")]),
        lambda worker, lease: worker.recover_leases([], 1),
    ],
    ids=["route", "take", "extend", "commit", "release", "recover"],
)
def test_every_step_of_a_worker_is_refused_after_spark_has_taken_over(
    client: Client, late: Callable[[KeyedStream, KeyLease], object]
) -> None:
    worker, lease = some_of_two_queues(client)
    store = spark(client)
    store.begin_run(["in"])
    with pytest.raises(StaleOwner):
        late(worker, lease)
    with pytest.raises(ConfigError):
        skip(client, KEYS, b"kA", error="x") or park(client, KEYS, b"kA", "x")
    assert (client.execute("XPENDING", "in", KEYS.group)[0], outputs(client)) == (0, {"kA": [1]})


def test_a_worker_that_slept_during_a_spark_run_commits_none_of_its_former_entries(client: Client) -> None:
    worker, lease = some_of_two_queues(client)
    run_on_spark(client, 3)
    keyed(client, "w2")
    assert not commit(lease)
    drain(worker)
    assert outputs(client) == expected("ABABABAB")


def test_a_worker_that_had_enqueued_further_than_spark_committed_enqueues_that_again(client: Client) -> None:
    publish(client, "ABAB")
    worker = keyed(client)
    assert worker.enqueue_new(count=10, max_pending=MANY) == 4
    run_on_spark(client, 1)
    keyed(client, "w2")
    drain(worker)
    assert outputs(client) == expected("ABAB")


def test_a_redis_that_was_restored_is_enqueued_again_without_a_new_entry(client: Client) -> None:
    publish(client, "ABAB")
    worker = keyed(client)
    dumps = {key: client.execute("DUMP", key) for key in client.execute("KEYS", "*")}
    worker.enqueue_new(count=10, max_pending=MANY)
    client.execute("FLUSHDB")
    client.pipeline([("RESTORE", key, 0, dump) for key, dump in dumps.items()])
    drain(worker)
    assert outputs(client) == expected("ABAB")


@pytest.mark.parametrize("advance", [True, False], ids=["whole batches", "half batches"])
@pytest.mark.parametrize("step", [1, 3, 7])
def test_switching_between_spark_and_workers_loses_doubles_and_reorders_nothing(
    client: Client, step: int, advance: bool
) -> None:
    keys = "".join("ABCD-"[n * n % 5] for n in range(80))
    publish(client, keys)
    for round_number in range(6):
        worker = keyed(client, f"w{round_number}")
        worker.enqueue_new(count=3 * step, max_pending=MANY)
        for n, lease in enumerate(lease_keys(worker, run=step).leases):
            if (n + round_number) % 2:
                assert commit(lease, 1 + n % len(lease.queued))
        run_on_spark(client, step, advance=advance)
    drain(keyed(client, "last"))
    assert outputs(client) == expected(keys)
    assert client.execute("EXISTS", KEYS.incomplete, KEYS.offsets) == 0


def test_key_offsets_of_a_batch_that_died_are_kept_until_all_of_them_are_passed(client: Client) -> None:
    publish(client, "ABAB")
    run_on_spark(client, 3, advance=False)
    worker = keyed(client)
    worker.enqueue_new(count=2, max_pending=MANY)
    assert client.execute("HLEN", KEYS.offsets) == 2
    worker.enqueue_new(count=1, max_pending=MANY)
    assert client.execute("EXISTS", KEYS.offsets) == 0
    drain(worker)
    assert outputs(client) == expected("ABAB")


def test_a_handler_that_gets_a_key_skips_the_messages_that_it_committed_without_one(client: Client) -> None:
    publish(client, "AAAA")
    store = spark(client)
    store.begin_run(["in"])
    store.commit({"in": [Effects(b"i2-0", b"", first_id="2-0", last_id="2-0", message_count=1)]})
    keyed(client).enqueue_new(count=3, max_pending=MANY)
    assert queued_ids(client, "kA") == [[1, 3]]


def test_keyed_workers_take_over_from_unkeyed_workers_and_back(client: Client) -> None:
    publish(client, "-" * 12)
    first = unkeyed(client)
    found = first.fetch(count=8)
    finish(first, [found[1], found[4], found[5]])
    first.checkpoint()
    finish(first, [found[2]])
    second = keyed(client)
    assert second.token > first.token
    second.enqueue_new(count=5, max_pending=MANY)
    leases = lease_keys(second).leases
    assert [one.queue for one in leases] == [b"i1-0", b"i4-0"]
    assert commit(leases[1])
    third = unkeyed(client)
    rest = third.claim_idle() + third.fetch(count=100)
    assert sorted(int(one.id.partition(b"-")[0]) for one in rest) == [1, 7, 8, 9, 10, 11, 12]
    finish(third, rest)
    assert numbers(client) == list(range(1, 13))
    with pytest.raises(StaleOwner):
        commit(leases[0])


def test_entries_committed_above_the_progress_of_keyed_workers_are_not_committed_again(client: Client) -> None:
    publish(client, "-" * 12)
    first = unkeyed(client)
    found = first.fetch(count=10)
    finish(first, [one for one in found if one.id not in (b"2-0", b"5-0", b"9-0")])
    first.checkpoint()
    assert client.execute("EXISTS", KEYS.offsets) == 0
    second = keyed(client)
    second.enqueue_new(count=2, max_pending=MANY)
    assert commit(lease_one(second))  # it has come to 3
    position = spark(client).begin_run(["in"])["in"]
    assert (position.committed_id, position.takeover_offset) == (EntryId(4, 0), EntryId(10, 0))
    third = keyed(client, "w3")
    third.enqueue_new(count=1, max_pending=MANY)
    drain(third)
    assert numbers(client) == list(range(1, 13))


def test_spark_begins_at_the_takeover_offset_when_all_below_it_is_committed(client: Client) -> None:
    publish(client, "-" * 12)
    first = unkeyed(client)
    found = first.fetch(count=10)
    finish(first, [one for one in found if one.id != b"2-0"])
    second = keyed(client)
    second.enqueue_new(count=2, max_pending=MANY)
    assert commit(lease_one(second))
    position = spark(client).begin_run(["in"])["in"]
    assert (position.committed_id, position.takeover_offset) == (EntryId(10, 0), None)


def test_incomplete_entries_that_spark_has_committed_are_not_incomplete_for_workers(client: Client) -> None:
    publish(client, "-" * 12)
    first = unkeyed(client)
    found = first.fetch(count=10)
    finish(first, [one for one in found if one.id not in (b"2-0", b"5-0", b"9-0")])
    run_on_spark(client, 2)
    second = unkeyed(client)
    rest = second.claim_idle() + second.fetch(count=100)
    finish(second, rest)
    assert numbers(client) == list(range(1, 13))


def test_spark_commits_nothing_again_after_the_group_of_workers_was_set_back(client: Client) -> None:
    publish(client, "-" * 6)
    first = unkeyed(client)
    finish(first, first.fetch(count=4))
    first.checkpoint()
    client.execute("XGROUP", "SETID", "in", KEYS.group, "0")
    run_on_spark(client)
    assert numbers(client) == list(range(1, 7))


def test_no_incomplete_entry_is_lost_however_many_are_still_to_be_enqueued(client: Client) -> None:
    publish(client, "-" * 600)  # a hash of more than 512 has no order
    unkeyed(client).fetch(count=600)
    keyed(client)
    run_on_spark(client)
    assert numbers(client) == list(range(1, 601))


def test_a_lost_group_with_many_incomplete_entries_leaves_room_to_enqueue_them(client: Client) -> None:
    publish(client, "-" * 12)
    first = unkeyed(client)
    first.fetch(count=10)
    second = keyed(client)
    client.execute("XGROUP", "DESTROY", "in", KEYS.group)
    second.join()
    assert client.execute("XPENDING", "in", KEYS.group)[0] == 0
    drain(second, max_pending=4)
    assert numbers(client) == list(range(1, 13))


def test_a_checkpoint_of_keyed_workers_drops_no_entry_that_is_still_to_be_enqueued(client: Client) -> None:
    publish(client, "-" * 6)
    first = unkeyed(client)
    first.fetch(count=5)
    second = keyed(client)
    assert second.checkpoint() == "noted"
    drain(second)
    assert numbers(client) == list(range(1, 7))


def test_spark_takes_over_from_workers_whose_group_is_lost(client: Client) -> None:
    some_of_two_queues(client)
    client.execute("XGROUP", "DESTROY", "in", KEYS.group)
    run_on_spark(client)
    assert outputs(client) == expected("ABABABAB")


@pytest.mark.parametrize("successor", [run_on_spark, unkeyed])
def test_parked_keys_must_be_settled_before_another_engine_takes_over(
    client: Client, successor: Callable[[Client], object]
) -> None:
    worker, lease = some_of_two_queues(client)
    worker.release_leases([LeaseRelease(lease, "park", "why")])
    before = client.execute("HGETALL", KEYS.meta)
    with pytest.raises(ConfigError, match="parked"):
        successor(client)
    assert client.execute("HGETALL", KEYS.meta) == before
    assert violations(keyed(client, "w2")) == []
    unpark(client, KEYS, b"kA")
    successor(client)


def test_a_key_that_is_parked_without_entries_does_not_prevent_a_takeover(client: Client) -> None:
    worker, _ = some_of_two_queues(client)
    park(client, KEYS, b"kZ", "just in case")
    run_on_spark(client)
    assert violations(worker) == []
    assert outputs(client) == expected("ABABABAB")


def test_a_new_handler_begins_at_the_earliest_or_latest_entry_or_where_its_group_was_created(client: Client) -> None:
    publish(client, "AAAA")
    client.execute("XGROUP", "CREATE", "in", KEYS.group, "2-0")
    worker = keyed(client)
    assert (worker.enqueue_new(count=10, max_pending=MANY), worker.enqueued_id) == (2, b"4-0")
    late = KeyedStream(
        client, "in", queue_of=lambda entry_id, pairs: b"kA", app="app", handler="late", consumer="w", start="latest"
    )
    late.join()
    publish(client, "A", first=5)
    assert (late.enqueue_new(count=10, max_pending=MANY), late.enqueued_id) == (1, b"5-0")
