"""Lags that rise: handlers to whose streams more is added than they commit, by the history of the console. No I/O."""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise, takewhile

from millstream.admin.figure_history import Sample
from millstream.admin.findings import Finding
from millstream.redis_client.formats import format_age

TREND_MS = 900_000
"""How far back a trend is looked for, in milliseconds: the samples of lags, and dead letters that count as new."""

_FEWEST_SAMPLES = 5
_LEAST_GROWTH = 100


def rising_lags(samples: Sequence[Sample], running: Collection[str]) -> Iterator[Finding]:
    """A warning for each of the `running` handlers whose lag has risen from sample to sample.

    It takes five samples in a row and a growth by a hundred entries: a burst that is being processed does not count.
    """
    for label in sorted(running):
        rise = _rise_of(_lags_of(samples, label))
        if len(rise) >= _FEWEST_SAMPLES and rise[-1][1] - rise[0][1] >= _LEAST_GROWTH:
            (start_ms, first), (end_ms, last) = rise[0], rise[-1]
            yield Finding(
                check="rising",
                handler=label,
                severity="warning",
                since_ms=start_ms,
                what=f"{label}: its lag has risen from {first:,} to {last:,} entries in {format_age(end_ms - start_ms)}",
                why="more entries come than its workers or its run commit: add workers, or make the handler faster",
                mend=(f"millstream info {label.partition('.')[0]}",),
            )


def _lags_of(samples: Sequence[Sample], label: str) -> list[tuple[int, int | None]]:
    """The lags of the last samples, with their times, all of which have the handler: one without it breaks the row."""
    last = takewhile(lambda one: label in one.handlers, reversed(samples))
    return [(one.at_ms, one.handlers[label].lag) for one in last][::-1]


def _rise_of(lags: Sequence[tuple[int, int | None]]) -> list[tuple[int, int]]:
    """The last lags, with their times, of which each is larger than the one before."""
    known = [(at_ms, lag) for at_ms, lag in lags if lag is not None]
    starts = [at for at, (one, after) in enumerate(pairwise(known), 1) if after[1] <= one[1]]
    return known[starts[-1] if starts else 0 :]
