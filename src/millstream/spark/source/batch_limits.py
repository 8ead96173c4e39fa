"""BatchLimits: how much a planner may put into the next batch, and what it returns. No I/O."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from millstream.spark.source.offsets import Positions

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The limits of one batch.

    * `max_entries`: the most entries; None = all
    * `target`: no entries beyond these positions, and none of other streams; None = all
    * `may_delay`: a batch of fewer than `minOffsetsPerTrigger` entries may wait for more, up to `maxTriggerDelay`
    """

    max_entries: int | None = None
    target: Positions | None = None
    may_delay: bool = False


NO_LIMITS = BatchLimits()
"""All entries, at once."""


@dataclass(frozen=True, slots=True)
class Advance(Generic[T]):
    """The query goes on to `end`: with a batch, or with an empty one that records new streams.

    `entries`: how many entries the batch has; None if that is unknown
    """

    end: T
    entries: int | None


@dataclass(frozen=True, slots=True)
class NoAdvance:
    """The query stays where it is. `delay_ms`: the longest time that a small batch is still delayed, in milliseconds.

    0: nothing is new.
    """

    delay_ms: float = 0.0
