"""`Retry(then="cancel")`: the dead letter of a key takes the messages with it that wait behind it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from millstream import Message, Reject, Retry, State
from millstream.admin.key_queues import list_queues, park, skip, unpark
from millstream.delivery.cancellation import read_cancellations
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue
from millstream.delivery.keyed_stream import KeyLease, LeaseRelease
from millstream.errors import ConfigError
from millstream.handlers.attempt import DeadLettered
from millstream.redis_client.client import Client
from millstream.services.master.settings import MasterSettings
from millstream.testing.invariants import check_invariants
from millstream.worker.handler_steps import HandlerSteps
from tests.support.commandline import call
from tests.support.fields import text_fields
from tests.support.keyed_fixtures import MANY, commit, expire, ids, keyed, lease_keys, lease_one, publish, routed
from tests.support.waiting import eventually
from tests.support.workers import KEYS, QUICK, dead, double, make, pending, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]

CANCEL = Retry(attempts=2, delay_ms=10, then="cancel")
A = b"kA"


class Runs:
    """A handler that records its runs, and fails or rejects what `fails` says."""

    def __init__(self, *fails: int) -> None:
        self.seen: list[int] = []
        self.fails = set(fails)

    def run(self, message: Message, state: State) -> dict[str, Any]:
        n = int(message.fields["n"])
        self.seen.append(n)
        if n in self.fails:
            raise Reject("no") if message.text("how") == "reject" else RuntimeError("no")
        state["count"] = state.get("count", 0) + 1
        return {"n": n, "count": state["count"]}

    async def run_async(self, message: Message, state: State) -> dict[str, Any]:
        await asyncio.sleep(0)
        return self.run(message, state)


def add(client: Client, numbers: range, key: str = "A", **fields: str) -> None:
    more = [part for pair in fields.items() for part in pair]
    client.pipeline([("XADD", "in", "*", "n", n, "key", key, *more) for n in numbers])


def outputs(client: Client) -> list[int]:
    return [int(text_fields(pairs)["n"]) for _, pairs in client.execute("XRANGE", "out", "-", "+")]


def letters(client: Client) -> list[tuple[int, str]]:
    return [(int(letter.pairs[1]), letter.reason) for letter in dead(client)]


def done(client: Client, count: int) -> Callable[[], bool]:
    return lambda: client.execute("HGET", KEYS.meta, "committed") == str(count).encode() and not pending(client)


@pytest.mark.parametrize("how", ["fail", "reject"])
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_what_was_published_before_a_dead_letter_of_its_key_is_canceled_and_later_messages_run(
    client: Client, how: str, is_async: bool
) -> None:
    runs = Runs(2)
    handler = make(runs.run_async if is_async else runs.run, key="key", retry=CANCEL)
    add(client, range(60), how=how)
    add(client, range(100, 110), key="B")
    with working(client, handler):
        eventually(done(client, 70), "the drain")
        assert sorted(set(runs.seen)) == [0, 1, 2, *range(100, 110)]
        add(client, range(60, 63))
        eventually(done(client, 73), "the later messages")
    assert sorted(outputs(client)) == [0, 1, *range(60, 63), *range(100, 110)]
    reason = "failed" if how == "fail" else "rejected"
    assert letters(client) == [(2, reason), *((n, "canceled") for n in range(3, 60))]
    first, *rest = dead(client)
    assert {letter.error for letter in rest} == {f"message {first.id} of its key became a dead letter before it"}
    assert {letter.attempts for letter in rest} == {0}
    assert (check_invariants(client, KEYS, "in"), client.execute("EXISTS", KEYS.canceled)) == ([], 0)


def test_messages_that_no_worker_has_enqueued_yet_are_canceled_too(client: Client) -> None:
    runs = Runs(0)
    add(client, range(200))
    with working(client, make(runs.run, key="key", retry=CANCEL), policy=replace(QUICK, look_ahead=5)):
        eventually(done(client, 200), "the drain")
    assert (set(runs.seen), len(letters(client)), outputs(client)) == ({0}, 200, [])


def test_without_the_option_a_key_continues_after_a_dead_letter(client: Client) -> None:
    runs = Runs(0)
    add(client, range(5))
    with working(client, make(runs.run, key="key", retry=replace(CANCEL, then="dead-letter"))):
        eventually(done(client, 5), "the drain")
    assert (outputs(client), letters(client)) == ([1, 2, 3, 4], [(0, "failed")])


def test_messages_of_other_keys_and_without_a_key_are_not_canceled(client: Client) -> None:
    runs = Runs(0)
    add(client, range(1))
    client.execute("XADD", "in", "*", "n", 1, "other", "A")
    client.execute("XADD", "in", "*", "n", 2, "other", "A")
    with working(client, make(runs.run, key="key", retry=CANCEL, missing_key="unordered")):
        eventually(done(client, 3), "the drain")
    assert (sorted(outputs(client)), letters(client)) == ([1, 2], [(0, "failed")])


# --- Step by step, without a worker's threads


STEPS = HandlerSteps(make(Runs().run, key="k", retry=CANCEL))


def dies(lease: KeyLease) -> bool:
    """Commit the dead letter of the first entry of a lease; False if it was refused."""
    return settles(lease, DeadLettered("failed", "no"))


def settles(lease: KeyLease, outcome: DeadLettered) -> bool:
    delivery = lease.queued.popleft()
    effects = STEPS.commit_key(lease, [(delivery, outcome)])
    lease.in_flight_count -= 1
    return lease.stream.commit([effects]) == []


def cancel_leased(lease: KeyLease) -> list[int]:
    """Commit the dead letters of the entries of a lease that are canceled; return their numbers."""
    found = []
    while lease.queued and (outcome := STEPS.canceled(lease.queued[0])) is not None:
        found += ids(lease)[:1]
        assert settles(lease, outcome)
    return found


def released(lease: KeyLease) -> None:
    assert lease.stream.release_leases([LeaseRelease(lease, "requeue")]) == []


def test_the_next_worker_continues_a_cancellation_of_which_the_first_has_died_at_any_step(client: Client) -> None:
    first = routed(client, "AAAAAA")
    lease = lease_one(first)
    assert dies(lease)
    publish(client, "AA", first=7)
    for number in range(2, 6):  # each worker dies after one entry more
        expire(client)
        lease = lease_one(keyed(client, f"w{number}"), run=4)
        assert ids(lease)[0] == number
        canceled = STEPS.canceled(lease.queued[0])
        assert canceled is not None
        assert settles(lease, canceled)
    expire(client)
    last = keyed(client, "last")
    last.enqueue_new(count=10, max_pending=MANY)
    lease = lease_one(last)
    assert (ids(lease), cancel_leased(lease), ids(lease)) == ([6], [6], [])
    released(lease)
    lease = lease_one(last)
    assert (ids(lease), lease.cancellation, cancel_leased(lease)) == ([7, 8], None, [])
    assert client.execute("EXISTS", KEYS.canceled) == 0
    assert [letter.reason for letter in dead(client)] == ["failed", *5 * ["canceled"]]
    assert [letter.id for letter in dead(client)] == [f"{n}-0" for n in range(1, 7)]


def test_a_dead_letter_whose_commit_is_refused_cancels_nothing(client: Client) -> None:
    worker = routed(client, "AAA")
    lease = lease_one(worker)
    expire(client)
    other = lease_one(keyed(client, "w2"))
    assert not dies(lease)
    assert (client.execute("EXISTS", KEYS.canceled, KEYS.dead_letters), other.cancellation) == (0, None)
    assert commit(other)


def test_a_worker_that_runs_a_message_which_is_canceled_meanwhile_commits_nothing(client: Client) -> None:
    stale = lease_one(routed(client, "AA"))
    assert dies(stale)
    expire(client)
    second = lease_one(keyed(client, "w2"))
    assert cancel_leased(second) == [2]
    assert (commit(stale), client.execute("EXISTS", "out")) == (False, 0)


def test_a_key_may_be_parked_and_skipped_while_it_is_canceled(client: Client) -> None:
    worker = routed(client, "AAAA")
    lease = lease_one(worker, run=1)
    assert dies(lease)
    assert park(client, KEYS, A, "wait")
    released(lease)
    assert (lease_keys(worker).leases, skip(client, KEYS, A, error="x")) == ([], "2-0")
    assert unpark(client, KEYS, A)
    lease = lease_one(worker)
    assert cancel_leased(lease) == [3, 4]
    assert (client.execute("EXISTS", KEYS.canceled), check_invariants(client, KEYS, "in")) == (0, [])


def test_ended_cancellations_of_keys_without_later_messages_are_dropped_with_later_dead_letters(client: Client) -> None:
    """Entries that no worker had enqueued came after them, so each of the keys might have had more to cancel."""
    names = [chr(one) for one in range(ord("B"), ord("Z"))]
    publish(client, "".join(names))
    worker = keyed(client)
    worker.enqueue_new(count=len(names), max_pending=MANY)
    publish(client, "A", first=100)
    for lease in lease_keys(worker).leases:
        assert dies(lease)
        released(lease)
    assert client.execute("HLEN", KEYS.canceled) == len(names)
    for n in range(len(names)):
        worker.enqueue_new(count=10, max_pending=MANY)
        lease = lease_one(worker)
        assert dies(lease)
        released(lease)
        publish(client, "A", first=101 + n)
    assert client.execute("EXISTS", KEYS.canceled) == 0


def test_a_canceled_message_that_workers_have_died_with_runs_nowhere_and_is_not_isolated(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    lease = lease_one(routed(client, "AA"), run=1)
    assert dies(lease)
    client.execute("HSET", KEYS.crashes, "2-0l", 9)
    released(lease)
    runs = Runs()
    with working(client, make(runs.run, key="k", retry=CANCEL)):
        eventually(done(client, 2), "the drain")
    assert (runs.seen, [letter.reason for letter in dead(client)]) == ([], ["failed", "canceled"])
    assert ("isolation" in caplog.text, client.execute("EXISTS", KEYS.crashes)) == (False, 0)


def test_a_cancellation_names_the_dead_message_and_the_last_id_that_the_stream_had(client: Client) -> None:
    worker = routed(client, "AAB")
    assert dies(lease_one(worker))
    found = read_cancellations(client, KEYS, [A, b"kB"])
    assert {name: (one.canceled_by, str(one.up_to)) for name, one in found.items()} == {A: ("1-0", "3-0")}
    assert [queue.length for queue in list_queues(client, KEYS) if queue.name == A] == [1]


# --- Redrive


def test_a_redrive_of_the_key_brings_back_the_dead_message_first_and_then_the_canceled_ones(client: Client) -> None:
    runs = Runs(1)
    handler = make(runs.run, key="key", retry=CANCEL)
    add(client, range(120))
    add(client, range(200, 203), key="B")
    with working(client, handler):
        eventually(done(client, 123), "the drain")
    assert len(letters(client)) == 119
    listed = call("dlq", "list", "app.handle", "--count", "--json", url=client.url)
    assert {row["reason"]: row["count"] for row in listed.json_lines()} == {"failed": 1, "canceled": 118}
    back = call("dlq", "redrive", "app.handle", "--key", "A", "--yes", "--json", url=client.url)
    assert back.json() == {"selected": 119, "redriven": 119, "dry_run": False}
    with working(client, handler):
        eventually(done(client, 242), "the second drain")
    assert [n for n, _ in letters(client)] == [1, *range(2, 120)], "it fails again, and cancels the rest again"
    runs.fails.clear()
    queue = DeadLetterQueue(client)
    assert all(one.new_id for one in queue.redrive(queue.select(DeadLetterFilter(key=b"A"))))
    with working(client, handler):
        eventually(done(client, 361), "the third drain")
    assert [n for n in outputs(client) if n < 200] == list(range(120))
    assert letters(client) == []


# --- Where the option is refused


def test_the_option_needs_a_key() -> None:
    with pytest.raises(ConfigError, match=r'Retry\(then="cancel"\) cancels the rest of keys, and the handler has none'):
        make(double, retry=CANCEL)


def test_a_master_refuses_the_option() -> None:
    with pytest.raises(ConfigError, match="is for handlers of an app"):
        MasterSettings(ticket_stream="in", group="g", retry=CANCEL)
