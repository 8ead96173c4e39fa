"""OffsetRange: splits streams into offset ranges and assigns them to Spark's tasks. No I/O.

A Spark task costs about 33 ms however little it reads, so a batch has about as many tasks as cores, each with ranges
of many streams.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from millstream.model import EntryId

_ENTRIES_WORTH_A_TASK = 2_000


class OffsetRange(NamedTuple):
    """The entries of `stream` after `after`, up to and including `until`.

    * `size`: estimated number of entries
    * `rows`: exact number of entries; None where that is not known
    * `untouched`: no entry had ever been removed from the stream, so it is whole if that still holds after reading
    """

    stream: str
    after: EntryId
    until: EntryId
    size: int
    rows: int | None
    untouched: bool = False


RangeColumns = tuple[list[str], list[int], list[int], list[int], list[int], list[int], list[int | None], list[bool]]
"""A list for each field of ranges, for ids one for each part, as Spark sends them to tasks.

Python's garbage collector, which Spark's workers run as usual, would scan an object for each range again and again.
"""


def to_columns(ranges: Sequence[OffsetRange]) -> RangeColumns:
    """Return ranges as columns."""
    return (
        [one.stream for one in ranges],
        [one.after.ms for one in ranges],
        [one.after.seq for one in ranges],
        [one.until.ms for one in ranges],
        [one.until.seq for one in ranges],
        [one.size for one in ranges],
        [one.rows for one in ranges],
        [one.untouched for one in ranges],
    )


@dataclass(frozen=True, kw_only=True)
class TaskSizing:
    """How to split a batch into tasks: `minPartitions`, `maxRecordsPerPartition`, and the number of cores."""

    min_partitions: int | None = None
    max_records: int | None = None
    cores: int = 1

    def task_size(self, total: int) -> int:
        """Maximum number of entries that one task should get of a batch of `total`."""
        tasks = self.min_partitions or min(self.cores, -(-total // _ENTRIES_WORTH_A_TASK))
        target = -(-total // max(tasks, 1))
        return max(1, min(target, self.max_records or target))

    def task_count(self, total: int) -> int:
        """Number of tasks for a batch of `total` entries."""
        return max(1, -(-total // self.task_size(total)))


def split_at(whole: OffsetRange, step: int, ids: Sequence[EntryId]) -> list[OffsetRange]:
    """Split `whole` at `ids`, which are `step` entries apart."""
    ranges = []
    after, left = whole.after, whole.size
    for entry_id in ids:
        if not after < entry_id < whole.until:
            break
        ranges.append(OffsetRange(whole.stream, after, entry_id, step, None if whole.rows is None else step))
        after, left = entry_id, left - step
    done = step * len(ranges)
    rest = None if whole.rows is None else whole.rows - done
    return [*ranges, OffsetRange(whole.stream, after, whole.until, max(left, 1), rest)]


def split_evenly(whole: OffsetRange, parts: int) -> list[OffsetRange]:
    """Split `whole` into `parts` of even id space, without a call to Redis: the size of each is a guess.

    Counts an id as one number, milliseconds first; the width of its lower digits follows from the sequence numbers at
    both ends, so that entries of one millisecond are spread too.
    """
    width = max(whole.after.seq, whole.until.seq) + 1
    first = whole.after.ms * width + whole.after.seq
    span = whole.until.ms * width + whole.until.seq - first
    inner = sorted({EntryId(*divmod(first + span * part // parts, width)) for part in range(1, parts)})
    size = -(-whole.size // parts)
    cuts = [whole.after, *(one for one in inner if whole.after < one < whole.until), whole.until]
    return [whole._replace(after=a, until=b, size=size, rows=None) for a, b in pairwise(cuts)]


def assign(ranges: Iterable[OffsetRange], tasks: int, max_size: int) -> list[list[OffsetRange]]:
    """Assign `ranges` to about `tasks` tasks of even size (greatest first, to the least loaded).

    A task gets more than `max_size` entries only where a single range has more. Read in the order of the tasks, the
    entries of each stream are in their order.
    """
    of_stream: dict[str, list[OffsetRange]] = {}
    for one in ranges:
        of_stream.setdefault(one.stream, []).append(one)
    # All ranges of a stream weigh as much as its greatest, so that they may change places.
    weights = {stream: max([one.size for one in some]) for stream, some in of_stream.items()}
    loads: list[tuple[int, int]] = [(0, index) for index in range(tasks)]
    task_indexes: dict[str, list[int]] = {}
    count = tasks
    for stream in sorted(weights, key=lambda stream: (-weights[stream], stream)):
        weight = weights[stream]
        for _ in of_stream[stream]:
            load, index = loads[0]
            if load and load + weight > max_size:
                index, count = count, count + 1
                heapq.heappush(loads, (weight, index))
            else:
                heapq.heapreplace(loads, (load + weight, index))
            task_indexes.setdefault(stream, []).append(index)
    assigned: list[list[OffsetRange]] = [[] for _ in range(count)]
    for stream in sorted(of_stream):
        for one, index in zip(sorted(of_stream[stream]), sorted(task_indexes[stream]), strict=True):
            assigned[index].append(one)
    return [some for some in assigned if some]
