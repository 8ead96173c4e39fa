"""HandlerSweep: the figures of all handlers on all their streams, at a cost that follows what changes.

Key tracking says which keys have changed. What it does not report has no effect on these figures: an entry that a group
delivers (XREADGROUP) is uncommitted before and after it, and each commit changes the metadata of its handler.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from millstream.admin.inspection import inspect_handlers, inspect_streams
from millstream.admin.reports import HandlerReport, StreamReport
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import AccessDenied, ConfigError, Unavailable
from millstream.redis_client.client import SCAN_START, Client
from millstream.redis_client.key_names import PREFIX, HandlerKeys, from_wire
from millstream.redis_client.key_tracking import KeyTracker

_METADATA = f"{PREFIX}:*:meta"


class SweepPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How much a sweep reads.

    * `at_once`: handlers on streams in one step; some fifteen commands each
    * `unchanged_at_once`: in each round, those of which nothing was reported, as key tracking does not report all;
      `untracked_at_once`: without key tracking
    * `pages_at_once`: pages of names of keys, a thousand each, in each round, and in each step until all are scanned once
    """

    at_once: int = 100
    unchanged_at_once: int = 3
    untracked_at_once: int = 8
    pages_at_once: int = 40


class PlaceFigures(msgspec.Struct, frozen=True, gc=False):
    """The figures of a handler on one stream; see HandlerReport. `added`: entries ever added to the stream; `mode`: how it
    reads.

    * `read_ms`: when they were read; `oldest_since_ms`: since when the first uncommitted entry has waited; None without
      one. Both by the monotonic clock
    * `is_readable`: False if its keys hold foreign data
    """

    read_ms: float
    is_readable: bool
    added: int
    done: int
    dead: int
    lag: int | None
    oldest_since_ms: float | None
    is_exact: bool
    mode: str
    is_paused: bool
    pending: int
    in_flight: int
    dead_letters: int
    parked: int
    backing_off: int


class HandlerSweep:
    """Reads every handler on each of its streams once, and then again what may have changed, in bounded steps.

    A round is a call of `begin`, and of `step` until nothing waits. Where the server or the user does not allow key tracking,
    it reads some in each round, those first that were read the longest ago. Handlers are known by their metadata; new ones
    are found once the names of all keys were scanned again. Not for several threads at the same time.
    """

    def __init__(self, client: Client, policy: SweepPolicy | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._policy = policy or SweepPolicy()
        self.clock = clock
        self._tracker = KeyTracker(client)
        self._checked_ms = clock.monotonic_ms()
        self._position = SCAN_START
        self._is_scanned = False
        self._on_streams: dict[str, tuple[HandlerKeys, ...]] = {}
        # Those first that were read the longest ago; None for one that this user may not access.
        self._figures: dict[HandlerKeys, PlaceFigures | None] = {}
        self._waiting: dict[HandlerKeys, float] = {}  # since when their figures may be old, the oldest first
        self._changing: set[HandlerKeys] = set()  # those of which all keys are tracked

    def close(self) -> None:
        """Close the tracked connections; it may be used again."""
        self._tracker.close()

    @property
    def is_complete(self) -> bool:
        """Whether every handler was read on each of its streams."""
        return self._is_scanned and all(keys in self._figures for keys in self._waiting)

    @property
    def is_waiting(self) -> bool:
        """Whether another step has something to read in this round."""
        return not self._is_scanned or bool(self._waiting)

    @property
    def age_ms(self) -> float:
        """How old the oldest of the figures are, in milliseconds: since when they may have changed."""
        if self._tracker.refused:
            first = next(filter(None, self._figures.values()), None)
            since_ms = None if first is None else first.read_ms
        else:
            since_ms = next(iter(self._waiting.values()), None)
        return 0.0 if since_ms is None else self.clock.monotonic_ms() - since_ms

    def figures(self) -> Iterator[tuple[HandlerKeys, PlaceFigures]]:
        """The figures of every handler on each of its streams, as far as they are read."""
        return ((keys, one) for keys, one in self._figures.items() if one is not None)

    def begin(self) -> None:
        """Begin a round: find what has changed, scan some of the names, and read some that have not changed."""
        now_ms = self.clock.monotonic_ms()
        changed = self._tracker.changed()
        if changed is None and not self._tracker.refused:
            self._position = SCAN_START  # the server may be another one, with other cursors
            self._wait((one for places in self._on_streams.values() for one in places), self._checked_ms)
        for place in self._places_of(changed or ()):
            self._changing.add(place)
            self._wait((place,), self._checked_ms)
        self._checked_ms = now_ms
        if self._is_scanned:
            self._scan()
            count = self._policy.untracked_at_once if self._tracker.refused else self._policy.unchanged_at_once
            self._read([*islice((one for one in self._figures if one not in self._waiting), count)])

    def step(self) -> int:
        """Read the next that wait; return how many handlers on streams these were."""
        if not self._is_scanned:
            self._scan()
        some = [*islice(self._waiting, self._policy.at_once)]
        self._read(some)
        return len(some)

    def _wait(self, places: Iterable[HandlerKeys], since_ms: float) -> None:
        for one in places:
            self._waiting.setdefault(one, since_ms)

    def _places_of(self, changed: Iterable[str]) -> Iterator[HandlerKeys]:
        """The handlers on streams that these keys belong to."""
        for key in changed:
            yield from self._on_streams.get(key, ())
            if (keys := _parse(key)) and keys in self._on_streams.get(keys.stream, ()):
                yield keys

    def _scan(self) -> None:
        """Scan some of the names for handlers on streams that are not known yet."""
        now_ms = self.clock.monotonic_ms()
        for number, (page, position) in enumerate(self._client.scan_keys_from(_METADATA, self._position), 1):
            self._position = position
            for keys in filter(None, map(_parse, map(from_wire, page))):
                known = self._on_streams.get(keys.stream, ())
                if keys not in known:
                    self._on_streams[keys.stream] = (*known, keys)
                    self._wait((keys,), now_ms)
            if number == self._policy.pages_at_once:
                return
        self._position = SCAN_START
        self._is_scanned = True

    def _read(self, places: Sequence[HandlerKeys]) -> None:
        """Read these, and have the server track their keys before: no change is missed. Those that are gone are forgotten."""
        if not places:
            return
        tracked = dict.fromkeys(name for one in places for name in self._keys_of(one))
        is_there = dict(self._tracker.read_each(("EXISTS",), tracked))
        for reply in is_there.values():
            if isinstance(reply, Unavailable):  # its key is not tracked: these wait on
                raise reply
        left = [one for one in places if is_there.get(one.meta) != 0]
        for one in set(places).difference(left):
            self._forget(one)
        read_ms = self.clock.monotonic_ms()
        streams, reports = self._inspect(left) if left else ({}, ())
        by_keys = {one.keys: one for one in reports}
        for place in left:
            report = by_keys.get(place)
            self._waiting.pop(place, None)
            self._figures.pop(place, None)
            if report is None:
                self._figures[place] = None
                continue
            self._figures[place] = _figures_of(report, streams.get(place.stream), read_ms)
            is_stuck = bool(report.dead_letters or report.parked or report.backing_off)
            if is_stuck and place not in self._changing:
                self._changing.add(place)
                self._wait((place,), read_ms)
            elif not (is_stuck or report.lag):
                self._changing.discard(place)  # what begins next changes one of the first three

    def _inspect(self, places: Sequence[HandlerKeys]) -> tuple[dict[str, StreamReport], Sequence[HandlerReport]]:
        try:
            streams = {one.name: one for one in inspect_streams(self._client, [*{keys.stream for keys in places}])}
            return streams, inspect_handlers(
                self._client, places, streams=streams, with_workers=False, clock=self.clock
            )
        except AccessDenied as error:
            if not error.concerns_key:
                raise
            return {}, ()  # this user may access none of them

    def _keys_of(self, place: HandlerKeys) -> Iterator[str]:
        """The keys that are tracked, the metadata first. While nothing changes and nothing is stuck, three suffice: workers change the metadata."""
        if self._tracker.refused:
            yield place.meta
            return
        yield from (place.meta, place.stream, place.parked)
        if place in self._changing:
            yield from (place.dead_letters, place.awaiting, place.backoff)

    def _forget(self, place: HandlerKeys) -> None:
        self._figures.pop(place, None)
        self._waiting.pop(place, None)
        self._changing.discard(place)
        rest = tuple(one for one in self._on_streams.get(place.stream, ()) if one != place)
        if rest:
            self._on_streams[place.stream] = rest
        else:
            self._on_streams.pop(place.stream, None)


def _parse(key: str) -> HandlerKeys | None:
    """The handler on a stream that a key belongs to; names of handlers are kept once."""
    if not key.startswith(f"{PREFIX}:"):
        return None
    try:
        found = HandlerKeys.parse(key)
    except ConfigError:
        return None
    return HandlerKeys(sys.intern(found.app), sys.intern(found.handler), found.stream)


def _figures_of(report: HandlerReport, stream: StreamReport | None, read_ms: float) -> PlaceFigures:
    return PlaceFigures(
        read_ms=read_ms,
        is_readable=report.problem is None,
        added=stream.added if stream else 0,
        done=report.committed,
        dead=report.dead,
        lag=report.lag,
        oldest_since_ms=None if report.oldest_age_ms is None else read_ms - report.oldest_age_ms,
        is_exact=report.lag_exact,
        mode=sys.intern(report.mode),
        is_paused=report.paused,
        pending=report.pending,
        in_flight=report.in_flight,
        dead_letters=report.dead_letters,
        parked=report.parked,
        backing_off=report.backing_off,
    )
