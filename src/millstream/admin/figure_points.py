"""FigurePoints: the curves of a history: rates of totals, and figures as they were, with the gaps between them. No I/O."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from millstream.admin.figure_history import HandlerSample, Sample

_LATE = 1.5
"""A sample that comes later than so many steps after the one before leaves a gap: none was recorded meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Figures at one time; None where they are unknown.

    * `at_ms`: Unix milliseconds
    * `added`, `done`: entries a second that were added, and committed; `dead`: new dead letters a minute
    * `lag`, `oldest_ms`, `dead_letters`, `stuck`: the largest ones since the point before
    """

    at_ms: int
    added: float | None
    done: float | None
    dead: float | None
    lag: float | None
    oldest_ms: float | None
    dead_letters: float | None
    stuck: float | None


@dataclass(frozen=True, kw_only=True)
class FigurePoints:
    """The figures of a handler, or the sums over all, between two times in Unix milliseconds.

    * `runs`: points without a gap between them, the oldest first; `newest`: the figures of the newest sample
    * `gaps`: from when until when nothing was recorded
    * `is_partial`: there are handlers that the history does not have; `age_ms`: how much older than their time the oldest
      figures may be, in milliseconds
    """

    start_ms: int
    end_ms: int
    runs: Sequence[Sequence[Point]]
    newest: Point | None
    gaps: Sequence[tuple[int, int]]
    is_partial: bool
    age_ms: int


def points_of(
    samples: Iterable[Sample], handler: str | None, *, start_ms: int, end_ms: int, bucket_ms: int
) -> FigurePoints:
    """The figures of `handler`, or the sums over all handlers, in points at least `bucket_ms` milliseconds apart."""
    runs: list[list[Point]] = []
    gaps: list[tuple[int, int]] = []
    before: Sample | None = None
    expected_ms: int | None = None
    last_ms = start_ms
    is_partial, age_ms = False, 0
    for sample in samples:
        is_partial |= sample.is_partial
        age_ms = max(age_ms, sample.age_ms)
        if expected_ms is None:
            expected_ms = start_ms + sample.step_ms
        chosen = _chosen(sample, handler)
        if not chosen:
            before = None
            continue
        if before is None or sample.at_ms > expected_ms:
            if sample.at_ms > expected_ms:
                gaps.append((last_ms, sample.at_ms))
            runs.append([])
            before = None
        runs[-1].append(_point(None if before is None else (before.at_ms, _chosen(before, handler)), sample, chosen))
        before, last_ms = sample, sample.at_ms
        expected_ms = sample.at_ms + int(_LATE * sample.step_ms)
    if expected_ms is None or end_ms > expected_ms:
        gaps.append((last_ms, end_ms))
    return FigurePoints(
        start_ms=start_ms,
        end_ms=end_ms,
        runs=[[*_merged(run, bucket_ms)] for run in runs],
        newest=runs[-1][-1] if runs else None,
        gaps=gaps,
        is_partial=is_partial,
        age_ms=age_ms,
    )


def _chosen(sample: Sample, handler: str | None) -> Mapping[str, HandlerSample]:
    return {name: one for name, one in sample.handlers.items() if handler in (None, name)}


def _point(
    before: tuple[int, Mapping[str, HandlerSample]] | None, sample: Sample, chosen: Mapping[str, HandlerSample]
) -> Point:
    pairs = [] if before is None else [(before[1][name], one) for name, one in chosen.items() if name in before[1]]
    seconds = (sample.at_ms - before[0]) / 1_000 if before is not None else 0.0

    def rate(total: Callable[[HandlerSample], int | None]) -> float | None:
        grown = [found for one, other in pairs if (found := _growth(one, other, total)) is not None]
        return sum(grown) / seconds if grown else None

    dead = rate(lambda one: one.dead)
    return Point(
        at_ms=sample.at_ms,
        added=rate(lambda one: one.added),
        done=rate(lambda one: one.done),
        dead=None if dead is None else dead * 60,
        lag=_sum(one.lag for one in chosen.values()),
        oldest_ms=max((one.oldest_ms or 0 for one in chosen.values()), default=None),
        dead_letters=_sum(one.dead_letters for one in chosen.values()),
        stuck=_sum(one.stuck for one in chosen.values()),
    )


def _growth(before: HandlerSample, after: HandlerSample, total: Callable[[HandlerSample], int | None]) -> int | None:
    """By how much a total has grown; None if that is unknown: it went back, or the handler reads other streams."""
    first, last = total(before), total(after)
    if first is None or last is None or last < first or before.streams != after.streams:
        return None
    return last - first


def _sum(values: Iterator[int | None]) -> int | None:
    known = [one for one in values if one is not None]
    return sum(known) if known else None


def _merged(run: Sequence[Point], bucket_ms: int) -> Iterator[Point]:
    """One point for each bucket: the mean of its rates, and its largest figures."""
    for _, group in groupby(run, key=lambda one: one.at_ms // bucket_ms):
        points = list(group)
        yield Point(
            at_ms=points[-1].at_ms,
            added=_mean([one.added for one in points]),
            done=_mean([one.done for one in points]),
            dead=_mean([one.dead for one in points]),
            lag=_largest([one.lag for one in points]),
            oldest_ms=_largest([one.oldest_ms for one in points]),
            dead_letters=_largest([one.dead_letters for one in points]),
            stuck=_largest([one.stuck for one in points]),
        )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None


def _largest(values: Sequence[float | None]) -> float | None:
    return max((one for one in values if one is not None), default=None)
