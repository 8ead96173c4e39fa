"""Pages of the entries of a stream, bounded in number and in bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import to_wire

_AT_ONCE = 5
_MOST_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class EntryPage:
    """Entries of a stream, each with its id and its names and values; `next_id`: where the next page begins, None at
    the end.
    """

    entries: Sequence[tuple[str, Sequence[bytes]]]
    next_id: str | None


def read_entries(client: Client, stream: str, start: str, *, most: int = 50) -> EntryPage:
    """Read a page that begins at the id `start`: at most `most` entries, fewer if they have about a million bytes.

    Raises RedisError.
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
