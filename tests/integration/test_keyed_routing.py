"""Routing by the server: it finds the keys of entries as Python does, and keeps the bounds of a step."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream import App
from millstream.delivery.keyed_stream import READ_BYTES, KeyedStream
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD, HandlerKeys
from millstream.testing.invariants import check_invariants
from millstream.worker.handler_steps import HandlerSteps
from tests.support.command_stats import commands_run
from tests.support.keyed_fixtures import (
    KEYS,
    MANY,
    commit,
    keyed,
    lease_keys,
    lease_one,
    publish,
    queued_ids,
    routed,
    violations,
)
from tests.support.workers import make

pytestmark = [pytest.mark.keys]

# Names and values that could be mistaken for each other; None: the entry has no such field.
FIELDS = st.lists(
    st.tuples(st.sampled_from([b"k", b"n", b"", b"kA"]), st.sampled_from([b"A", b"B", b"k", b""])), min_size=1
)
FIRST = st.sampled_from([(), (REDRIVE_FIELD, b"app.handle"), (REDRIVE_FIELD, b"app.other"), (b"millstream.x", b"A")])


@settings(max_examples=30)
@example(entries=[((), [(b"k", b"A"), (b"n", b"k"), (b"k", b"B")]), ((), [(b"n", b"k")])], count=5)
@given(entries=st.lists(st.tuples(FIRST, FIELDS), min_size=1, max_size=60), count=st.integers(1, 70))
def test_the_server_finds_the_keys_and_the_order_of_entries_that_python_finds(
    client: Client, entries: list[tuple[tuple[bytes, ...], list[tuple[bytes, bytes]]]], count: int
) -> None:
    client.execute("FLUSHALL")
    client.pipeline([("XADD", "in", "*", *first, *chain.from_iterable(pairs)) for first, pairs in entries])
    found = []
    for name in ("by_python", "by_server"):
        app = App("app")
        app.handler("in", key="k", name=name)(lambda message: None)
        handler = app.handlers[name]
        steps = HandlerSteps(handler)
        worker = KeyedStream(
            client, "in", queue_of=partial(steps.queue_of, "in"), app="app", handler=name, consumer="w"
        )
        worker.key_field = handler.key_name if name == "by_server" else None
        worker.join()
        while worker.enqueue_new(count=count, max_pending=MANY):
            pass
        keys = HandlerKeys("app", name, "in")
        assert check_invariants(client, keys, "in") == []
        names = sorted(client.execute("LRANGE", keys.ready, 0, -1))
        queues = {one: client.execute("LRANGE", keys.queue(one), 0, -1) for one in names}
        info = Group(client, "in", keys.group).info()
        assert info is not None
        position = client.execute("HGET", keys.meta, "committed_id"), info.last_delivered, info.entries_read
        found.append((queues, position, info.pending))
    assert found[0] == found[1]


def test_where_the_server_finds_the_keys_the_look_ahead_and_the_bytes_of_a_step_are_kept(client: Client) -> None:
    publish(client, "AB" * 1_500)
    worker = keyed(client)
    assert [worker.enqueue_new(count=8_000, max_pending=2_600) for _ in range(3)] == [1_000, 1_600, 0]
    assert (worker.enqueued_id, worker.pending_count) == (b"2600-0", 2_600)
    client.execute("FLUSHALL")
    client.pipeline([("XADD", "in", f"{n}-0", "k", "A", "payload", b"x" * 300_000) for n in range(1, 51)])
    worker = keyed(client)
    steps = [worker.enqueue_new(count=8_000, max_pending=MANY) for _ in range(5)]
    assert steps == [READ_BYTES // 300_009] * 3 + [50 - 3 * (READ_BYTES // 300_009), 0]
    assert violations(worker) == []


def test_the_server_reads_no_entry_that_a_step_has_no_room_for_after_a_large_one(client: Client) -> None:
    client.pipeline([("XADD", "in", f"{n}-0", "k", "A", "payload", b"x" * READ_BYTES) for n in (1, 2)])
    worker = keyed(client)
    client.execute("CONFIG", "RESETSTAT")
    assert worker.enqueue_new(count=100, max_pending=MANY) == 1
    assert commands_run(client.execute)["xreadgroup"] == 1
    assert worker.enqueue_new(count=100, max_pending=1) == 0, "the queues are full"
    assert commands_run(client.execute)["xreadgroup"] == 1
    assert [worker.enqueue_new(count=100, max_pending=MANY) for _ in range(2)] == [1, 0]


def test_queues_that_the_server_made_ready_are_counted_also_where_python_has_to_go_on(client: Client) -> None:
    publish(client, "AB")
    client.execute("XADD", "in", "*", REDRIVE_FIELD, b"app.other", "k", "C")
    worker = keyed(client)
    worker._queue_of = lambda entry_id, pairs: b""
    assert (worker.enqueue_new(count=10, max_pending=MANY), worker.newly_ready) == (3, 2)
    assert (worker.enqueue_new(count=10, max_pending=MANY), worker.newly_ready) == (0, 0)


@pytest.mark.parametrize("by_field", [False, True])
def test_new_entries_of_an_empty_queue_make_it_ready_unless_it_is_leased_or_parked(
    client: Client, by_field: bool
) -> None:
    worker = routed(client, "A")
    lease = lease_one(worker)
    assert commit(lease), "the lease goes on though its queue is empty"
    client.execute("HSET", KEYS.parked, "kB", "1 test")
    publish(client, "ABC", first=2)
    other = keyed(client, "w2", by_field=by_field)
    assert (other.enqueue_new(count=10, max_pending=MANY), other.newly_ready) == (3, 1)
    assert [one.queue for one in lease_keys(other).leases] == [b"kC"]
    assert queued_ids(client, "kA", "kB", "kC") == [[2], [3], [4]]
    assert violations(worker) == []


@pytest.mark.parametrize("by_field", [False, True])
def test_entries_after_the_group_s_position_are_enqueued_where_the_progress_of_the_handler_was_deleted(
    client: Client, by_field: bool
) -> None:
    publish(client, "AB")
    worker = keyed(client, by_field=by_field)
    worker.enqueue_new(count=10, max_pending=MANY)
    client.execute("DEL", KEYS.meta)
    publish(client, "AB", first=3)
    while worker.enqueue_new(count=10, max_pending=MANY):
        pass
    assert queued_ids(client, "kA", "kB") == [[1, 3], [2, 4]]


def test_a_handler_that_finds_keys_in_its_own_way_is_not_routed_by_the_server() -> None:
    class OwnSteps(HandlerSteps):
        def queue_of(self, stream: str, entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
            return super().queue_of(stream, entry_id, pairs)

    by_field, by_function = make(lambda message: None, key="k"), make(lambda message: None, key=lambda message: "a")
    assert HandlerSteps(by_field).finds_keys_by_field
    assert not HandlerSteps(by_function).finds_keys_by_field
    assert not OwnSteps(by_field).finds_keys_by_field
