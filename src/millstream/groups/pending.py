"""PendingList: the entries of a group that are delivered and not acknowledged; inspects and claims them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millstream.errors import ConfigError
from millstream.groups.entries import Batch, Id, execute_on, wire_id
from millstream.redis_client.call import Call
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import from_wire, to_wire
from millstream.redis_client.resp import Arg, Command, Reply

_FIRST = b"0-0"
_ASKED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class PendingSummary:
    """How many entries are pending, the lowest and the highest id of them, and how many each consumer holds."""

    count: int
    lowest: bytes | None
    highest: bytes | None
    by_consumer: Mapping[str, int]


class PendingEntry(NamedTuple):
    """One pending entry: its consumer, its idle time in milliseconds, and how often it was delivered."""

    id: bytes
    consumer: str
    idle_ms: int
    deliveries: int


class ClaimedIds(NamedTuple):
    """Claimed entries, by their ids only, and those found to be `gone` from the stream."""

    ids: list[bytes]
    gone: list[bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimOptions:
    """Options of a claim besides the consumer.

    * `idle_ms`: the idle time; None = 0
    * `time_ms`: the time of the last delivery instead, in Unix milliseconds
    * `deliveries`: the delivery count; None = one more
    * `force`: also claim entries that are not in the pending list
    * `last_id`: the group's last delivered id is raised to this, if it is lower: entries up to it that were not
      delivered are skipped. Redis' own replication sets it; of use for rebuilding a group entry by entry
    """

    idle_ms: int | None = None
    time_ms: int | None = None
    deliveries: int | None = None
    force: bool = False
    last_id: Id | None = None

    def args(self) -> list[Arg]:
        """Return the options as XCLAIM takes them. Raises ConfigError if both idle_ms and time_ms are set."""
        if self.idle_ms is not None and self.time_ms is not None:
            raise ConfigError("give a claim either idle_ms or time_ms, not both")
        given = (("IDLE", self.idle_ms), ("TIME", self.time_ms), ("RETRYCOUNT", self.deliveries))
        args: list[Arg] = [part for name, value in given if value is not None for part in (name, value)]
        if self.force:
            args.append("FORCE")
        return args if self.last_id is None else [*args, "LASTID", wire_id(self.last_id)]


DEFAULT_CLAIM = ClaimOptions()


class PendingList:
    """The pending entries of `group` on `stream` (Redis: PEL). Each method raises RedisError, such as GroupMissing."""

    def __init__(self, client: Client, stream: str, group: str) -> None:
        self._client = client
        self._stream = stream
        self._names = (to_wire(stream), to_wire(group))

    # Inspecting

    def summary(self) -> PendingSummary:
        """Return the count, the lowest and the highest id, and the count of each consumer (XPENDING)."""
        count, lowest, highest, holders = self._execute("XPENDING", *self._names)
        return PendingSummary(count, lowest, highest, {from_wire(name): int(held) for name, held in holders or ()})

    def entries(
        self, start: Id = "-", end: Id = "+", *, count: int = 100, consumer: str | None = None, min_idle_ms: int = 0
    ) -> list[PendingEntry]:
        """Return up to `count` entries from `start` to `end`, in order (XPENDING).

        `consumer`: of this one only; `min_idle_ms`: idle for at least so many milliseconds.
        """
        idle: tuple[Arg, ...] = ("IDLE", min_idle_ms) if min_idle_ms else ()
        holder = () if consumer is None else (to_wire(consumer),)
        return _parse_entries(
            self._execute("XPENDING", *self._names, *idle, wire_id(start), wire_id(end), count, *holder)
        )

    def lowest_call(self, count: int) -> Call[list[PendingEntry]]:
        """Return the call that reads the `count` lowest entries (XPENDING), for callers that pipeline many streams."""
        return Call(("XPENDING", *self._names, "-", "+", count), _parse_entries)

    def has_idle_call(self, min_idle_ms: int) -> Call[bool]:
        """Return the call that checks whether an entry was idle for `min_idle_ms` (XPENDING); an error reply counts as one."""
        return Call(("XPENDING", *self._names, "IDLE", min_idle_ms, "-", "+", 1), bool, on_error=lambda _: True)

    def iter_entries(
        self, *, consumer: str | None = None, min_idle_ms: int = 0, page: int = 500
    ) -> Iterator[PendingEntry]:
        """Yield all entries in order, fetched in pages of `page`."""
        start = "-"
        while found := self.entries(start, count=page, consumer=consumer, min_idle_ms=min_idle_ms):
            yield from found
            start = f"({found[-1].id.decode()}"

    def delivery_counts(self, ids: Sequence[bytes]) -> dict[bytes, int]:
        """Return how often each of `ids` was delivered, for those that are pending."""
        found: dict[bytes, int] = {}
        for at in range(0, len(ids), _ASKED_AT_ONCE):
            asked: list[Command] = [("XPENDING", *self._names, one, one, 1) for one in ids[at : at + _ASKED_AT_ONCE]]
            for reply in self._client.pipeline(asked):
                found.update((one, times) for one, _, _, times in raise_if_error(reply))
        return found

    # Claiming

    def claim(
        self, ids: Sequence[bytes | str], *, consumer: str, min_idle_ms: int, options: ClaimOptions = DEFAULT_CLAIM
    ) -> Batch:
        """Claim for `consumer` those of `ids` that were idle for `min_idle_ms` (XCLAIM), and return their entries.

        Of several concurrent claims one succeeds, as each claim resets the idle time. Redis silently removes ids whose
        entries are gone from the pending list; `auto_claim` names them.
        """
        return Batch(self._stream, self._claim(ids, consumer, min_idle_ms, options.args()), recovered=True)

    def claim_ids(
        self, ids: Sequence[bytes | str], *, consumer: str, min_idle_ms: int, options: ClaimOptions = DEFAULT_CLAIM
    ) -> list[bytes]:
        """Claim as `claim` does, and return ids only: contents are not sent, and the delivery count stays as it is."""
        return self._claim(ids, consumer, min_idle_ms, [*options.args(), "JUSTID"])

    def auto_claim(self, consumer: str, *, min_idle_ms: int, count: int = 100) -> Iterator[Batch]:
        """Claim for `consumer` all entries idle for `min_idle_ms` (XAUTOCLAIM), from first to last, `count` at a time.

        A batch is claimed when the iterator reaches it. Its `gone` were pending but are no longer in the stream: Redis
        has removed them from the pending list, and no consumer will ever get them.
        """
        cursor = _FIRST
        while True:
            cursor, batch = self.auto_claim_from(cursor, consumer, min_idle_ms=min_idle_ms, count=count)
            if batch.raw or batch.gone:
                yield batch
            if cursor == _FIRST:
                return

    def auto_claim_from(
        self, cursor: bytes, consumer: str, *, min_idle_ms: int, count: int = 100
    ) -> tuple[bytes, Batch]:
        """Run one step of `auto_claim`: return the next cursor, b"0-0" at the end, and the claimed batch, perhaps
        empty.

        Redis examines ten times `count` entries in a step at most.
        """
        following, entries, gone = self._auto_claim(cursor, consumer, min_idle_ms, count)
        return following, Batch(self._stream, entries, gone=gone, recovered=True)

    def auto_claim_ids(self, consumer: str, *, min_idle_ms: int, count: int = 100) -> Iterator[ClaimedIds]:
        """Claim as `auto_claim` does, and yield ids only: contents are not sent, and delivery counts stay as
        they are.
        """
        cursor = _FIRST
        while True:
            cursor, ids, gone = self._auto_claim(cursor, consumer, min_idle_ms, count, "JUSTID")
            if ids or gone:
                yield ClaimedIds(ids, gone)
            if cursor == _FIRST:
                return

    def _claim(self, ids: Sequence[bytes | str], consumer: str, min_idle_ms: int, options: Sequence[Arg]) -> list[Any]:
        if not ids:
            return []
        claimed: list[Any] = self._execute("XCLAIM", *self._names, to_wire(consumer), min_idle_ms, *ids, *options)
        return claimed

    def _auto_claim(
        self, cursor: bytes, consumer: str, min_idle_ms: int, count: int, *options: Arg
    ) -> tuple[bytes, list[Any], list[bytes]]:
        command = ("XAUTOCLAIM", *self._names, to_wire(consumer), min_idle_ms, cursor, "COUNT", count, *options)
        following, claimed, gone = self._execute(*command)
        return following, claimed, gone

    def _execute(self, *command: Arg) -> Any:
        return execute_on(self._client, self._stream, *command)


def _parse_entries(reply: Reply) -> list[PendingEntry]:
    return [PendingEntry(one, from_wire(name), idle_ms, times) for one, name, idle_ms, times in reply]
