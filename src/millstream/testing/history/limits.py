"""Runs of a handler with a limit: how many of a value were running at once, and how much of its rate they took."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from millstream.errors import ConfigError
from millstream.model import Limit
from millstream.testing.history.account import Run, runs_of
from millstream.testing.history.events import Event
from millstream.testing.history.report import Finding


class _Window(NamedTuple):
    """Some last runs, which were permitted at `since` or later; `before`: what those before them took of the rate.

    `furthest`: of this window and longer ones, the largest time that is left of the rate at `since`, and its first run.
    """

    since: float
    before: float
    first: str
    furthest: tuple[float, str]


class LimitedRuns:
    """The runs of one handler on one stream, each of a value of the field by which the handler is limited.

    A run in which its entry was started again does not count for the most at once: its owner had lost it by then.
    """

    def __init__(self, handler: str, stream: str, events: Iterable[Event], limit: Limit) -> None:
        self._place = handler, stream
        self._limit = limit
        self._runs = runs_of(event for event in events if event.kind in ("started", "ended"))
        self.most_at_once = 0

    def verify(self, rate_excess_ms: float) -> Iterator[Finding]:
        """Return the findings: the runs that should not have begun when they did."""
        for value, runs in _by_value(_owned(self._runs)).items():
            yield from self._beyond_at_once(value, runs)
        if self._limit.rate is not None:
            for value, runs in _by_value(self._runs).items():
                yield from self._beyond_rate(value, [run.start for run in runs], rate_excess_ms)

    def _beyond_at_once(self, value: str, runs: Sequence[Run]) -> Iterator[Finding]:
        running: list[tuple[float, str]] = []
        for run in runs:
            while running and running[0][0] <= run.begin:
                heappop(running)
            heappush(running, (run.end, run.start.id))
            self.most_at_once = max(self.most_at_once, len(running))
            if self._limit.at_once is not None and len(running) > self._limit.at_once:
                others = [one for _, one in running if one != run.start.id]
                expected = f"at most {self._limit.at_once} runs of {value or 'the limit'} at once"
                yield self._finding(run.start, others, expected, f"{len(running)}")

    def _beyond_rate(self, value: str, starts: Sequence[Event], excess_ms: float) -> Iterator[Finding]:
        """Find the runs up to which some window has more of the rate than it allows.

        Each run was permitted between `asked` and `at`. So all from one on were permitted from the first `asked` of them
        on; they took so many milliseconds of the rate, without the largest message, or that long and the excess passed.
        """
        per_cost_ms = self._limit.period_ms / self._limit.amount
        largest_ms = max(start.cost for start in starts) * per_cost_ms
        windows: list[_Window] = []
        took_ms = 0.0
        for start in sorted(starts, key=_permitted_by):
            since, first, before = _asked(start), start.id, took_ms
            while windows and windows[-1].since >= since:
                first, before = windows[-1].first, windows[-1].before
                windows.pop()
            furthest = since - before, first
            if windows and windows[-1].furthest[0] > furthest[0]:
                furthest = windows[-1].furthest
            windows.append(_Window(since, before, first, furthest))
            took_ms += start.cost * per_cost_ms
            left_ms, begin = windows[-1].furthest
            over_ms = took_ms - largest_ms + left_ms - _permitted_by(start)
            if over_ms > excess_ms:
                expected = f"no more of {value or 'the limit'} than its rate {self._limit.rate} since {begin}"
                yield self._finding(start, [begin], expected, f"{over_ms:.0f} ms more of it")

    def _finding(self, start: Event, others: Sequence[str], expected: str, found: str) -> Finding:
        handler, stream = self._place
        return Finding(
            fault="over_limit",
            handler=handler,
            stream=stream,
            key=start.key,
            ids=(start.id, *others),
            expected=expected,
            found=found,
        )


def _owned(runs: Sequence[Run]) -> Iterator[Run]:
    """Leave out the runs in which another owner started the entry again."""
    begins: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        begins[run.start.id].append(run.begin)
    for run in runs:
        of_entry = begins[run.start.id]
        again = bisect_right(of_entry, run.begin)
        if again == len(of_entry) or of_entry[again] >= run.end:
            yield run


def _by_value(runs: Iterable[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.start.limited].append(run)
    return found


def _permitted_by(start: Event) -> float:
    if start.at is None:
        raise ConfigError(f"the start of {start.id} has no time; give it `at`, which the check of a rate needs")
    return start.at


def _asked(start: Event) -> float:
    return _permitted_by(start) if start.asked is None else start.asked
