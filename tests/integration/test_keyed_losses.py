"""Leases of keys that were lost with their process: counted, leased alone, and given out again after a back-off."""

import pytest

from millstream import Retry
from millstream.admin.key_queues import park
from millstream.delivery.keyed_stream import KeyedStream, LeaseRelease
from millstream.handlers.attempt import Done
from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from millstream.worker.running import losses
from millstream.worker.settling.key_committer import KeyCommitter
from tests.support.keyed_fixtures import (
    HOUR_MS,
    KEYS,
    MANY,
    commit,
    expire,
    ids,
    keyed,
    lease_keys,
    lease_one,
    pending_by_consumer,
    publish,
    routed,
    spark,
    unit_of,
    violations,
)
from tests.support.waiting import eventually
from tests.support.workers import double, make, make_context, outputs, working

pytestmark = [pytest.mark.keys]

DAY_MS = 24 * HOUR_MS


def test_an_entry_that_a_worker_died_of_is_counted_and_leased_alone(client: Client) -> None:
    worker, second = routed(client, "AAAA"), keyed(client, "w2")
    lease = lease_one(worker)
    assert commit(lease)
    expire(client)
    leased = lease_keys(second)
    assert (leased.expired_count, [ids(one) for one in leased.leases]) == (1, [[2]])
    assert (leased.leases[0].queued[0].deliveries, leased.leases[0].queued[0].attempt) == (2, 1)
    expire(client)
    again = lease_one(worker)
    assert (ids(again), again.queued[0].deliveries) == ([2], 3)
    assert (pending_by_consumer(client), violations(worker)) == ({"w1": [2], "waiting": [3, 4]}, [])
    assert commit(again)
    worker.release_leases([LeaseRelease(again, "requeue")])
    assert (ids(lease_one(worker)), client.execute("EXISTS", KEYS.crashes)) == ([3, 4], 0)


def backing_off(client: Client) -> KeyedStream:
    """A worker at which keys back off for an hour after the first loss of their lease."""
    worker = keyed(client, "w2")
    worker.loss_retry = Retry(delay_ms=HOUR_MS, max_delay_ms=4 * HOUR_MS)
    return worker


def due_in_hours(client: Client) -> list[tuple[bytes, int]]:
    """The keys that back off, and when they are due."""
    seconds, microseconds = client.execute("TIME")
    now_ms = 1_000 * int(seconds) + int(microseconds) // 1_000
    found = client.execute("ZRANGE", KEYS.backoff, 0, -1, "WITHSCORES")
    return [(name, round((float(at) - now_ms) / HOUR_MS)) for name, at in zip(found[::2], found[1::2], strict=True)]


def test_a_key_whose_worker_was_lost_with_the_lease_backs_off_while_other_keys_run(client: Client) -> None:
    lost = lease_one(routed(client, "AABB"))
    worker = backing_off(client)
    expire(client)
    leased = lease_keys(worker)
    assert (leased.expired_count, [one.queue for one in leased.leases]) == (1, [b"kB"])
    assert (due_in_hours(client), violations(worker)) == ([(b"kA", 1)], [])
    assert HOUR_MS / 2 < (leased.wait_ms or 0) <= HOUR_MS + 1
    assert not commit(lost)
    worker.release_leases([LeaseRelease(leased.leases[0], "return")])
    expire(client)
    found = lease_keys(worker).leases
    assert [(one.queue, ids(one)) for one in found] == [(b"kA", [1]), (b"kB", [3, 4])], "it has kept its turn"
    assert [one.queued[0].deliveries for one in found] == [2, 1]


def test_the_back_off_of_lost_leases_grows_up_to_its_limit(client: Client) -> None:
    routed(client, "A")
    worker, hours = backing_off(client), []
    for _ in range(4):
        expire(client)
        lease_one(worker)
        expire(client)
        lease_keys(worker)
        hours += due_in_hours(client)
    assert hours == [(b"kA", 1), (b"kA", 2), (b"kA", 4), (b"kA", 4)]


@pytest.mark.parametrize("how", ["expires", "restarts"])
def test_the_worker_that_finds_the_mark_of_an_isolated_run_gets_it_at_once_as_it_waits_itself(
    client: Client, how: str
) -> None:
    routed(client, "A")
    first = keyed(client, "w2")
    lease = lease_one(first)
    first.begin_isolation(lease.queued[0], "dead-0 w2")
    worker = backing_off(client)
    if how == "expires":
        expire(client)
    else:
        worker.recover_leases([], run=100)
    found = lease_one(worker)
    worker.record_deaths(found.queued[0], 1)
    expire(client)
    assert lease_keys(worker).leases == [], "lost again before it was run"


def test_the_keys_of_a_dead_process_back_off_at_its_restart_but_for_lost_replies_and_parked_ones(
    client: Client,
) -> None:
    routed(client, "ABC")
    lease_keys(keyed(client, "w2"), queues=2)
    park(client, KEYS, b"kB", "by hand")
    worker = backing_off(client)
    lease_keys(worker)  # the reply to this is lost
    assert worker.recover_leases([], run=100) == (2, 1)
    assert (due_in_hours(client), violations(worker)) == ([(b"kA", 1)], [])
    assert [one.queue for one in lease_keys(worker).leases] == [b"kC"]


@pytest.mark.parametrize("how", ["expires", "restarts"])
def test_on_a_worker_a_key_whose_lease_was_lost_waits_while_others_run_for_a_second_at_most(
    client: Client, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    handler = make(double, key="k", retry=Retry(attempts=4, delay_ms=DAY_MS, max_delay_ms=DAY_MS))
    name = "w1" if how == "restarts" else "w2"
    lost = routed(client, "AB", "w1")
    assert lease_one(lost).queue == b"kA"
    if how == "expires":
        expire(client)
    with monkeypatch.context() as patch:
        patch.setattr(losses, "_MAX_LOSS_DELAY_MS", DAY_MS)
        with working(client, handler, name):
            for n in range(2, 6):
                eventually(lambda: outputs(client) == list(range(2, n + 1)), "the other key")  # noqa: B023 - at once
                publish(client, "B", first=n + 1)
            eventually(lambda: outputs(client) == [2, 3, 4, 5, 6], "the other key")
    expire(client)
    assert lease_one(keyed(client, "w1")).queue == b"kA"
    if how == "expires":
        expire(client)
    with working(client, handler, name):
        eventually(lambda: outputs(client) == [2, 3, 4, 5, 6, 1], "it, after a second at most")


def test_an_entry_that_a_worker_died_of_is_leased_alone_even_behind_others(client: Client) -> None:
    worker = routed(client, "AAAAA")
    client.execute("HSET", KEYS.crashes, "3-0l", 1)
    for expected_ids in ([1, 2], [3], [4, 5]):
        lease = lease_one(worker)
        assert ids(lease) == expected_ids
        assert commit(lease, len(expected_ids))
        worker.release_leases([LeaseRelease(lease, "requeue")])


def test_an_isolated_entry_is_leased_alone_until_an_attempt_ends(client: Client) -> None:
    worker = routed(client, "AA")
    lease = lease_one(worker)
    worker.begin_isolation(lease.queued[0], "a w1")
    expire(client)
    again = lease_one(keyed(client, "w2"))
    assert ids(again) == [1]
    again.stream.release_leases([LeaseRelease(again, "requeue", "", 1)])
    counts = mapping_of(client.execute("HGETALL", KEYS.crashes))
    assert counts.pop(b"1-0s") > b"0", "since when it has failed"
    assert counts == {b"1-0l": b"1", b"1-0f": b"1"}


def test_the_isolation_of_a_dead_process_is_kept_when_its_key_is_returned_untouched(client: Client) -> None:
    worker = routed(client, "AA")
    worker.begin_isolation(lease_one(worker).queued[0], "dead-0 w1")
    expire(client)
    other = keyed(client, "w2")
    lease = lease_one(other)
    other.release_leases([LeaseRelease(lease, "return")])
    assert other.isolation_state(lease_one(other).queued[0]) == (0, "dead-0 w1")


def test_an_entry_that_a_spark_task_died_of_is_leased_alone(client: Client) -> None:
    publish(client, "AA")
    spark(client).set_crash_count("in", "1-0", 1)
    worker = keyed(client)
    worker.enqueue_new(count=10, max_pending=MANY)
    assert ids(lease_one(worker)) == [1]


def test_a_restarted_worker_ends_the_leases_of_its_former_incarnation_at_once(client: Client) -> None:
    routed(client, "AABBC")
    old = keyed(client, "w1")
    mine = lease_keys(old, queues=2).leases
    lease_keys(keyed(client, "w2"))
    again = keyed(client, "w1")
    assert again.recover_leases([], run=100) == (2, 0)
    assert again.recover_leases([], run=100) == (0, 0)
    assert (pending_by_consumer(client), violations(again)) == ({"waiting": [1, 2, 3, 4], "w2": [5]}, [])
    found = lease_keys(again).leases
    assert sorted((ids(one), one.queued[0].deliveries) for one in found) == [([1], 2), ([3], 2)]
    assert old.commit([unit_of(mine[0])]) != []


def test_a_lease_whose_reply_was_lost_ends_without_a_crash_count_and_known_leases_stay(client: Client) -> None:
    worker = routed(client, "AABB")
    known = lease_one(worker)
    lease_keys(worker)  # the reply to this is lost
    assert worker.recover_leases([known], run=100) == (0, 1)
    assert commit(known)
    assert [(ids(one), one.queued[0].deliveries) for one in lease_keys(worker).leases] == [([3, 4], 1)]


def test_a_run_whose_entry_left_flight_meanwhile_commits_nothing_of_its_key(client: Client) -> None:
    worker = routed(client, "AAB")
    context = make_context(client, make(double, key="key"))
    committer = KeyCommitter(context, release=lambda released: None, on_lease_end=lambda stream: None)
    leases = lease_keys(worker).leases
    context.in_flight.add_leases(leases, 0)
    for lease in leases:
        for one in lease.entries:
            one.running = one.finished = True
        lease.queued.clear()
        lease.last_run = lease.entries[-1]
    context.in_flight.remove(leases[0].entries[:1])
    committer.settle([((one,), Done((), b"")) for lease in leases for one in lease.entries])
    assert [lease.expired for lease in leases] == [True, False]
    assert client.execute("HGET", worker._store.keys("in").meta, "committed") == b"1"
