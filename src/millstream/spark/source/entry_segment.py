"""EntrySegment: entries as the bytes that Redis sent, and where each id, name and value is in them.

A Python object for every name and value costs more than all else that a task does with an entry. Arrow copies them from
the bytes instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Data = NDArray[np.uint8]
Places = NDArray[np.int32]
"""Offsets in the bytes of a segment, or in its fields."""

Entry = Sequence[Any]
"""As hiredis parses it: [id, [name, value, name, value, ...]]."""

_BINARIES = ((1 << 8, 0xC4, 1), (1 << 16, 0xC5, 2), (1 << 32, 0xC6, 4))
_LISTS = ((1 << 4, 0x90, 0), (1 << 16, 0xDC, 2), (1 << 32, 0xDD, 4))
"""Headers of msgpack: for fewer bytes, or items, than the first number, a first byte and so many with the number."""


@dataclass(slots=True, frozen=True, eq=False)
class EntrySegment:
    """Consecutive entries of a reply, or of several.

    * `data`: the bytes; those before an id, a name or a value, at least six, are free for headers of another format
    * `id_starts`, `id_ends`: where the id of each entry is
    * `starts`, `ends`: where each name and each value is, of one entry after the other
    * `bounds`: the index of the first name of each entry in `starts`, and their number
    """

    data: Data
    id_starts: Places
    id_ends: Places
    starts: Places
    ends: Places
    bounds: Places

    def __len__(self) -> int:
        return len(self.id_starts)

    @property
    def ids(self) -> pa.Array:
        """The id of each entry, as binary."""
        return self._values(self.id_starts, self.id_ends)

    @property
    def fields(self) -> list[list[bytes]]:
        """The names and values of each entry, as Python objects."""
        begin = self.starts[0] if len(self) else 0
        data, bounds = self.data[begin : self.ends[-1] if len(self) else 0].tobytes(), self.bounds.tolist()
        places = zip((self.starts - begin).tolist(), (self.ends - begin).tolist(), strict=True)
        values = [data[start:end] for start, end in places]
        return [values[first:end] for first, end in pairwise(bounds)]

    def __getitem__(self, entries: slice) -> list[list[bytes]]:
        return [self.part(index, index + 1).fields[0] for index in range(*entries.indices(len(self)))]

    def id_of(self, index: int) -> bytes:
        """The id of one entry."""
        return self.data[self.id_starts[index] : self.id_ends[index]].tobytes()

    def ids_of(self, indexes: NDArray[np.intp]) -> pa.Array:
        """The ids of some entries, as binary."""
        return self._values(self.id_starts[indexes], self.id_ends[indexes])

    def part(self, first: int, end: int) -> "EntrySegment":
        """The entries from the index `first` to before `end`."""
        if end - first == len(self):
            return self
        bounds = self.bounds[first : end + 1]
        entries, fields = slice(first, end), slice(bounds[0], bounds[-1])
        return EntrySegment(
            self.data,
            self.id_starts[entries],
            self.id_ends[entries],
            self.starts[fields],
            self.ends[fields],
            bounds - bounds[0],
        )

    def followed_by(self, other: "EntrySegment") -> "EntrySegment":
        """These entries, and those of another segment with the same bytes."""
        return EntrySegment(
            self.data,
            np.concatenate((self.id_starts, other.id_starts)),
            np.concatenate((self.id_ends, other.id_ends)),
            np.concatenate((self.starts, other.starts)),
            np.concatenate((self.ends, other.ends)),
            np.concatenate((self.bounds, other.bounds[1:] + self.bounds[-1])),
        )

    def begins_with(self, name: bytes) -> bool:
        """True if the first field of any entry is called `name`."""
        first = self.bounds[:-1]
        return bool(pc.any(self._are(first[self.ends[first] - self.starts[first] == len(name)], name)).as_py())

    def names(self) -> pa.Array:
        """All names, of one entry after the other."""
        return self._values(self.starts[0::2], self.ends[0::2])

    def values(self) -> pa.Array:
        """The values of `names`."""
        return self._values(self.starts[1::2], self.ends[1::2])

    def last_values(self, name: bytes) -> pa.Array:
        """The value of the field `name` in each entry, the last of a repeated one; null where there is none."""
        likely = 2 * np.flatnonzero(self.ends[0::2] - self.starts[0::2] == len(name))
        found = likely[self._are(likely, name).to_numpy(zero_copy_only=False)]
        if len(found) == len(self) and (found >= self.bounds[:-1]).all() and (found < self.bounds[1:]).all():
            return self._values(self.starts[found + 1], self.ends[found + 1])  # each entry has it, once
        places = np.full(len(self), -1, np.int32)
        entries = np.searchsorted(self.bounds, found, side="right") - 1
        np.maximum.at(places, entries, (found + 1).astype(np.int32))  # of several the last counts
        absent = places < 0
        values = self._values(
            np.where(absent, self.id_ends, self.starts[places]), np.where(absent, self.id_ends, self.ends[places])
        )
        return pc.if_else(pa.array(~absent), values, pa.scalar(None, pa.binary())) if absent.any() else values

    def packed(self) -> pa.Array:
        """The names and values of each entry, as one msgpack list of binaries."""
        first = self.bounds[:-1]
        starts = self.starts.copy()
        starts -= _write_headers(self.data, starts, self.ends - self.starts, _BINARIES)
        starts[first] -= _write_headers(self.data, starts[first], np.diff(self.bounds), _LISTS)
        _, offsets, data = self._values(starts, self.ends).buffers()
        return pa.Array.from_buffers(
            pa.binary(),
            len(self),
            [None, pa.py_buffer(np.frombuffer(offsets, np.int32)[self.bounds]), data],
        )

    def _are(self, places: NDArray[np.intp] | Places, value: bytes) -> pa.Array:
        """Which of the names and values at the indexes `places` are `value`."""
        return pc.equal(self._values(self.starts[places], self.ends[places]), pa.scalar(value, pa.binary()))

    def _values(self, starts: Places, ends: Places) -> pa.Array:
        """The bytes between each two offsets of `starts` and `ends`, as binary."""
        offsets = np.empty(2 * len(starts), np.int32)
        offsets[0::2], offsets[1::2] = starts, ends
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.data)]
        all_bytes = pa.Array.from_buffers(pa.binary(), max(len(offsets) - 1, 0), buffers)
        return all_bytes.take(pa.array(np.arange(0, len(offsets), 2, dtype=np.int32)))


def _write_headers(
    data: Data, places: Places, numbers: Places, forms: Sequence[tuple[int, int, int]]
) -> NDArray[np.int32] | int:
    """Write a header of msgpack with each of `numbers` before each of `places`; return the sizes of the headers."""
    most = int(numbers.max(initial=0))
    sizes = np.zeros(len(numbers), np.int32)
    least = 0
    for limit, kind, size in forms:
        is_all = least == 0 and most < limit
        chosen = slice(None) if is_all else np.flatnonzero((numbers >= least) & (numbers < limit))
        at, some = places[chosen] - size - 1, numbers[chosen]
        data[at] = kind if size else kind + some
        for index in range(size):
            data[at + 1 + index] = some >> 8 * (size - 1 - index)
        if is_all:
            return size + 1
        sizes[chosen] = size + 1
        least = limit
    return sizes


class RawEntries:
    """The entries of one reply, in parts of segments. Entries are parsed when they are iterated over."""

    __slots__ = ("_count", "parts")

    def __init__(self) -> None:
        self.parts: list[tuple[EntrySegment, int, int]] = []
        self._count = 0

    def append(self, segment: EntrySegment, first: int, end: int) -> None:
        """Append the entries of `segment` from the index `first` to before `end`."""
        self.parts.append((segment, first, end))
        self._count += end - first

    @property
    def last_id(self) -> bytes:
        """The id of the last entry."""
        segment, _, end = self.parts[-1]
        return segment.id_of(end - 1)

    def split(self, counts: NDArray[np.intp]) -> "list[RawEntries]":
        """The first entries, as many as the first of `counts` says, then the next, and so on."""
        found = []
        rest = iter(self.parts)
        first = end = 0
        for count in counts.tolist():
            some = RawEntries()
            while len(some) < count:
                if first == end:
                    segment, first, end = next(rest)
                until = min(first + count - len(some), end)
                some.append(segment, first, until)
                first = until
            found.append(some)
        return found

    def begins_with(self, name: bytes) -> bool:
        """True if the first field of any entry is called `name`."""
        return any(segment.part(first, end).begins_with(name) for segment, first, end in self.parts)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        for whole, first, end in self.parts:
            segment = whole.part(first, end)
            for index, fields in enumerate(segment.fields):
                yield [segment.id_of(index), fields]


Entries = Sequence[Entry] | RawEntries
"""The entries of one reply."""


def last_id(entries: Entries) -> bytes:
    """The id of the last of `entries`."""
    found: bytes = entries.last_id if isinstance(entries, RawEntries) else entries[-1][0]
    return found
