"""The history of a key: which streams have its messages, how far back they are kept, and their entries. Only reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millstream.admin.redis_metrics import streams_of
from millstream.delivery.keyed_stream import READ_BYTES, READ_RANGE
from millstream.errors import GroupMissing, MillstreamError
from millstream.groups.stream import stream_info
from millstream.handlers.handler import Handler
from millstream.model import LAST_ID, EntryId
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import can_share_slot, from_wire, to_wire

_AT_ONCE = 1_000
_NONE = b"0-0"


@dataclass(frozen=True, kw_only=True)
class HistoryPart:
    """A stream with messages of a key, up to the id `until`."""

    stream: str
    until: EntryId = LAST_ID


History = Sequence[HistoryPart]
"""The streams that one state of a key goes through, in order: one, or a partition after the older ones of the key."""


@dataclass(frozen=True, kw_only=True)
class KeptEntries:
    """What a stream still has.

    * `length`: how many entries; `first`, `last`: the first and the last of them
    * `removed`: how many entries it had that are gone
    * `only_trimmed`: none was deleted by its id, so all that are gone were before `first`
    """

    length: int
    first: EntryId
    last: EntryId
    removed: int
    only_trimmed: bool


def histories_of(client: Client, handler: Handler, key: bytes, stream: str | None = None) -> list[History]:
    """The histories of `key`, one for each of its states: each stream of a handler has states of its own.

    `stream`: only that stream; of partitions it is their base, or one of the key's partitions. Raises MillstreamError if
    the handler does not read it, or has no stream, and RedisError.
    """
    if handler.partitions:
        found = [one for base in handler.streams for one in _of_partitions(client, base, key, stream)]
    else:
        wanted = from_wire(key) if handler.order == "stream" else stream
        names = [name for name in streams_of(client, handler) if can_share_slot(name)]
        found = [[HistoryPart(stream=name)] for name in names if wanted in (None, name) and stream in (None, name)]
    if not found:
        where = "a stream on this Redis" if stream is None else repr(stream)
        raise MillstreamError(f"{handler.label} does not read {where}" + _hint(handler))
    return found


def _hint(handler: Handler) -> str:
    return "; its key is the name of a stream" if handler.order == "stream" else ""


def _of_partitions(client: Client, base: str, key: bytes, stream: str | None) -> Iterator[History]:
    layout = Partitions(client, base).load()
    if layout is None:
        return
    owner = layout.partition_of(key)
    past = layout.past_owners(key, owner)
    parts = [
        HistoryPart(stream=layout.stream(one.partition), until=EntryId.parse(layout.close_id(one))) for one in past
    ]
    parts.append(HistoryPart(stream=layout.stream(owner)))
    if stream is None or stream in (base, *(one.stream for one in parts)):
        yield parts


def kept_entries(client: Client, stream: str) -> KeptEntries | None:
    """What `stream` still has; None if it does not exist or has no entry. Raises RedisError."""
    try:
        info = stream_info(client, stream)
    except GroupMissing:
        return None
    if info.first is None or info.last is None:
        return None
    return KeptEntries(
        length=info.length,
        first=EntryId.parse(info.first.id),
        last=EntryId.parse(info.last.id),
        removed=max(0, info.entries_added - info.length),
        only_trimmed=info.max_deleted_id == _NONE,
    )


def read_history(
    client: Client, stream: str, first: EntryId, last: EntryId
) -> Iterator[Sequence[tuple[bytes, Sequence[bytes]]]]:
    """The entries from `first` to `last`, in pages of about 4 MB, one at least. Raises RedisError."""
    after = first.previous()
    while after < last:
        _, page = client.script(READ_RANGE, (to_wire(stream),), (str(after), _AT_ONCE, READ_BYTES, 1))
        entries = [(entry_id, pairs) for entry_id, pairs in page if EntryId.parse(entry_id) <= last]
        if entries:
            yield entries
        if len(entries) < len(page) or not page:
            return
        after = EntryId.parse(page[-1][0])
