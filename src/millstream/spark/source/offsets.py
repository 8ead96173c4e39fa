"""Where a query stands: one position per stream, and its form in Spark's checkpoint.

Spark compares offsets as JSON text, so the same positions must always give the same text (Spark,
`PythonStreamingSourceOffset`).
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from millstream.errors import ConfigError
from millstream.model import ZERO_ID, EntryId

_MOST_READABLE = 1_000
_PACKED = "packed"
_QUICK = 1


class Position(NamedTuple):
    """The last entry that has been taken from a stream.

    * `id`: its id; whatever comes next is greater
    * `added`: how many entries had ever been added up to and including it; None where that cannot be known
    """

    id: EntryId
    added: int | None


Offsets = dict[str, Position]

BEGINNING = Position(ZERO_ID, 0)
"""Before the first entry of a stream that nothing has been taken from."""


def dump(offsets: Mapping[str, Position]) -> dict[str, Any]:
    """Return the JSON form of `offsets`: `{"stream": ["ms-seq", added]}`, sorted by stream.

    Of more than 1,000 streams the text of that is compressed (RFC 1950, base64): `{"packed": "eJy..."}`. Spark passes it
    about several times in a batch, and keeps it for a hundred batches.
    """
    if len(offsets) <= _MOST_READABLE:
        return {stream: [str(position.id), position.added] for stream, position in sorted(offsets.items())}
    items = []
    for stream in sorted(offsets):
        (ms, seq), added = offsets[stream]
        items.append(f'{encode_basestring_ascii(stream)}: ["{ms}-{seq}", {"null" if added is None else added}]')
    text = "{" + ", ".join(items) + "}"
    return {_PACKED: b64encode(zlib.compress(text.encode(), _QUICK)).decode()}


def readable(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `{"stream": ["ms-seq", added]}` of whatever `dump` returned. Raises ValueError for what is damaged."""
    packed = raw.get(_PACKED)
    if not isinstance(packed, str):  # of a stream with that name it is a list
        return raw
    try:
        return json.loads(zlib.decompress(b64decode(packed)))  # type: ignore[no-any-return]
    except zlib.error as error:
        raise ValueError(str(error)) from error


def load(raw: Mapping[str, Any]) -> Offsets:
    """Read back what `dump` returned. Raises ConfigError for anything else."""
    try:
        return {stream: _position(*place) for stream, place in readable(raw).items()}
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(
            'the offsets in the checkpoint are not of the form {"stream": ["ms-seq", number]}: was it written by '
            "another source? Use a new checkpoint folder (for `millstream run`, with --from-frontier)"
        ) from None


def _position(text: str, added: int | None) -> Position:
    # EntryId.parse, which says what is wrong with what people write, takes three times as long.
    ms, _, seq = text.partition("-")
    return Position(EntryId(int(ms), int(seq)), added)
