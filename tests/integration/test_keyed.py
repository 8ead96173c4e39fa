"""Keyed streams: one queue per key, one worker per queue, and only the newest lease commits, in order and once."""

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from millstream.admin.key_queues import park, unpark
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.effects import Effects
from millstream.delivery.keyed_stream import READ_BYTES, ROUTE, KeyedStream, KeyLease, LeaseRelease
from millstream.errors import CommandFailed, Unavailable
from millstream.handlers.encoding import pack_output
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.keyed_fixtures import (
    HOUR_MS,
    KEYS,
    MANY,
    commit,
    drain,
    expected,
    expire,
    ids,
    keyed,
    lease_keys,
    lease_one,
    outputs,
    pending_by_consumer,
    publish,
    queued_ids,
    routed,
    unit_of,
    violations,
)
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.keys]

# --- Routing ---


def test_entries_are_enqueued_by_key_in_stream_order_and_without_a_key_in_a_queue_of_their_own(client: Client) -> None:
    worker = routed(client, "ABA-A-")
    assert queued_ids(client, "kA", "kB", "i4-0", "i6-0") == [[1, 3, 5], [2], [4], [6]]
    assert (pending_by_consumer(client), violations(worker)) == ({"waiting": [1, 2, 3, 4, 5, 6]}, [])


def test_a_router_that_is_behind_enqueues_nothing_twice_and_continues_where_the_other_stopped(client: Client) -> None:
    publish(client, "ABABAB")
    ahead, behind = keyed(client, "w1"), keyed(client, "w2", by_field=False)
    assert behind.enqueue_new(count=1, max_pending=MANY) == 1
    assert ahead.enqueue_new(count=3, max_pending=MANY) == 3
    assert behind.enqueue_new(count=10, max_pending=MANY) == 0
    assert behind.enqueue_new(count=10, max_pending=MANY) == 2
    assert (queued_ids(client, "kA", "kB"), violations(behind)) == ([[1, 3, 5], [2, 4, 6]], [])


def test_routers_that_race_enqueue_all_once_and_in_stream_order(client: Client) -> None:
    keys = "".join("ABCDEFG"[n * n % 7] for n in range(1_500))
    publish(client, keys)

    def go_on(name: str, count: int) -> None:
        with Client(client.url) as own:
            worker = keyed(own, name)
            while worker.enqueued_id != b"1500-0":
                worker.enqueue_new(count=count, max_pending=MANY)

    threads = [threading.Thread(target=go_on, args=(f"w{n}", 3 + n)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    found = dict(zip(expected(keys), queued_ids(client, *expected(keys)), strict=True))
    assert (found, violations(keyed(client))) == (expected(keys), [])


def test_a_large_enqueue_in_chunks_is_done_once_in_stream_order_and_within_the_look_ahead(
    client: Client,
) -> None:
    keys = "".join("ABCDEFG"[n * n % 7] for n in range(3_500))
    publish(client, keys)
    worker, other = (keyed(client, name, by_field=False) for name in ("w1", "w2"))
    assert worker.enqueue_new(count=8_000, max_pending=2_600) == 100, "how much is worth reading is not known yet"
    assert worker.enqueue_new(count=8_000, max_pending=2_600) == 2_500
    assert worker.enqueued_id == b"2600-0"
    assert other.enqueue_new(count=8_000, max_pending=2_600) == 0
    client.execute("SCRIPT", "FLUSH")
    assert worker.enqueue_new(count=8_000, max_pending=MANY) == 900
    found = dict(zip(expected(keys), queued_ids(client, *expected(keys)), strict=True))
    assert (found, violations(worker)) == (expected(keys), [])


def test_few_large_entries_are_read_at_once(client: Client) -> None:
    client.pipeline([("XADD", "in", f"{n}-0", "k", "A", "payload", b"x" * 300_000) for n in range(1, 201)])
    worker = keyed(client)
    for _ in range(2):  # also when nothing is known of them yet
        assert worker.enqueue_new(count=8_000, max_pending=MANY) == READ_BYTES // 300_009
    other = keyed(client, "w2")
    other.enqueue_new(count=0, max_pending=MANY)
    for size in (300_009, 0):  # by then it asks for no more than there is room for
        read = other.read_call(count=1_000, max_pending=MANY)
        assert read is not None
        entries, unfit = client.run(read)
        assert (len(entries), unfit) == (READ_BYTES // 300_009, size)
        client.run(other.enqueue_call(entries, max_pending=MANY))


def test_an_entry_that_is_larger_than_the_read_limit_is_read_alone(client: Client) -> None:
    publish(client, "AB")
    client.execute("XADD", "in", "3-0", "k", "C", "payload", b"x" * (READ_BYTES + 1))
    publish(client, "AB", first=4)
    worker = keyed(client, by_field=False)
    assert [worker.enqueue_new(count=100, max_pending=MANY) for _ in range(5)] == [2, 1, 1, 1, 0]
    assert violations(worker) == []


def test_no_more_bytes_are_leased_than_there_is_room_for_and_the_rest_stays_queued(client: Client) -> None:
    for n in range(1, 9):
        client.execute("XADD", "in", f"{n}-0", "k", "AB"[n % 2], "payload", b"x" * (1_000 if n < 5 else 100_000))
    worker = keyed(client)
    worker.enqueue_new(count=100, max_pending=MANY)
    worker.entry_sizes.record(1, 100)  # it expects small ones
    leased = lease_keys(worker, max_bytes=110_000)
    assert (sorted(n for one in leased.leases for n in ids(one)), leased.unfit_bytes) == ([1, 3, 5], 100_009)
    assert pending_by_consumer(client) == {"w1": [1, 3, 5], "waiting": [2, 4, 6, 7, 8]}
    assert violations(worker) == []
    assert [ids(one) for one in lease_keys(worker, max_bytes=2_100).leases] == [[2]]
    worker.release_leases([LeaseRelease(one, "requeue") for one in leased.leases])
    small = lease_keys(worker, max_bytes=10, one_at_least=False)
    assert (small.leases, small.unfit_bytes) == ([], 1_009)
    assert [ids(one) for one in lease_keys(worker, max_bytes=10).leases] == [[1]]
    assert violations(worker) == []


def test_a_read_that_is_too_large_for_the_server_is_repeated_with_less(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    with Client(millstream_fresh_server.url) as client:
        publish(client, "A" * 2_000)
        worker = keyed(client, by_field=False)
        while worker.enqueue_new(count=8_000, max_pending=MANY):
            pass
        client.execute("CONFIG", "SET", "client-output-buffer-limit", "normal 2mb 0 0")
        client.pipeline([("XADD", "in", f"{n}-0", "k", "A", "payload", b"x" * 500_000) for n in range(2_001, 2_101)])
        with pytest.raises(Unavailable):
            worker.enqueue_new(count=8_000, max_pending=MANY)
        routed = 0
        for _ in range(200):  # what is too much again is tried with less again
            with suppress(Unavailable):
                routed += worker.enqueue_new(count=8_000, max_pending=MANY)
        assert routed == 100
        assert violations(worker) == []


def test_the_router_reads_nothing_after_the_greatest_id(client: Client) -> None:
    publish(client, "AB")
    greatest = f"{2**64 - 1}-{2**64 - 1}"
    client.execute("XADD", "in", greatest, "k", "A")
    worker = keyed(client)
    assert worker.enqueue_new(count=100, max_pending=MANY) == 3
    assert worker.enqueue_new(count=100, max_pending=MANY) == 0
    assert worker.read_call(count=100, max_pending=MANY) is None
    assert queued_ids(client, "kA", "kB") == [[1, 2**64 - 1], [2]]
    assert violations(worker) == []


def test_key_queues_have_no_more_entries_than_the_look_ahead(client: Client) -> None:
    publish(client, "A" * 30)
    worker = keyed(client)
    assert worker.enqueue_new(count=100, max_pending=10) == 10
    assert (worker.enqueue_new(count=100, max_pending=10), worker.pending_count) == (0, 10)
    lease = lease_one(worker)
    assert commit(lease, 4)
    assert worker.enqueue_new(count=100, max_pending=10) == 4
    assert len(queued_ids(client, "kA")[0]) == 10


def test_the_script_bounds_a_router_that_assumes_too_much_room_to_the_look_ahead(client: Client) -> None:
    publish(client, "AAAA")
    worker = keyed(client)
    items = [part for n in range(1, 5) for part in (f"{n}-0", "kA")]
    passed, _, pending, last = worker._run_script(ROUTE, (worker.token, worker.group, "0-0", 3, *items))
    assert (passed, pending, last, queued_ids(client, "kA")) == (3, 3, b"3-0", [[1, 2, 3]])


def test_an_entry_for_another_handler_is_not_enqueued(client: Client) -> None:
    publish(client, "AAA")
    worker = keyed(client, by_field=False)
    worker._queue_of = lambda entry_id, pairs: b"" if entry_id == b"2-0" else b"kA"
    worker.enqueue_new(count=10, max_pending=MANY)
    assert (queued_ids(client, "kA"), worker.enqueued_id, violations(worker)) == ([[1, 3]], b"3-0", [])


# --- Leasing ---


def test_key_queues_are_leased_in_rotation_whatever_their_length(client: Client) -> None:
    worker = routed(client, "A" * 20 + "BBCC")
    order = []
    for _ in range(7):
        lease = lease_one(worker, run=2)
        order.append((lease.queue.decode(), ids(lease)))
        assert commit(lease, len(lease.queued))
        worker.release_leases([LeaseRelease(lease, "requeue")])
    assert order == [
        ("kA", [1, 2]),
        ("kB", [21, 22]),
        ("kC", [23, 24]),
        ("kA", [3, 4]),
        ("kA", [5, 6]),
        ("kA", [7, 8]),
        ("kA", [9, 10]),
    ]


def test_several_entries_of_a_key_run_under_one_lease_and_may_be_committed_in_parts(client: Client) -> None:
    worker = routed(client, "AAAAAB")
    lease = lease_one(worker, run=4)
    assert (ids(lease), lease.key) == ([1, 2, 3, 4], b"A")
    assert commit(lease, 2)
    assert (pending_by_consumer(client), violations(worker)) == ({"w1": [3, 4], "waiting": [5, 6]}, [])
    assert commit(lease)
    worker.release_leases([LeaseRelease(lease, "requeue")])
    assert (pending_by_consumer(client), violations(worker)) == ({"waiting": [4, 5, 6]}, [])
    drain(worker)
    assert outputs(client) == expected("AAAAAB")


def test_a_key_queue_is_leased_to_one_worker_at_a_time(client: Client) -> None:
    first, second = routed(client, "ABCABC"), keyed(client, "w2")
    mine, theirs = lease_keys(first, queues=2).leases, lease_keys(second).leases
    assert [one.queue for one in mine + theirs] == [b"kA", b"kB", b"kC"]
    assert lease_keys(first).leases == []
    first.release_leases([LeaseRelease(mine[0], "requeue")])
    assert [one.queue for one in lease_keys(second).leases] == [b"kA"]


def test_workers_that_race_lease_each_key_queue_one_at_a_time_and_commit_in_order(client: Client) -> None:
    keys = "".join("ABCDE"[n * n % 5] for n in range(400))
    publish(client, keys)
    inside: set[bytes] = set()
    overlaps: list[bytes] = []

    def go_on(name: str) -> None:
        with Client(client.url) as own:
            worker = keyed(own, name)
            while sum(map(len, outputs(own).values())) < len(keys):
                worker.enqueue_new(count=20, max_pending=100)
                for lease in lease_keys(worker, queues=2, run=3).leases:
                    if lease.queue in inside:
                        overlaps.append(lease.queue)
                    inside.add(lease.queue)
                    assert commit(lease, len(lease.queued))
                    inside.remove(lease.queue)
                    worker.release_leases([LeaseRelease(lease, "requeue")])

    threads = [threading.Thread(target=go_on, args=(f"w{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    assert (outputs(client), overlaps, violations(keyed(client))) == (expected(keys), [], [])


def test_one_call_leases_no_more_entries_and_key_queues_than_asked(client: Client) -> None:
    worker = routed(client, "AAABBBCCC")
    found = lease_keys(worker, queues=2, entries=4, run=3).leases
    assert [ids(one) for one in found] == [[1, 2, 3], [4]]
    assert [ids(one) for one in lease_keys(worker, queues=1, entries=9, run=2).leases] == [[7, 8]]


def test_a_lease_brings_the_state_that_was_committed_last(client: Client) -> None:
    worker = routed(client, "AAA")
    lease = lease_one(worker, run=1)
    unit = unit_of(lease)
    unit.state = b"\x01"
    assert (lease.state, worker.commit([unit])) == (b"", [])
    worker.release_leases([LeaseRelease(lease, "requeue")])
    assert lease_one(worker).state == b"\x01"


def test_waiting_workers_are_notified_of_ready_keys_and_notifications_are_bounded(client: Client) -> None:
    worker = routed(client, "AB")
    assert client.execute("LLEN", KEYS.notify) == 2
    client.execute("DEL", KEYS.notify)
    (lease,) = lease_keys(worker, queues=1).leases
    assert client.execute("LLEN", KEYS.notify) == 1  # it left a key queue to the next
    client.execute("DEL", KEYS.notify)
    worker.release_leases([LeaseRelease(lease, "requeue")])
    assert client.execute("LLEN", KEYS.notify) == 1
    for n in range(30):
        park(client, KEYS, b"kB", "x")
        unpark(client, KEYS, b"kB")
        publish(client, "C", first=10 + n)
        worker.enqueue_new(count=1, max_pending=MANY)
    assert client.execute("LLEN", KEYS.notify) == 16


# --- Committing ---


def expired_and_new_lease(client: Client) -> tuple[KeyLease, KeyLease]:
    """A lease that ran out, and the one that took its place."""
    late = lease_one(routed(client, "AAAB"), run=2)
    expire(client)
    return late, next(one for one in lease_keys(keyed(client, "w2")).leases if one.queue == b"kA")


@pytest.mark.parametrize(
    "late_call",
    [
        lambda late: late.stream.commit([unit_of(late)]),
        lambda late: late.stream.renew_leases([late], 1, 0),
        lambda late: late.stream.release_leases([LeaseRelease(late, "requeue")]),
        lambda late: late.stream.release_leases([LeaseRelease(late, "backoff", 1, 9)]),
        lambda late: late.stream.release_leases([LeaseRelease(late, "park", "late")]),
    ],
    ids=["commit", "extend", "release", "back-off", "park"],
)
def test_a_token_that_is_not_the_newest_is_refused_and_changes_nothing(
    client: Client, late_call: Callable[[KeyLease], list[object]]
) -> None:
    late, newest = expired_and_new_lease(client)
    client.execute("DEL", KEYS.notify)

    def everything() -> list[object]:
        kept = [
            client.execute("DUMP", key) for key in sorted(client.execute("KEYS", "millstream:*")) if key[-4:] != b"meta"
        ]
        return [*kept, pending_by_consumer(client), outputs(client)]

    before = everything()
    assert len(late_call(late)) == 1
    assert everything() == before
    assert (newest.fence > late.fence, commit(newest), outputs(client)) == (True, True, {"kA": [1]})


def test_a_refused_commit_is_counted(client: Client) -> None:
    late, _ = expired_and_new_lease(client)
    late.stream.commit([unit_of(late)])
    assert client.execute("HGET", KEYS.meta, "refused") == b"1"


def test_an_expired_lease_stays_valid_until_another_worker_leases_the_key(client: Client) -> None:
    worker = routed(client, "AA")
    lease = lease_one(worker)
    expire(client)
    assert commit(lease)
    assert worker.renew_leases([lease], HOUR_MS, 5) == []
    assert (lease.expires_ms, lease_keys(keyed(client, "w2")).leases, commit(lease)) == (HOUR_MS + 5, [], True)


@pytest.mark.parametrize("chosen", [[1], [1, 2], [0, 2], [0, 1, 3], [2, 1], [0, 0]])
def test_only_the_first_entries_of_a_key_queue_can_be_committed(client: Client, chosen: list[int]) -> None:
    worker = routed(client, "AAAAA")
    lease = lease_one(worker, run=4)
    entries = list(lease.queued)
    unit = worker.key_effects_of(lease, [entries[n] for n in chosen])
    assert worker.commit([unit]) == [unit]
    assert (queued_ids(client, "kA"), pending_by_consumer(client)["w1"]) == ([[1, 2, 3, 4, 5]], [1, 2, 3, 4])
    assert commit(lease, 4)


def test_no_entry_of_another_key_queue_is_committed_under_a_lease(client: Client) -> None:
    worker = routed(client, "AB")
    a, b = lease_keys(worker).leases
    assert worker.commit([worker.key_effects_of(a, list(b.queued))]) != []
    assert worker.commit([Effects(b.queue, a.token, first_id="2-0", last_id="2-0", message_count=1)]) != []
    assert violations(worker) == []


def test_no_entry_of_a_key_queue_is_committed_without_a_lease(client: Client) -> None:
    worker = routed(client, "AB")
    lease, _ = lease_keys(worker).leases
    with pytest.raises(CommandFailed, match="UNLEASED"):
        worker.ack(*lease.queued)
    unleased = worker.effects_of(lease.queued[0])
    unleased.add_outputs([pack_output({"x": 1})])
    assert worker.commit([unleased]) == [unleased]
    assert (outputs(client), violations(worker)) == ({}, [])


def commit_store_of(worker: KeyedStream) -> CommitStore:
    store = CommitStore(worker._client, app="app", handler="handle", into="out", consumer=worker.consumer)
    return store.with_token(worker.token)


def test_a_commit_repeated_under_its_number_gets_the_same_reply_and_doubles_nothing(client: Client) -> None:
    worker = routed(client, "AAB")
    a, b = lease_keys(worker).leases
    store, units = commit_store_of(worker), [unit_of(a, 2), unit_of(b)]
    units.append(worker.key_effects_of(b, [a.queued[0]]))
    for _ in range(3):
        assert store.commit({"in": units}, call_number="life-1") == [units[2]]
    assert outputs(client) == {"kA": [1, 2], "kB": [3]}
    assert client.execute("HMGET", KEYS.meta, "committed", "written", "refused") == [b"3", b"3", b"1"]
    assert len(store.commit({"in": units}, call_number="life-2")) == 3
    assert 0 < client.execute("TTL", f"{KEYS.base}:w1:last") <= 3_600


def test_a_call_number_belongs_to_one_worker(client: Client) -> None:
    first, second = routed(client, "AB"), keyed(client, "w2")
    (a,), (b,) = lease_keys(first, queues=1).leases, lease_keys(second).leases
    assert commit_store_of(first).commit({"in": [unit_of(a)]}, call_number="1") == []
    assert commit_store_of(second).commit({"in": [unit_of(b)]}, call_number="1") == []
    assert outputs(client) == {"kA": [1], "kB": [2]}


def test_a_commit_can_release_its_lease(client: Client) -> None:
    worker = routed(client, "AAAB")
    a, _ = lease_keys(worker, queues=2, run=2).leases
    unit = unit_of(a)
    unit.unfinished = 1
    assert worker.commit([unit]) == []
    assert (pending_by_consumer(client), violations(worker)) == ({"w1": [4], "waiting": [2, 3]}, [])
    assert ids(lease_one(keyed(client, "w2"))) == [2, 3]


def test_nothing_is_committed_under_a_released_lease_not_even_in_the_same_call(client: Client) -> None:
    worker = routed(client, "AAB")
    a, b = lease_keys(worker, run=2).leases
    first, second, other = unit_of(a), unit_of(a, 2), unit_of(b)
    second.first_id, second.other_ids = second.last_id, []
    first.unfinished, other.unfinished = 1, 0
    assert worker.commit([first, second, other]) == [second]
    assert (outputs(client), violations(worker)) == ({"kA": [1], "kB": [3]}, [])
    assert ids(lease_one(worker)) == [2]


def test_a_commit_that_releases_its_lease_keeps_a_key_parked_that_was_parked_meanwhile(client: Client) -> None:
    worker = routed(client, "AAB")
    a, b = lease_keys(worker, run=1).leases
    park(client, KEYS, b"kA", "by hand")
    units = [unit_of(a), unit_of(b)]
    for unit in units:
        unit.unfinished = 0
    assert worker.commit(units) == []
    assert (lease_keys(worker).leases, violations(worker)) == ([], [])
    unpark(client, KEYS, b"kA")
    assert ids(lease_one(worker)) == [2]


def test_an_entry_without_a_key_has_no_state_even_if_a_key_has_its_name(client: Client) -> None:
    worker = routed(client, "-A")
    client.execute("HSET", KEYS.state, "1-0", "of a key", "A", "of A")
    alone, of_key = lease_keys(worker).leases
    assert (alone.queue, alone.state) == (b"i1-0", b"")
    assert (of_key.queue, of_key.state) == (b"kA", b"of A")


# --- Failing ---


def test_keys_that_fail_are_leased_after_the_other_keys(client: Client) -> None:
    worker = routed(client, "ABCDEF")
    failing = lease_keys(worker, queues=3).leases
    assert [one.queue for one in failing] == [b"kA", b"kB", b"kC"]
    worker.release_leases([LeaseRelease(one, "backoff", 0, 1) for one in failing])
    expire(client)
    assert [one.queue for one in lease_keys(worker, queues=3).leases] == [b"kD", b"kE", b"kF"]
    assert [one.queue for one in lease_keys(worker, queues=3).leases] == [b"kA", b"kB", b"kC"]


def test_a_failed_attempt_keeps_its_place_and_is_counted_while_other_keys_run(client: Client) -> None:
    worker = routed(client, "AABB")
    a = lease_one(worker)
    worker.release_leases([LeaseRelease(a, "backoff", HOUR_MS, 1)])
    leased = lease_keys(worker)
    assert [one.queue for one in leased.leases] == [b"kB"]
    assert HOUR_MS / 2 < (leased.wait_ms or 0) <= HOUR_MS + 1
    assert commit(leased.leases[0], 2)
    expire(client, b"kA")
    a = lease_one(keyed(client, "w2"))
    assert (ids(a), [one.attempt for one in a.queued]) == ([1], [2])
    assert commit(a)
    assert (client.execute("EXISTS", KEYS.crashes), violations(worker)) == (0, [])


def test_leases_and_back_offs_end_in_time_after_the_clock_of_redis_went_back(client: Client) -> None:
    worker = routed(client, "AB")
    worker.release_leases([LeaseRelease(lease_one(worker), "backoff", HOUR_MS, 1)])
    lease_keys(worker)
    client.execute("HINCRBY", KEYS.meta, "clock", 5 * HOUR_MS)  # so it is as if all this had been five hours later
    for times in (KEYS.leases, KEYS.backoff):
        for name in client.execute("ZRANGE", times, 0, -1):
            client.execute("ZINCRBY", times, 5 * HOUR_MS, name)
    worker.renew_leases([], HOUR_MS, 0)
    assert 0 < (lease_keys(worker).wait_ms or 0) <= HOUR_MS + 1
    for times in (KEYS.leases, KEYS.backoff):
        ((_, due_ms),) = [client.execute("ZRANGE", times, 0, -1, "WITHSCORES")]
        seconds, microseconds = client.execute("TIME")
        assert float(due_ms) - (1_000 * int(seconds) + int(microseconds) // 1_000) <= HOUR_MS
    assert lease_keys(worker).leases == []


def test_a_key_that_is_returned_untouched_is_leased_before_the_others(client: Client) -> None:
    worker = routed(client, "ABC")
    a = lease_one(worker)
    worker.release_leases([LeaseRelease(a, "return")])
    leases = lease_keys(worker).leases
    assert [(one.queue, one.queued[0].attempt) for one in leases] == [(b"kA", 1), (b"kB", 1), (b"kC", 1)]


def test_one_call_clears_about_a_thousand_trimmed_entries_of_key_queues(client: Client) -> None:
    worker = routed(client, "AB" * 1_500 + "C")
    while worker.enqueue_new(count=8_000, max_pending=MANY):
        pass
    client.execute("XTRIM", "in", "MINID", "3001-0")
    left = []
    while not (leases := lease_keys(worker, run=100).leases):
        left.append(sum(map(len, queued_ids(client, "kA", "kB"))))
    assert left == [2_000, 1_000, 0]
    assert ([ids(lease) for lease in leases], violations(worker)) == ([[3_001]], [])


def test_tokens_grow_even_if_a_failover_has_set_the_newest_token_back(client: Client) -> None:
    worker = routed(client, "A" * 10)
    fences = []
    for fence in (None, 5, None, 10**15, 2**52):
        lease = lease_one(worker, run=1)
        fences.append(lease.fence)
        worker.release_leases([LeaseRelease(lease, "requeue")])
        client.execute(*(("HDEL", KEYS.meta, "fence") if fence is None else ("HSET", KEYS.meta, "fence", fence)))
    fences.append(lease_one(worker).fence)
    assert (fences == sorted(set(fences)), fences[-1] > 2**52) == (True, True)
