"""The streams that have delayed messages, how many, and when the first is due."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

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


def find_delayed_streams(client: Client, *, most: int = 1_000) -> list[DelayedStream]:
    """At most `most` streams that have delayed messages, the one with the earliest first. Raises RedisError.

    Those that this user may not access are left out.
    """
    names = sorted(set(islice(_named(client), most)))
    due = first_due_ms(client, names)
    counts = send_all(client, [("ZCARD", to_wire(StreamKeys(name).due)) for name in due])
    found = [
        DelayedStream(stream=name, count=count, due_ms=due_ms)
        for (name, due_ms), count in zip(due.items(), counts, strict=True)
        if isinstance(count, int) and count
    ]
    return sorted(found, key=lambda one: (one.due_ms, one.stream))


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


def _named(client: Client) -> Iterator[str]:
    for page in client.scan_key_pages(f"{PREFIX}:*:{StreamKeys.due.suffix}"):
        for key in page:
            with suppress(ConfigError):  # a key of another program
                yield StreamKeys.parse(from_wire(key)).stream
