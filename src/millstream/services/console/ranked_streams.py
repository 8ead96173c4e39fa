"""RankedStreams: the figures of all streams, each as it was read last, and those that come first in an order."""

import heapq
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from millstream.admin.reports import StreamReport
from millstream.admin.stream_order import StreamOrder, known_lag
from millstream.model import EntryId
from millstream.services.console.stream_rates import StreamRead, next_stream_read
from millstream.services.console.total_rates import TotalRead

_AT_ONCE = 1_000
MOST_RANKED = 1_000
"""So many streams are listed in an order."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The first streams in an order, by their figures as they were read last.

    * `names`: at most 1,000
    * `ranked`: how many streams have a place in the order
    * `age_ms`: how long ago the first of these was read, in milliseconds; None if none was
    """

    names: Sequence[str]
    ranked: int
    age_ms: float | None


class RankedStreams:
    """The figures of streams by their names, which are sorted: some 80 bytes for each.

    One thread updates it while any others ask for rankings. `before`: what is known of streams with these names.
    """

    def __init__(self, names: Sequence[str] = (), before: "RankedStreams | None" = None) -> None:
        self.names = names
        count = len(names)
        self._read_ms = array("d", bytes(8 * count))
        self._added_ms = array("d", bytes(8 * count))
        self._added = array("Q", bytes(8 * count))
        self._rate = array("d", bytes(8 * count))
        self._last_ms = array("Q", bytes(8 * count))
        self._last_seq = array("Q", bytes(8 * count))
        self._length = array("Q", bytes(8 * count))
        self._since_ms = array("d", bytes(8 * count))
        self._lag = array("q", bytes(8 * count))
        self._is_read = bytearray(count)
        self._is_rated = bytearray(count)
        if before is not None:
            self._take_over(before)

    @property
    def _columns(self) -> Sequence[MutableSequence[Any]]:
        return (
            *(self._read_ms, self._added_ms, self._added, self._rate, self._last_ms, self._last_seq),
            *(self._length, self._since_ms, self._lag, self._is_read, self._is_rated),
        )

    def _take_over(self, before: "RankedStreams") -> None:
        place = at = 0
        while place < len(self.names):
            at = bisect_left(before.names, self.names[place], at)
            count = _count_same(self.names, place, before.names, at)
            for mine, known in zip(self._columns, before._columns, strict=True):
                mine[place : place + count] = known[at : at + count]
            place += max(1, count)

    def places(self, prefixes: Iterable[str]) -> list[int]:
        """The places of streams whose names begin with one of these, those first that were read the longest ago."""
        found = {place for prefix in prefixes for place in self._places_of(prefix)}
        return sorted(found, key=lambda place: (self._is_read[place], self._read_ms[place], place))

    def update(self, places: Sequence[int], found: Mapping[str, StreamReport], read_ms: float) -> None:
        """Take over the figures of the streams at these places, by name, as of this time; those that are gone have none."""
        for place in places:
            stream = found.get(self.names[place])
            if stream is None:
                self._length[place], self._since_ms[place], self._lag[place], self._rate[place] = 0, math.inf, -1, 0.0
                self._is_rated[place] = 1
            else:
                self._put(place, stream, read_ms)
            self._read_ms[place], self._is_read[place] = read_ms, 1

    def _put(self, place: int, stream: StreamReport, read_ms: float) -> None:
        read = next_stream_read(self._last_read(place), stream, read_ms)
        self._added_ms[place], self._added[place] = read.added.at_ms, read.added.total
        self._last_ms[place], self._last_seq[place] = read.last_id
        self._is_rated[place] = read.added.rate is not None
        self._rate[place] = read.added.rate or 0.0
        self._length[place] = stream.length
        self._since_ms[place] = math.inf if stream.first_id is None else EntryId.parse(stream.first_id).ms
        lag = known_lag(stream)
        self._lag[place] = -1 if lag is None else lag

    def _last_read(self, place: int) -> StreamRead | None:
        if not self._is_read[place]:
            return None
        rate = self._rate[place] if self._is_rated[place] else None
        added = TotalRead(self._added_ms[place], self._added[place], rate)
        return StreamRead(added, EntryId(self._last_ms[place], self._last_seq[place]))

    def is_read(self, prefix: str) -> bool:
        """Whether all streams whose names begin with it were read."""
        places = self._places_of(prefix)
        return self._is_read.count(1, places.start, places.stop) == len(places)

    def rank(self, prefix: str, order: StreamOrder, now_ms: float) -> Ranking:
        """The first streams of those whose names begin with `prefix`. One without a rate yet has no place by rate."""
        places = self._places_of(prefix)
        known = (self._is_rated if order == "rate" else self._is_read)[places.start : places.stop]
        ranked = list(compress(places, known))
        figures: Mapping[StreamOrder, Sequence[float]] = {
            "entries": self._length,
            "oldest": self._since_ms,
            "lag": self._lag,
            "rate": self._rate,
        }
        choose = heapq.nsmallest if order == "oldest" else heapq.nlargest
        first = choose(MOST_RANKED, ranked, key=figures[order].__getitem__)
        return Ranking(
            names=[self.names[place] for place in first],
            ranked=len(ranked),
            age_ms=now_ms - min(compress(self._read_ms[places.start : places.stop], known)) if ranked else None,
        )

    def _places_of(self, prefix: str) -> range:
        first = bisect_left(self.names, prefix)
        return range(first, bisect_right(self.names, prefix, first, key=lambda one: one[: len(prefix)]))


def _count_same(names: Sequence[str], first: int, others: Sequence[str], second: int) -> int:
    """How many names are the same in both from these places on."""
    found, most = 0, min(len(names) - first, len(others) - second)
    while found < most:
        some = names[first + found : first + found + _AT_ONCE]
        same = others[second + found : second + found + _AT_ONCE]
        if some != same:
            pairs = zip(some, same, strict=False)
            return found + next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(some), len(same)))
        found += len(some)
    return most
