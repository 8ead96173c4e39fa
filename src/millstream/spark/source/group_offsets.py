"""GroupOffset: the offset of a query that reads through a consumer group, and its JSON in Spark's checkpoint.

Spark compares offsets as JSON text, so equal offsets must always give equal text.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from millstream.errors import ConfigError


class GroupOffset(NamedTuple):
    """The end of a batch. The ids of its entries are recorded in Redis, by `Batches`.

    * `token`: identifies the checkpoint that the batch belongs to; "" before the first batch
    * `batch`: its number
    * `counts`: its number of entries of each stream that the query knows; 0 for most of them
    """

    token: str
    batch: int
    counts: Mapping[str, int]

    @property
    def non_empty(self) -> dict[str, int]:
        """The numbers of entries, without the streams that the batch has none of."""
        return {stream: count for stream, count in self.counts.items() if count}


BEFORE_FIRST_BATCH = GroupOffset("", 0, {})
"""Before the first batch."""


def dump(offset: GroupOffset) -> dict[str, Any]:
    """Return the JSON form: `{"batch": number, "counts": {"stream": count}, "token": text}`."""
    return {"batch": offset.batch, "counts": dict(sorted(offset.counts.items())), "token": offset.token}


def load(raw: Mapping[str, Any]) -> GroupOffset:
    """Parse the result of `dump`. Raises ConfigError for anything else."""
    match raw:
        case {"batch": int(batch), "counts": dict(counts), "token": str(token), **rest} if not rest:
            return GroupOffset(token, batch, counts)
    raise ConfigError(
        "the offsets in the checkpoint are not those of readAs=group; they may be those of another source, or of a run "
        "without that option: use a new checkpoint folder"
    )
