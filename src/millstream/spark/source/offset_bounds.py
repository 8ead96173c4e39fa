"""OffsetBounds: starting and ending offsets per stream, as words, entry ids or times, parsed from the options."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, cast

from millstream.errors import ConfigError
from millstream.model import EntryId
from millstream.redis_client.formats import format_time
from millstream.spark.option_parser import OptionParser, suggestion

BoundWord = Literal["earliest", "latest", "group", "committed"]

_LIKE_SECONDS = range(10**9, 10**10)
"""Numbers that are times early in 1970 as milliseconds, and times since 2001 as seconds."""
T = TypeVar("T")


@dataclass(frozen=True)
class Timestamp:
    """A time, in milliseconds since 1970."""

    ms: int

    @property
    def last_id_before(self) -> EntryId:
        """The greatest id of an older entry."""
        return EntryId(max(self.ms, 0), 0).previous()


Bound = BoundWord | EntryId | Timestamp
"""A start or an end of reading. A word; an id: the last entry before the start, or at the end; a time: that of the
first entry at the start, or after the end."""


def id_of(bound: Bound) -> EntryId | None:
    """The greatest id that a start at `bound` leaves out; None for a word, whose id differs between streams."""
    if isinstance(bound, Timestamp):
        return bound.last_id_before
    return bound if isinstance(bound, EntryId) else None


@dataclass(frozen=True, kw_only=True)
class OffsetBounds:
    """All starts or all ends: `default` holds for streams that `streams` does not name; None = the reader's default."""

    default: Bound | None = None
    streams: Mapping[str, Bound] = field(default_factory=dict)

    def for_stream(self, stream: str, default: Bound) -> Bound:
        """The bound of one stream."""
        return self.streams.get(stream, self.default or default)

    def mentions(self, word: BoundWord) -> bool:
        """True if any stream may begin or end at `word`."""
        return word in (self.default, *self.streams.values())

    def are_all(self, word: BoundWord, streams: Collection[str]) -> bool:
        """True if each of `streams` begins or ends at `word`; of no streams: if all that a pattern finds do."""
        if not streams:
            return self.default == word and not self.streams
        return all(self.streams.get(stream, self.default) == word for stream in streams)


DEFAULT_BOUNDS = OffsetBounds()
"""The reader's default in all streams."""


def read_bounds(options: OptionParser, side: str, streams: Sequence[str], words: Sequence[str]) -> OffsetBounds:
    """Parse the options of one `side`, "starting" or "ending": `<side>Timestamp` has priority over
    `<side>OffsetsByTimestamp`, and that over `<side>Offsets`, as with Spark's Kafka source.

    `streams`: those that are listed, none if there is a pattern. `words`: values allowed beside ids and times. Raises
    ConfigError for an invalid value.
    """
    offsets = _offsets(options, f"{side}Offsets", streams, words)
    timestamps = _timestamps(options, f"{side}OffsetsByTimestamp", streams)
    text = options.text(f"{side}Timestamp")
    if text is not None:
        return OffsetBounds(default=_timestamp(f"{side}Timestamp", text))
    return OffsetBounds(default=offsets.default, streams={**offsets.streams, **timestamps})


def check_order(starting: OffsetBounds, ending: OffsetBounds, streams: Collection[str]) -> None:
    """Raise ConfigError if the end of a stream comes before its start. Without `streams`, which a pattern will find,
    checks those with bounds of their own, and the default."""
    for stream in streams or ("", *starting.streams, *ending.streams):  # no stream has the name ""
        start, end = id_of(starting.for_stream(stream, "earliest")), id_of(ending.for_stream(stream, "latest"))
        if start is not None and end is not None and start > end:
            where = f" in the stream {stream!r}" if stream else ""
            raise ConfigError(
                f"reading would begin{where} {_describe(starting.for_stream(stream, 'earliest'), 'after', 'from')} and end "
                f"before that, {_describe(ending.for_stream(stream, 'latest'), 'at', 'at')}: set an end after the start"
            )


def _describe(bound: Bound, id_word: str, time_word: str) -> str:
    if not isinstance(bound, Timestamp):
        return f"{id_word} {bound}"
    return f"{time_word} {format_time(bound.ms) or f'{bound.ms} ms since 1970'}"


def _offsets(options: OptionParser, name: str, streams: Sequence[str], words: Sequence[str]) -> OffsetBounds:
    text = options.text(name)
    if text is None:
        return OffsetBounds()
    if not text.startswith("{"):
        return OffsetBounds(default=_bound(name, text, words))

    def parse(value: object) -> Bound:
        # Users may paste a position from a checkpoint, ["ms-seq", n].
        return _bound(name, value[0] if isinstance(value, list) and value else value, words)

    return OffsetBounds(streams=_per_stream(name, text, streams, parse, example="1700000000000-0"))


def _timestamps(options: OptionParser, name: str, streams: Sequence[str]) -> dict[str, Timestamp]:
    text = options.text(name)
    if text is None:
        return {}
    return _per_stream(name, text, streams, lambda value: _timestamp(name, value), example="2025-01-31T12:00:00+01:00")


def _per_stream(
    name: str, text: str, streams: Sequence[str], parse: Callable[[object], T], *, example: str
) -> dict[str, T]:
    """Parse JSON with a value for each stream."""
    raw: Any = None
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ConfigError(f'option {name} is not JSON like {{"orders": "{example}"}}: {error}') from error
    if not isinstance(raw, dict):
        raise ConfigError(f'option {name} must be JSON like {{"orders": "{example}"}}')
    unknown = sorted(set(raw) - set(streams)) if streams else []
    if unknown:
        raise ConfigError(
            f"option {name} names {unknown[0]!r}, which is not subscribed to{suggestion(unknown[0], streams)}"
        )
    return {stream: parse(value) for stream, value in raw.items()}


def _bound(name: str, value: object, words: Sequence[str]) -> Bound:
    if isinstance(value, str):
        if value.lower() in words:
            return cast(BoundWord, value.lower())
        if value[:1].isdigit():
            return EntryId.parse(value)
    raise ConfigError(f"option {name}: {value!r} must be {', '.join(words)} or an entry id like 1700000000000-0")


def _timestamp(name: str, value: object) -> Timestamp:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        if value in _LIKE_SECONDS:
            raise ConfigError(f"option {name}={value} are milliseconds since 1970; for seconds write {value}000")
        return Timestamp(value)
    if isinstance(value, str):
        try:
            parsed = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            return Timestamp(round((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000))
    raise ConfigError(
        f"option {name}={value!r} must be milliseconds since 1970 or a time like 2025-01-31T12:00:00+01:00"
    )
