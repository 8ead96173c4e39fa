"""Where a query stands that takes from a consumer group: which batch, of which streams, and its form in Spark's checkpoint.

Spark compares offsets as JSON text, so the same place must always give the same text.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from millstream.errors import ConfigError


class GroupOffset(NamedTuple):
    """The end of a batch. Its entries are named in Redis, where `Batches` notes them.

    * `token`: tells the batches of this checkpoint from those of another one; "" before the first
    * `batch`: its number
    * `taken`: how many entries it has of each stream that the query knows; 0 for most of them
    """

    token: str
    batch: int
    taken: Mapping[str, int]

    @property
    def filled(self) -> dict[str, int]:
        """The streams that the batch has entries of."""
        return {stream: count for stream, count in self.taken.items() if count}


START = GroupOffset("", 0, {})
"""Before the first batch."""


def dump(place: GroupOffset) -> dict[str, Any]:
    """Return the JSON form: `{"batch": number, "taken": {"stream": count}, "token": text}`."""
    return {"batch": place.batch, "taken": dict(sorted(place.taken.items())), "token": place.token}


def load(raw: Mapping[str, Any]) -> GroupOffset:
    """Read back what `dump` returned. Raises ConfigError for anything else."""
    match raw:
        case {"batch": int(batch), "taken": dict(taken), "token": str(token), **rest} if not rest:
            return GroupOffset(token, batch, taken)
    raise ConfigError(
        "the offsets in the checkpoint are not those of readAs=group: was it written by another source, or without that "
        "option? Use a new checkpoint folder"
    )
