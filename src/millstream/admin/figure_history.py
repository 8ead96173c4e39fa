"""FigureHistory: the figures of all handlers over the last 24 hours, kept in one capped stream of Redis."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from typing import Generic, TypeVar

import msgspec

from millstream.admin.handler_sweep import HandlerSweep, PlaceFigures
from millstream.errors import CommandFailed
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import history_key
from millstream.redis_client.replies import mapping_of

STEP_MS = 60_000
"""The time between two samples, in milliseconds."""

KEPT_MS = 86_400_000
MOST_HANDLERS = 100
"""So many handlers the history has by name, and so many others."""

WHICH_HANDLERS = (
    f"the first {MOST_HANDLERS} handlers by name, and up to {MOST_HANDLERS} others where entries wait, "
    "that are paused, or that have stuck keys or dead letters"
)
"""Which handlers a partial sample has."""

_PAGE = 200
_T = TypeVar("_T")


class HandlerSample(msgspec.Struct, array_like=True, frozen=True):
    """The figures of one handler at one time, over all its streams. Stored as an array: a new field comes last.

    * `streams`: the number of its streams
    * `added`, `done`, `dead`: totals of entries added to its streams, of messages that it has committed, and of those
      that became dead letters; None if unknown
    * `lag`, `oldest_ms`: uncommitted entries, and the age of the first; None if unknown, or for no entry
    * `dead_letters`: dead letters in its queue; `stuck`: keys that are parked or back off; `parked`: the former of these
    * `pending`, `in_flight`, `paused`, `modes`: as in ReaderReport; `is_exact`: the lag is no lower bound
    """

    streams: int
    added: int | None
    done: int | None
    dead: int | None
    lag: int | None
    oldest_ms: int | None
    dead_letters: int
    stuck: int
    parked: int = 0
    pending: int = 0
    in_flight: int = 0
    paused: int = 0
    is_exact: bool = True
    modes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The figures of all handlers at one time.

    * `at_ms`: Unix milliseconds, by the clock of Redis; `step_ms`: after this time the next sample is due
    * `is_partial`: it has not all handlers, but `WHICH_HANDLERS`
    * `age_ms`: how old the oldest of its figures may be, in milliseconds
    """

    at_ms: int
    step_ms: int = STEP_MS
    is_partial: bool = False
    age_ms: int = 0
    handlers: Mapping[str, HandlerSample] = field(default_factory=dict)


class _Stored(msgspec.Struct, Generic[_T], array_like=True, frozen=True):
    at_ms: int
    step_ms: int
    is_partial: bool
    handlers: dict[str, _T]
    age_ms: int = 0


def sample_of(sweep: HandlerSweep, at_ms: int) -> Sample:
    """The figures of the handlers that a sweep knows at `at_ms`, which is now: of all, or of `WHICH_HANDLERS`."""
    now_ms = sweep.clock.monotonic_ms()
    by_handler: dict[str, list[PlaceFigures]] = {}
    for keys, figures in sweep.figures():
        by_handler.setdefault(keys.label, []).append(figures)
    found = [(label, _sample_of_handler(by_handler[label], now_ms)) for label in sorted(by_handler)]
    others = ((label, one) for label, one in islice(found, MOST_HANDLERS, None) if needs_place(one))
    kept = dict([*found[:MOST_HANDLERS], *nlargest(MOST_HANDLERS, others, key=lambda one: _urgency(one[1]))])
    return Sample(at_ms=at_ms, age_ms=int(sweep.age_ms), is_partial=len(kept) < len(found), handlers=kept)


def needs_place(one: HandlerSample) -> bool:
    """Whether a handler that is not among the first ones by name is one of the others that a sample has."""
    return bool(one.lag or one.paused or one.stuck or one.dead_letters)


def _urgency(one: HandlerSample) -> tuple[bool, int]:
    """Stuck keys and pauses come first, and then the entries that have waited the longest."""
    return bool(one.stuck or one.paused), one.oldest_ms or 0


def _sample_of_handler(places: Sequence[PlaceFigures], now_ms: float) -> HandlerSample:
    is_readable = all(one.is_readable for one in places)
    lags = [one.lag for one in places if one.lag is not None]
    oldest_ms = min((one.oldest_since_ms for one in places if one.oldest_since_ms is not None), default=None)
    return HandlerSample(
        streams=len(places),
        added=sum(one.added for one in places) if is_readable else None,
        done=sum(one.done for one in places) if is_readable else None,
        dead=sum(one.dead for one in places) if is_readable else None,
        lag=sum(lags) if lags else None,
        oldest_ms=None if oldest_ms is None else max(0, int(now_ms - oldest_ms)),
        dead_letters=sum(one.dead_letters for one in places),
        stuck=sum(one.parked + one.backing_off for one in places),
        parked=sum(one.parked for one in places),
        pending=sum(one.pending for one in places),
        in_flight=sum(one.in_flight for one in places),
        paused=sum(one.is_paused for one in places),
        is_exact=all(one.is_exact for one in places),
        modes=tuple(sorted({one.mode for one in places})),
    )


class FigureHistory:
    """The history of one Redis, which holds about the last 1,440 samples."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def newest(self) -> Sample | None:
        """The newest sample; one without handlers if it is unreadable. Raises RedisError."""
        found = self._client.execute("XREVRANGE", history_key(), "+", "-", "COUNT", 1)
        return _parse(found[0], None) if found else None

    def is_due(self, now_ms: int) -> bool:
        """Whether the step of the newest sample is over. `now_ms`: by the clock of Redis. Raises RedisError."""
        found = self.newest()
        return found is None or now_ms // STEP_MS >= (found.at_ms + found.step_ms) // STEP_MS

    def add(self, sample: Sample) -> bool:
        """Add a sample, unless there is one of the same minute, or a later one. Raises RedisError.

        Its id is the minute: however many processes add, Redis takes one of each minute.
        """
        minute_ms = sample.at_ms // STEP_MS * STEP_MS
        stored = msgspec.msgpack.encode(
            _Stored(sample.at_ms, sample.step_ms, sample.is_partial, dict(sample.handlers), sample.age_ms)
        )
        most = KEPT_MS // STEP_MS
        try:
            self._client.execute("XADD", history_key(), "MAXLEN", "~", most, f"{minute_ms}-0", "sample", stored)
        except CommandFailed:
            if self._client.execute("XRANGE", history_key(), f"{minute_ms}-0", "+", "COUNT", 1):
                return False
            raise
        return True

    def read(self, since_ms: int) -> list[Sample]:
        """The samples since this time, the oldest first. Omits those that are unreadable. Raises RedisError."""
        return [*self.scan(since_ms)]

    def scan(self, since_ms: int, handler: str | None = None) -> Iterator[Sample]:
        """Likewise, one after another: a day of them takes much memory. `handler`: have the figures of this one only.

        Omits samples that have no figures of that handler, but for partial ones. Raises RedisError.
        """
        start = f"{max(0, since_ms)}-0"
        while True:
            page = self._client.execute("XRANGE", history_key(), start, "+", "COUNT", _PAGE)
            for entry in page:
                found = _parse(entry, handler)
                if found.handlers or found.is_partial:
                    yield found
            if len(page) < _PAGE:
                return
            start = f"({page[-1][0].decode()}"


def _parse(entry: tuple[bytes, list[bytes]], handler: str | None) -> Sample:
    """The sample of an entry, with all handlers or that one; one without handlers if it is unreadable."""
    at_ms = int(entry[0].partition(b"-")[0])
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        stored = msgspec.msgpack.decode(mapping_of(entry[1]).get(b"sample", b""), type=_Stored[msgspec.Raw])
        return Sample(
            at_ms=stored.at_ms,
            step_ms=max(STEP_MS, stored.step_ms),
            is_partial=stored.is_partial,
            age_ms=stored.age_ms,
            handlers={
                name: msgspec.msgpack.decode(one, type=HandlerSample)
                for name, one in stored.handlers.items()
                if handler in (None, name)
            },
        )
    return Sample(at_ms=at_ms)
