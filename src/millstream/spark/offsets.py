"""Where a query stands: one position per stream, and its form in Spark's checkpoint.

Spark compares offsets as JSON text, so the same positions must always give the same text (Spark,
`PythonStreamingSourceOffset`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from millstream.errors import ConfigError
from millstream.model import ZERO_ID, EntryId


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


def dump(offsets: Mapping[str, Position]) -> dict[str, list[Any]]:
    """Return the JSON form of `offsets`: `{"stream": ["ms-seq", added]}`, sorted by stream."""
    return {stream: [str(position.id), position.added] for stream, position in sorted(offsets.items())}


def load(raw: Mapping[str, Any]) -> Offsets:
    """Read back what `dump` returned. Raises ConfigError for anything else."""
    try:
        return {stream: Position(EntryId.parse(text), added) for stream, (text, added) in raw.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            'the offsets in the checkpoint are not of the form {"stream": ["ms-seq", number]}: was it written by '
            "another source? Use a new checkpoint folder (for `millstream run`, with --from-frontier)"
        ) from error
