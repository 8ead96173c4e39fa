"""StreamInfo: ids and counters of streams, and the loss of unread entries that they prove."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from millstream.errors import AccessDenied, CommandFailed, ConfigError, KeyMissing, Unavailable, WrongType
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client import pipelining
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Command, Reply, ReplySize
from millstream.spark.source.offsets import Position


class StreamInfo(NamedTuple):
    """The ids and counters of one stream (Redis XINFO STREAM).

    * `tail`: the position after everything is read: the last id, and the number of entries ever added
    * `first_id`: id of the oldest entry that is left; 0-0 if there is none
    * `max_deleted_id`: greatest id that was deleted singly (XDEL), not by trimming
    * `length`: number of entries that are left
    """

    tail: Position
    first_id: EntryId
    max_deleted_id: EntryId
    length: int

    @property
    def last_id(self) -> EntryId:
        """Id of the newest entry that was ever added."""
        return self.tail.id

    @property
    def entries_added(self) -> int:
        """Number of entries ever added."""
        count = self.tail.entries_added
        assert count is not None
        return count

    @property
    def entries_removed(self) -> int:
        """Number of entries that were added and are gone."""
        return self.entries_added - self.length

    def has_gaps_after(self, entry_id: EntryId) -> bool:
        """True if single entries after `entry_id` may have been deleted, so that counts there prove nothing."""
        return self.max_deleted_id > entry_id and self.max_deleted_id >= self.first_id and self.length > 0

    def is_whole_after(self, entry_id: EntryId) -> bool:
        """True if no entry after `entry_id` was trimmed: an entry at or before it is left."""
        return self.length > 0 and self.first_id <= entry_id

    def earliest_position(self) -> Position:
        """The position before the first entry that is left. Entries removed before count as no loss."""
        return Position(ZERO_ID, None if self.has_gaps_after(ZERO_ID) else self.entries_removed)


def fetch_calls(client: Client, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
    """Run `commands` in pipelines of bounded size; returns errors among the replies, but raises Unavailable."""
    replies = pipelining.send_all(client, commands, meter)
    for reply in replies:
        if isinstance(reply, Unavailable):
            raise reply
    return replies


def fetch(client: Client, streams: Iterable[str]) -> dict[str, StreamInfo | None]:
    """Return the info of each stream, None for one that does not exist.

    Raises WrongType if a key holds another type, RedisError for other errors.
    """
    names = list(streams)
    replies = fetch_calls(client, [("XINFO", "STREAM", name) for name in names])
    return {name: parse_info(name, reply) for name, reply in zip(names, replies, strict=True)}


def parse_info(stream: str, reply: Reply) -> StreamInfo | None:
    """Parse a reply to XINFO STREAM, of RESP2 or RESP3. Raises as `fetch`, also for an unexpected reply."""
    return _stream_info(_fields(stream, reply))


def parse_full_info(stream: str, reply: Reply) -> tuple[StreamInfo | None, dict[str, EntryId]]:
    """Parse a reply to XINFO STREAM FULL: the info of a stream, and the last delivered id of each consumer group."""
    found = _fields(stream, reply)
    groups = {}
    for group in found[b"groups"] if found is not None else ():
        about = mapping_of(group)
        groups[about[b"name"].decode("utf-8", "replace")] = _id(about[b"last-delivered-id"])
    return _stream_info(found), groups


def _fields(stream: str, reply: Any) -> dict[bytes, Any] | None:
    if isinstance(reply, dict):
        return reply
    if isinstance(reply, list):
        return mapping_of(reply)
    if isinstance(reply, KeyMissing):
        return None
    if isinstance(reply, WrongType):
        raise WrongType(f"the key {stream!r} holds another type of value than a stream: rename or delete that key")
    if isinstance(reply, AccessDenied) and not reply.concerns_credentials:
        raise AccessDenied(f"XINFO STREAM {stream}: {reply}; grant the rights that `millstream acl` lists")
    raise_if_error(reply)
    raise CommandFailed(f"XINFO STREAM {stream}: unexpected reply {reply!r}")


def _stream_info(found: dict[bytes, Any] | None) -> StreamInfo | None:
    if found is None:
        return None
    if b"entries-added" not in found:
        raise ConfigError("this server is too old: the redis-streams source needs Redis 7.0 or Valkey 7.2")
    return StreamInfo(
        tail=Position(_id(found[b"last-generated-id"]), found[b"entries-added"]),
        first_id=_id(found[b"recorded-first-entry-id"]),
        max_deleted_id=_id(found[b"max-deleted-entry-id"]),
        length=found[b"length"],
    )


def _id(reply: bytes) -> EntryId:
    # Redis writes ids in one form only; to validate 30,000 of them as user input takes a tenth of a second.
    if reply == b"0-0":
        return ZERO_ID
    ms, _, seq = reply.partition(b"-")
    return EntryId(int(ms), int(seq))
