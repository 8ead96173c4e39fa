"""SmallReplies: reads many small replies to XRANGE as one run of entries, without a Python object for each reply.

numpy finds which lines begin a reply, and compares the number of entries that each announces with those that follow.
"""

import select
from socket import socket
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.redis_client.resp import Parser
from millstream.spark.source.entry_segment import Data, Places, RawEntries
from millstream.spark.source.reply_segments import (
    STAR,
    Misfit,
    ReceiveBuffer,
    ReplySegments,
    SegmentParser,
    number_of_entries,
    numbers_after_stars,
)

MAX_SMALL_ENTRIES = 999
"""A reply that announces more is a misfit: numpy reads numbers of three digits."""

_LIKELY_SHARE = 0.95
_BREAK_MS = 1
_CLOSED = getattr(select, "POLLRDHUP", 0)  # macOS has none
_NOT_SPLIT: list[Any] = []


class SmallReplies(ReplySegments):
    """Reads the replies of one server into `entries`, of which each reply has as many as `counts` says.

    What it returns for each reply is empty. After a misfit, `has_misfit`, it returns replies as hiredis parses them.
    About `expected_bytes` are parsed at once if they come without a break, as each parse has a cost of its own.
    """

    def __init__(self, most: float, buffer: ReceiveBuffer, expected_bytes: int = 0) -> None:
        super().__init__(most, buffer)
        self._expected_bytes = expected_bytes * _LIKELY_SHARE
        self.entries = RawEntries()
        self.counts: NDArray[np.intp] = np.zeros(0, np.intp)

    def read_all(self, opened: socket, reader: Parser, nothing: object, count: int) -> list[Any]:
        """The next `count` replies."""
        parser = _SmallReplyParser(count)
        replies = self.read_by(parser, opened, reader, nothing, count)
        if replies is not None:
            return replies
        self.entries, self.counts = parser.entries, np.concatenate(parser.counts)
        return [_NOT_SPLIT] * count

    def _expects_more(self, opened: socket) -> bool:
        """True if more bytes are there, or come at once, and probably belong to the replies."""
        if self.total_bytes >= self._expected_bytes:
            return False
        poll = select.poll()
        poll.register(opened, select.POLLIN | _CLOSED)
        return any(not event & (_CLOSED | select.POLLHUP) for _, event in poll.poll(_BREAK_MS))

    def last_ids(self) -> pa.Array:
        """The id of the last entry of each reply, as binary."""
        lasts = np.cumsum(self.counts) - 1
        found = []
        before = 0
        for segment, first, end in self.entries.parts:
            own = lasts[np.searchsorted(lasts, before) : np.searchsorted(lasts, before + end - first)]
            found.append(segment.ids_of(own - before + first))
            before += end - first
        return pa.concat_arrays(found)

    def split(self) -> list[RawEntries]:
        """The entries of each reply."""
        return self.entries.split(self.counts)


class _SmallReplyParser(SegmentParser):
    """Parses `count` replies, each with entries, to `entries`. An empty reply is a misfit."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.entries = RawEntries()
        self.counts: list[NDArray[np.intp]] = []
        self._begun = 0

    @property
    def is_done(self) -> bool:
        """True if all replies are complete."""
        return self._begun == self._count and not self._left

    def _match_replies(
        self, data: Data, starts: Places, ends: Places, entries: NDArray[np.intp], stops: NDArray[np.intp]
    ) -> tuple[NDArray[np.intp], list[tuple[RawEntries, int, int]]]:
        before = np.concatenate((np.zeros(1, np.intp), stops))
        gaps = entries - before[:-1]  # a line between two entries begins a reply
        if ((gaps != 0) & (gaps != 1)).any():
            raise Misfit
        firsts = np.flatnonzero(gaps)
        headers = before[firsts]
        if (data[starts[headers]] != STAR).any():
            raise Misfit
        announced = np.concatenate(([self._left], numbers_after_stars(data, starts, ends, headers)))
        found = np.diff(np.concatenate(([0], firsts, [len(entries)])))
        if (announced[:-1] != found[:-1]).any() or announced[-1] < found[-1]:
            raise Misfit
        self._left = int(announced[-1] - found[-1])
        self.counts.append(announced[1:])
        self._begun += len(firsts)
        if self._begun > self._count:
            raise Misfit
        line = int(before[-1])
        if not self._left and not self.is_done and line < len(ends):
            begin = starts[line]
            if data[begin] != STAR or not number_of_entries(data[begin + 1 : ends[line]].tobytes()):
                raise Misfit  # an error or an empty reply, after which nothing more may come
        return headers, [(self.entries, 0, len(entries))] if len(entries) else []
