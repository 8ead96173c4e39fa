"""What masters do in Redis, step by step, where only the moment matters."""

import pytest

from millstream.client import Client
from millstream.master.desk import Desk
from millstream.master.registry import Registry
from millstream.master.settings import MasterSettings
from millstream.web.refusal import Refused
from tests.support.masters import GROUP, KEYS, STREAM, holders, is_clean, publish
from tests.support.waiting import eventually

pytestmark = [pytest.mark.master]

SETTINGS = MasterSettings(ticket_stream=STREAM, group=GROUP)


@pytest.fixture
def registry(client: Client) -> Registry:
    return Registry(client, KEYS)


@pytest.fixture
def desk(client: Client, registry: Registry) -> Desk:
    found = Desk(client, registry, SETTINGS)
    found.join()
    return found


def join(desk: Desk, registry: Registry, name: str, count: int = 1) -> list[str]:
    """Register a consumer; return the ids that it is given."""
    found = registry.register(name, health_url=None, max_tickets=10, instance="", silent_ms=1_000)
    desk.stream.route(count=100, most_pending=1_000)
    return [one.decode() for one in desk.deal(name, found, count=count)]


def test_a_consumer_does_not_see_the_next_message_while_the_one_before_is_being_committed(
    client: Client, registry: Registry, desk: Desk
) -> None:
    first, second = publish(client, "A", "A")
    assert join(desk, registry, "c1") == [first]
    (lease,) = desk.held_by("c1")
    assert not desk.stream.commit([desk.stream.unit_of(lease, list(lease.waiting))])
    desk.stream.tend()
    assert holders(client) == {second: "waiting"}
    # The master has died there.
    eventually(lambda: desk.stream.tend() and holders(client) == {second: "c1"}, "another one to go on with it")
    assert desk.acknowledge("c1", second) == (True, [])
    desk.stream.tend()
    assert is_clean(client)


def test_two_masters_give_no_consumer_more_than_it_asked_for(client: Client, registry: Registry, desk: Desk) -> None:
    publish(client, *(f"T{n}" for n in range(30)))
    assert len(join(desk, registry, "c1", count=8)) == 8
    other = Desk(client, registry, SETTINGS)
    assert len(other.deal("c1", registry.get("c1"), count=8)) == 2
    assert not desk.deal("c1", registry.get("c1"), count=8)


def test_a_lease_of_an_earlier_life_ends_and_cannot_be_acknowledged(
    client: Client, registry: Registry, desk: Desk
) -> None:
    (only,) = publish(client, "A")
    join(desk, registry, "c1")
    before = desk.held_by("c1")[0]
    registry.register("c1", health_url=None, max_tickets=1, instance="", silent_ms=1_000)
    assert [(lost.id.decode(), lost.why) for lost in desk.stream.tend().lost] == [(only, "gone")]
    with pytest.raises(Refused, match="does not have"):
        desk.acknowledge("c1", only)
    assert desk.stream.commit([desk.stream.unit_of(before, list(before.waiting))])
    assert join(desk, registry, "c2") == [only]


def test_what_was_trimmed_while_it_was_in_hand_can_still_be_acknowledged(
    client: Client, registry: Registry, desk: Desk
) -> None:
    first, second = publish(client, "A", "A")
    join(desk, registry, "c1")
    client.execute("XDEL", STREAM, first)
    assert desk.acknowledge("c1", first) == (True, [second.encode()])


def test_no_change_of_a_registration_undoes_another(client: Client, registry: Registry, desk: Desk) -> None:
    join(desk, registry, "c1")
    found = registry.get("c1")
    assert found is not None
    assert not registry.silent("c1", found.incarnation, silent_ms=10_000), "it was heard of a moment ago"
    assert registry.silent("c1", found.incarnation, silent_ms=0)
    registry.healthy("c1", found.incarnation, every_ms=0)  # the answer of its last life
    dead = registry.get("c1")
    assert dead is not None
    assert dead.state == "dead"
    registry.healthy("c1", dead.incarnation, every_ms=0)
    alive = registry.get("c1")
    assert alive is not None
    assert alive.state == "alive"
