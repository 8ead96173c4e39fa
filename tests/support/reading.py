"""What a task of the Spark source reads, by stream."""

from collections.abc import Sequence

from millstream.spark.source.entry_runs import Run, StreamEntries, split
from millstream.spark.source.offset_ranges import OffsetRange, to_columns
from millstream.spark.source.planned_ranges import PlannedRanges


def as_planned(ranges: Sequence[OffsetRange]) -> PlannedRanges:
    """The ranges as a task receives them."""
    return PlannedRanges(to_columns(ranges))


def by_stream(runs: Sequence[Run]) -> list[StreamEntries]:
    """The entries of each stream, for `PartitionReader.batches`."""
    return [one for run in runs for one in split(run)]
