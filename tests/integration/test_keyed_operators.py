"""What operators do to key queues, and what is reported about them."""

import re
from collections.abc import Sequence

import pytest

from millstream.admin.key_queues import PARK_UNPARK_SKIP, list_queues, park, skip, unpark
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.keyed_stream import KeyedStream, LeaseRelease, queue_of_key
from millstream.errors import ConfigError, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Arg
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
    publish,
    queue_of,
    queued_ids,
    routed,
    violations,
)

pytestmark = [pytest.mark.keys]


def test_a_parked_key_waits_for_an_operator_and_keeps_its_order(client: Client) -> None:
    worker = routed(client, "AAB")
    a = lease_one(worker)
    worker.release_leases([LeaseRelease(a, "park", "bad address", 4)])
    assert [one.queue for one in lease_keys(worker).leases] == [b"kB"]
    publish(client, "AA", first=4)
    worker.enqueue_new(count=10, max_pending=MANY)
    assert (lease_keys(worker).leases, violations(worker)) == ([], [])
    assert (unpark(client, KEYS, b"kA"), unpark(client, KEYS, b"kA")) == (True, False)
    a = lease_one(worker)
    assert (ids(a), a.queued[0].attempt, violations(worker)) == ([1, 2, 4, 5], 1, [])


@pytest.mark.parametrize("how", ["ready", "leased", "backing off"])
def test_a_key_can_be_parked_in_any_state(client: Client, how: str) -> None:
    worker = routed(client, "AA")
    leases = [] if how == "ready" else lease_keys(worker).leases
    if how == "backing off":
        worker.release_leases([LeaseRelease(leases[0], "backoff", 1)])
    assert (park(client, KEYS, b"kA", "wait"), park(client, KEYS, b"kA", "more")) == (True, False)
    assert violations(worker) == []
    if how == "leased":
        assert commit(leases[0])
        worker.release_leases([LeaseRelease(leases[0], "backoff", 1)])
        assert violations(worker) == []
    expire(client)
    assert (lease_keys(worker).leases, violations(worker)) == ([], [])
    assert unpark(client, KEYS, b"kA")
    assert ids(lease_one(worker))[-1] == 2


def test_a_key_that_is_parked_and_unparked_while_it_is_leased_stays_leased(client: Client) -> None:
    worker = routed(client, "AA")
    lease = lease_one(worker)
    assert park(client, KEYS, b"kA", "x")
    assert unpark(client, KEYS, b"kA")
    assert (lease_keys(keyed(client, "w2")).leases, violations(worker), commit(lease)) == ([], [], True)


def test_an_entry_that_is_skipped_becomes_a_dead_letter_and_late_commits_of_it_are_refused(client: Client) -> None:
    worker = routed(client, "AAA")
    lease = lease_one(worker)
    assert skip(client, KEYS, b"kA", error="by hand") == "1-0"
    assert (commit(lease), violations(worker)) == (False, [])
    ((_, items),) = client.execute("XRANGE", KEYS.dead_letters, "-", "+")
    letter = mapping_of(items)
    assert (letter[b"id"], letter[b"key"], letter[b"reason"], letter[b"error"]) == (
        b"1-0",
        b"A",
        b"skipped",
        b"by hand",
    )
    assert ids(lease_one(worker)) == [2, 3]
    assert client.execute("HMGET", KEYS.meta, "committed", "dead") == [b"1", b"1"]
    assert skip(client, KEYS, b"kB", error="nothing") is None


def test_skipping_leaves_a_key_parked_and_ends_its_back_off_and_its_counts(client: Client) -> None:
    worker = routed(client, "AAABB")
    a, b = lease_keys(worker).leases
    worker.release_leases([LeaseRelease(a, "park", "why", 3), LeaseRelease(b, "backoff", HOUR_MS, 2)])
    for queue in (b"kA", b"kB"):
        assert skip(client, KEYS, queue, error="x") is not None
    assert (violations(worker), client.execute("EXISTS", KEYS.crashes)) == ([], 0)
    assert [(one.queue, ids(one)) for one in lease_keys(worker).leases] == [(b"kB", [5])]
    skip(client, KEYS, b"kA", error="x")
    skip(client, KEYS, b"kA", error="x")
    assert (queued_ids(client, "kA"), violations(worker)) == ([[]], [])


def test_a_ready_key_stays_ready_once_when_its_first_entry_is_skipped(client: Client) -> None:
    worker = routed(client, "AAB")
    assert skip(client, KEYS, b"kA", error="x") == "1-0"
    assert (violations(worker), [ids(one) for one in lease_keys(worker).leases]) == ([], [[2], [3]])


def test_only_the_given_entry_is_skipped(client: Client) -> None:
    worker = routed(client, "AA")
    names = (KEYS.meta, KEYS.offsets, KEYS.state, KEYS.crashes, KEYS.dead_letters, KEYS.incomplete, "in")
    assert client.script(PARK_UNPARK_SKIP, names, (KEYS.group, b"kA", "skip", "2-0", "f", "v")) == 0
    assert (violations(worker), client.execute("EXISTS", KEYS.dead_letters)) == ([], 0)


def test_no_entry_is_skipped_if_its_dead_letter_cannot_be_stored(client: Client) -> None:
    worker = routed(client, "AA")
    client.execute("SET", KEYS.dead_letters, "not a stream")
    with pytest.raises(WrongType):
        skip(client, KEYS, b"kA", error="x")
    assert (violations(worker), ids(lease_one(worker))) == ([], [1, 2])
    client.execute("DEL", KEYS.dead_letters)


def test_keys_cannot_be_parked_or_unparked_without_keyed_workers(client: Client) -> None:
    with pytest.raises(ConfigError, match="has not begun on in as a handler with a key"):
        park(client, KEYS, b"kA", "x")
    with pytest.raises(ConfigError, match="has not begun on in as a handler with a key"):
        unpark(client, KEYS, b"kA")


def test_the_list_shows_for_each_key_queue_why_it_waits(client: Client) -> None:
    worker = routed(client, "AAABBCCDDE")
    leases = {one.queue: one for one in lease_keys(worker, queues=4).leases}
    worker.release_leases(
        [LeaseRelease(leases[b"kB"], "backoff", HOUR_MS, 1), LeaseRelease(leases[b"kC"], "park", "bad é", 2)]
    )
    expire(client, b"kD")
    park(client, KEYS, b"kA", "soon")
    found = {one.name: one for one in list_queues(client, KEYS)}
    assert next(iter(found)) == b"kA"
    seen = [
        (one.key, one.state, one.length, one.first_id, one.worker, one.failed_attempts, one.parked_reason)
        for one in found.values()
    ]
    assert sorted(seen, key=repr) == [
        (b"A", "leased", 3, "1-0", "w1", 0, "soon"),
        (b"B", "backing off", 2, "4-0", None, 1, None),
        (b"C", "parked", 2, "6-0", None, 2, "bad é"),
        (b"D", "leased", 2, "8-0", "w1", 0, None),
        (b"E", "ready", 1, "10-0", None, 0, None),
    ]
    why = {name: one.why for name, one in found.items()}
    assert "worker w1 has leased it for" in why[b"kA"]
    assert why[b"kA"].endswith("then it stays parked: soon")
    assert why[b"kB"].startswith("attempt 2 of its first entry, which has failed for ")
    assert why[b"kC"].endswith(": bad é")
    assert "the lease expired" in why[b"kD"]
    assert why[b"kE"] == "waits for a free worker, number 1 of the ready queues"
    store = CommitStore(client, app=KEYS.app, handler=KEYS.handler)
    store.reserve_rate(KEYS.stream, 1 / 3_600, 2)
    why = {one.name: one.why for one in list_queues(client, KEYS)}
    assert re.match(r"waits for a free worker, and for the handler's rate, whose next \S+ \w+ are reserved", why[b"kE"])
    client.execute("HSET", KEYS.meta, "rate_at", "never")
    assert "rate" not in {one.name: one.why for one in list_queues(client, KEYS)}[b"kE"]
    store.set_paused([KEYS.stream], paused=True)
    why = {one.name: one.why for one in list_queues(client, KEYS)}
    assert why[b"kE"] == "waits for the end of the handler's pause, number 1 of the ready queues"
    assert (found[b"kA"].until_ms or 0) - (found[b"kA"].since_ms or 0) in range(HOUR_MS - 1, HOUR_MS + 2)
    assert len(list_queues(client, KEYS, most=2)) == 2
    lease_keys(keyed(client, "w2"))
    assert "its lease expired once" in next(one.why for one in list_queues(client, KEYS) if one.name == b"kD")


@pytest.mark.parametrize(
    ("leased", "expected"), [(False, [b"1-0", b"2-0", b"3-0", b"4-0"]), (True, [b"1-0", b"3-0", b"2-0", b"4-0"])]
)
def test_an_entry_that_is_moved_to_another_queue_comes_before_newer_ones_that_no_worker_has(
    client: Client, leased: bool, expected: list[bytes]
) -> None:
    worker = routed(client, "A-AA")
    leases = {one.queue: one for one in lease_keys(worker, run=2).leases}
    assert [one.id for one in leases[b"kA"].entries] == [b"1-0", b"3-0"]
    if not leased:
        worker.release_leases([LeaseRelease(leases[b"kA"], "return")])
    moved = LeaseRelease(leases[b"i2-0"], "move", b"kA")
    assert worker.release_leases([moved]) == []
    assert client.execute("LRANGE", KEYS.queue(b"kA"), 0, -1) == expected
    assert not client.execute("EXISTS", KEYS.queue(b"i2-0"))
    assert worker.release_leases([moved]) == [leases[b"i2-0"]], "a repeated call changes nothing"
    assert client.execute("LLEN", KEYS.queue(b"kA")) == 4


def test_a_new_lease_of_a_key_outlives_the_one_that_a_skip_has_ended(client: Client) -> None:
    worker = routed(client, "AAA")
    old = lease_one(worker)
    assert skip(client, KEYS, b"kA", error="by hand") == "1-0"
    new = lease_one(worker)
    assert (new.queue, [one.id for one in new.entries]) == (old.queue, [b"2-0", b"3-0"])
    assert worker.renew_leases([old, new], HOUR_MS, 0) == [old]
    assert (old.expired, new.expired) == (True, False)
    assert worker.release_leases([LeaseRelease(old, "return"), LeaseRelease(new, "return")]) == [old]


def test_the_queues_that_entries_move_to_are_prepared_as_those_of_new_entries(client: Client) -> None:
    """On a partition a key may have to wait there until it has left another one."""
    prepared: list[bytes] = []

    class Preparing(KeyedStream):
        def _before_enqueue(self, queues: Sequence[Arg]) -> None:
            prepared.extend(name for name in queues if isinstance(name, bytes))

    publish(client, "AB-")
    earlier = KeyedStream(
        client,
        "in",
        queue_of=lambda entry_id, _: queue_of_key(None, entry_id),
        app="app",
        handler="handle",
        consumer="w0",
    )
    earlier.join()
    earlier.enqueue_new(count=10, max_pending=100)
    worker = Preparing(client, "in", queue_of=queue_of, app="app", handler="handle", consumer="w1")
    worker.join()
    (rest,) = worker.move_to_their_keys(lease_keys(worker).leases)
    assert (rest.queue, prepared) == (b"i3-0", [b"kA", b"kB"])
    assert client.execute("LRANGE", KEYS.ready, 0, -1) == [b"kA", b"kB"]
