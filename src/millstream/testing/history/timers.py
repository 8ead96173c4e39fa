"""Timers of a handler's keys: whether each came once, not early, in order, and not at all if it was canceled."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple

from millstream.errors import ConfigError
from millstream.testing.history.events import Event
from millstream.testing.history.report import Fault, Finding

_Identity = tuple[bytes | None, str, str]
"""The key and the name of a timer, and the entry whose commit has set it."""


class _Timer(NamedTuple):
    """A timer as it was set; `number`: its place among all that were set; `until`: when it was canceled or replaced."""

    event: Event
    number: int
    due: float
    delay: float
    until: float


class Timers:
    """The timers of one handler on one stream. All times are those of the server.

    A timer that comes in the millisecond in which it was canceled or replaced came before or after: it is no finding.
    A timer may not be overtaken by one of its key that was set later and has the same delay or a longer one. Others are
    not compared: a server may take the time more than once in a commit, so their due times are not known well enough.
    """

    def __init__(self, handler: str, stream: str, events: Iterable[Event]) -> None:
        self._place = handler, stream
        in_order = sorted(events, key=_at)
        self._came: dict[_Identity, list[Event]] = {}
        changes: dict[tuple[bytes | None, str], dict[str, tuple[int, Event]]] = {}
        for number, event in enumerate(in_order):
            if event.kind == "timer_came":
                self._came.setdefault(_identity(event), []).append(event)
            else:
                # Of the changes of one commit the last one counts.
                changes.setdefault((event.key, event.timer), {})[event.id] = number, event
        self._timers = dict(_timers(changes.values()))

    def verify(self, *, drained: bool, late_ms: float | None) -> Iterator[Finding]:
        """Return the findings; `drained` and `late_ms` as in `check`."""
        for identity, arrivals in self._came.items():
            if identity not in self._timers:
                yield self._finding(
                    "unexpected", arrivals[0], (), f"no {_message_of(arrivals[0])}: it was not set", _times(arrivals)
                )
            if len(arrivals) > 1:
                yield self._finding("duplicated", arrivals[0], (), f"one {_message_of(arrivals[0])}", _times(arrivals))
        for identity, timer in self._timers.items():
            arrivals = self._came.get(identity, [])
            if arrivals:
                yield from self._mistimed(timer, _at(arrivals[0]), late_ms)
            elif drained and timer.until == inf:
                yield self._finding("lost", timer.event, (), _not_before(timer), "none")
        yield from self._overtaken(drained=drained)

    def _mistimed(self, timer: _Timer, came_at: float, late_ms: float | None) -> Iterator[Finding]:
        found = f"it came at {came_at:.0f}"
        if came_at > timer.until:
            expected = f"no {_message_of(timer.event)}: it was canceled or replaced at {timer.until:.0f}"
            yield self._finding("not_canceled", timer.event, (), expected, found)
        elif came_at < timer.due:
            yield self._finding("early", timer.event, (), _not_before(timer), found)
        elif late_ms is not None and came_at > timer.due + late_ms:
            expected = f"the {_message_of(timer.event)} at {timer.due + late_ms:.0f} at the latest"
            yield self._finding("late", timer.event, (), expected, found)

    def _overtaken(self, *, drained: bool) -> Iterator[Finding]:
        by_key: dict[bytes | None, list[tuple[_Timer, float]]] = {}
        for identity, arrivals in self._came.items():
            if identity in self._timers:
                by_key.setdefault(identity[0], []).append((self._timers[identity], _at(arrivals[0])))
        if not drained:
            for identity, timer in self._timers.items():
                if identity not in self._came and timer.until == inf:
                    by_key.setdefault(identity[0], []).append((timer, inf))
        for of_key in by_key.values():
            yield from self._overtaken_of_key(of_key)

    def _overtaken_of_key(self, of_key: Sequence[tuple[_Timer, float]]) -> Iterator[Finding]:
        # Of the timers that came, in the order in which they were set, those with a longer delay than all set later: the
        # first of them that was set after another timer has the longest delay of all that were.
        numbers: list[int] = []
        longest: list[_Timer] = []
        for timer, came_at in of_key:
            place = bisect_right(numbers, timer.number)
            if place < len(longest) and longest[place].delay >= timer.delay:
                other = longest[place].event.id
                expected = f"the {_message_of(timer.event)}, due at {timer.due:.0f}, before that of {other}, set later"
                found = "it has not come" if came_at == inf else f"it came at {came_at:.0f}, after it"
                yield self._finding("out_of_order", timer.event, (other,), expected, found)
            elif came_at < inf:
                while place and longest[place - 1].delay <= timer.delay:
                    place -= 1
                    del numbers[place], longest[place]
                numbers.insert(place, timer.number)
                longest.insert(place, timer)

    def _finding(self, fault: Fault, event: Event, others: tuple[str, ...], expected: str, found: str) -> Finding:
        handler, stream = self._place
        return Finding(
            fault=fault,
            handler=handler,
            stream=stream,
            key=event.key,
            ids=(event.id, *others),
            expected=expected,
            found=found,
        )


def _timers(changes: Iterable[dict[str, tuple[int, Event]]]) -> Iterator[tuple[_Identity, _Timer]]:
    for of_name in changes:
        in_order = sorted(of_name.values(), key=itemgetter(0))
        ends = [*(_at(event) for _, event in in_order[1:]), inf]
        for (number, event), until in zip(in_order, ends, strict=True):
            if event.kind == "timer_set":
                if event.due is None:
                    raise ConfigError(
                        f"the timer {event.timer!r} that {event.id} has set is due at no time; give it `due`"
                    )
                yield _identity(event), _Timer(event, number, event.due, event.due - _at(event), until)


def _identity(event: Event) -> _Identity:
    return event.key, event.timer, event.id


def _at(event: Event) -> float:
    if event.at is None:
        raise ConfigError(f"{event.kind} of {event.id}: give it `at`, the time of the server")
    return event.at


def _message_of(event: Event) -> str:
    return f"message of timer {event.timer}"


def _not_before(timer: _Timer) -> str:
    return f"the {_message_of(timer.event)} at {timer.due:.0f} or later"


def _times(arrivals: Sequence[Event]) -> str:
    return f"{len(arrivals)} at " + ", ".join(f"{_at(one):.0f}" for one in arrivals)
