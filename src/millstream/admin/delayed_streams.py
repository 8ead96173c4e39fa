"""The streams that have delayed messages, how many, and when the first is due."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import PREFIX, StreamKeys, from_wire, to_wire
from millstream.redis_client.pipelining import send_all


@dataclass(frozen=True, kw_only=True)
class DelayedStream:
    """A stream with `count` delayed messages, the first of which is due at `due_ms` (Unix milliseconds)."""

    stream: str
    count: int
    due_ms: int


def find_delayed_streams(
    client: Client, *, most: int = 1_000, budget_ms: float = 1_000.0, clock: Clock = SYSTEM_CLOCK
) -> tuple[list[DelayedStream], bool]:
    """At most `most` streams that have delayed messages, that with the earliest first, and whether there may be more.

    There may be more, too, where Redis has so many keys that they cannot be scanned within `budget_ms`
    milliseconds. Those that this user may not access are left out. Raises RedisError.
    """
    end_ms = clock.monotonic_ms() + budget_ms
    found_names: set[str] = set()
    is_partial = False
    for page in _named(client):
        found_names.update(page)
        if is_partial := len(found_names) > most or clock.monotonic_ms() >= end_ms:
            break
    found = delayed_of(client, sorted(found_names)[:most])
    return sorted(found, key=lambda one: (one.due_ms, one.stream)), is_partial


def delayed_of(client: Client, streams: Sequence[str]) -> list[DelayedStream]:
    """Those of these streams that have delayed messages. Left out: as in `first_due_ms`. Raises Unavailable."""
    due = first_due_ms(client, streams)
    counts = send_all(client, [("ZCARD", to_wire(StreamKeys(name).due)) for name in due])
    return [
        DelayedStream(stream=name, count=count, due_ms=due_ms)
        for (name, due_ms), count in zip(due.items(), counts, strict=True)
        if isinstance(count, int) and count
    ]


def first_due_ms(client: Client, streams: Sequence[str]) -> dict[str, int]:
    """When the first delayed message of each of these streams is due, in Unix milliseconds.

    Streams without one, and those that this user may not access, are left out. Raises Unavailable.
    """
    named: dict[str, StreamKeys] = {}
    for stream in streams:
        with suppress(ConfigError):  # no delayed message can have this stream
            named[stream] = StreamKeys(stream)
    replies = send_all(client, [("ZRANGE", to_wire(keys.due), 0, 0, "WITHSCORES") for keys in named.values()])
    found = zip(named, replies, strict=True)
    return {stream: round(float(reply[1])) for stream, reply in found if reply and not isinstance(reply, RedisError)}


def _named(client: Client) -> Iterator[list[str]]:
    """The streams whose keys say that they have delayed messages, page by page."""
    for page in client.scan_key_pages(f"{PREFIX}:*:{StreamKeys.due.suffix}"):
        names = []
        for key in page:
            with suppress(ConfigError):  # a key of another program
                names.append(StreamKeys.parse(from_wire(key)).stream)
        yield names
