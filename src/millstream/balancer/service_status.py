"""What a balanced service looks like from outside: its consumers, its streams, and who has which."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import ServiceKeys, from_wire

_PAGE = 1_000
_OWNER = re.compile(rb"(\d{1,19}) (.*)", re.DOTALL)
_ABOUT = re.compile(rb"\S* (\d{1,9}(?:\.\d{1,19})?(?:e[+-]?\d{1,2})?) (\d{1,19})")
_LATEST_MS = 2.0**53


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerState:
    """One consumer: how many streams it has, its weight and limit (0 = none), and when its leases end if it is not heard of.

    `unreadable`: no consumer has written what Redis holds of it: weight and limit are not known.
    """

    name: str
    streams: int
    weight: float
    limit: int
    until_ms: int
    unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """One announced stream: who has it since when (Unix milliseconds) under which token; or nobody.

    `left_out`: why a handler's worker that has it does not work on it for now. `unreadable`: no consumer has written
    what Redis holds of its owner, so that this is not known.
    """

    name: str
    consumer: str | None = None
    since_ms: int | None = None
    token: int | None = None
    left_out: str | None = None
    unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """A service at a moment. `unread`: announcements that no consumer has read; `dead`: its dead letters."""

    consumers: Sequence[ConsumerState]
    streams: Sequence[StreamState]
    unread: int
    dead: int


def survey(client: Client, service: str) -> ServiceState:
    """Look at a service. Others go on meanwhile, so figures may be a moment apart. Raises ConfigError, RedisError."""
    keys = ServiceKeys(service)
    owners, troubles = dict(_pairs(client, keys.owners)), dict(_pairs(client, keys.troubles))
    streams = [_stream(name, owners.get(name), troubles.get(name, b"")) for name, _ in _pairs(client, keys.streams)]
    facts = [("XLEN", keys.input), ("XLEN", keys.dead), ("ZRANGE", keys.alive, 0, -1, "WITHSCORES")]
    announced, dead, alive = map(raise_if_error, client.pipeline(facts))
    until = dict(zip(alive[::2], alive[1::2], strict=True))
    has = Counter(one.consumer for one in streams)
    consumers = [
        _consumer(from_wire(name), about, has[from_wire(name)], float(until.get(name, b"0")))
        for name, about in sorted(_pairs(client, keys.consumers))
    ]
    streams.sort(key=lambda one: (one.consumer is not None, one.name))
    return ServiceState(consumers=consumers, streams=streams, unread=max(0, announced - len(streams)), dead=dead)


def _stream(name: bytes, owner: bytes | None, trouble: bytes) -> StreamState:
    if owner is None:
        return StreamState(name=from_wire(name))
    found, of_token = _OWNER.fullmatch(owner), trouble.partition(b" ")
    if found is None:
        return StreamState(name=from_wire(name), unreadable=True)
    token = int(found[1])
    return StreamState(
        name=from_wire(name),
        consumer=from_wire(found[2]),
        since_ms=token // 1_000,
        token=token,
        left_out=from_wire(of_token[2]) if of_token[0] == found[1] else None,
    )


def _consumer(name: str, about: bytes, streams: int, until_ms: float) -> ConsumerState:
    found = _ABOUT.fullmatch(about)
    weight, limit = (float(found[1]), int(found[2])) if found else (0.0, 0)
    return ConsumerState(
        name=name, streams=streams, weight=weight, limit=limit, until_ms=round(min(until_ms, _LATEST_MS)),
        unreadable=found is None,
    )  # fmt: skip


def _pairs(client: Client, key: str) -> Iterator[tuple[bytes, bytes]]:
    seen: set[bytes] = set()
    cursor = b"0"
    while True:
        cursor, found = client.execute("HSCAN", key, cursor, "COUNT", _PAGE)
        for name, value in zip(found[::2], found[1::2], strict=True):
            if name not in seen:  # a walk may show one twice
                seen.add(name)
                yield name, value
        if cursor == b"0":
            return
