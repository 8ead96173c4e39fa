"""examples/leases.py does what it says: sensors are shared, each in order, and the command shows the owner of each."""

from collections import Counter
from pathlib import Path

import pytest

from examples.fencing import WRITE, write
from examples.leases import app
from millstream.admin.inspection import read_state
from millstream.balancer import Balancer, BalancerPolicy, StreamAdded, announce
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, ServiceKeys
from millstream.redis_client.replies import mapping_of
from tests.support.balancers import next_notice, trigger_heartbeats
from tests.support.commandline import call
from tests.support.waiting import eventually
from tests.support.workers import working

pytestmark = [pytest.mark.balancer]

EXAMPLE = Path(__file__).parents[2] / "examples/leases.py"
SENSORS = [f"sensor:{name}" for name in ("attic", "cellar", "hall", "roof")]


OF = ServiceKeys.of_handler("sensors.watch")


def add(client: Client, *celsius: float) -> None:
    client.pipeline([("XADD", sensor, "*", "celsius", one) for one in celsius for sensor in SENSORS])


def readings(client: Client) -> list[int]:
    states = [read_state(client, HandlerKeys("sensors", "watch", sensor), sensor.encode()) for sensor in SENSORS]
    return [state["readings"] if state else 0 for state in states]


def shown(client: Client) -> dict[str, tuple[str, int]]:
    """The owner of each sensor, and its lag, as the command of the example says."""
    found = call("lease", "list", "sensors.watch", "--json", "--url", client.url).json_lines()
    return {row["stream"]: (row["consumer"], row["lag"]) for row in found}


def owned(client: Client) -> Counter[str]:
    """How many sensors each owner has."""
    return Counter(owner for owner, _ in shown(client).values())


def test_the_example_shares_sensors_and_keeps_each_in_order(client: Client) -> None:
    handler = app.handlers["watch"]
    add(client, 20.0, 21.0, 31.0)
    with working(client, handler, "one"):
        eventually(lambda: readings(client) == [3] * 4)
        with working(client, handler, "two"):
            eventually(lambda: trigger_heartbeats(client, OF) and owned(client) == {"one": 2, "two": 2}, "equal shares")
            add(client, 22.0, -300.0, 10.0)
            eventually(lambda: readings(client) == [5] * 4)
            text = call("lease", "list", "sensors.watch", "--url", client.url).out
            assert "4 streams: 4 with an owner" in text
        add(client, 10.0)
        eventually(lambda: shown(client) == dict.fromkeys(SENSORS, ("one", 0)))
    alarms = client.execute("XRANGE", "alarms", "-", "+")
    rows = [mapping_of(pairs) for _, pairs in alarms]
    for sensor in SENSORS:
        mine = [row for row in rows if row[b"sensor"] == sensor.encode()]
        assert [row[b"celsius"] for row in mine] == [b"31.0", b"10.0", b"10.0"]
        assert client.execute("XLEN", HandlerKeys("sensors", "watch", sensor).dead_letters) == 1


def test_the_store_of_the_other_example_refuses_a_stale_owner(client: Client) -> None:
    announce(client, "calls", "call:1")
    patient = BalancerPolicy(lease_ms=300_000)
    with Balancer(client.url, "calls", consumer="one", policy=patient) as one:
        stale = next_notice(one, StreamAdded)
        assert write(client, "book:1", stale.lease, "total", "1")
    with Balancer(client.url, "calls", consumer="two", policy=patient) as two:
        fresh = next_notice(two, StreamAdded)
        assert write(client, "book:1", fresh.lease, "total", "2")
        assert not write(client, "book:1", stale.lease, "total", "3")
        assert write(client, "book:1", fresh.lease, "sum", "4")
    assert client.execute("HGET", "book:1", "total") == b"2"


def test_the_documentation_shows_the_store_as_it_is() -> None:
    assert WRITE.strip() in (EXAMPLE.parents[1] / "docs/leases.md").read_text()


def test_the_example_is_small() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
