"""ServiceState: a balanced service as seen from outside: its consumers, its streams, and their owners."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import ServiceKeys, from_wire
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.replies import mapping_of, pairs_of

_PAGE = 1_000
_OWNER = re.compile(rb"(\d{1,19}) (.*)", re.DOTALL)
_CONSUMER = re.compile(rb"\S* (\d{1,9}(?:\.\d{1,19})?(?:e[+-]?\d{1,2})?) (\d{1,19})")
_LATEST_MS = 2.0**53


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerState:
    """One consumer: its number of streams, its weight and limit (0 = none), and the expiry of its leases.

    * `until_ms`: Unix milliseconds at which its leases expire without another heartbeat
    * `unreadable`: its record in Redis was not written by a consumer: weight and limit are unknown
    """

    name: str
    streams: int
    weight: float
    limit: int
    until_ms: int
    unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """One announced stream: its owner, since when (Unix milliseconds) and under which token; None without an owner.

    * `excluded_reason`: why a handler's worker that owns it does not work on it for now
    * `unreadable`: its record in Redis was not written by a consumer: the owner is unknown
    """

    name: str
    consumer: str | None = None
    since_ms: int | None = None
    token: int | None = None
    excluded_reason: str | None = None
    unreadable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """A snapshot of a service. `unread`: announcements that no consumer has read; `dead`: its dead letters."""

    consumers: Sequence[ConsumerState]
    streams: Sequence[StreamState]
    unread: int
    dead: int


def fetch_service_state(client: Client, service: str) -> ServiceState:
    """Take a snapshot of a service. Consumers go on meanwhile, so figures may differ by a moment.

    Raises ConfigError, RedisError.
    """
    keys = ServiceKeys(service)
    owners, stream_errors = dict(_pairs(client, keys.owners)), dict(_pairs(client, keys.stream_errors))
    streams = [
        _stream(name, owners.get(name), stream_errors.get(name, b"")) for name, _ in _pairs(client, keys.streams)
    ]
    commands = [("XLEN", keys.input), ("XLEN", keys.dead), ("ZRANGE", keys.alive, 0, -1, "WITHSCORES")]
    announced, dead, alive = call_all(client, commands)
    until = mapping_of(alive)
    has = Counter(one.consumer for one in streams)
    consumers = [
        _consumer(from_wire(name), record, has[from_wire(name)], float(until.get(name, b"0")))
        for name, record in sorted(_pairs(client, keys.consumers))
    ]
    streams.sort(key=lambda one: (one.consumer is not None, one.name))
    return ServiceState(consumers=consumers, streams=streams, unread=max(0, announced - len(streams)), dead=dead)


def _stream(name: bytes, owner: bytes | None, stream_error: bytes) -> StreamState:
    if owner is None:
        return StreamState(name=from_wire(name))
    parsed, error_of_token = _OWNER.fullmatch(owner), stream_error.partition(b" ")
    if parsed is None:
        return StreamState(name=from_wire(name), unreadable=True)
    token = int(parsed[1])
    return StreamState(
        name=from_wire(name),
        consumer=from_wire(parsed[2]),
        since_ms=token // 1_000,
        token=token,
        excluded_reason=from_wire(error_of_token[2]) if error_of_token[0] == parsed[1] else None,
    )


def _consumer(name: str, record: bytes, streams: int, until_ms: float) -> ConsumerState:
    parsed = _CONSUMER.fullmatch(record)
    weight, limit = (float(parsed[1]), int(parsed[2])) if parsed else (0.0, 0)
    return ConsumerState(
        name=name,
        streams=streams,
        weight=weight,
        limit=limit,
        until_ms=round(min(until_ms, _LATEST_MS)),
        unreadable=parsed is None,
    )


def _pairs(client: Client, key: str) -> Iterator[tuple[bytes, bytes]]:
    seen: set[bytes] = set()
    cursor = b"0"
    while True:
        cursor, page = client.execute("HSCAN", key, cursor, "COUNT", _PAGE)
        for name, value in pairs_of(page):
            if name not in seen:  # HSCAN may return a field twice
                seen.add(name)
                yield name, value
        if cursor == b"0":
            return
