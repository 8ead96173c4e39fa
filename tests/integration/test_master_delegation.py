"""What masters do in Redis, step by step, where only the moment matters."""

import pytest

from millstream.admin.key_queues import unpark
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue
from millstream.model import Retry
from millstream.redis_client.client import Client
from millstream.redis_client.pipelining import server_time_ms
from millstream.services.master.acknowledgements import Acknowledger, AckRequest
from millstream.services.master.delegation import Delegator
from millstream.services.master.queries import Queries
from millstream.services.master.registry import Registry
from millstream.services.master.settings import MasterSettings
from millstream.services.web.errors import Refused
from tests.support.clocks import ManualClock
from tests.support.command_stats import scripts_run
from tests.support.dead_letters import add_dead_letter
from tests.support.masters import GROUP, KEYS, STREAM, holders, is_clean, publish
from tests.support.waiting import eventually

pytestmark = [pytest.mark.master]

SETTINGS = MasterSettings(ticket_stream=STREAM, group=GROUP, lease_ms=1_000)


@pytest.fixture
def registry(client: Client) -> Registry:
    return Registry(client, KEYS)


@pytest.fixture
def delegator(client: Client, registry: Registry) -> Delegator:
    found = Delegator(client, registry, SETTINGS)
    found.join()
    return found


def join(delegator: Delegator, registry: Registry, name: str, count: int = 1) -> list[str]:
    """Register a consumer; return the ids that it is given."""
    found = registry.register(name, health_url=None, max_tickets=10, instance="", silent_ms=1_000)
    delegator.group_stream.enqueue_new(count=100, max_pending=1_000)
    return [one.decode() for one in delegator.assign(name, found, count=count)]


def lose(delegator: Delegator, registry: Registry, name: str) -> None:
    """Have a consumer begin another life, so that what it had is lost to it."""
    registry.register(name, health_url=None, max_tickets=10, instance="", silent_ms=1_000)
    delegator.group_stream.renew_consumer_leases()


def acknowledge(client: Client, delegator: Delegator, name: str, message_id: str) -> tuple[bool, list[str]]:
    """Whether a message is done only now, and what its consumer is given next. Raises Refused."""
    (found,) = Acknowledger(client, Registry(client, KEYS), delegator).acknowledge(
        [AckRequest(name, [message_id.encode()])]
    )
    for _, refusal in found.refused:
        raise refusal
    return bool(found.newly_acked), [one.decode() for one in found.next_ids]


def test_a_consumer_does_not_get_the_next_message_while_the_one_before_is_being_committed(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    first, second = publish(client, "A", "A")
    assert join(delegator, registry, "c1") == [first]
    (lease,) = delegator.leases_of("c1")
    assert not delegator.group_stream.commit([delegator.group_stream.key_effects_of(lease, list(lease.queued))])
    delegator.group_stream.renew_consumer_leases()
    assert holders(client) == {second: "waiting"}
    # The master has died there.
    eventually(
        lambda: delegator.group_stream.renew_consumer_leases() and holders(client) == {second: "c1"},
        "another one to go on with it",
    )
    assert acknowledge(client, delegator, "c1", second) == (True, [])
    delegator.group_stream.renew_consumer_leases()
    assert is_clean(client)


def leases_have_ended(client: Client) -> None:
    """Wait until all leases are over by the server's clock, as after an outage that was longer than they last."""
    eventually(
        lambda: not client.execute("ZCOUNT", KEYS.leases, server_time_ms(client), "+inf"), "the end of the leases"
    )


def test_an_acknowledged_message_is_not_assigned_again_after_its_lease_has_expired(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    first, second = publish(client, "A", "A")
    assert join(delegator, registry, "c1") == [first]
    assert client.execute("XACK", STREAM, GROUP, first) == 1
    leases_have_ended(client)
    assert join(delegator, registry, "c2") == []
    assert delegator.group_stream.renew_consumer_leases().acknowledged == [first.encode()]
    assert delegator.assign("c2", registry.get("c2"), count=1) == [second.encode()]


def test_a_consumer_that_is_still_alive_keeps_its_message_after_its_lease_has_expired(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    (only,) = publish(client, "A")
    assert join(delegator, registry, "c1") == [only]
    leases_have_ended(client)
    assert join(delegator, registry, "c2") == []
    tended = delegator.group_stream.renew_consumer_leases()
    assert (tended.renewed, tended.revoked) == (1, [])
    assert client.execute("HLEN", KEYS.crashes) == 0
    assert acknowledge(client, delegator, "c1", only) == (True, [])


def test_two_masters_assign_no_consumer_more_than_it_asked_for(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    publish(client, *(f"T{n}" for n in range(30)))
    assert len(join(delegator, registry, "c1", count=8)) == 8
    other = Delegator(client, registry, SETTINGS)
    assert len(other.assign("c1", registry.get("c1"), count=8)) == 2
    assert not delegator.assign("c1", registry.get("c1"), count=8)


def test_a_lease_of_a_former_incarnation_ends_and_cannot_be_acknowledged(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    (only,) = publish(client, "A")
    join(delegator, registry, "c1")
    before = delegator.leases_of("c1")[0]
    registry.register("c1", health_url=None, max_tickets=1, instance="", silent_ms=1_000)
    assert [(lost.id.decode(), lost.cause) for lost in delegator.group_stream.renew_consumer_leases().revoked] == [
        (only, "registered")
    ]
    with pytest.raises(Refused, match="does not have"):
        acknowledge(client, delegator, "c1", only)
    assert delegator.group_stream.commit([delegator.group_stream.key_effects_of(before, list(before.queued))])
    assert join(delegator, registry, "c2") == [only]


def test_a_message_counts_its_lost_leases_by_cause_and_not_those_of_consumers_that_have_left(
    client: Client, registry: Registry
) -> None:
    settings = MasterSettings(ticket_stream=STREAM, group=GROUP, delegation_ms=100, retry=Retry(attempts=4))
    delegator = Delegator(client, registry, settings)
    delegator.join()
    (only,) = publish(client, "A")

    def end(name: str, cause: str) -> None:
        assert join(delegator, registry, name) == [only]
        found = registry.get(name)
        assert found is not None
        if cause == "left":
            registry.unregister(name)
        elif cause == "unhealthy":
            assert registry.record_failure(name, found.incarnation, silent_ms=0)
            registry.register(name, health_url=None, max_tickets=1, instance="", silent_ms=1_000)  # and it is back
        elif cause == "registered":
            registry.register(name, health_url=None, max_tickets=1, instance="another", silent_ms=1_000)
        revoked = eventually(lambda: delegator.group_stream.renew_consumer_leases().revoked, "the end of its lease")
        assert [(one.holder, one.cause) for one in revoked] == [(name, cause)]

    end("c1", "unhealthy")
    end("c2", "registered")
    end("c3", "stuck")
    end("c4", "left")
    assert not client.execute("EXISTS", KEYS.parked)
    end("c5", "unhealthy")
    (reason,) = client.execute("HVALS", KEYS.parked)
    assert reason.decode().partition(" ")[2] == (
        "lost its consumer 4 times: 2 x failed health checks, 1 x registration of a new process, "
        "1 x over --delegation-limit"
    )
    assert unpark(client, KEYS, b"kA")
    assert not client.execute("EXISTS", KEYS.crashes)


def test_a_registration_with_the_same_instance_loses_no_lease_and_counts_nothing(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    publish(client, "A")
    registry.register("c1", health_url=None, max_tickets=1, instance="x", silent_ms=1_000)
    delegator.group_stream.enqueue_new(count=100, max_pending=1_000)
    delegator.assign("c1", registry.get("c1"), count=1)
    registry.register("c1", health_url=None, max_tickets=1, instance="x", silent_ms=1_000)
    assert delegator.group_stream.renew_consumer_leases().revoked == []
    assert not client.execute("EXISTS", KEYS.crashes)


def test_a_message_that_was_trimmed_while_in_flight_can_still_be_acknowledged(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    first, second = publish(client, "A", "A")
    join(delegator, registry, "c1")
    client.execute("XDEL", STREAM, first)
    assert acknowledge(client, delegator, "c1", first) == (True, [second])


def test_a_message_that_was_trimmed_while_in_flight_can_still_fail(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    first, second = publish(client, "A", "A")
    join(delegator, registry, "c1")
    client.execute("XDEL", STREAM, first)
    assert delegator.fail("c1", first, "nonsense", retry=False) == ("dead-letter", [second.encode()])


def test_no_change_of_a_registration_undoes_another(client: Client, registry: Registry, delegator: Delegator) -> None:
    join(delegator, registry, "c1")
    found = registry.get("c1")
    assert found is not None
    assert not registry.record_failure("c1", found.incarnation, silent_ms=10_000), "it was heard of a moment ago"
    assert registry.record_failure("c1", found.incarnation, silent_ms=0)
    registry.record_success("c1", found.incarnation, every_ms=0)  # the answer of its last life
    dead = registry.get("c1")
    assert dead is not None
    assert dead.state == "dead"
    registry.record_success("c1", dead.incarnation, every_ms=0)
    alive = registry.get("c1")
    assert alive is not None
    assert alive.state == "alive"


# --- What is acknowledged ---


def test_a_late_acknowledgement_is_refused_with_the_new_owner_and_the_owner_may_repeat_its_own(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    (only,) = publish(client, "A")
    assert join(delegator, registry, "late") == [only]
    lose(delegator, registry, "late")
    assert join(delegator, registry, "c2") == [only]
    with pytest.raises(Refused, match="'c2' has it") as refused:
        acknowledge(client, delegator, "late", only)
    assert refused.value.status == 409
    assert acknowledge(client, delegator, "c2", only) == (True, [])
    for _ in range(2):
        assert acknowledge(client, delegator, "c2", only) == (False, [])
        with pytest.raises(Refused, match="'c2' has done it") as refused:
            acknowledge(client, delegator, "late", only)
        assert refused.value.status == 409


def test_a_message_that_a_consumer_ended_by_xack_counts_as_done_by_that_consumer(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    (only,) = publish(client, "A")
    join(delegator, registry, "c1")
    client.execute("XACK", STREAM, GROUP, only)
    delegator.group_stream.renew_consumer_leases()
    assert acknowledge(client, delegator, "c1", only) == (False, [])
    with pytest.raises(Refused, match="'c1' has done it"):
        acknowledge(client, delegator, "c2", only)


@pytest.mark.parametrize("by_xack", [False, True])
def test_the_dead_letter_of_an_edited_copy_goes_once_a_consumer_has_finished_the_copy(
    client: Client, registry: Registry, delegator: Delegator, by_xack: bool
) -> None:
    add_dead_letter(client, [b"ticket_id", b"A"], keys=KEYS)
    queue = DeadLetterQueue(client)
    (ref,) = queue.select(DeadLetterFilter())
    copy_id = queue.redrive_edited(ref, [b"ticket_id", b"B"], by="ann").new_id
    assert copy_id is not None
    assert join(delegator, registry, "c1") == [copy_id]
    assert client.execute("XLEN", KEYS.dead_letters) == 1
    if by_xack:
        client.execute("XACK", STREAM, GROUP, copy_id)
        delegator.group_stream.renew_consumer_leases()
    else:
        acknowledge(client, delegator, "c1", copy_id)
    assert (client.execute("XLEN", KEYS.dead_letters), client.execute("EXISTS", KEYS.resent)) == (0, 0)


def test_a_missing_or_unassigned_message_cannot_be_acknowledged(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    join(delegator, registry, "c1")
    with pytest.raises(Refused, match="there is no message 1-1") as refused:
        acknowledge(client, delegator, "c1", "1-1")
    assert refused.value.status == 404
    (new,) = publish(client, "A")
    with pytest.raises(Refused, match="not assigned to any consumer yet") as refused:
        acknowledge(client, delegator, "c1", new)
    assert refused.value.status == 409


def test_a_dead_letter_cannot_be_acknowledged(client: Client, registry: Registry, delegator: Delegator) -> None:
    (only,) = publish(client, "A")
    join(delegator, registry, "c1")
    assert delegator.fail("c1", only, "nonsense", retry=False)[0] == "dead-letter"
    with pytest.raises(Refused, match="dead-lettered"):
        acknowledge(client, delegator, "c1", only)


def test_the_consumers_of_at_least_the_last_twenty_thousand_done_messages_are_known(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    ids = publish(client, "A", "A", "A", "A")
    join(delegator, registry, "c1")
    done, full = f"{KEYS.base}:done", 20_000
    for first, last in ((0, 1), (2, 3)):
        acknowledge(client, delegator, "c1", ids[first])
        client.pipeline([("HSET", done, f"other-{number}", "c9") for number in range(full - 2)])
        assert client.execute("HLEN", done) == full - 1
        acknowledge(client, delegator, "c1", ids[last])
        assert client.execute("HLEN", done) == 0
        assert client.execute("HLEN", f"{done}-before") == full
        assert [acknowledge(client, delegator, "c1", ids[one])[0] for one in (first, last)] == [False, False]
    with pytest.raises(Refused, match="done or dead-lettered before"):
        acknowledge(client, delegator, "c1", ids[0])


def test_acknowledgements_that_are_combined_are_answered_separately(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    a1, b1, a2, b2 = publish(client, "A", "B", "A", "B")
    assert join(delegator, registry, "c1") == [a1]
    assert join(delegator, registry, "c2") == [b1]
    found = Acknowledger(client, registry, delegator).acknowledge(
        [AckRequest("c1", [a1.encode()]), AckRequest("c2", [a1.encode()]), AckRequest("c2", [b1.encode(), b2.encode()])]
    )
    assert [one.newly_acked for one in found] == [1, 0, 1]
    assert [[(one, why.status) for one, why in call.refused] for call in found] == [
        [],
        [(a1.encode(), 409)],
        [(b2.encode(), 409)],
    ]
    given = [one for call in found for one in call.next_ids]
    assert sorted(given) == sorted([a2.encode(), b2.encode()])
    assert holders(client).keys() == {a2, b2}


def test_a_message_that_another_master_has_assigned_can_be_acknowledged(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    first, second = publish(client, "A", "A")
    join(delegator, registry, "c1")
    other = Delegator(client, registry, SETTINGS)
    other.join()
    assert acknowledge(client, other, "c1", first) == (True, [second])


# --- Pages ---


def test_every_ticket_is_on_a_page_and_the_tickets_are_searched_for_once(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    tickets = 12_000
    client.pipeline([("XADD", STREAM, "*", "ticket_id", f"T{number:05}") for number in range(tickets)])
    while delegator.group_stream.enqueue_new(count=1_000, max_pending=100_000):
        pass
    views = Queries(client, registry, SETTINGS, clock=ManualClock())
    scripts_before = scripts_run(client)
    shown, cursor, pages = [], None, 0
    while cursor or not pages:
        page = views.tickets(cursor, 1_000)
        shown += [one.ticket_id for one in page.tickets]
        cursor, pages = page.cursor, pages + 1
    assert shown == [f"T{number:05}" for number in range(tickets)]
    assert scripts_run(client) - scripts_before <= 2, "once by its hash, and once more where the server lacked it"


def test_a_listing_continues_after_messages_that_are_done_meanwhile(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    ids = publish(client, *"ABCDE")
    delegator.group_stream.enqueue_new(count=100, max_pending=1_000)
    views = Queries(client, registry, SETTINGS)
    first = views.tickets(None, 2)
    assert [one.ticket_id for one in first.tickets] == ["A", "B"]
    assert join(delegator, registry, "c1", count=4) == ids[:4]
    assert [acknowledge(client, delegator, "c1", one)[0] for one in ids[:3]] == [True] * 3
    second = views.tickets(first.cursor, 2)
    assert [(one.ticket_id, one.consumer_name) for one in second.tickets] == [("D", "c1"), ("E", "c1")]
    assert second.cursor is None
    late = Queries(client, registry, SETTINGS)  # another master, which has not begun this listing
    assert [one.ticket_id for one in late.tickets(first.cursor, 2).tickets] == ["D", "E"]


def test_a_page_without_open_tickets_returns_a_cursor_to_continue(
    client: Client, registry: Registry, delegator: Delegator
) -> None:
    publish(client, *(f"T{number:04}" for number in range(1_200)))
    while delegator.group_stream.enqueue_new(count=1_000, max_pending=100_000):
        pass
    views = Queries(client, registry, SETTINGS, clock=ManualClock())
    cursor = views.tickets(None, 1).cursor
    client.execute("FLUSHALL")
    second = views.tickets(cursor, 10)
    assert (second.tickets, second.cursor is None) == ([], False)
    third = views.tickets(second.cursor, 10)
    assert (third.tickets, third.cursor) == ([], None)
