"""PlannedRanges: the ranges of a task, taken one by one, or many small ones at once as packed commands.

Arrow makes the commands of a thousand ranges in a few steps. A Python object for each range, its ids and its command
takes longer than the entries, where a stream has but a few.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.model import EntryId
from millstream.redis_client.resp import PackedCommands
from millstream.spark.source.entry_runs import ManyStreams
from millstream.spark.source.offset_ranges import OffsetRange, RangeColumns
from millstream.spark.source.small_replies import MAX_SMALL_ENTRIES, SmallReplies

_BLOCK_RANGES = 4_000
_MAX_COMMANDS = 1_000
_NEVER_FITS = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SmallRanges:
    """Ranges whose number of entries is known and small, and the commands that read each of them to its end."""

    commands: PackedCommands
    streams: ManyStreams
    last_ids: pa.Array

    def __len__(self) -> int:
        return len(self.commands)

    def are_whole_in(self, replies: SmallReplies) -> bool:
        """True if each reply has all entries of its range, and no other."""
        return (
            np.array_equal(replies.counts, self.streams.counts)
            and pc.all(pc.equal(replies.last_ids(), self.last_ids)).as_py()
        )


class PlannedRanges(Iterator[OffsetRange]):
    """The ranges of a result of `offset_ranges.to_columns`, each made when it is taken."""

    def __init__(self, columns: RangeColumns) -> None:
        self._columns = columns
        self._next = 0
        self._block: _Block | None = None

    def __next__(self) -> OffsetRange:
        index = self._next
        names, after_ms, after_seq, until_ms, until_seq, sizes, rows, untouched = self._columns
        if index == len(names):
            raise StopIteration
        self._next += 1
        after, until = EntryId(after_ms[index], after_seq[index]), EntryId(until_ms[index], until_seq[index])
        return OffsetRange(names[index], after, until, sizes[index], rows[index], untouched[index])

    def small(self, *, least: int, most: int) -> SmallRanges | None:
        """The next ranges, if they are small, with so many entries in total. They are not taken; `skip` takes them."""
        if self._next == len(self._columns[0]):
            return None
        if self._block is None or self._next >= self._block.end:
            self._block = _Block(self._columns, self._next)
        return self._block.small(self._next, least=least, most=most)

    def skip(self, count: int) -> None:
        """Take the next `count` ranges."""
        self._next += count


class _Block:
    """Consecutive ranges as Arrow's columns, from the index `begin` on, and their commands."""

    def __init__(self, columns: RangeColumns, begin: int) -> None:
        names, after_ms, after_seq, until_ms, until_seq, _, rows, _ = columns
        some = slice(begin, begin + _BLOCK_RANGES)
        counts = np.array([0 if count is None else count for count in rows[some]], np.intp)
        is_small = (counts > 0) & (counts <= MAX_SMALL_ENTRIES)
        self._begin, self.end = begin, begin + len(counts)
        self._totals = np.cumsum(np.where(is_small, counts, _NEVER_FITS))
        self._streams = ManyStreams(pa.array(names[some], pa.string()), counts)
        last_ids = _join(_digits(until_ms[some]), "-", _digits(until_seq[some]))
        self._last_ids = last_ids.cast(pa.binary())
        after = _join("(", _digits(after_ms[some]), "-", _digits(after_seq[some]))
        self._commands = _pack(
            "XRANGE", self._streams.names, after, last_ids, "COUNT", pa.array(counts).cast(pa.string())
        )

    def small(self, begin: int, *, least: int, most: int) -> SmallRanges | None:
        """As `PlannedRanges.small`, from the index `begin` on."""
        first = begin - self._begin
        before = int(self._totals[first - 1]) if first else 0
        end = min(int(np.searchsorted(self._totals, before + most, side="right")), first + _MAX_COMMANDS)
        if end == first or int(self._totals[end - 1]) - before < least:
            return None
        some = slice(first, end)
        return SmallRanges(
            commands=PackedCommands(b"".join(self._commands[some].to_pylist()), end - first),
            streams=ManyStreams(self._streams.names[some], self._streams.counts[some]),
            last_ids=self._last_ids[some],
        )


def _digits(numbers: list[int]) -> pa.Array:
    return pa.array(numbers, pa.uint64()).cast(pa.string())


def _join(*parts: pa.Array | str) -> pa.Array:
    texts = [pa.scalar(part) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*texts, pa.scalar(""))


def _pack(*words: pa.Array | str) -> pa.Array:
    """Commands as Redis' protocol has them; a word is the same in all, or of each another."""
    parts: list[pa.Array | str] = [f"*{len(words)}\r\n"]
    for word in words:
        size = str(len(word)) if isinstance(word, str) else pc.binary_length(word).cast(pa.string())
        parts += ["$", size, "\r\n", word, "\r\n"]
    return _join(*parts).cast(pa.binary())
