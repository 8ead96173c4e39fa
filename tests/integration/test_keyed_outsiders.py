"""What outsiders do to a keyed stream with plain Redis commands: no key queue is wedged, leased twice, or loses an entry."""

import contextlib
from collections.abc import Callable

import pytest

from millstream.admin.key_queues import skip, unpark
from millstream.delivery.keyed_stream import LOWEST_QUEUED_ID, KeyedStream, KeyLease, LeaseRelease
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import GroupMissing
from millstream.redis_client.client import Client
from millstream.redis_client.pipelining import server_time_ms
from millstream.redis_client.scripts import Script
from tests.support.keyed_fixtures import (
    HOUR_MS,
    KEYS,
    commit,
    drain,
    expected,
    expire,
    keyed,
    lease_keys,
    lease_one,
    outputs,
    publish,
    run_on_spark,
    violations,
)

pytestmark = [pytest.mark.keys]

LETTERS = "ABCABCABCABC"
LOOK_AHEAD = 6
GROUP = KEYS.group
EVERYTHING = [f"{n}-0" for n in range(1, 13)]

DEEDS: dict[str, list[tuple[object, ...]]] = {
    "nothing": [],
    "entries are acknowledged": [("XACK", "in", GROUP, *EVERYTHING)],
    "entries are taken over": [("XCLAIM", "in", GROUP, "outsider", 0, *EVERYTHING)],
    "entries are claimed before their time": [("XCLAIM", "in", GROUP, "outsider", 0, *EVERYTHING, "FORCE")],
    "new entries are read": [("XREADGROUP", "GROUP", GROUP, "outsider", "STREAMS", "in", ">")],
    "all entries are read": [
        ("XGROUP", "SETID", "in", GROUP, "0"),
        ("XREADGROUP", "GROUP", GROUP, "outsider", "STREAMS", "in", ">"),
    ],
    "the group is set back": [("XGROUP", "SETID", "in", GROUP, "0")],
    "the group is set back a little": [("XGROUP", "SETID", "in", GROUP, "4-0")],
    "the group is set forward": [("XGROUP", "SETID", "in", GROUP, "$")],
    "the waiting consumer is deleted": [("XGROUP", "DELCONSUMER", "in", GROUP, "waiting")],
    "a worker's consumer is deleted": [("XGROUP", "DELCONSUMER", "in", GROUP, "w1")],
    "the group is destroyed": [("XGROUP", "DESTROY", "in", GROUP)],
    "the group is made anew at the end": [("XGROUP", "DESTROY", "in", GROUP), ("XGROUP", "CREATE", "in", GROUP, "$")],
    "the group is made anew at the start": [("XGROUP", "DESTROY", "in", GROUP), ("XGROUP", "CREATE", "in", GROUP, "0")],
    "a waiting entry is deleted": [("XDEL", "in", "2-0")],
    "a new entry is deleted": [("XDEL", "in", "8-0")],
    "a whole line is deleted": [("XDEL", "in", "3-0", "6-0", "9-0", "12-0")],
    "what runs is deleted": [("XDEL", "in", "1-0", "4-0")],
    "the stream is trimmed": [("XTRIM", "in", "MINID", "8-0")],
    "the stream is emptied": [("XTRIM", "in", "MAXLEN", "0")],
    "the stream is deleted": [("DEL", "in")],
    "the scripts are forgotten": [("SCRIPT", "FLUSH")],
}


def left_after(client: Client) -> dict[str, list[int]]:
    """What is to be committed: what is still there, and 1 and 4, which a worker has in flight."""
    there = {int(entry_id.partition(b"-")[0]) for entry_id, _ in client.execute("XRANGE", "in", "-", "+")} | {1, 4}
    found = {queue: [n for n in ids if n in there] for queue, ids in expected(LETTERS).items()}
    return {queue: ids for queue, ids in found.items() if ids}


def interfere(client: Client, deed: str) -> None:
    for command in DEEDS[deed]:
        client.execute(*command)  # type: ignore[arg-type]


@pytest.mark.parametrize("deed", DEEDS)
def test_workers_commit_all_that_is_left_in_order_and_once_after_any_interference(client: Client, deed: str) -> None:
    publish(client, LETTERS)
    first, second = keyed(client, "w1"), keyed(client, "w2")
    assert first.enqueue_new(count=100, max_pending=LOOK_AHEAD) == LOOK_AHEAD
    lease = lease_one(first)
    interfere(client, deed)
    others = lease_keys(second).leases
    assert b"kA" not in [one.queue for one in others]
    second.release_leases([LeaseRelease(one, "requeue") for one in others])
    assert first.renew_leases([lease], HOUR_MS, 0) == []
    assert commit(lease, 2)
    first.release_leases([LeaseRelease(lease, "requeue")])
    drain(second, max_pending=LOOK_AHEAD)
    assert outputs(client) == left_after(client)
    assert client.execute("EXISTS", KEYS.owners, KEYS.leases, KEYS.ready, KEYS.crashes) == 0
    if deed != "all entries are read" and deed != "entries are claimed before their time":  # of which some were done
        assert violations(second) == []


@pytest.mark.parametrize("deed", DEEDS)
def test_spark_takes_over_all_uncommitted_entries_after_any_interference(client: Client, deed: str) -> None:
    publish(client, LETTERS)
    first = keyed(client, "w1")
    first.enqueue_new(count=100, max_pending=LOOK_AHEAD)
    lease = lease_one(first)
    assert commit(lease)
    interfere(client, deed)
    run_on_spark(client)
    there = left_after(client)
    if not client.execute("XRANGE", "in", "4-0", "4-0"):
        there["kA"].remove(4)
    assert outputs(client) == there


@pytest.mark.parametrize("deed", DEEDS)
def test_unkeyed_workers_take_over_all_uncommitted_entries_after_any_interference(client: Client, deed: str) -> None:
    publish(client, LETTERS)
    first = keyed(client, "w1")
    first.enqueue_new(count=100, max_pending=LOOK_AHEAD)
    assert commit(lease_one(first))
    interfere(client, deed)
    there = {int(entry_id.partition(b"-")[0]) for entry_id, _ in client.execute("XRANGE", "in", "-", "+")}
    second = ReliableStream(client, "in", app="app", handler="handle", consumer="w2", into="out")
    second.join()
    found = second.claim_idle() + second.fetch(count=100)
    assert {int(one.id.partition(b"-")[0]) for one in found} == there - {1}
    assert second.ack(*found) == []


@pytest.mark.parametrize(
    "step",
    [
        lambda worker, lease: worker.release_leases([LeaseRelease(lease, "requeue")]),
        lambda worker, lease: worker.recover_leases([], run=10),
        lambda worker, lease: skip(worker._client, KEYS, lease.queue, error="x"),
        lambda worker, lease: lease_keys(worker),
    ],
    ids=["release", "recover", "skip", "take"],
)
def test_a_step_that_needs_the_group_is_done_whole_or_not_at_all(
    client: Client, step: Callable[[KeyedStream, KeyLease], object]
) -> None:
    publish(client, "AAA")
    worker = keyed(client)
    worker.enqueue_new(count=10, max_pending=100)
    lease = lease_one(worker, run=2)
    expire(client)
    client.execute("XGROUP", "DESTROY", "in", GROUP)
    with contextlib.suppress(GroupMissing):
        step(worker, lease)
    worker.join()
    assert violations(worker) == []
    expire(client)
    drain(worker)
    skipped = [int(pairs[1].partition(b"-")[0]) for _, pairs in client.execute("XRANGE", KEYS.dead_letters, "-", "+")]
    assert outputs(client)["kA"] == [n for n in (1, 2, 3) if n not in skipped]


@pytest.mark.parametrize(
    "deed", ["nothing", "the waiting consumer is deleted", "the group is made anew at the end", "all entries are read"]
)
def test_workers_do_not_trim_queued_entries_after_any_interference(client: Client, deed: str) -> None:
    publish(client, "B" * 250 + "A" * 500 + "B" * 250)
    worker = keyed(client)
    worker.enqueue_new(count=1_000, max_pending=1_000)
    while worker.enqueue_new(count=1_000, max_pending=1_000):
        pass
    leases = lease_keys(worker, run=1).leases
    worker.release_leases(
        [LeaseRelease(one, "park", "x") if one.queue == b"kA" else LeaseRelease(one, "requeue") for one in leases]
    )
    drain(worker)
    interfere(client, deed)
    client.execute("XACK", "in", GROUP, *(f"{n}-0" for n in range(1, 1_001)))
    worker.trim()
    assert 700 < client.execute("XLEN", "in") < 1_000
    client.execute("HDEL", KEYS.meta, "trim_at")
    unpark(client, KEYS, b"kA")
    drain(worker)
    assert outputs(client)["kA"] == list(range(251, 751))
    worker.trim()
    assert client.execute("XLEN", "in") < 200


def test_the_lowest_queued_id_is_searched_for_only_after_a_pause(client: Client) -> None:
    publish(client, "-" * 500)
    worker = keyed(client)
    while worker.enqueue_new(count=1_000, max_pending=1_000):
        pass
    began_ms = server_time_ms(client)
    assert worker._run_script(LOWEST_QUEUED_ID, (1_000,)) == b"1-0"
    assert began_ms + 50 <= int(client.execute("HGET", KEYS.meta, "trim_at")) <= server_time_ms(client) + 50
    most = 20 * HOUR_MS  # with which an hour is not too far ahead
    client.execute("HSET", KEYS.meta, "trim_at", began_ms + HOUR_MS)
    assert worker._run_script(LOWEST_QUEUED_ID, (most,)) is None, "not before that time has passed"
    client.execute("HDEL", KEYS.meta, "trim_at")
    assert worker._run_script(LOWEST_QUEUED_ID, (499,)) is None, "they are too many"
    client.execute("HSET", KEYS.meta, "trim_at", 10**14)
    assert worker._run_script(LOWEST_QUEUED_ID, (1_000,)) == b"1-0", "the clock went back"


def test_a_parked_key_and_foreign_entries_do_not_fill_the_look_ahead_together(client: Client) -> None:
    publish(client, "AAAB" + "C" * 20)
    worker = keyed(client)
    worker.enqueue_new(count=4, max_pending=5)
    (a,) = lease_keys(worker, queues=1).leases
    worker.release_leases([LeaseRelease(a, "park", "x")])
    client.execute("XREADGROUP", "GROUP", GROUP, "outsider", "STREAMS", "in", ">")
    drain(worker, max_pending=5)
    assert outputs(client) == {"kB": [4], "kC": list(range(5, 25))}
    assert (client.execute("XPENDING", "in", GROUP)[0], violations(worker)) == (3, [])


def test_entries_that_were_deleted_while_they_waited_are_named_in_the_log(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    publish(client, "AAB")
    worker = keyed(client)
    worker.enqueue_new(count=10, max_pending=100)
    client.execute("XDEL", "in", "1-0", "3-0")
    assert [one.queue for one in lease_keys(worker).leases] == [b"kA"]
    assert "2 pending entries of stream in were trimmed or deleted before they were processed: 1-0, 3-0" in caplog.text
    assert violations(worker) == []


def test_the_failures_of_a_deleted_entry_are_removed_with_it(client: Client) -> None:
    publish(client, "AAB")
    worker = keyed(client)
    worker.enqueue_new(count=10, max_pending=100)
    worker.release_leases([LeaseRelease(lease_one(worker), "requeue", "", 3)])
    client.execute("XDEL", "in", "1-0")
    lease = next(one for one in lease_keys(worker).leases if one.queue == b"kA")
    assert (lease.queued[0].id, lease.queued[0].attempt) == (b"2-0", 1)
    assert (client.execute("EXISTS", KEYS.crashes), violations(worker)) == (0, [])


def test_entries_that_another_consumer_read_ahead_of_the_router_are_enqueued_once(client: Client) -> None:
    publish(client, LETTERS)
    worker = keyed(client)
    worker.enqueue_new(count=3, max_pending=100)
    client.execute("XREADGROUP", "GROUP", GROUP, "outsider", "STREAMS", "in", ">")
    items = [part for n, letter in enumerate(LETTERS, 1) for part in (f"{n}-0", f"k{letter}")]
    assert worker._run_script(Script("keys/requeue_pending"), (worker.token, worker.group, *items)) == []
    drain(worker)
    assert (outputs(client), violations(worker)) == (expected(LETTERS), [])


def test_entries_that_were_pending_before_the_handler_joined_are_enqueued_in_order(client: Client) -> None:
    publish(client, "ABAB")
    client.execute("XGROUP", "CREATE", "in", GROUP, "0")
    client.execute("XREADGROUP", "GROUP", GROUP, "outsider", "COUNT", 3, "STREAMS", "in", ">")
    worker = keyed(client)
    drain(worker)
    items = ["3-0", "kA", "1-0", "kA", "2-0", "kB"]
    assert worker._run_script(Script("keys/requeue_pending"), (worker.token, worker.group, *items)) == [
        b"3-0",
        b"1-0",
        b"2-0",
    ]
    assert violations(worker) == []
    drain(worker)
    assert outputs(client) == {"kB": [4, 2], "kA": [1, 3]}
