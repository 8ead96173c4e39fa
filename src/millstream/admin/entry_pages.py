"""Pages of the entries of a stream, bounded in number and in bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import to_wire

_AT_ONCE, _MOST_AT_ONCE = 5, 10
"""Redis does not report the size of an entry beforehand: so many more than fit may be read where large ones begin."""
_MOST_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class EntryPage:
    """Entries of a stream, each with its id and its names and values; `next_id`: where the next page begins, None at
    the end.
    """

    entries: Sequence[tuple[str, Sequence[bytes]]]
    next_id: str | None


def read_entries(client: Client, stream: str, start: str, *, most: int = 50) -> EntryPage:
    """Read a page that begins at the id `start`: at most `most` entries, up to the one that makes a million bytes.

    It reads at most four more. Raises RedisError.
    """
    found: list[tuple[str, Sequence[bytes]]] = []
    size = 0
    while True:
        some = client.execute("XRANGE", to_wire(stream), start, "+", "COUNT", _AT_ONCE)
        for entry_id, pairs in some:
            if len(found) == most or size >= _MOST_BYTES:
                return EntryPage(entries=found, next_id=entry_id.decode())
            found.append((entry_id.decode(), pairs))
            size += sum(map(len, pairs))
        if len(some) < _AT_ONCE:
            return EntryPage(entries=found, next_id=None)
        start = f"({found[-1][0]}"


def newest_first(client: Client, stream: str, *, most: int) -> Iterator[tuple[str, Sequence[bytes]]]:
    """The last entries, the newest first: at most `most`, and at most nine after the one that makes a million bytes.

    Raises RedisError.
    """
    count, size, end, at_once = 0, 0, "+", _AT_ONCE
    while count < most and size < _MOST_BYTES:
        some = client.execute("XREVRANGE", to_wire(stream), end, "-", "COUNT", min(at_once, most - count))
        for entry_id, pairs in some:
            size += sum(map(len, pairs))
            yield entry_id.decode(), pairs
        if not some:
            return
        count += len(some)
        end = f"({some[-1][0].decode()}"
        fitting = (_MOST_BYTES - size) * count // max(1, size)
        at_once = max(1, min(2 * at_once, _MOST_AT_ONCE, fitting))


@dataclass(frozen=True, kw_only=True)
class NewestEntries:
    """The last entries of a stream, the newest first.

    * `gap_id`: the first entry after the id that was seen last which is not among them; None if there is none
    """

    entries: Sequence[tuple[str, Sequence[bytes]]]
    gap_id: str | None


def read_newest(client: Client, stream: str, seen: str | None, *, most: int = 50) -> NewestEntries:
    """Read the last entries, as `newest_first`. `seen`: the last id seen before.

    Raises RedisError.
    """
    found = list(newest_first(client, stream, most=most))
    gap = []
    if seen is not None and found and EntryId.parse(found[-1][0]) > EntryId.parse(seen):
        gap = client.execute("XRANGE", to_wire(stream), f"({seen}", f"({found[-1][0]}", "COUNT", 1)
    return NewestEntries(entries=found, gap_id=gap[0][0].decode() if gap else None)
