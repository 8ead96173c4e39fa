"""The state of a stream: its figures, and, at one atomic moment, its groups with their consumers and entries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millstream.errors import ConfigError
from millstream.groups.entries import Delivered, execute_on
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import from_wire, to_wire
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Reply


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFigures:
    """The figures of a stream.

    * `length`: how many entries it has
    * `last_id`: the greatest id that it ever had: the next entry gets a greater one
    * `max_deleted_id`: the greatest id of an entry that was deleted (XDEL); b"0-0" if none was
    * `entries_added`: how many entries were ever added
    * `first_id`: the lowest id that it has; b"0-0" if it has none
    * `radix_tree_keys`, `radix_tree_nodes`: size of the tree that stores it in memory
    """

    length: int
    last_id: bytes
    max_deleted_id: bytes
    entries_added: int
    first_id: bytes
    radix_tree_keys: int
    radix_tree_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamInfo(StreamFigures):
    """A stream (XINFO STREAM): how many `groups` it has, its `first` and its `last` entry, None if it is empty."""

    groups: int
    first: Delivered | None
    last: Delivered | None


class HeldEntry(NamedTuple):
    """A pending entry as `stream_details` shows it: its consumer, when it was delivered (Unix ms), and how often."""

    id: bytes
    consumer: str
    since_ms: int
    deliveries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerDetails:
    """A consumer as `stream_details` shows it. Times are in Unix milliseconds.

    * `seen_ms`: the time of its last command
    * `active_ms`: when it last got entries; None if it never did, and before Redis 7.2
    * `pending`: how many entries are pending with it; `held`: the first of them
    """

    name: str
    seen_ms: int
    active_ms: int | None
    pending: int
    held: Sequence[HeldEntry]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDetails:
    """A group as `stream_details` shows it: figures as of `GroupInfo`, the first pending entries, and its consumers."""

    name: str
    last_delivered: bytes
    entries_read: int | None
    lag: int | None
    pending: int
    held: Sequence[HeldEntry]
    consumers: Sequence[ConsumerDetails]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamDetails(StreamFigures):
    """A stream with its first `entries`, and with all its `groups` (XINFO STREAM FULL)."""

    entries: Sequence[Delivered]
    groups: Sequence[GroupDetails]


def stream_info(client: Client, stream: str) -> StreamInfo:
    """Return the figures of `stream`. Raises GroupMissing if there is no such stream, and RedisError."""
    info = mapping_of(execute_on(client, stream, "XINFO", "STREAM", to_wire(stream)))
    first, last = _entry(info[b"first-entry"]), _entry(info[b"last-entry"])
    return StreamInfo(groups=info[b"groups"], first=first, last=last, **_figures(info))


def stream_details(client: Client, stream: str, *, count: int = 10) -> StreamDetails:
    """Return `stream` with all its groups and consumers, as they are at one moment.

    At most `count` entries are shown of the stream, and of the pending ones of each group and each consumer. Redis
    serves no other client meanwhile: use it now and then, not in a loop. Raises ConfigError for a count below 1,
    GroupMissing if there is no such stream, and RedisError.
    """
    if count < 1:
        raise ConfigError(f"count={count}: Redis would list all entries; use 1 or more")
    info = mapping_of(execute_on(client, stream, "XINFO", "STREAM", to_wire(stream), "FULL", "COUNT", count))
    return StreamDetails(
        entries=[Delivered(entry_id, pairs, 0) for entry_id, pairs in info[b"entries"]],
        groups=[_group(mapping_of(one)) for one in info[b"groups"]],
        **_figures(info),
    )


def _entry(item: Reply) -> Delivered | None:
    return None if item is None else Delivered(item[0], item[1], 0)


def _figures(info: Mapping[bytes, Reply]) -> dict[str, Any]:
    return {
        "length": info[b"length"],
        "last_id": info[b"last-generated-id"],
        "max_deleted_id": info[b"max-deleted-entry-id"],
        "entries_added": info[b"entries-added"],
        "first_id": info[b"recorded-first-entry-id"],
        "radix_tree_keys": info[b"radix-tree-keys"],
        "radix_tree_nodes": info[b"radix-tree-nodes"],
    }


def _group(info: Mapping[bytes, Reply]) -> GroupDetails:
    return GroupDetails(
        name=from_wire(info[b"name"]),
        last_delivered=info[b"last-delivered-id"],
        entries_read=info[b"entries-read"],
        lag=info[b"lag"],
        pending=info[b"pel-count"],
        held=[HeldEntry(one, from_wire(name), since_ms, times) for one, name, since_ms, times in info[b"pending"]],
        consumers=[_consumer(mapping_of(one)) for one in info[b"consumers"]],
    )


def _consumer(info: Mapping[bytes, Reply]) -> ConsumerDetails:
    name, active_ms = from_wire(info[b"name"]), info.get(b"active-time", -1)
    return ConsumerDetails(
        name=name,
        seen_ms=info[b"seen-time"],
        active_ms=None if active_ms < 0 else active_ms,
        pending=info[b"pel-count"],
        held=[HeldEntry(one, name, since_ms, times) for one, since_ms, times in info[b"pending"]],
    )
