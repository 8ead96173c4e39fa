"""Group: one consumer group of one stream, its position, its pending entries and its consumers."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property

from millstream.errors import CommandFailed, ConfigError, RedisError
from millstream.groups.entries import BEGINNING, Id, execute_on, wire_id
from millstream.groups.pending import PendingList
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import from_wire, to_wire
from millstream.redis_client.pipelining import send_all
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Arg, Reply
from millstream.redis_client.scripts import Script

_DELETE_CONSUMER = Script("groups/delete_consumer")
_REASSIGNED_AT_ONCE = 500
_AT_ONCE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupInfo:
    """The state of a group in Redis.

    * `last_delivered`: the highest id delivered so far
    * `entries_read`: how many entries it has delivered; None where Redis does not know
    * `lag`: how many entries it has yet to deliver; None where Redis does not know; after deletions it may be wrong
    """

    name: str
    consumers: int
    pending: int
    last_delivered: bytes
    entries_read: int | None
    lag: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerInfo:
    """The state of a consumer in Redis.

    * `idle_ms`: milliseconds since its last command, before Redis 7.2 since a read last returned entries; grows during
      a long poll
    * `inactive_ms`: milliseconds since it last got entries; None before Redis 7.2
    """

    name: str
    pending: int
    idle_ms: int
    inactive_ms: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedConsumer:
    """The deleted consumer's entries: how many were `reassigned`, and the ids that are `gone` from the stream."""

    existed: bool
    reassigned: int = 0
    gone: Sequence[bytes] = ()


def groups_of(client: Client, stream: str) -> list[GroupInfo]:
    """Return the groups of `stream`. Raises GroupMissing if there is no such stream, and RedisError."""
    found = []
    for item in execute_on(client, stream, "XINFO", "GROUPS", to_wire(stream)):
        info = mapping_of(item)
        found.append(
            GroupInfo(
                name=from_wire(info[b"name"]),
                consumers=info[b"consumers"],
                pending=info[b"pending"],
                last_delivered=info[b"last-delivered-id"],
                entries_read=info.get(b"entries-read"),
                lag=info.get(b"lag"),
            )
        )
    return found


class Group:
    """The consumer group `name` of `stream`.

    Each method raises RedisError; GroupMissing, which is one, if the stream or the group does not exist. Exceptions for
    a missing group: `ack` returns 0, `destroy` False, and `info` None.
    """

    def __init__(self, client: Client, stream: str, name: str) -> None:
        self._client = client
        self.stream = stream
        self.name = name
        self._names = (to_wire(stream), to_wire(name))

    # Group

    def create(self, at: Id = BEGINNING, *, mkstream: bool = False, entries_read: int | None = None) -> bool:
        """Create it (XGROUP CREATE), so that entries with ids greater than `at` are delivered; False if it exists.

        `at` is an id, BEGINNING or END. `mkstream` creates a missing stream as well. `entries_read` is how many entries
        the stream has had up to `at`: Redis needs it for the lag. Raises GroupMissing if there is no stream to create
        it on.
        """
        options: list[Arg] = ["MKSTREAM"] if mkstream else []
        try:
            self._execute("XGROUP", "CREATE", *self._names, wire_id(at), *options, *_entries_read(entries_read))
        except CommandFailed as error:
            if error.code != "BUSYGROUP":
                raise
            return False
        return True

    def set_id(self, at: Id, *, entries_read: int | None = None) -> None:
        """Set the last delivered id (XGROUP SETID): an earlier id delivers entries again, a later one skips entries.

        Pending entries stay pending.
        """
        self._execute("XGROUP", "SETID", *self._names, wire_id(at), *_entries_read(entries_read))

    def destroy(self) -> bool:
        """Remove it with all its pending entries (XGROUP DESTROY); False if there was none.

        Consumers that are blocked in a read get an error.
        """
        return bool(self._execute("XGROUP", "DESTROY", *self._names))

    def info(self) -> GroupInfo | None:
        """Return its state in Redis; None if it does not exist."""
        return next((group for group in groups_of(self._client, self.stream) if group.name == self.name), None)

    # Entries

    @cached_property
    def pending(self) -> PendingList:
        """Its pending entries, to inspect and to claim."""
        return PendingList(self._client, self.stream, self.name)

    def ack(self, ids: Sequence[bytes | str]) -> int:
        """Acknowledge entries of any consumer (XACK); return how many were pending. Safe to repeat."""
        return int(self._execute("XACK", *self._names, *ids)) if ids else 0

    # Consumers

    def consumers(self) -> list[ConsumerInfo]:
        """Return all consumers (XINFO CONSUMERS), sorted by name."""
        return _to_consumers(self._execute("XINFO", "CONSUMERS", *self._names))

    def create_consumer(self, consumer: str) -> bool:
        """Create a consumer before its first read (XGROUP CREATECONSUMER); False if it exists."""
        return bool(self._execute("XGROUP", "CREATECONSUMER", *self._names, to_wire(consumer)))

    def delete_consumer(self, consumer: str, *, transfer_to: str | None = None) -> DeletedConsumer:
        """Delete a consumer, after its pending entries were reassigned to the consumer `transfer_to`.

        Their idle times and delivery counts stay. One atomic step reassigns the last of them and deletes the consumer,
        so no entry delivered meanwhile is dropped. `transfer_to` finds them by reading its own pending entries, other
        consumers by claiming. Raises ConfigError, and deletes nothing, if entries are pending and `transfer_to` is None
        or not in the group. Stop its process first: a consumer that still reads is created again by its next read.
        """
        if transfer_to == consumer:
            raise ConfigError(f"{consumer!r} cannot get its own entries: name another consumer")
        transferred, gone, outcome = 0, list[bytes](), "more"
        while outcome == "more":
            outcome, count, *lost = self._delete_consumer(consumer, transfer_to or "", min_idle_ms=0)
            if outcome == "pending":
                raise ConfigError(
                    f"consumer {consumer!r} of group {self.name!r} holds {count} pending entries of {self.stream}, "
                    "which deleting it would drop: name the consumer that gets them"
                )
            if outcome == "no-receiver":
                raise ConfigError(
                    f"group {self.name!r} of {self.stream} has no consumer {transfer_to!r}: name an existing one"
                )
            transferred += count
            gone += lost
        return DeletedConsumer(existed=outcome == "deleted", reassigned=transferred, gone=gone)

    def delete_idle_consumers(self, min_idle_ms: int, *, only: Container[str] | None = None) -> list[str]:
        """Delete the consumers without pending entries that are idle for `min_idle_ms`; return their names.

        `only`: deletes none but these. The step that deletes a consumer checks again that it is idle and has no pending
        entries. Choose more than the longest poll: a blocked consumer looks idle; before Redis 7.2, so does one that
        gets no entries. A deleted consumer exists again with its next entry.
        """
        idle = [
            one.name
            for one in self.consumers()
            if one.idle_ms >= min_idle_ms and not one.pending and (only is None or one.name in only)
        ]
        return [name for name in idle if self._delete_consumer(name, "", min_idle_ms=min_idle_ms)[0] == "deleted"]

    def _delete_consumer(self, consumer: str, transfer_to: str, *, min_idle_ms: int) -> Reply:
        outcome, *rest = self._client.script(*self._delete_call(consumer, transfer_to, min_idle_ms))
        return outcome.decode(), *rest

    def _delete_call(
        self, consumer: str, transfer_to: str, min_idle_ms: int
    ) -> tuple[Script, Sequence[Arg], Sequence[Arg]]:
        stream, group = self._names
        return (
            _DELETE_CONSUMER,
            (stream,),
            (group, to_wire(consumer), to_wire(transfer_to), _REASSIGNED_AT_ONCE, min_idle_ms),
        )

    def _execute(self, *command: Arg) -> Reply:
        return execute_on(self._client, self.stream, *command)


def delete_if_empty(client: Client, groups: Sequence[Group], consumer: str) -> None:
    """Delete `consumer` from each group in which it has no pending entries. Raises RedisError: then some may be
    left.
    """
    calls = [one._delete_call(consumer, "", 0) for one in groups]
    for at in range(0, len(calls), _AT_ONCE):
        client.scripts(calls[at : at + _AT_ONCE])


def consumers_of(client: Client, places: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[ConsumerInfo]]:
    """Return the consumers of many groups, each given by its stream and its name, in few round trips.

    Groups that are gone, or that this user may not access, are left out. Raises RedisError.
    """
    replies = send_all(client, [("XINFO", "CONSUMERS", to_wire(stream), to_wire(group)) for stream, group in places])
    return {
        place: _to_consumers(reply)
        for place, reply in zip(places, replies, strict=True)
        if not isinstance(reply, RedisError)
    }


def _to_consumers(reply: Reply) -> list[ConsumerInfo]:
    found = [mapping_of(item) for item in reply]
    consumers = [
        ConsumerInfo(
            name=from_wire(info[b"name"]),
            pending=info[b"pending"],
            idle_ms=info[b"idle"],
            inactive_ms=info.get(b"inactive"),
        )
        for info in found
    ]
    return sorted(consumers, key=lambda consumer: consumer.name)


def _entries_read(count: int | None) -> Sequence[Arg]:
    return () if count is None else ("ENTRIESREAD", count)
