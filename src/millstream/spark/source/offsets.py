"""Offsets: one position per stream, and their JSON in Spark's checkpoint.

Spark compares offsets as JSON text, so equal positions must always give equal text (Spark,
`PythonStreamingSourceOffset`).
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from millstream.errors import ConfigError
from millstream.model import ZERO_ID, EntryId

_MAX_READABLE = 1_000
_PACKED = "packed"
_QUICK = 1


class Position(NamedTuple):
    """The offset of a query in one stream: its last entry that is in a batch.

    * `id`: its id; all entries of later batches have greater ids
    * `entries_added`: number of entries ever added up to and including it; None where that is not known
    """

    id: EntryId
    entries_added: int | None


Positions = Mapping[str, Position]
"""Positions in some streams, for a look-up or a calculation."""

_versions = count(1)


@dataclass(frozen=True, slots=True, eq=False)
class Offsets(Positions):
    """The position of a query in each of its streams, as one value that never changes.

    `version`: no other value of this process has the same one, so where versions are equal, positions are. Caches
    compare versions, never the positions of 100,000 streams. `positions` is not copied: it must not change later.
    """

    positions: Positions
    version: int = field(init=False, default_factory=lambda: next(_versions))

    def __getitem__(self, stream: str) -> Position:
        return self.positions[stream]

    def __iter__(self) -> Iterator[str]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Offsets):
            return self.version == other.version or self.positions == other.positions
        return self.positions == other

    __hash__ = None  # type: ignore[assignment]  # as of every mapping


BEGINNING = Position(ZERO_ID, 0)
"""Before the first entry ever added to a stream."""


def dump(offsets: Positions) -> dict[str, Any]:
    """Return the JSON form of `offsets`: `{"stream": ["ms-seq", added]}`, sorted by stream.

    For more than 1,000 streams that text is compressed (RFC 1950, base64): `{"packed": "eJy..."}`. Spark passes offsets
    on several times in a batch, and keeps those of a hundred batches.
    """
    if len(offsets) <= _MAX_READABLE:
        return {stream: [str(position.id), position.entries_added] for stream, position in sorted(offsets.items())}
    items = []
    for stream in sorted(offsets):
        (ms, seq), added = offsets[stream]
        items.append(f'{encode_basestring_ascii(stream)}: ["{ms}-{seq}", {"null" if added is None else added}]')
    text = "{" + ", ".join(items) + "}"
    return {_PACKED: b64encode(zlib.compress(text.encode(), _QUICK)).decode()}


def unpack(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Unpack the result of `dump` to `{"stream": ["ms-seq", added]}`. Raises ValueError for damaged data."""
    packed = raw.get(_PACKED)
    if not isinstance(packed, str):  # a stream of that name has a list here
        return raw
    try:
        return json.loads(zlib.decompress(b64decode(packed)))  # type: ignore[no-any-return]
    except zlib.error as error:
        raise ValueError(str(error)) from error


def load(raw: Mapping[str, Any]) -> Offsets:
    """Parse the result of `dump`. Raises ConfigError for anything else."""
    try:
        return Offsets({stream: _position(*fields) for stream, fields in unpack(raw).items()})
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(
            'the offsets in the checkpoint are not of the form {"stream": ["ms-seq", number]}; they may be those of '
            "another source: use a new checkpoint folder (for `millstream run`, with --from-committed)"
        ) from None


def _position(text: str, added: int | None) -> Position:
    # Three times as fast as EntryId.parse, which explains errors in user input.
    ms, _, seq = text.partition("-")
    return Position(EntryId(int(ms), int(seq)), added)
