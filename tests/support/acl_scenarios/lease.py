"""Every operation of a balancer's consumer in Redis, and every command about a service."""

from typing import Any

import pytest

from millstream.balancer import Balancer, BalancerPolicy, StreamAdded, Terminated, announce
from millstream.balancer.protocol import Service
from millstream.errors import NameHeld
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import PREFIX, ServiceKeys
from tests.support.balancers import heartbeat_request
from tests.support.waiting import FAIL_SAFE_S

SERVICES = ("calls", f"{PREFIX}:shop.bill")
"""The service of a program, and that of a handler."""
STREAMS = ("orders:1", "orders:2", "orders:3")


def serve(url: str, admin: Client) -> None:
    """Every operation of a program or a worker with leases."""
    with Client(url) as client:
        for service in SERVICES:
            wait_for_a_stream(client, service)
            share(client, admin, service)


def wait_for_a_stream(client: Client, service: str) -> None:
    """Also raises the exception that ends the balancer's thread."""
    with Balancer(client.url, service, consumer="waits", policy=BalancerPolicy(lease_ms=300_000)) as balancer:
        balancer.announce("orders:0")
        notice = balancer.next(FAIL_SAFE_S)
        if isinstance(notice, Terminated) and notice.error is not None:
            raise notice.error
        assert isinstance(notice, StreamAdded)
        balancer.done(notice.lease)


def share(client: Client, admin: Client, service: str) -> None:
    """Two consumers, every kind of heartbeat, and every possible end of a lease."""
    keys = ServiceKeys(service)
    one, other = (Service(client, service, consumer=name, incarnation="1") for name in ("one", "other"))
    for stream in STREAMS:
        announce(client, service, stream)
    admin.execute("XADD", keys.input, "*", "no", "announcement")
    leases = one.heartbeat(heartbeat_request(requests_all=True)).added
    assert admin.execute("XLEN", keys.dead) == 1
    with pytest.raises(NameHeld):
        Service(client, service, consumer="one", incarnation="2").heartbeat(heartbeat_request())
    other.heartbeat(heartbeat_request())
    assert one.heartbeat(heartbeat_request(requests_all=True)).excess == 1
    assert one.end_leases("released", leases[:1]) == set()
    assert other.heartbeat(heartbeat_request(recovers=False)).unassigned == [leases[0].stream]
    assert other.end_leases("done", [other.claim(leases[0].stream)]) == set()
    admin.execute("ZADD", keys.alive, 1, "one")
    assert len(other.heartbeat(heartbeat_request()).added) == 2
    assert other.leave() == 2


def oversee(command: Any, url: str, admin: Client) -> None:
    """Every command about a service, with owned and with free streams."""
    for service, name in zip(SERVICES, ("calls", "shop.bill"), strict=True):
        for stream in STREAMS:
            announce(admin, service, stream)
        Service(admin, service, consumer="one", incarnation="1").heartbeat(heartbeat_request())
        command(url, "lease", "add", service, "orders:4")
        command(url, "lease", "list", name)
        command(url, "lease", "release", name, "orders:1", "--yes")
        command(url, "lease", "remove", name, "orders:1", "orders:2", "--yes")
