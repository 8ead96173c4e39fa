"""Batches of entries as Redis sent them: a thousand entries cost one object, not a thousand."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

from millstream.errors import ConfigError, GroupMissing, KeyMissing, WrongType
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.error_translation import not_a_stream
from millstream.redis_client.resp import Arg, Reply

Id = bytes | str | EntryId
"""An entry id or a position in a stream, as Redis, text or `EntryId` has it."""

BEGINNING = "0"
"""Before the first entry of a stream."""
END = "$"
"""After the entry that is the last one now; only for creating a group and setting its id."""


class Delivered(NamedTuple):
    """One entry delivered to a consumer: its `id` as Redis sent it, and `[name, value, name, value, ...]`.

    * `deliveries`: how often Redis has delivered it, this time included: 1 for a new entry. A `Reader` sets it for each
      entry; entries that a `Consumer` reads again and claimed ones have 0, since Redis does not say: see
      `PendingList.delivery_counts`
    """

    id: bytes
    pairs: list[bytes]
    deliveries: int = 1

    @property
    def entry_id(self) -> EntryId:
        """The id in a form that can be compared."""
        return EntryId.parse(self.id)

    @property
    def fields(self) -> dict[str, bytes]:
        """The fields as a mapping; a repeated name keeps its last value, and undecodable names are escaped."""
        pairs = self.pairs
        return {pairs[i].decode("utf-8", "surrogateescape"): pairs[i + 1] for i in range(0, len(pairs), 2)}


class Batch:
    """Entries of one stream from one read; iterating yields them as `Delivered`.

    * `stream`: their stream
    * `raw`: the entries as hiredis parsed them, `[id, pairs]` each, for code on the hot path
    * `gone`: ids that were pending but whose entries are no longer in the stream (trimmed or deleted)
    * `recovered`: True if they may have been delivered before: read again, or claimed
    * `delivery_counts`: for recovered entries, how often each was delivered, as far as that was queried
    """

    __slots__ = ("delivery_counts", "gone", "raw", "recovered", "stream")

    def __init__(
        self, stream: str, raw: list[list[Any]], *, gone: Sequence[bytes] = (), recovered: bool = False
    ) -> None:
        self.stream = stream
        self.raw = raw
        self.gone = gone
        self.recovered = recovered
        self.delivery_counts: Mapping[bytes, int] = {}

    @property
    def ids(self) -> list[bytes]:
        """The ids of the entries, without those that are gone."""
        return [entry[0] for entry in self.raw]

    def __len__(self) -> int:
        return len(self.raw)

    def __iter__(self) -> Iterator[Delivered]:
        if self.recovered:
            times = self.delivery_counts
            return (Delivered(entry_id, pairs, times.get(entry_id, 0)) for entry_id, pairs in self.raw)
        return starmap(Delivered, self.raw)

    def __repr__(self) -> str:
        return f"Batch({self.stream!r}, {len(self.raw)} entries, {len(self.gone)} gone)"


def recovered_batch(stream: str, entries: list[list[Any]]) -> Batch:
    """Return a batch of entries that were delivered before; Redis sends nil fields for those that are gone."""
    gone = [entry[0] for entry in entries if entry[1] is None]
    raw = [entry for entry in entries if entry[1] is not None] if gone else entries
    return Batch(stream, raw, gone=gone, recovered=True)


def wire_id(place: Id) -> bytes | str:
    """Return a position in a stream as it is sent to Redis."""
    return str(place) if isinstance(place, EntryId) else place


def check_position(where: str, place: Id, *named: str) -> None:
    """Raise ConfigError if `place` is neither an entry id nor one of `named`."""
    if isinstance(place, EntryId) or place in named:
        return
    try:
        EntryId.parse(place)
    except (ConfigError, AttributeError) as error:
        wanted = " or ".join(["an entry id, like 1700000000000-0,", *map(repr, named)])
        raise ConfigError(f"{where} must be {wanted}, not {place!r}") from error


def execute_on(client: Client, stream: str, *command: Arg) -> Reply:
    """Run a command on `stream`; a missing stream raises GroupMissing, and WrongType names the key."""
    try:
        return client.execute(*command)
    except WrongType as error:
        raise not_a_stream(stream) from error
    except KeyMissing as error:
        raise GroupMissing(f"there is no stream {stream!r}: add an entry, or create it with its group") from error
