"""One consumer group of one stream: its life, its place in the stream, and its consumers."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property

from millstream.errors import CommandFailed, ConfigError
from millstream.groups.entries import BEGINNING, Id, ask, mapping, wire_id
from millstream.groups.pending import PendingList
from millstream.redis_client.client import Arg, Client, Reply, Script
from millstream.redis_client.key_names import from_wire, to_wire

_DELETE_CONSUMER = Script("groups/delete_consumer")
_HAND_ON = 500
_AT_ONCE = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupInfo:
    """What Redis knows of a group.

    * `last_delivered`: the highest id delivered so far
    * `entries_read`: how many entries it was given; None where Redis cannot say
    * `lag`: how many wait; None where Redis cannot say, and known to be wrong after deletions
    """

    name: str
    consumers: int
    pending: int
    last_delivered: bytes
    entries_read: int | None
    lag: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerInfo:
    """What Redis knows of a consumer.

    * `idle_ms`: milliseconds since it last asked for something, before Redis 7.2 since a read last gave it anything; grows
      while it waits in a long poll
    * `inactive_ms`: milliseconds since it last got something; None before Redis 7.2
    """

    name: str
    pending: int
    idle_ms: int
    inactive_ms: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedConsumer:
    """What became of a consumer's entries: `handed_on` is how many, `gone` are ids that left the stream before."""

    existed: bool
    handed_on: int = 0
    gone: Sequence[bytes] = ()


def groups_of(client: Client, stream: str) -> list[GroupInfo]:
    """The groups of `stream`. Raises GroupMissing if there is no such stream, and RedisError."""
    found = []
    for item in ask(client, stream, "XINFO", "GROUPS", to_wire(stream)):
        info = mapping(item)
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

    Each method raises RedisError; GroupMissing, which is one, if the stream does not exist, and if the group does not. But
    what removes something says of a missing group only that there was nothing: `ack` 0, `destroy` False; and `info` None.
    """

    def __init__(self, client: Client, stream: str, name: str) -> None:
        self._client = client
        self.stream = stream
        self.name = name
        self._at = (to_wire(stream), to_wire(name))

    # Its life

    def create(self, at: Id = BEGINNING, *, mkstream: bool = False, entries_read: int | None = None) -> bool:
        """Create it, so that entries with ids greater than `at` are delivered; False if it exists already.

        `at` is an id, BEGINNING or END. `mkstream` creates an absent stream as well. `entries_read` is how many
        entries the stream has had up to `at`, for Redis to work out the lag. Raises GroupMissing if there is no
        stream to create it on.
        """
        options: list[Arg] = ["MKSTREAM"] if mkstream else []
        try:
            self._ask("XGROUP", "CREATE", *self._at, wire_id(at), *options, *_entries_read(entries_read))
        except CommandFailed as error:
            if error.code != "BUSYGROUP":
                raise
            return False
        return True

    def set_id(self, at: Id, *, entries_read: int | None = None) -> None:
        """Go on after `at`: further back delivers again, further on passes over. Pending entries stay pending."""
        self._ask("XGROUP", "SETID", *self._at, wire_id(at), *_entries_read(entries_read))

    def destroy(self) -> bool:
        """Remove it with all that is pending; False if there was none. Consumers that wait in a read get an error."""
        return bool(self._ask("XGROUP", "DESTROY", *self._at))

    def info(self) -> GroupInfo | None:
        """What Redis knows of it; None if it does not exist."""
        return next((group for group in groups_of(self._client, self.stream) if group.name == self.name), None)

    # Its entries

    @cached_property
    def pending(self) -> PendingList:
        """What is delivered and not acknowledged: to look at and to claim."""
        return PendingList(self._client, self.stream, self.name)

    def ack(self, ids: Sequence[bytes | str]) -> int:
        """Acknowledge entries, whoever holds them; return how many were pending. Safe to repeat."""
        return int(self._ask("XACK", *self._at, *ids)) if ids else 0

    # Its consumers

    def consumers(self) -> list[ConsumerInfo]:
        """All consumers, by name."""
        found = []
        for item in self._ask("XINFO", "CONSUMERS", *self._at):
            info = mapping(item)
            found.append(
                ConsumerInfo(
                    name=from_wire(info[b"name"]),
                    pending=info[b"pending"],
                    idle_ms=info[b"idle"],
                    inactive_ms=info.get(b"inactive"),
                )
            )
        return sorted(found, key=lambda consumer: consumer.name)

    def create_consumer(self, consumer: str) -> bool:
        """Create a consumer before its first read; False if it exists."""
        return bool(self._ask("XGROUP", "CREATECONSUMER", *self._at, to_wire(consumer)))

    def delete_consumer(self, consumer: str, *, heir: str | None = None) -> DeletedConsumer:
        """Delete a consumer, after all it holds has passed to the consumer `heir`, idle times and counts unchanged.

        It is deleted in one atomic step with the last of its entries, so that nothing it is given meanwhile is
        dropped. The heir finds them by reading its own pending entries, anyone by claiming. Raises ConfigError,
        and deletes nothing, if it holds entries and no heir is named, or if the heir is not in the group. Stop
        its process first: a consumer that still reads is created again by its next read.
        """
        if heir == consumer:
            raise ConfigError(f"{consumer!r} cannot be its own heir: name another consumer")
        handed_on, gone, outcome = 0, list[bytes](), "more"
        while outcome == "more":
            outcome, count, *lost = self._dismiss(consumer, heir or "", min_idle_ms=0)
            if outcome == "pending":
                raise ConfigError(
                    f"consumer {consumer!r} of group {self.name!r} holds {count} pending entries of {self.stream}, "
                    "which deleting it would drop: name an heir"
                )
            if outcome == "no-heir":
                raise ConfigError(f"there is no consumer {heir!r} in group {self.name!r} of {self.stream} to inherit")
            handed_on += count
            gone += lost
        return DeletedConsumer(existed=outcome == "deleted", handed_on=handed_on, gone=gone)

    def delete_idle_consumers(self, min_idle_ms: int, *, only: Container[str] | None = None) -> list[str]:
        """Delete the consumers that hold nothing and have asked for nothing for `min_idle_ms`; return their names.

        `only`: none but these. Whether that is so is asked again in the step that deletes each. Choose more than the longest
        poll: a consumer that waits looks idle; before Redis 7.2 one that is given nothing does, too. Deleted, it is there
        again with its next entry.
        """
        idle = [
            one.name
            for one in self.consumers()
            if one.idle_ms >= min_idle_ms and not one.pending and (only is None or one.name in only)
        ]
        return [name for name in idle if self._dismiss(name, "", min_idle_ms=min_idle_ms)[0] == "deleted"]

    def _dismiss(self, consumer: str, heir: str, *, min_idle_ms: int) -> Reply:
        outcome, *rest = self._client.script(*self._dismissal(consumer, heir, min_idle_ms))
        return outcome.decode(), *rest

    def _dismissal(self, consumer: str, heir: str, min_idle_ms: int) -> tuple[Script, Sequence[Arg], Sequence[Arg]]:
        stream, group = self._at
        return _DELETE_CONSUMER, (stream,), (group, to_wire(consumer), to_wire(heir), _HAND_ON, min_idle_ms)

    def _ask(self, *command: Arg) -> Reply:
        return ask(self._client, self.stream, *command)


def delete_if_empty(client: Client, groups: Sequence[Group], consumer: str) -> None:
    """Delete `consumer` from each of the groups in which it holds nothing. Raises RedisError: then some may be left."""
    calls = [one._dismissal(consumer, "", 0) for one in groups]
    for at in range(0, len(calls), _AT_ONCE):
        client.scripts(calls[at : at + _AT_ONCE])


def _entries_read(count: int | None) -> Sequence[Arg]:
    return () if count is None else ("ENTRIESREAD", count)
