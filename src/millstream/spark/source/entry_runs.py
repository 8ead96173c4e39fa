"""Run: consecutive entries as a task reads them, of one stream or of many, and what is joined of several runs."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millstream.spark.source.entry_segment import Entries, Entry, EntrySegment, RawEntries


class ManyStreams(NamedTuple):
    """The streams of consecutive entries: so many of `counts` are of each of `names`, one stream after the other."""

    names: pa.Array
    counts: NDArray[np.intp]


StreamEntries = tuple[str, Entries]
"""Consecutive entries of one stream."""

Run = StreamEntries | tuple[ManyStreams, RawEntries]
"""Consecutive entries of one stream, or of many."""


def split(run: Run) -> list[StreamEntries]:
    """The entries of each stream."""
    streams, entries = run
    if isinstance(streams, str):
        return [(streams, entries)]
    assert isinstance(entries, RawEntries)
    return list(zip(streams.names.to_pylist(), entries.split(streams.counts), strict=True))


def streams_of(runs: Sequence[Run]) -> Iterator[tuple[str, int]]:
    """Yield the stream of the first entries, and how many they are, then those of the next, and so on."""
    for streams, entries in runs:
        if isinstance(streams, str):
            yield streams, len(entries)
        else:
            yield from zip(streams.names.to_pylist(), streams.counts.tolist(), strict=True)


def stream_column(runs: Sequence[Run]) -> pa.Array:
    """The stream of each entry."""
    if len(runs) == 1 and isinstance(runs[0][0], str):
        return pa.repeat(pa.scalar(runs[0][0]), len(runs[0][1]))
    found = list(_gathered(runs))
    counts = np.concatenate([one.counts for one in found])
    names = pa.concat_arrays([one.names for one in found])
    return names.take(pa.array(np.repeat(np.arange(len(counts)), counts)))


def _gathered(runs: Sequence[Run]) -> Iterator[ManyStreams]:
    """The streams of `runs`, those of runs of one stream each together."""
    for are_single, some in groupby(runs, lambda run: isinstance(run[0], str)):
        if are_single:
            names, counts = zip(*((stream, len(entries)) for stream, entries in some), strict=True)
            yield ManyStreams(pa.array(names, pa.string()), np.array(counts, np.intp))
        else:
            yield from (streams for streams, _ in some if not isinstance(streams, str))


def chunks(runs: Sequence[Run]) -> list[EntrySegment | list[Entry]]:
    """All entries in order: those with the same bytes as one segment, others as lists; one chunk at least."""
    if RawEntries not in {type(run) for _, run in runs}:
        return [list(chain.from_iterable([run for _, run in runs]))]  # in one step for all of many small streams
    found: list[EntrySegment | list[Entry]] = []
    for part in _parts(runs):
        last = found[-1] if found else None
        if isinstance(part, EntrySegment):
            if isinstance(last, EntrySegment) and last.data is part.data:
                found[-1] = last.followed_by(part)
            else:
                found.append(part)
        elif isinstance(last, list):
            last += part
        else:
            found.append(part)
    return found


def _parts(runs: Sequence[Run]) -> Iterator[EntrySegment | list[Entry]]:
    """The entries of `runs`, those of replies that follow each other in a segment as one part."""
    last: tuple[EntrySegment, int, int] | None = None
    for _, run in runs:
        for part in run.parts if isinstance(run, RawEntries) else (list(run),):
            if isinstance(part, list):
                if last is not None:
                    yield last[0].part(*last[1:])
                last = None
                yield part
            elif last is not None and last[0] is part[0] and last[2] == part[1]:
                last = (last[0], last[1], part[2])
            else:
                if last is not None:
                    yield last[0].part(*last[1:])
                last = part
    if last is not None:
        yield last[0].part(*last[1:])
