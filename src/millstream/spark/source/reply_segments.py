"""ReplySegments: reads replies to XRANGE from a socket into segments of entries, without a Python object for each value.

The replies are parsed 512 KB at a time, and many values at once: numpy finds the ends of all lines (CR LF), and compares
the length of each value with the length that Redis announced. Where all are equal, lines are values. Where one is not,
a value has a line break in it, or it is no reply to XRANGE: then hiredis parses the replies.
"""

from collections.abc import Sequence
from socket import socket
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.redis_client.resp import Parser, ReplySize
from millstream.spark.source.entry_segment import Data, EntrySegment, Places, RawEntries

_BUFFER_BYTES, _SEGMENT_BYTES = 1 << 21, 1 << 19
"""Each segment costs a third of a millisecond, however small it is; larger ones do not stay in the caches of a core."""
_SPARE_BYTES = 8  # a word is read from each line, the last one included

_CR, _LF, _DOLLAR, STAR = b"\r\n$*"
_MAX_TABLED = 1_000


def _word(text: bytes) -> int:
    return int.from_bytes(text, "little")


_ENTRY = _word(b"*2\r\n")
_LENGTHS = np.array([_word((b"\r\n$%d" % length)[-4:]) for length in range(_MAX_TABLED)], np.uint32)
"""The four bytes that end the line before a value, by the value's length."""


class Misfit(Exception):
    """The bytes are not replies to XRANGE whose values have no line breaks."""


class ReceiveBuffer:
    """The bytes of replies, which the segments of several round trips share: Arrow copies from them all at once."""

    def __init__(self) -> None:
        self._allocate()
        self.parsed = self.size = 0

    def _allocate(self) -> None:
        self.data = np.empty(_BUFFER_BYTES + _SPARE_BYTES, np.uint8)
        self._view = self.data.data[:_BUFFER_BYTES]

    def begin(self) -> None:
        """Begin with the replies of a round trip; drop what is not parsed."""
        self.size = self.parsed

    def receive(self, opened: socket) -> Data:
        """Receive bytes, and return them. Unparsed bytes that reach the end of the buffer go to a new one."""
        if self.size == _BUFFER_BYTES:
            if not self.parsed:
                raise Misfit  # an entry is larger
            rest = self.data[self.parsed : self.size]
            self._allocate()
            self.data[: len(rest)] = rest
            self.parsed, self.size = 0, len(rest)
        begin = self.size
        self.size += opened.recv_into(self._view[begin:])
        return self.data[begin : self.size]

    @property
    def is_to_parse(self) -> bool:
        """True if enough is unparsed for a segment."""
        return self.size - self.parsed >= _SEGMENT_BYTES or self.size == _BUFFER_BYTES

    @property
    def may_end(self) -> bool:
        """True if a reply may have ended."""
        return bytes(self._view[self.size - 2 : self.size]) == b"\r\n"


class ReplySegments(ReplySize):
    """Reads replies as `RawEntries` into `buffer`; after a misfit, `has_misfit`, as hiredis parses them."""

    def __init__(self, most: float, buffer: ReceiveBuffer) -> None:
        super().__init__(most)
        self._buffer = buffer
        self.has_misfit = False

    def read_all(self, opened: socket, reader: Parser, nothing: object, count: int) -> list[Any]:
        """The next `count` replies."""
        parser = SegmentParser(count)
        replies = self.read_by(parser, opened, reader, nothing, count)
        return list(parser.replies) if replies is None else replies

    def read_by(
        self, parser: "SegmentParser", opened: socket, reader: Parser, nothing: object, count: int
    ) -> list[Any] | None:
        """Let `parser` parse the next `count` replies; after a misfit return them, as hiredis parses them."""
        if self.has_misfit:
            return super().read_all(opened, reader, nothing, count)
        received: list[Data] = []
        buffer = self._buffer
        buffer.begin()
        try:
            while not parser.is_done:
                received.append(buffer.receive(opened))
                self.add(len(received[-1]))
                if buffer.is_to_parse or (buffer.may_end and not self._expects_more(opened)):
                    buffer.parsed = parser.parse(buffer.data, buffer.parsed, buffer.size)
            if buffer.parsed < buffer.size:
                raise Misfit
        except Misfit:
            self.has_misfit = True
            self.total_bytes -= sum(map(len, received))
            again: Any = _Received(received, opened)
            return super().read_all(again, reader, nothing, count)
        return None

    def _expects_more(self, opened: socket) -> bool:
        """Whether to wait for more bytes before those that have come are parsed."""
        return False  # few large replies are parsed while Redis sends


class _Received:
    """A socket whose first bytes were received before."""

    def __init__(self, received: Sequence[Data], opened: socket) -> None:
        self._received = b"".join([some.tobytes() for some in received])
        self._at = 0
        self._opened = opened

    def recv(self, size: int) -> bytes:
        """The next bytes, at most `size`."""
        some = self._received[self._at : self._at + size]
        self._at += len(some)
        return some or self._opened.recv(size)


class SegmentParser:
    """Parses `count` replies to XRANGE, in as many chunks as they arrive."""

    def __init__(self, count: int) -> None:
        self.replies: list[RawEntries] = []
        self._count = count
        self._left = 0  # entries of the last of `replies`

    @property
    def is_done(self) -> bool:
        """True if all replies are complete."""
        return len(self.replies) == self._count and not self._left

    def parse(self, data: Data, begin: int, size: int) -> int:
        """Parse the complete entries in the bytes from `begin` to `size`; return where they end.

        `data` has a few bytes more. Raises Misfit.
        """
        text = data[begin:size]
        ends = np.flatnonzero((text[:-1] == _CR) & (text[1:] == _LF)).astype(np.int32) + np.int32(begin)
        starts = np.concatenate((np.array([begin], np.int32), ends + np.int32(2)))
        words: NDArray[np.uint32] = np.ndarray((size,), np.dtype("<u4"), data, strides=(1,))
        kinds = data[starts]
        entries = _find_entries(words, kinds, starts)
        widths = numbers_after_stars(data, starts, ends, entries + 3)
        if (widths % 2).any():
            raise Misfit
        stops = entries + 4 + 2 * widths
        is_whole = stops <= len(ends)
        entries, widths, stops = entries[is_whole], widths[is_whole], stops[is_whole]
        headers, places = self._match_replies(data, starts, ends, entries, stops)
        end = int(stops[-1]) if len(stops) else 0
        is_field = np.ones(end, bool)
        is_field[headers[: np.searchsorted(headers, end)]] = False
        for line in range(4):
            is_field[entries + line] = False
        values = np.flatnonzero(is_field)[1::2]
        segment = EntrySegment(
            data,
            starts[entries + 2],
            ends[entries + 2],
            starts[values],
            ends[values],
            np.concatenate((np.zeros(1, np.int32), np.cumsum(widths, dtype=np.int32))),
        )
        _check_lengths(data, words, segment.id_starts, segment.id_ends)
        _check_lengths(data, words, segment.starts, segment.ends)
        for reply, first, until in places:
            reply.append(segment, first, until)
        return int(starts[max(end, headers[-1] + 1 if len(headers) else 0)])

    def _match_replies(
        self, data: Data, starts: Places, ends: Places, entries: NDArray[np.intp], stops: NDArray[np.intp]
    ) -> tuple[NDArray[np.intp], list[tuple[RawEntries, int, int]]]:
        """Find the lines that begin a reply, and the entries of each reply."""
        gaps = np.cumsum(entries[1:] - stops[:-1])
        if (entries[1:] < stops[:-1]).any():
            raise Misfit
        headers: list[int] = []
        places = []
        line = done = 0
        while line < len(ends) and not self.is_done:
            if not self._left:
                if data[starts[line]] != STAR:
                    raise Misfit
                self._left = number_of_entries(data[starts[line] + 1 : ends[line]].tobytes())
                self.replies.append(RawEntries())
                headers.append(line)
                line += 1
                continue
            count = min(self._left, len(entries) - done)
            if not count:
                break
            last = done + count - 1
            if entries[done] != line or (count > 1 and gaps[last - 1] != (gaps[done - 1] if done else 0)):
                raise Misfit
            places.append((self.replies[-1], done, done + count))
            self._left -= count
            done, line = last + 1, int(stops[last])
        return np.array(headers, np.intp), places


def _find_entries(words: NDArray[np.uint32], kinds: Data, starts: Places) -> NDArray[np.intp]:
    """The lines at which entries probably begin: a list of two, of which the first is a text, the second a list."""
    found = np.flatnonzero(kinds[:-1] == STAR)
    found = found[: np.searchsorted(found, len(starts) - 4)]  # with three complete lines after it
    is_entry = (words[starts[found]] == _ENTRY) & (kinds[found + 1] == _DOLLAR) & (kinds[found + 3] == STAR)
    return found[np.flatnonzero(is_entry)]


def numbers_after_stars(data: Data, starts: Places, ends: Places, lines: NDArray[np.intp]) -> NDArray[np.intp]:
    """The numbers, of three digits at most, in lines that begin with a star."""
    at, until = starts[lines] + 1, ends[lines]
    numbers = np.zeros(len(lines), np.intp)
    for index in range(int((until - at).max(initial=0))):
        if index == 3:
            raise Misfit
        is_digit = at + index < until
        digits = data[at + index] - np.uint8(ord("0"))
        if (digits[is_digit] > 9).any():
            raise Misfit
        numbers = np.where(is_digit, numbers * 10 + digits, numbers)
    return numbers


def number_of_entries(text: bytes) -> int:
    """The number in the line that begins a reply. Raises Misfit for an error, or no list."""
    if not text.isdigit():
        raise Misfit
    return int(text)


def _check_lengths(data: Data, words: NDArray[np.uint32], starts: Places, ends: Places) -> None:
    """Raise Misfit unless each value is as long as the line before it says."""
    lengths = ends - starts
    if not len(lengths):
        return
    if int(lengths.max()) < _MAX_TABLED:
        if (words[starts - 6] != _LENGTHS[lengths]).any():
            raise Misfit
        return
    short = lengths < _MAX_TABLED
    _check_lengths(data, words, starts[short], ends[short])
    for start, length in zip(starts[~short].tolist(), lengths[~short].tolist(), strict=True):
        line = b"$%d\r\n" % length
        if data[start - len(line) : start].tobytes() != line:
            raise Misfit
