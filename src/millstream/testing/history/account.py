"""What one handler must complete of one stream: its effects, their order, its runs, and their owners."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from millstream.testing.history.events import Event, in_log_order
from millstream.testing.history.report import Fault, Finding

_EFFECTS = ("committed", "dead")
_RUNS = ("started", "ended")


class Account:
    """One handler on one stream: `source` has the entries that it must complete, `rank` an entry's position in it."""

    def __init__(
        self, handler: str, stream: str, source: Mapping[str, bytes | None], rank: Callable[[str], Any]
    ) -> None:
        self._place = handler, stream
        self._source = source
        self._rank = rank
        self._keys = dict(source)
        self._completed: set[str] = set()

    # The methods are generators: `lost` relies on the state that `match_effects` leaves once it is exhausted.

    def verify(self, events: Sequence[Event], *, drained: bool, overlap: bool) -> Iterator[Finding]:
        """Return the findings of the handler's events; the options are those of `check`."""
        self._keys.update({event.id: event.key for event in events if event.key is not None})
        effects = [event for event in events if event.kind in _EFFECTS]
        known = [event for event in effects if event.id in self._source]
        yield from self.match_effects(known, [event for event in effects if event.id not in self._source])
        if drained:
            yield from self.lost()
            yield from self.out_of_order(known)
        else:
            incomplete = [entry for entry in self._source if entry not in self._completed]
            yield from self.out_of_order(known, incomplete)
        if overlap:
            for key, runs in self._by_key(event for event in events if event.kind in _RUNS).items():
                yield from self._overlaps(key, runs)
        for key, holders in self._by_key(event for event in events if event.token is not None).items():
            yield from self._stale(key, holders)

    def match_effects(self, known: Iterable[Event], unknown: Iterable[Event]) -> Iterator[Finding]:
        """Return the unexpected and the duplicated effects, of those on entries of the source and of the others."""
        known_by_id, unknown_by_id = _by_id(known), _by_id(unknown)
        self._completed = set(known_by_id)
        for entry, effects in unknown_by_id.items():
            expected = "no effect: it was not enqueued here"
            yield self._finding("unexpected", effects[0].key, (entry,), expected, _kinds(effects))
        for by_id in (known_by_id, unknown_by_id):
            for entry, effects in by_id.items():
                if len(effects) > 1:
                    key = self._keys.get(entry, effects[0].key)
                    yield self._finding("duplicated", key, (entry,), "one effect", _kinds(effects))

    def lost(self) -> Iterator[Finding]:
        """Return the entries without an effect."""
        for entry in self._source:
            if entry not in self._completed:
                yield self._finding("lost", self._keys[entry], (entry,), "an effect", "none")

    def out_of_order(self, effects: Iterable[Event], incomplete: Iterable[str] = ()) -> Iterator[Finding]:
        """Return the entries that a later one of their key overtook, also of the incomplete ones."""
        incomplete_of: dict[bytes | None, list[str]] = defaultdict(list)
        for entry in incomplete:
            incomplete_of[self._keys[entry]].append(entry)
        for key, of_key in self._by_key(effects).items():
            if len(of_key) > 1 or key in incomplete_of:
                yield from self._overtaken(key, of_key, incomplete_of[key])

    def _overtaken(self, key: bytes, effects: Sequence[Event], incomplete: list[str]) -> Iterator[Finding]:
        seen: set[str] = set()
        for chain in _chains(effects):
            heights: list[Any] = []
            peaks: list[str] = []
            late: list[tuple[str, Any, str]] = []
            for effect in chain:
                if effect.id in seen:
                    continue
                seen.add(effect.id)
                rank = self._rank(effect.id)
                if not heights or rank >= heights[-1]:
                    heights.append(rank)
                    peaks.append(effect.id)
                else:
                    late.append((effect.id, rank, f"{effect.kind} after it"))
            for entry in incomplete:
                rank = self._rank(entry)
                if heights and rank < heights[-1] and entry not in seen:
                    seen.add(entry)
                    late.append((entry, rank, "incomplete"))
            for entry, rank, found in late:
                overtaker = peaks[bisect_right(heights, rank)]
                expected = f"an effect before that on {overtaker}"
                yield self._finding("out_of_order", key, (entry, overtaker), expected, found)

    def _overlaps(self, key: bytes, runs: Iterable[Event]) -> Iterator[Finding]:
        last: Run | None = None
        for run in runs_of(runs):
            if last is not None and run.begin < last.end:
                expected = f"a start after the run of {last.start.id} by {last.start.worker or '?'}"
                found = f"a start during it by {run.start.worker or '?'}"
                yield self._finding("overlapping", key, (run.start.id, last.start.id), expected, found)
            if last is None or run.end > last.end:
                last = run

    def _stale(self, key: bytes, holders: Sequence[Event]) -> Iterator[Finding]:
        for chain in _chains(holders):
            highest = 0
            for event in chain:
                token = event.token or 0
                if token < highest and event.kind in _EFFECTS:
                    found = f"{event.kind} by {event.worker or '?'} with token {token}"
                    yield self._finding("stale", key, (event.id,), f"token {highest} or higher", found)
                highest = max(highest, token)

    def _finding(self, fault: Fault, key: bytes | None, ids: tuple[str, ...], expected: str, found: str) -> Finding:
        handler, stream = self._place
        return Finding(fault=fault, handler=handler, stream=stream, key=key, ids=ids, expected=expected, found=found)

    def _by_key(self, events: Iterable[Event]) -> dict[bytes, list[Event]]:
        by_key: dict[bytes, list[Event]] = defaultdict(list)
        for event in events:
            key = self._keys.get(event.id)
            if key is not None:
                by_key[key].append(event)
        return by_key


@dataclass(slots=True)
class Run:
    """One run of a handler; without a known end it has no duration."""

    start: Event
    begin: float
    end: float


def runs_of(events: Iterable[Event]) -> list[Run]:
    """Pair the starts and ends of one key, in the order of the starts."""
    ordered = in_log_order(events)
    times: Sequence[Any] = [event.at for event in ordered]
    if None in times:
        times = range(len(ordered))
    runs: list[Run] = []
    running: dict[tuple[str, str], Run] = {}
    for event, time in zip(ordered, times, strict=True):
        owner = event.worker, event.id
        if event.kind == "started":
            running[owner] = Run(event, time, time)
            runs.append(running[owner])
        elif owner in running:
            running.pop(owner).end = time
    return runs


def _chains(events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """Return the events with a position and those without, each in its own order; the two do not compare."""
    placed = [event for event in events if event.position is not None]
    placed.sort(key=attrgetter("position"))
    return placed, in_log_order(event for event in events if event.position is None)


def _by_id(effects: Iterable[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for effect in effects:
        found[effect.id].append(effect)
    return found


def _kinds(effects: Iterable[Event]) -> str:
    return " and ".join(f"{times} x {kind}" for kind, times in Counter(e.kind for e in effects).items())
