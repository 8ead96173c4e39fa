"""What the tests of the balancer share: consumers without a process, programs that listen, and death at will."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from millstream.balancer import Balancer, BalancerPolicy, Notice, StreamAdded, announce
from millstream.balancer.service import BALANCE, CLAIM, FIELD, HAND_IN, RETIRE, Bid, Round, Service
from millstream.client import Client
from millstream.naming import ServiceKeys

SERVICE = "flights"
KEYS = ServiceKeys(SERVICE)
LEASE_MS = 600
STEADY_MS = 3_000  # so that a slow machine costs no lease
ROUND_S = STEADY_MS / 3 / 1000
LONG_MS = 60_000
NoticeT = TypeVar("NoticeT", bound=Notice)


# Consumers without a process: they do nothing unless told to, and so die when they are told no more


def peer(client: Client, name: str, incarnation: str = "i1") -> Service:
    return Service(client, SERVICE, consumer=name, incarnation=incarnation)


def bid(**changes: Any) -> Bid:
    usual: dict[str, Any] = {
        "lease_ms": LONG_MS, "weight": 1.0, "limit": None, "take": 1_000, "recovers": True, "leaving": 0,
        "wants_all": False, "moves": 1.0, "most_losses": None,
    }  # fmt: skip
    return Bid(**usual | changes)


def round_of(client: Client, name: str, **changes: Any) -> Round:
    return peer(client, name).round(bid(**changes))


def settle(client: Client, *names: str, rounds: int = 3, **changes: Any) -> dict[str, Round]:
    """Rounds of living consumers, each of which gives back at once what it has too much."""
    last = {}
    for _ in range(rounds):
        for name in names:
            last[name] = found = round_of(client, name, wants_all=True, **changes)
            peer(client, name).hand_in("released", found.all[: found.excess])
    return last


def expire(client: Client, *names: str, ago_ms: int = 0) -> None:
    """The leases of these consumers have ended, as far as the server's clock goes."""
    seconds, micros = client.execute("TIME")
    for name in names:
        client.execute("ZADD", KEYS.alive, int(seconds) * 1000 + int(micros) // 1000 - ago_ms, name)


def load_scripts(client: Client) -> None:
    """Have Redis know them all, so that they are called by their hash."""
    for script in (BALANCE, CLAIM, HAND_IN, RETIRE):
        client.execute("SCRIPT", "LOAD", script.text)


# What is in Redis


def names(count: int, first: int = 0) -> list[str]:
    return [f"s{number:04}" for number in range(first, first + count)]


def announced(client: Client, *streams: str) -> list[str]:
    return [announce(client, SERVICE, stream, {"of": stream}) for stream in streams]


def add_raw(client: Client, text: str | bytes, field: str = FIELD) -> str:
    return str(client.execute("XADD", KEYS.input, "*", field, text).decode())


def owners(client: Client) -> dict[str, str]:
    """Who owns each stream that has an owner."""
    pairs = client.execute("HGETALL", KEYS.owners)
    return {
        stream.decode(): owner.decode().partition(" ")[2] for stream, owner in zip(pairs[::2], pairs[1::2], strict=True)
    }


def counts(client: Client) -> Counter[str]:
    return Counter(owners(client).values())


def pending(client: Client) -> dict[str, str]:
    """Announcement -> who has it, as any tool sees it."""
    found = client.execute("XPENDING", KEYS.input, KEYS.group, "-", "+", 100_000)
    return {entry_id.decode(): name.decode() for entry_id, name, *_ in found}


def group_consumers(client: Client) -> set[str]:
    return {row[1].decode() for row in client.execute("XINFO", "CONSUMERS", KEYS.input, KEYS.group)}


def free(client: Client) -> list[str]:
    return [one.decode() for one in client.execute("LRANGE", KEYS.free, 0, -1)]


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


class Watch:
    """A clock that a test can put forward."""

    def __init__(self) -> None:
        self.ahead_ms = 0.0

    def monotonic_ms(self) -> float:
        return time.monotonic() * 1000 + self.ahead_ms

    def sleep_ms(self, duration_ms: float) -> None:
        time.sleep(duration_ms / 1000)


@contextmanager
def joined(url: str, *consumers: str, options: dict[str, Any] | None = None, **policy: Any) -> Iterator[Any]:
    """Balancers, started one after the other; a single one comes as itself."""
    made = [
        Balancer(
            url, SERVICE, consumer=name, policy=BalancerPolicy(**{"lease_ms": STEADY_MS} | policy), **options or {}
        )
        for name in consumers
    ]
    try:
        yield made[0].start() if len(made) == 1 else [one.start() for one in made]
    finally:
        for one in made:
            one.close()


def hear(balancer: Balancer, kind: type[NoticeT], timeout_s: float = 30.0) -> NoticeT:
    """The next notification, which has to be of this kind."""
    found = balancer.next(timeout_s)
    assert isinstance(found, kind), f"{found} instead of {kind.__name__}"
    return found


def hear_added(balancer: Balancer, count: int) -> dict[str, StreamAdded]:
    """So many streams that are added next, by name."""
    found = [hear(balancer, StreamAdded) for _ in range(count)]
    return {notice.stream: notice for notice in found}


def silent(balancer: Balancer, for_s: float = 1.1 * ROUND_S) -> bool:
    return balancer.next(for_s) is None


def streams_of(balancers: Sequence[Balancer]) -> list[set[str]]:
    return [{lease.stream for lease in one.leases} for one in balancers]
