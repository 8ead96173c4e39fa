"""What a balanced service looks like from outside: its consumers, its streams, and who has which."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millstream.client import Client, raise_if_error
from millstream.naming import ServiceKeys, from_wire

_PAGE = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerState:
    """One consumer: how many streams it has, its weight and limit (0 = none), and when its leases end if it is not heard of."""

    name: str
    streams: int
    weight: float
    limit: int
    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """One announced stream: who has it since when (Unix milliseconds) under which token; or nobody.

    `left_out`: why a handler's worker that has it does not work on it for now.
    """

    name: str
    consumer: str | None = None
    since_ms: int | None = None
    token: int | None = None
    left_out: str | None = None


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
    owners = {name: value.split(b" ", 1) for name, value in _pairs(client, keys.owners)}
    troubles = {name: value.split(b" ", 1) for name, value in _pairs(client, keys.troubles)}
    streams = []
    for name, _ in _pairs(client, keys.streams):
        token, consumer = owners.get(name, (None, None))
        of_token, why = troubles.get(name, (None, None))
        streams.append(
            StreamState(
                name=from_wire(name),
                consumer=None if consumer is None else from_wire(consumer),
                since_ms=None if token is None else int(token) // 1_000,
                token=None if token is None else int(token),
                left_out=None if token is None or why is None or of_token != token else from_wire(why),
            )
        )
    facts = [("XLEN", keys.input), ("XLEN", keys.dead), ("ZRANGE", keys.alive, 0, -1, "WITHSCORES")]
    announced, dead, alive = map(raise_if_error, client.pipeline(facts))
    until = dict(zip(alive[::2], alive[1::2], strict=True))
    consumers = []
    for name, about in sorted(_pairs(client, keys.consumers)):
        _, weight, limit = about.split(b" ")
        has = sum(1 for one in streams if one.consumer == from_wire(name))
        until_ms = int(float(until.get(name, b"0")))
        consumers.append(
            ConsumerState(name=from_wire(name), streams=has, weight=float(weight), limit=int(limit), until_ms=until_ms)
        )
    streams.sort(key=lambda one: (one.consumer is not None, one.name))
    return ServiceState(consumers=consumers, streams=streams, unread=max(0, announced - len(streams)), dead=dead)


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
