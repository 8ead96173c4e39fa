"""Failed attempts on messages that a worker has lost meanwhile: they have no consequence, and are logged all the same."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from millstream import Retry
from millstream.admin.key_queues import skip
from millstream.delivery.effects import Effects
from millstream.delivery.keyed_stream import KeyedStream, KeyLease
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.handlers.attempt import DeadLettered, Outcome, Parked, RetryLater
from millstream.redis_client.client import Client
from millstream.worker.context import WorkerContext
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.settling.claim_renewal import ClaimRenewer
from millstream.worker.settling.committer import Committer
from millstream.worker.settling.key_committer import KeyCommitter
from millstream.worker.settling.key_lease_renewal import KeyLeaseRenewer
from tests.support.keyed_fixtures import KEYS, lease_keys, routed
from tests.support.workers import double, fill, make, make_context

pytestmark = [pytest.mark.worker, pytest.mark.keys]

ERROR = "ValueError: the bank refuses"
RETRY, DEAD, PARKED = RetryLater(10.0, ERROR), DeadLettered("failed", ERROR), Parked("failed", ERROR)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "millstream.failures"]


def line_of(delivery: Delivery, *, key: str = "") -> str:
    return (
        f"app.handle: attempt 1 of 3 failed on message {delivery.id.decode()} of in{key}: {ERROR}; "
        "the message is another worker's now, or was skipped or deleted; this attempt does not count"
    )


def fetched(client: Client, count: int = 1, **options: Any) -> tuple[list[Delivery], WorkerContext, Committer]:
    fill(client, count)
    stream = ReliableStream(client, "in", app="app", handler="handle", consumer="w")
    stream.join()
    found = stream.fetch(count=count)
    context = make_context(client, make(double, **options))
    context.in_flight.add(found, 0)
    return found, context, Committer(context, release=lambda released: None)


def leased(client: Client, keys: str, **options: Any) -> tuple[list[KeyLease], WorkerContext, KeyCommitter]:
    worker = routed(client, keys)
    context = make_context(client, make(double, key="k", **options))
    leases = lease_keys(worker).leases
    context.in_flight.add_leases(leases, 0)
    return leases, context, KeyCommitter(context, release=lambda released: None, on_lease_end=lambda stream: None)


def ended(lease: KeyLease, outcome: Outcome) -> tuple[Sequence[Delivery], Outcome]:
    """The run of the first message of a lease, after which no other one runs."""
    lease.last_run = lease.entries[0]
    return lease.entries[:1], outcome


def test_a_failed_attempt_on_an_entry_that_another_worker_has_claimed_is_logged(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    found, context, committer = fetched(client, 2)
    context.in_flight.remove(found)  # as the renewal of claims does
    committer.settle([(found[:1], RETRY), (found[1:], DEAD)])
    assert lines(caplog) == [line_of(one) for one in found]
    assert client.execute("EXISTS", KEYS.crashes, KEYS.dead_letters) == 0


def test_the_cause_of_a_dead_letter_that_redis_refuses_is_logged(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    found, _, committer = fetched(client)
    client.execute("XCLAIM", "in", KEYS.group, "other", 0, found[0].id)
    committer.settle([(found, DEAD)])
    committer.finish()
    assert lines(caplog) == [line_of(found[0])]
    assert client.execute("EXISTS", KEYS.dead_letters) == 0


def test_a_message_that_did_not_run_has_no_failed_attempt(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    found, context, committer = fetched(client)
    context.in_flight.remove(found)
    committer.settle([(found, RetryLater(10.0, "no permit", limited=b"ann"))])
    committer.settle([(found, DeadLettered("canceled", "by 1-0"))])
    assert lines(caplog) == []


def renewed(client: Client, lease: KeyLease, context: WorkerContext) -> None:
    lease.stream.renew_leases([lease], 60_000, 0)
    context.in_flight.remove_lease(lease)


def unnoticed(client: Client, lease: KeyLease, context: WorkerContext) -> None:
    """The worker learns of it from Redis, which refuses what it does under the lease."""


@pytest.mark.parametrize("notice", [renewed, unnoticed])
@pytest.mark.parametrize("outcome", [RETRY, DEAD, PARKED])
def test_a_failed_attempt_on_a_key_whose_lease_was_lost_is_logged_once(
    client: Client,
    caplog: pytest.LogCaptureFixture,
    outcome: Outcome,
    notice: Callable[[Client, KeyLease, WorkerContext], None],
) -> None:
    (lease,), context, committer = leased(client, "AA")
    first = lease.entries[0]
    skip(client, KEYS, lease.queue, error="an operator")
    notice(client, lease, context)
    caplog.clear()
    letters = client.execute("XLEN", KEYS.dead_letters)
    committer.settle([ended(lease, outcome)])
    assert lines(caplog) == [line_of(first, key=", key A")]
    assert client.execute("XLEN", KEYS.dead_letters) == letters
    assert client.execute("HGET", KEYS.crashes, first.id.decode() + "f") is None
    assert context.in_flight.leases == set()


def test_a_failed_attempt_after_messages_that_are_committed_is_logged_if_its_lease_is_lost_then(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lease,), context, committer = leased(client, "AA")
    first, second = lease.entries
    release = KeyedStream.release_leases

    def lost_before(stream: KeyedStream, endings: Sequence[object]) -> list[KeyLease]:
        skip(client, KEYS, lease.queue, error="an operator")
        return release(stream, endings)  # type: ignore[arg-type]

    monkeypatch.setattr(KeyedStream, "release_leases", lost_before)
    lease.last_run = second
    committer.settle([((first,), DEAD), ((second,), RETRY)])
    letter, lost = lines(caplog)
    assert letter.startswith("app.handle: dead letter (failed, attempt 1 of 3): ")
    assert lost == line_of(second, key=", key A")
    assert (context.loop_metrics.committed, context.in_flight.leases) == (1, set())


# --- Runs that were given up: the attempt is recorded and logged by then ---

OUTCOMES = pytest.mark.parametrize("outcome", [RETRY, DEAD])
LIMIT = "it took longer than its time limit of 600,000 ms"


@OUTCOMES
@pytest.mark.parametrize("attempts", [1, 3])
def test_a_run_that_fails_after_it_was_given_up_is_not_logged_again(
    client: Client, caplog: pytest.LogCaptureFixture, outcome: Outcome, attempts: int
) -> None:
    found, context, committer = fetched(client, retry=Retry(attempts=attempts), time_limit_ms=600_000)
    assert context.in_flight.start(found[0], 0.0)
    ClaimRenewer(context, {}, release=lambda released: None).give_up(found[0])
    committer.settle([(found, outcome)])
    (line,) = lines(caplog)
    assert LIMIT in line


def test_a_run_that_is_given_up_while_its_dead_letter_is_made_is_not_logged_again(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, context, committer = fetched(client, time_limit_ms=600_000)
    assert context.in_flight.start(found[0], 0.0)
    renewer, make_letter = ClaimRenewer(context, {}, release=lambda released: None), HandlerSteps.dead_letter

    def given_up_before(steps: HandlerSteps, delivery: Delivery, dead: DeadLettered) -> Effects:
        renewer.give_up(delivery)
        return make_letter(steps, delivery, dead)

    monkeypatch.setattr(HandlerSteps, "dead_letter", given_up_before)
    committer.settle([(found, DEAD)])
    committer.finish()
    (line,) = lines(caplog)
    assert LIMIT in line
    assert client.execute("EXISTS", KEYS.dead_letters) == 0


@pytest.mark.parametrize("outcome", [RETRY, DEAD, PARKED])
@pytest.mark.parametrize("retry", [Retry(attempts=1), Retry(attempts=3), Retry(attempts=1, then="park")])
def test_a_run_of_a_key_that_fails_after_it_was_given_up_is_not_logged_again(
    client: Client, caplog: pytest.LogCaptureFixture, outcome: Outcome, retry: Retry
) -> None:
    (lease,), context, committer = leased(client, "AA", retry=retry, time_limit_ms=600_000)
    assert context.in_flight.start(lease.entries[0], 0.0)
    KeyLeaseRenewer(context).give_up(lease.entries[0])
    committer.settle([ended(lease, outcome)])
    (line,) = lines(caplog)
    assert LIMIT in line


@OUTCOMES
def test_a_list_that_fails_after_it_was_given_up_is_not_logged_again_whichever_message_ends_it(
    client: Client, caplog: pytest.LogCaptureFixture, outcome: Outcome
) -> None:
    (lease,), context, committer = leased(client, "AA", time_limit_ms=600_000)
    first, second = lease.entries
    assert context.in_flight.start_list(first, 2, 0.0) == [first, second]
    KeyLeaseRenewer(context).give_up(first)
    lease.last_run = second
    committer.settle([((second,), outcome)])
    (line,) = lines(caplog)
    assert LIMIT in line


def test_a_failed_attempt_whose_outcome_waits_while_the_next_run_of_its_key_is_given_up_is_logged(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    (lease,), context, committer = leased(client, "AA", time_limit_ms=600_000)
    first, second = lease.entries
    for one in lease.entries:
        assert context.in_flight.start(one, 0.0)
        one.finished = one is first
    KeyLeaseRenewer(context).give_up(second)
    committer.settle([((first,), DEAD)])
    assert lines(caplog)[1:] == [line_of(first, key=", key A")]


@pytest.mark.parametrize("kind", ["no key", "key"])
def test_a_failed_attempt_of_a_run_that_was_given_up_without_a_record_is_logged(
    client: Client, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    options: dict[str, Any] = {"retry": Retry(attempts=1), "time_limit_ms": 600_000}
    if kind == "key":
        (lease,), context, committer = leased(client, "A", **options)
        run, keys = lease.entries[0], ", key A"
        assert context.in_flight.start(run, 0.0)
        skip(client, KEYS, lease.queue, error="an operator")
        caplog.clear()
        KeyLeaseRenewer(context).give_up(run)
        committer.settle([ended(lease, DEAD)])
    else:
        found, context, plain = fetched(client, **options)
        run, keys = found[0], ""
        assert context.in_flight.start(run, 0.0)
        client.execute("XCLAIM", "in", KEYS.group, "other", 0, run.id)
        ClaimRenewer(context, {}, release=lambda released: None).give_up(run)
        plain.settle([(found, DEAD)])
    assert lines(caplog) == [line_of(run, key=keys).replace("of 3", "of 1")]
