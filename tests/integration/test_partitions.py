"""Partitions: keys have their places, and keep their order, their state and their single run when there are more."""

import asyncio
import string
from collections import defaultdict
from typing import Any

import pytest

from millstream.admin.inspection import inspect_handlers
from millstream.admin.key_queues import list_queues, park, parked_queues, unpark
from millstream.delivery.keyed_stream import READ_RANGE, LeaseRelease
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import CommandFailed, ConfigError, NotReplicated
from millstream.partitions.key_migration import FORWARD_ENTRY
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitioned_producer import PartitionedProducer
from millstream.partitions.partitions import Partitions
from millstream.producer.producer import Producer
from millstream.producer.session import PublishOptions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import hash_tag
from tests.support.partition_fixtures import (
    BASE,
    MANY,
    Publisher,
    Worker,
    check_all,
    growth_killed_after,
    keys_of,
    moved_key,
    outcome,
    places_are_right,
    waiting_in,
)

pytestmark = [pytest.mark.keys]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture
def sent() -> dict[str, list[int]]:
    return defaultdict(list)


def lengths(client: Client, layout: PartitionMap) -> list[int]:
    return [client.execute("XLEN", stream) for stream in layout.streams]


# --- Producers ---


def test_each_key_has_its_partition_and_each_partition_its_slot(client: Client, sent: dict[str, list[int]]) -> None:
    Publisher(client, 8).publish(sent, LETTERS * 3)
    layout = Partitions(client, BASE).require()
    assert (layout.count, sum(lengths(client, layout)), places_are_right(client, layout)) == (8, 78, True)
    assert len({hash_tag(stream) for stream in layout.streams}) == 8
    for place, stream in enumerate(layout.streams):
        assert {layout.partition_of(pairs[1]) for _, pairs in client.execute("XRANGE", stream, "-", "+")} <= {place}


def test_the_first_producer_sets_the_number_of_partitions(client: Client) -> None:
    assert Partitions(client, BASE).create(3).count == 3
    assert Partitions(client, BASE).create(5).count == 3
    with (
        PartitionedProducer(client, "others", key="k") as producer,
        pytest.raises(ConfigError, match="has no partitions"),
    ):
        producer.publish({"k": "A"})


def test_messages_without_a_key_are_spread_over_all_partitions(client: Client) -> None:
    with PartitionedProducer(client, BASE, key="k", partitions=4) as producer:
        where = producer.publish_many({"n": n} for n in range(100))
    assert len({one.stream for one in where}) == 4


def test_a_key_may_be_a_function(client: Client) -> None:
    with PartitionedProducer(client, BASE, key=lambda row: row["n"] % 5, partitions=4) as producer:  # type: ignore[index]
        where = producer.publish_many([{"n": n} for n in range(50)])
    layout = Partitions(client, BASE).require()
    assert [one.stream for one in where] == [layout.stream(layout.partition_of(str(n % 5).encode())) for n in range(50)]


def test_a_producer_that_slept_during_a_growth_continues_in_the_new_partitions(
    client: Client, sent: dict[str, list[int]]
) -> None:
    sleeper, other = Publisher(client), Publisher(client)
    sleeper.publish(sent, LETTERS)
    Partitions(client, BASE).grow(4)
    other.publish(sent, LETTERS)
    Partitions(client, BASE).grow(8)
    sleeper.publish(sent, LETTERS * 2)
    layout = Partitions(client, BASE).require()
    assert (layout.counts, places_are_right(client, layout)) == ((2, 4, 8), True)
    worker = Worker(client)
    worker.work()
    assert (outcome(client), check_all(client)) == (sent, [])


def test_a_message_published_under_its_own_id_is_recognised_after_a_growth(client: Client) -> None:
    rows, ids = [{"k": one, "n": 1} for one in LETTERS], list(LETTERS)
    with PartitionedProducer(client, BASE, key="k", partitions=2) as producer:
        first = producer.publish_many(rows, dedupe_ids=ids)
        Partitions(client, BASE).grow(6)
        assert producer.publish_many(rows, dedupe_ids=ids) == first
        more = producer.publish_many([{"k": one, "n": 2} for one in LETTERS], dedupe_ids=[f"{one}2" for one in LETTERS])
    layout = Partitions(client, BASE).require()
    assert {one.stream for one in more} > {one.stream for one in first}
    assert sum(lengths(client, layout)) == 52


def test_a_batch_whose_reply_was_lost_is_not_doubled_by_a_growth(client: Client) -> None:
    with PartitionedProducer(client, BASE, key="k", partitions=2) as producer:
        first = producer.publish({"k": "A"})
        Partitions(client, BASE).grow(64)
        channel = producer._session(first.stream)
        channel._sequence = 0  # it is sent again, under the number that it had
        assert producer._publish(
            PartitionMap(base=BASE, counts=(2,)), list(producer._items([({"k": "A"}, None)], ())), PublishOptions(), {}
        )
    layout = Partitions(client, BASE).require()
    assert sum(lengths(client, layout)) == 1


def test_coroutines_publish_in_the_order_of_their_calls(client: Client) -> None:
    async def go_on(producer: PartitionedProducer) -> None:
        await asyncio.gather(*(producer.publish_async({"k": "A", "n": n}) for n in range(20)))
        await producer.publish_many_async([{"k": "A", "n": n} for n in range(20, 40)])

    with PartitionedProducer(client, BASE, key="k", partitions=2) as producer:
        asyncio.run(go_on(producer))
        stream = producer.publish({"k": "A", "n": 40}).stream
    assert [int(pairs[3]) for _, pairs in client.execute("XRANGE", stream, "-", "+")] == list(range(41))


def test_not_replicated_names_all_published_ids(client: Client) -> None:
    with PartitionedProducer(client, BASE, key="k", partitions=2) as producer, pytest.raises(NotReplicated) as caught:
        producer.publish_many([{"k": "A"}, {"k": "A"}], replicas=1, timeout_ms=1)
    assert len(caught.value.ids) == 2


def test_a_producer_without_partitions_is_refused_by_a_partition(client: Client, sent: dict[str, list[int]]) -> None:
    Publisher(client).publish(sent, "A")
    layout = Partitions(client, BASE).require()
    with Producer(client) as producer, pytest.raises(ConfigError, match="PartitionedProducer"):
        producer.publish(layout.stream(layout.partition_of(b"A")), {"k": "A"})


def test_a_redriven_entry_is_not_forwarded_to_a_partition_that_a_newer_generation_has_closed(client: Client) -> None:
    client.execute("HSET", "partition", "generation", 3)
    names, entry = ("stream", "partition", "sent", "dead", "resent"), (60_000, 0, "k", "a")
    with pytest.raises(CommandFailed, match="CLOSED 3"):
        client.script(FORWARD_ENTRY, names, (2, *entry))
    assert client.execute("EXISTS", "stream", "sent") == 0
    added = [client.script(FORWARD_ENTRY, names, (3, *entry)) for _ in range(2)]
    assert [entry_id for entry_id, _ in client.execute("XRANGE", "stream", "-", "+")] == [added[0]]
    assert added[0] == added[1], "once, however often it is sent on"


# --- Growing ---


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("resumed_by", ["the same again", "a producer"])
def test_a_growth_that_was_killed_between_any_two_steps_is_completed_by_the_next_process(
    client: Client, sent: dict[str, list[int]], steps: int, resumed_by: str
) -> None:
    publisher, worker = Publisher(client), Worker(client)
    publisher.publish(sent, LETTERS)
    killed = growth_killed_after(client, steps, 5)
    assert killed == (steps < 4)  # it begins, closes two partitions, and ends
    worker.refresh()
    worker.work()
    publisher.publish(sent, LETTERS)
    if resumed_by == "the same again":
        assert Partitions(client, BASE).grow(5).growing_to is None
    publisher.publish(sent, LETTERS)
    layout = Partitions(client, BASE).require()
    # Where no partition was closed, no producer has noticed.
    assert layout.counts == ((2,) if steps == 0 and resumed_by == "a producer" else (2, 5))
    assert places_are_right(client, layout)
    worker.refresh()
    worker.work()
    assert (outcome(client), check_all(client)) == (sent, [])


def test_two_growths_at_once_run_one_after_the_other(client: Client, sent: dict[str, list[int]]) -> None:
    Publisher(client).publish(sent, LETTERS)
    assert growth_killed_after(client, 1, 5)
    assert Partitions(client, BASE).grow(7).counts == (2, 5, 7)
    with pytest.raises(ConfigError, match="cannot have fewer"):
        Partitions(client, BASE).grow(3)


def test_a_late_close_changes_nothing(client: Client, sent: dict[str, list[int]]) -> None:
    publisher, sleeper = Publisher(client), Publisher(client)
    publisher.publish(sent, LETTERS)
    stale = PartitionMap(base=BASE, counts=(2,), growing_to=5)
    Partitions(client, BASE).grow(5)
    sleeper.publish(sent, LETTERS)
    Partitions(client, BASE).grow(8)
    publisher.publish(sent, LETTERS)
    layout = Partitions(client, BASE).require()
    assert Partitions(client, BASE).finish_growth(stale) == layout
    moves = "".join(key for key in LETTERS if (found := layout.owners(key.encode()))[-1] > 4 and found[-2] < 2)
    assert {layout.partition_of(key.encode()) for key in moves} <= {5, 6, 7}
    sleeper.publish(sent, moves)
    assert places_are_right(client, layout)


# --- Keys that move ---


def grown(client: Client, sent: dict[str, list[int]]) -> tuple[Publisher, Worker, str, int, int]:
    """A key that has moved, with messages in both its partitions and a state in the old one."""
    publisher, worker = Publisher(client), Worker(client)
    key = moved_key(Partitions(client, BASE).require(), 4)
    publisher.publish(sent, key)
    worker.work()
    publisher.publish(sent, key)
    layout = Partitions(client, BASE).grow(4)
    publisher.publish(sent, key * 2)
    worker.refresh()
    old, new = layout.owners(key.encode())
    return publisher, worker, key, old, new


def test_a_key_waits_in_its_new_partition_until_the_old_one_is_done_with_it(
    client: Client, sent: dict[str, list[int]]
) -> None:
    _, worker, key, old, new = grown(client, sent)
    layout, queue = worker.moves.partition_map, b"k" + key.encode()
    assert worker.route(new) == 2
    assert waiting_in(client, layout, new) == {queue: b"migrating from " + layout.stream(old).encode()}
    keys = keys_of(layout, new)
    assert parked_queues(client, [keys]) == {keys: []}, "it does not wait for an operator"
    assert [one.parked for one in inspect_handlers(client, [keys])] == [0]
    worker.move()
    assert worker.lease_keys(new) == []  # nothing of the old one is routed
    worker.route(old)
    worker.move()
    assert worker.lease_keys(new) == []
    (lease,) = worker.lease_keys(old)
    worker.move()
    assert worker.lease_keys(new) == []
    worker.finish(lease)
    worker.move()
    (lease,) = worker.lease_keys(new)
    assert lease.state == b"2"  # it has come along
    worker.finish(lease)
    worker.work()
    assert (outcome(client), check_all(client)) == (sent, [])
    assert worker.moves.undrained() == []


def test_a_key_waits_in_its_new_partition_even_if_many_streams_are_enqueued_together(
    client: Client, sent: dict[str, list[int]]
) -> None:
    _, worker, key, old, new = grown(client, sent)
    layout, stream = worker.moves.partition_map, worker.streams[new]
    client.run(stream.enqueue_call((), max_pending=MANY))  # it knows where the routing stands
    read = stream.read_call(count=10, max_pending=MANY)
    assert read is not None
    client.script(READ_RANGE, (read.command[3],), read.command[4:])  # so that the server has it
    entries, _ = client.run(read)
    assert len(entries) == 2
    client.run(stream.enqueue_call(entries, max_pending=MANY))
    queue = b"k" + key.encode()
    assert waiting_in(client, layout, new) == {queue: b"migrating from " + layout.stream(old).encode()}
    assert worker.lease_keys(new) == []


def test_new_keys_do_not_wait_and_a_stuck_key_delays_only_itself(client: Client, sent: dict[str, list[int]]) -> None:
    publisher, worker, key, old, new = grown(client, sent)
    layout = worker.moves.partition_map
    worker.route(old)
    (lease,) = worker.lease_keys(old)
    worker.streams[old].release_leases([LeaseRelease(lease, "park", "bad address", 4)])
    others = "".join(one for one in LETTERS if one != key)
    publisher.publish(sent, others)
    worker.work()
    done = outcome(client)
    assert {one: done[one] for one in others} == {one: sent[one] for one in others}
    assert done[key] == [1]
    keys = keys_of(layout, new)
    (queue,) = list_queues(client, keys)
    assert queue.parked_reason == f"migrating from {layout.stream(old)}"
    with pytest.raises(ConfigError, match="goes on"):
        unpark(client, keys, queue.name)
    assert unpark(client, keys_of(layout, old), queue.name)
    worker.work()
    assert (outcome(client), check_all(client)) == (sent, [])


def test_a_key_that_was_parked_while_it_migrates_has_to_be_unparked(client: Client, sent: dict[str, list[int]]) -> None:
    _, worker, key, _, new = grown(client, sent)
    keys, queue = keys_of(worker.moves.partition_map, new), b"k" + key.encode()
    worker.route(new)
    assert (park(client, keys, queue, "mine"), park(client, keys, queue, "again")) == (True, False)
    assert (unpark(client, keys, queue), park(client, keys, queue, "mine")) == (True, True)
    worker.work()
    assert outcome(client) == {key: [1, 2]}
    assert waiting_in(client, worker.moves.partition_map, new) == {queue: b"mine"}
    assert unpark(client, keys, queue)
    worker.work()
    assert (outcome(client), check_all(client)) == (sent, [])


def test_a_key_that_is_parked_without_messages_in_its_old_partition_waits_in_the_new_one(
    client: Client, sent: dict[str, list[int]]
) -> None:
    publisher, worker = Publisher(client), Worker(client)
    key = moved_key(Partitions(client, BASE).require(), 4)
    layout = Partitions(client, BASE).grow(4)
    old, _ = layout.owners(key.encode())
    park(client, keys_of(layout, old), b"k" + key.encode(), "mine")
    publisher.publish(sent, key)
    worker.refresh()
    worker.work()
    assert outcome(client) == {}
    unpark(client, keys_of(layout, old), b"k" + key.encode())
    worker.work()
    assert (outcome(client), check_all(client)) == (sent, [])


def test_the_last_entries_before_a_close_may_be_deleted(client: Client, sent: dict[str, list[int]]) -> None:
    publisher, worker = Publisher(client), Worker(client)
    key = moved_key(Partitions(client, BASE).require(), 4)
    publisher.publish(sent, key)
    layout = Partitions(client, BASE).grow(4)
    old, _ = layout.owners(key.encode())
    client.execute("XTRIM", layout.stream(old), "MAXLEN", 0)
    publisher.publish(sent, key)
    worker.refresh()
    worker.work()
    assert outcome(client) == {key: [2]}


def test_states_of_keys_without_new_messages_migrate_too(client: Client, sent: dict[str, list[int]]) -> None:
    publisher, worker = Publisher(client), Worker(client)
    publisher.publish(sent, LETTERS)
    worker.work()
    for count in (4, 8):
        layout = Partitions(client, BASE).grow(count)
        worker.refresh()
        worker.work()
        assert (check_all(client), worker.moves.undrained()) == ([], [])
    found = {
        (place, key): state
        for place in range(layout.count)
        for key, state in zip(*[iter(client.execute("HGETALL", keys_of(layout, place).state))] * 2, strict=True)
    }
    assert found == {(layout.partition_of(key.encode()), key.encode()): b"1" for key in LETTERS}


def test_a_state_is_imported_once_even_if_a_late_worker_imports_it_again(
    client: Client, sent: dict[str, list[int]]
) -> None:
    _, worker, key, old, new = grown(client, sent)
    late = Worker(client, "w2")
    worker.route(new)
    worker.route(old)
    worker.finish(worker.lease_keys(old)[0])
    # The late one has read all, and comes with it when everything is over.
    calls: list[Any] = []

    def keep(some: Any) -> list[int]:
        calls.append(some)
        return [0]

    real, late.moves._run = late.moves._run, keep  # type: ignore[method-assign, assignment]
    late.moves._query_past_owners = worker.moves._query_past_owners  # type: ignore[method-assign]
    late.moves._delete_imported = lambda partition: None  # type: ignore[method-assign]
    late.moves._import_keys(new)
    worker.work()
    worker.moves._await_keys(new, [key.encode()])  # by one that had asked before that
    assert calls
    for some in calls:
        assert real(some) == [0]
    worker.work()
    assert (outcome(client), check_all(client)) == (sent, [])


def test_lease_tokens_keep_growing_in_the_new_partition_of_a_key(client: Client, sent: dict[str, list[int]]) -> None:
    _, worker, _, old, _ = grown(client, sent)
    ahead = 2**52  # the clock of another server
    client.execute("HSET", keys_of(worker.moves.partition_map, old).meta, "fence", ahead)
    worker.work()
    fences = [int(pairs[7]) for _, pairs in client.execute("XRANGE", "out", "-", "+")]
    assert fences[0] < ahead < fences[1] < fences[2] == fences[3]
    assert outcome(client) == sent


def test_an_entry_that_an_outsider_acknowledges_does_not_drain_its_partition(
    client: Client, sent: dict[str, list[int]]
) -> None:
    _, worker, _, old, new = grown(client, sent)
    keys = keys_of(worker.moves.partition_map, old)
    worker.route(old)
    for entry_id, *_ in client.execute("XPENDING", keys.stream, keys.group, "-", "+", 10):
        client.execute("XACK", keys.stream, keys.group, entry_id)
    worker.moves._refreshed_ms = float("-inf")
    assert worker.moves.drain([old]) == 0
    worker.route(new)
    assert worker.moves.import_keys([new]) == 0
    worker.work()
    assert (outcome(client), check_all(client)) == (sent, [])


def test_a_key_does_not_migrate_while_unkeyed_workers_own_its_old_partition(
    client: Client, sent: dict[str, list[int]]
) -> None:
    _, worker, _, old, new = grown(client, sent)
    keys = keys_of(worker.moves.partition_map, old)
    other = ReliableStream(client, keys.stream, app=keys.app, handler=keys.handler, consumer="w9", into="out")
    other.join()
    assert len(other.fetch(count=10)) == 1
    other.checkpoint()
    worker.route(new)
    assert worker.moves.import_keys([new]) == 0


# --- Keys that move twice ---


def moved_twice(client: Client, sent: dict[str, list[int]]) -> tuple[Publisher, Worker, str, list[int]]:
    """A key with a state in its first partition that has moved on twice since; a worker that has joined them all."""
    publisher, worker = Publisher(client), Worker(client)
    grown = PartitionMap(base=BASE, counts=(2, 4, 8))
    key = next(one for one in string.ascii_letters if len(grown.owners(one.encode())) == 3)
    publisher.publish(sent, key)
    worker.work()
    Partitions(client, BASE).grow(4)
    Partitions(client, BASE).grow(8)
    worker.refresh()
    return publisher, worker, key, grown.owners(key.encode())


def test_a_state_migrates_through_each_partition_in_which_its_key_has_been(
    client: Client, sent: dict[str, list[int]]
) -> None:
    publisher, worker, key, (first, second, third) = moved_twice(client, sent)
    publisher.publish(sent, key)
    worker.route(third)
    worker.moves.import_keys([third])
    assert worker.lease_keys(third) == []
    waiting = waiting_in(client, worker.moves.partition_map, second)
    assert waiting == {b"k" + key.encode(): b"migrating from {orders.%d}" % first}
    worker.work()
    publisher.publish(sent, key)
    worker.work()
    assert (outcome(client), check_all(client)) == (sent, [])


def test_a_partition_is_not_drained_while_an_older_one_may_migrate_keys_to_it(
    client: Client, sent: dict[str, list[int]]
) -> None:
    publisher, worker, key, (_, second, _) = moved_twice(client, sent)
    worker.moves._refreshed_ms = float("-inf")
    assert worker.moves.drain([second]) == 0
    worker.work()
    assert check_all(client) == []
    publisher.publish(sent, key)
    worker.work()
    assert outcome(client) == sent


def test_a_migrated_key_does_not_wait_again_for_a_late_worker(client: Client, sent: dict[str, list[int]]) -> None:
    publisher, worker, key, _, new = grown(client, sent)
    worker.work()
    publisher.publish(sent, key)
    worker.route(new)
    assert worker.moves._await_keys(new, [key.encode()]) == 0
    (lease,) = worker.lease_keys(new)
    worker.finish(lease)
    assert (outcome(client), check_all(client)) == (sent, [])
