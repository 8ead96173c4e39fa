"""FigureHistory: the figures of all handlers over the last 24 hours, kept in one capped stream of Redis."""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from millstream.admin.consumption_summary import ReaderReport, summarize_readers
from millstream.admin.inspection import inspect
from millstream.admin.reports import Inspection
from millstream.errors import CommandFailed
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import history_key
from millstream.redis_client.replies import mapping_of

STEP_MS = 60_000
"""The time between two samples, in milliseconds, unless there are so many streams that it is longer."""

KEPT_MS = 86_400_000
MOST_STREAMS = 1_000
MOST_HANDLERS = 100

_PAGE = 200
_COMMANDS_PER_S = 10
_COMMANDS_PER_STREAM = 4
_COMMANDS_PER_HANDLER = 12


class HandlerSample(msgspec.Struct, array_like=True, frozen=True):
    """The figures of one handler at one time, over all its streams. Stored as an array: a new field comes last.

    * `streams`: the number of its streams
    * `added`, `done`, `dead`: totals of entries added to its streams, of messages that it has committed, and of those
      that became dead letters; None if unknown
    * `lag`, `oldest_ms`: uncommitted entries, and the age of the first; None if unknown, or for no entry
    * `dead_letters`: dead letters in its queue; `stuck`: keys that are parked or back off
    """

    streams: int
    added: int | None
    done: int | None
    dead: int | None
    lag: int | None
    oldest_ms: int | None
    dead_letters: int
    stuck: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The figures of all handlers at one time.

    * `at_ms`: Unix milliseconds, by the clock of Redis; `step_ms`: after this time the next sample is due
    * `is_partial`: it has the first 100 handlers only; or none, as there are more than 1,000 streams
    """

    at_ms: int
    step_ms: int = STEP_MS
    is_partial: bool = False
    handlers: Mapping[str, HandlerSample] = field(default_factory=dict)


class _Stored(msgspec.Struct, array_like=True, frozen=True):
    at_ms: int
    step_ms: int
    is_partial: bool
    handlers: dict[str, HandlerSample]


def read_sample(client: Client, at_ms: int) -> Sample:
    """The figures of all handlers as of now, which is `at_ms`. Raises RedisError.

    `step_ms` is so long that reading takes at most ten commands a second on average.
    """
    found = inspect(client, max_streams=MOST_STREAMS)
    commands = _COMMANDS_PER_STREAM * len(found.streams) + _COMMANDS_PER_HANDLER * len(found.handlers)
    step_ms = STEP_MS * max(1, math.ceil(commands * 1_000 / _COMMANDS_PER_S / STEP_MS))
    if found.is_sample:
        return Sample(at_ms=at_ms, step_ms=step_ms, is_partial=True)
    readers = [one for one in summarize_readers(found) if one.kind == "handler"]
    dead = _count_dead(found)
    return Sample(
        at_ms=at_ms,
        step_ms=step_ms,
        is_partial=len(readers) > MOST_HANDLERS,
        handlers={one.name: _sample_of(one, dead[one.name]) for one in readers[:MOST_HANDLERS]},
    )


def _count_dead(found: Inspection) -> Mapping[str, int]:
    """How many messages of each handler have become dead letters."""
    counts: Counter[str] = Counter()
    for one in found.handlers:
        counts[one.label] += one.dead
    return counts


def _sample_of(reader: ReaderReport, dead: int) -> HandlerSample:
    is_readable = reader.status != "unreadable"
    return HandlerSample(
        streams=reader.streams,
        added=reader.added if is_readable else None,
        done=reader.done if is_readable else None,
        dead=dead if is_readable else None,
        lag=reader.lag,
        oldest_ms=reader.oldest_age_ms,
        dead_letters=reader.dead_letters,
        stuck=reader.parked + reader.backing_off,
    )


class FigureHistory:
    """The history of one Redis, which holds about the last 1,440 samples."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def is_due(self, now_ms: int) -> bool:
        """Whether the step of the newest sample is over. `now_ms`: by the clock of Redis. Raises RedisError."""
        newest = self._client.execute("XREVRANGE", history_key(), "+", "-", "COUNT", 1)
        found = next(map(_parse, newest), None)
        return found is None or now_ms // STEP_MS >= (found.at_ms + found.step_ms) // STEP_MS

    def add(self, sample: Sample) -> bool:
        """Add a sample, unless there is one of the same minute, or a later one. Raises RedisError.

        Its id is the minute: however many processes add, Redis takes one of each minute.
        """
        minute_ms = sample.at_ms // STEP_MS * STEP_MS
        stored = msgspec.msgpack.encode(_Stored(sample.at_ms, sample.step_ms, sample.is_partial, dict(sample.handlers)))
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
        found: list[Sample] = []
        start = f"{max(0, since_ms)}-0"
        while True:
            page = self._client.execute("XRANGE", history_key(), start, "+", "COUNT", _PAGE)
            found += [one for one in map(_parse, page) if one.handlers or one.is_partial]
            if len(page) < _PAGE:
                return found
            start = f"({page[-1][0].decode()}"


def _parse(entry: tuple[bytes, list[bytes]]) -> Sample:
    """The sample of an entry; one without handlers if it is unreadable."""
    at_ms = int(entry[0].partition(b"-")[0])
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        stored = msgspec.msgpack.decode(mapping_of(entry[1]).get(b"sample", b""), type=_Stored)
        return Sample(
            at_ms=stored.at_ms,
            step_ms=max(STEP_MS, stored.step_ms),
            is_partial=stored.is_partial,
            handlers=stored.handlers,
        )
    return Sample(at_ms=at_ms)
