"""Balancer fixtures: consumers without a process, programs that take notifications, and deaths on demand."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from millstream.balancer import Balancer, BalancerPolicy, Notice, StreamAdded, announce
from millstream.balancer.protocol import (
    ANNOUNCEMENT_FIELD,
    CLAIM_STREAM,
    END_LEASES,
    HEARTBEAT,
    LEAVE_SERVICE,
    HeartbeatReply,
    HeartbeatRequest,
    Service,
)
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import ServiceKeys
from millstream.redis_client.replies import time_us_of
from millstream.testing.proxy import Proxy
from tests.support.clocks import ManualClock
from tests.support.waiting import FAIL_SAFE_S, eventually

SERVICE = "flights"
KEYS = ServiceKeys(SERVICE)
LEASE_MS = 600
"""The lease of consumers that a test lets expire."""
LONG_MS = 86_400_000
"""The lease of all others: a day, so that a slow machine loses no lease, and no regular heartbeat finds a change.

A balancer in a test finds a change by an event, by a deadline of its own, or because the test calls `trigger_heartbeats`.
"""
NoticeT = TypeVar("NoticeT", bound=Notice)


# Consumers without a process: they act only when a test calls them, and expire otherwise


def peer(client: Client, name: str, incarnation: str = "i1") -> Service:
    return Service(client, SERVICE, consumer=name, incarnation=incarnation)


def heartbeat_request(**changes: Any) -> HeartbeatRequest:
    usual: dict[str, Any] = {
        "lease_ms": LONG_MS,
        "weight": 1.0,
        "limit": None,
        "max_new": 1_000,
        "recovers": True,
        "releasing": 0,
        "requests_all": False,
        "moves": 1.0,
        "max_losses": None,
    }
    return HeartbeatRequest(**usual | changes)


def heartbeat_of(client: Client, name: str, **changes: Any) -> HeartbeatReply:
    return peer(client, name).heartbeat(heartbeat_request(**changes))


def rebalance(client: Client, *names: str, rounds: int = 3, **changes: Any) -> dict[str, HeartbeatReply]:
    """Heartbeats of living consumers, each of which releases its excess at once."""
    last = {}
    for _ in range(rounds):
        for name in names:
            last[name] = found = heartbeat_of(client, name, requests_all=True, **changes)
            peer(client, name).end_leases("released", found.all_held[: found.excess])
    return last


def expire(client: Client, *names: str, ago_ms: int = 0) -> None:
    """Let the leases of these consumers expire by the server's clock. No balancer is notified."""
    ended_ms = server_us(client) // 1_000 - ago_ms
    for name in names:
        client.execute("ZADD", KEYS.alive, ended_ms, name)


def load_scripts(client: Client) -> None:
    """Load all scripts into Redis, so that they are called by their hash."""
    for script in (HEARTBEAT, CLAIM_STREAM, END_LEASES, LEAVE_SERVICE):
        client.execute("SCRIPT", "LOAD", script.text)


def trigger_heartbeats(client: Client, keys: ServiceKeys = KEYS) -> bool:
    """Have every waiting balancer send a heartbeat, as any event does; returns True, for conditions."""
    client.execute("XADD", keys.events, "*", "event", "a test asks")
    return True


def heartbeats_later(client: Client, balancer: Balancer, count: int = 2) -> None:
    """Wait until this balancer has sent so many heartbeats from now on, and has applied their replies."""
    for _ in range(count + 1):  # the first may have begun already, and the last is not applied yet
        before = until_ms(client, balancer.consumer)
        time.sleep(0.002)  # deadlines are in milliseconds: the next heartbeat must set another one
        trigger_heartbeats(client)
        _changed(client, balancer.consumer, before)


def _changed(client: Client, consumer: str, before: float) -> None:
    eventually(lambda: until_ms(client, consumer) != before, f"a heartbeat of {consumer}")


# State in Redis


def server_us(client: Client) -> int:
    """The server's time in microseconds, the unit of the tokens of leases."""
    return time_us_of(client.execute("TIME"))


def until_ms(client: Client, consumer: str) -> float:
    """When a consumer's leases expire by the server's clock; 0 if it has none."""
    return float(client.execute("ZSCORE", KEYS.alive, consumer) or 0)


def waits(client: Client) -> bool:
    """Whether any client waits in a blocking read."""
    return b"blocked_clients:0\r" not in client.execute("INFO", "clients")


def names(count: int, first: int = 0) -> list[str]:
    return [f"s{number:04}" for number in range(first, first + count)]


def announced(client: Client, *streams: str) -> list[str]:
    return [announce(client, SERVICE, stream, {"of": stream}) for stream in streams]


def add_raw(client: Client, text: str | bytes, field: str = ANNOUNCEMENT_FIELD) -> str:
    return str(client.execute("XADD", KEYS.input, "*", field, text).decode())


def owners(client: Client) -> dict[str, str]:
    """The owner of each stream that has one."""
    pairs = client.execute("HGETALL", KEYS.owners)
    return {
        stream.decode(): owner.decode().partition(" ")[2] for stream, owner in zip(pairs[::2], pairs[1::2], strict=True)
    }


def counts(client: Client) -> Counter[str]:
    return Counter(owners(client).values())


def pending(client: Client) -> dict[str, str]:
    """Announcement -> its consumer in the pending list."""
    found = client.execute("XPENDING", KEYS.input, KEYS.group, "-", "+", 100_000)
    return {entry_id.decode(): name.decode() for entry_id, name, *_ in found}


def group_consumers(client: Client) -> set[str]:
    return {row[1].decode() for row in client.execute("XINFO", "CONSUMERS", KEYS.input, KEYS.group)}


def unassigned(client: Client) -> list[str]:
    return [one.decode() for one in client.execute("LRANGE", KEYS.unassigned, 0, -1)]


def dead(client: Client) -> list[dict[str, str]]:
    entries = client.execute("XRANGE", KEYS.dead, "-", "+")
    return [
        {
            name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
            for name, value in zip(items[::2], items[1::2], strict=True)
        }
        for _, items in entries
    ]


# Programs


class StoppedClock(ManualClock):
    """A clock that a test moves by hand; waits take real time all the same.

    `reads`: how often it was read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def monotonic_ms(self) -> float:
        """The time set by the test."""
        self.reads += 1
        return super().monotonic_ms()

    def sleep_ms(self, duration_ms: float) -> None:
        """Wait in real time, since the awaited condition does not depend on this clock."""
        time.sleep(duration_ms / 1000)


@pytest.fixture
def proxy(client: Client, millstream_server: EmbeddedServer) -> Iterator[Proxy]:
    """A proxy before the shared server, with all scripts loaded, so that each is called by its hash."""
    load_scripts(client)
    with Proxy(millstream_server.port) as made:
        yield made


def policy_of(*, lease_ms: int = LONG_MS, **options: Any) -> BalancerPolicy:
    """A policy whose lease may be longer than the 5 minutes allowed to programs."""
    policy = BalancerPolicy(**options)
    object.__setattr__(policy, "lease_ms", lease_ms)
    return policy


@contextmanager
def started(url: str, *consumers: str, options: dict[str, Any] | None = None, **policy: Any) -> Iterator[Any]:
    """Balancers, started one after the other; a single one is not wrapped in a list."""
    made = [Balancer(url, SERVICE, consumer=name, policy=policy_of(**policy), **options or {}) for name in consumers]
    try:
        yield made[0].start() if len(made) == 1 else [one.start() for one in made]
    finally:
        for one in made:
            one.close()


def next_notice(balancer: Balancer, kind: type[NoticeT]) -> NoticeT:
    """The next notification, which must be of this kind."""
    found = balancer.next(FAIL_SAFE_S)
    assert isinstance(found, kind), f"{found} instead of {kind.__name__}"
    return found


def next_added(balancer: Balancer, count: int) -> dict[str, StreamAdded]:
    """The next so many StreamAdded, by stream."""
    found = [next_notice(balancer, StreamAdded) for _ in range(count)]
    return {notice.stream: notice for notice in found}


def is_silent(client: Client, balancer: Balancer) -> bool:
    """Whether it puts no notification during the next heartbeats."""
    heartbeats_later(client, balancer)
    return balancer.next(0) is None


def pass_deadline(client: Client, balancer: Balancer, stream: str) -> None:
    """Let the deadline of a stream pass; the balancer checks it in a heartbeat."""
    balancer.expect(stream, 0)
    trigger_heartbeats(client)


def streams_of(balancers: Sequence[Balancer]) -> list[set[str]]:
    return [{lease.stream for lease in one.leases} for one in balancers]
