"""The options of the `redis-streams` source: read from text, checked, and explained when wrong.

Names follow Spark's Kafka source where the meaning is the same. `docs/spark-source.md` describes each.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, cast

from millstream.errors import ConfigError
from millstream.model import ZERO_ID, EntryId
from millstream.spark.given import Given, near

Word = Literal["earliest", "latest", "frontier"]
Edge = Word | EntryId
"""Where reading starts or ends: a word, or the id of the last entry before the start, or at the end."""

FieldsAs = Literal["array", "map"]

_GREATEST_SEQ = 2**64 - 1
NAMES = (
    "url",
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "group",
    "fieldsAs",
    "mode",
    "layout",
    "keyField",
    "frontierApp",
    "frontierHandler",
)
_NAMES_SHOWN = 14
_PACKED_ONLY = ("keyField",)
_COLUMNS_ONLY = ("fieldsAs", "mode")


@dataclass(frozen=True, kw_only=True)
class Edges:
    """A start or an end: `default` for every stream that `streams` does not name; None = what is usual there."""

    default: Edge | None = None
    streams: Mapping[str, Edge] = field(default_factory=dict)

    def of(self, stream: str, usual: Edge) -> Edge:
        """The edge of one stream."""
        return self.streams.get(stream, self.default or usual)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Entries per batch, tasks per batch, entries per task; None = no limit of that kind."""

    per_trigger: int | None = None
    min_partitions: int | None = None
    per_partition: int | None = None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How entries become rows.

    * `fields_as`: the type of the column `fields`
    * `failfast`: a value that does not fit its typed column is an error, not null
    * `packed`: the layout of the handler engine, with the value of `key_field` as its key
    """

    fields_as: FieldsAs = "array"
    failfast: bool = False
    packed: bool = False
    key_field: str | None = None


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Everything that the source was told. `frontier` names the app and handler whose commits it must not outrun."""

    url: str
    streams: tuple[str, ...] = ()
    pattern: str | None = None
    starting: Edges = Edges()
    ending: Edges = Edges()
    limits: Limits = Limits()
    fail_on_data_loss: bool = True
    group: str = "spark-source"
    columns: Columns = Columns()
    frontier: tuple[str, str] | None = None

    def check_streaming(self) -> None:
        """Raise ConfigError for what only a batch read can do."""
        if self.ending != Edges():
            raise ConfigError("endingOffsets and endingTimestamp are for spark.read: a streaming query does not end")

    def check_batch(self) -> None:
        """Raise ConfigError for what only a streaming query can do."""
        if "latest" in (self.starting.default, *self.starting.streams.values()):
            raise ConfigError("startingOffsets=latest leaves nothing to read for spark.read: use earliest or an id")
        if self.limits.per_trigger is not None:
            raise ConfigError("maxOffsetsPerTrigger is for spark.readStream; spark.read ends at endingOffsets")


def parse(given: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> SourceOptions:
    """Understand the options of `spark.read` or `spark.readStream`; names in any case.

    Raises ConfigError, in one line with what to change, for an option that is unknown, misspelt, contradicts another
    one or has a value that makes no sense.
    """
    options = Given.read(given, NAMES, "reading", _NAMES_SHOWN)
    url = options.url(environ)
    streams, pattern = _subscription(options)
    frontier = _frontier(options)
    return SourceOptions(
        url=url,
        streams=streams,
        pattern=pattern,
        starting=_edges(options, "starting", streams, frontier is not None),
        ending=_edges(options, "ending", streams, False),
        limits=Limits(
            per_trigger=options.number("maxOffsetsPerTrigger"),
            min_partitions=options.number("minPartitions"),
            per_partition=options.number("maxRecordsPerPartition"),
        ),
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        group=options.values.get("group", SourceOptions.group),
        columns=_columns(options),
        frontier=frontier,
    )


def _subscription(options: Given) -> tuple[tuple[str, ...], str | None]:
    listed, pattern = options.text("subscribe"), options.text("subscribePattern")
    if (listed is None) == (pattern is None):
        raise ConfigError(
            'name the streams either by option("subscribe", "a,b") or by option("subscribePattern", "prefix:*")'
            + (", not by both" if listed else "")
        )
    names = tuple(dict.fromkeys(name.strip() for name in (listed or "").split(",") if name.strip()))
    if listed and not names:
        raise ConfigError(f"option subscribe={listed!r} names no stream")
    return names, pattern


def _frontier(options: Given) -> tuple[str, str] | None:
    app, handler = options.text("frontierApp"), options.text("frontierHandler")
    if (app is None) != (handler is None):
        raise ConfigError("frontierApp and frontierHandler go together")
    return (app, handler) if app and handler else None


def _columns(options: Given) -> Columns:
    packed = options.choice("layout", ("columns", "packed"), "columns") == "packed"
    for name in _COLUMNS_ONLY if packed else _PACKED_ONLY:
        if name in options.values:
            raise ConfigError(f"option {name} does not go with layout={'packed' if packed else 'columns'}")
    return Columns(
        fields_as=cast(FieldsAs, options.choice("fieldsAs", ("array", "map"), "array")),
        failfast=options.choice("mode", ("permissive", "failfast"), "permissive") == "failfast",
        packed=packed,
        key_field=options.text("keyField"),
    )


# --- Where to start and to end ----------------------------------------------------------------------------------


def _edges(options: Given, side: str, streams: tuple[str, ...], has_frontier: bool) -> Edges:
    """Read `<side>Timestamp`, which takes precedence, or `<side>Offsets`."""
    stamp = options.text(f"{side}Timestamp")
    if stamp is not None:
        return Edges(default=_just_before(_timestamp_ms(f"{side}Timestamp", stamp)))
    name = f"{side}Offsets"
    text = options.text(name)
    if text is None:
        return Edges()
    words = ("earliest", "latest", *(("frontier",) if has_frontier else ())) if side == "starting" else ("latest",)
    if not text.startswith("{"):
        return Edges(default=_edge(name, text, words))
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ConfigError(f'option {name} is not JSON like {{"orders": "1700000000000-0"}}: {error}') from error
    strangers = sorted(set(raw) - set(streams)) if streams else []
    if strangers:
        raise ConfigError(
            f"option {name} names {strangers[0]!r}, which is not subscribed to{near(strangers[0], streams)}"
        )
    # A position as it stands in a checkpoint, ["ms-seq", n], may be pasted here.
    edges = {stream: _edge(name, at[0] if isinstance(at, list) and at else at, words) for stream, at in raw.items()}
    return Edges(streams=edges)


def _edge(name: str, value: object, words: tuple[str, ...]) -> Edge:
    if isinstance(value, str):
        if value.lower() in words:
            return cast(Word, value.lower())
        if value[:1].isdigit():
            return EntryId.parse(value)
    raise ConfigError(f"option {name}: {value!r} must be {', '.join(words)} or an entry id like 1700000000000-0")


def _just_before(ms: int) -> EntryId:
    return EntryId(ms - 1, _GREATEST_SEQ) if ms > 0 else ZERO_ID


def _timestamp_ms(name: str, text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"option {name}={text!r} must be milliseconds since 1970 or a time like 2025-01-31T12:00:00+01:00"
        ) from error
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
