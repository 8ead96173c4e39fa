"""SinkOptions: the options of the `redis-streams` sink, parsed from text and checked. See `docs/spark-sink.md`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from millstream.errors import ConfigError
from millstream.model import EntryId
from millstream.redis_client.key_names import check_identifier, check_stream
from millstream.spark.option_parser import OptionParser
from millstream.spark.sink.write_options import WriteOptions

Target = Literal["stream", "hash", "json"]
FieldsAs = Literal["columns", "fields", "json"]

_STREAM_NAMES = (
    "stream",
    "streamColumn",
    "idColumn",
    "existingIds",
    "fieldsAs",
    "fieldsColumn",
    "jsonField",
    "maxlen",
    "minid",
    "exactTrim",
    "txnAppId",
    "txnVersion",
)
_UPSERT_NAMES = ("keyColumn", "keyPrefix", "guardColumn", "guardField")
NAMES = ("url", "target", *_STREAM_NAMES, *_UPSERT_NAMES)
_OF_SPARK = ("checkpointlocation", "queryname")
"""Options of Spark's own writer, which Spark passes on."""

_FIELD_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
_DEFAULT_WRITE_OPTIONS = WriteOptions()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How columns become entries. `stream`: the stream of all rows; None = `stream_column` names each row's."""

    stream: str | None = None
    stream_column: str | None = None
    id_column: str | None = None
    fields_as: FieldsAs = "columns"
    fields_column: str | None = None
    json_field: str = "json"


@dataclass(frozen=True, kw_only=True)
class UpsertLayout:
    """How columns become keys. Of two rows with the same key, the one with the greater guard is newer."""

    key_column: str
    guard_column: str
    key_prefix: str = ""
    guard_field: str = "millstream.guard"


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """All options of the sink. `transaction`: app id and version of a batch write that must happen only once."""

    url: str = field(repr=False)
    target: Target = "stream"
    layout: Layout = Layout()
    write_options: WriteOptions = _DEFAULT_WRITE_OPTIONS
    transaction: tuple[str, int] | None = None
    upsert: UpsertLayout | None = None

    def check_streaming(self) -> None:
        """Raise ConfigError for options that only a batch write supports."""
        if self.transaction:
            raise ConfigError("txnAppId and txnVersion are for df.write: a streaming query numbers its own batches")


def is_for_writing(user_options: Mapping[str, str], source_names: tuple[str, ...]) -> bool:
    """True if one of these options is the sink's only: reading and writing share one format name."""
    names = {name.lower() for name in user_options}
    sink_only = {name.lower() for name in NAMES} - {name.lower() for name in source_names} | {*_OF_SPARK}
    return bool(names & sink_only)


def parse_sink(user_options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> SinkOptions:
    """Parse the options of `df.write` or `df.writeStream`; names in any case.

    Raises ConfigError, one line that says what to change, for an option that is unknown or misspelt, contradicts
    another or has an invalid value.
    """
    ours = {name: value for name, value in user_options.items() if name.lower() not in _OF_SPARK}
    options = OptionParser.read(ours, NAMES, "writing", len(NAMES))
    url = options.url(environ)
    target = cast(Target, options.choice("target", ("stream", "hash", "json"), "stream"))
    others = _UPSERT_NAMES if target == "stream" else _STREAM_NAMES
    for name in others:
        if name in options.values:
            raise ConfigError(f"option {name} needs target={'hash or target=json' if target == 'stream' else 'stream'}")
    if target != "stream":
        return SinkOptions(url=url, target=target, upsert=_upsert(options))
    return SinkOptions(
        url=url, layout=_layout(options), write_options=_write_options(options), transaction=_transaction(options)
    )


def _upsert(options: OptionParser) -> UpsertLayout:
    key, guard = options.text("keyColumn"), options.text("guardColumn")
    if key is None or guard is None:
        raise ConfigError(
            'name the column with the key, option("keyColumn", "id"), and the column that is greater in newer rows, '
            'option("guardColumn", "version")'
        )
    field = options.text("guardField") or UpsertLayout.guard_field
    if not _FIELD_NAME.fullmatch(field):
        raise ConfigError(f"option guardField={field!r} must be letters, digits, '_', '-', '.' or ':'")
    return UpsertLayout(
        key_column=key,
        guard_column=guard,
        key_prefix=options.values.get("keyPrefix", ""),
        guard_field=field,
    )


def _layout(options: OptionParser) -> Layout:
    stream, column = options.text("stream"), options.text("streamColumn")
    if stream and column:
        raise ConfigError("name the stream either by option stream or by option streamColumn, not by both")
    fields_as = cast(FieldsAs, options.choice("fieldsAs", ("columns", "fields", "json"), "columns"))
    for name, wanted in (("fieldsColumn", "fields"), ("jsonField", "json")):
        if name in options.values and fields_as != wanted:
            raise ConfigError(f"option {name} needs fieldsAs={wanted}, not fieldsAs={fields_as}")
    return Layout(
        stream=check_stream(stream) if stream else None,
        stream_column=None if stream else column or "stream",
        id_column=options.text("idColumn"),
        fields_as=fields_as,
        fields_column=(options.text("fieldsColumn") or "fields") if fields_as == "fields" else None,
        json_field=options.text("jsonField") or Layout.json_field,
    )


def _write_options(options: OptionParser) -> WriteOptions:
    maxlen, minid = options.number("maxlen", minimum=0), options.text("minid")
    if maxlen is not None and minid is not None:
        raise ConfigError("trim either by maxlen or by minid, not by both")
    if "exactTrim" in options.values and maxlen is None and minid is None:
        raise ConfigError("option exactTrim needs maxlen or minid")
    existing = options.choice("existingIds", ("error", "skip"), "error")
    if "existingIds" in options.values and not options.text("idColumn"):
        raise ConfigError("option existingIds needs idColumn")
    return WriteOptions(
        maxlen=maxlen,
        minid=str(EntryId.parse(minid)) if minid is not None else None,
        exact=options.flag("exactTrim", False),
        skip_existing_ids=existing == "skip",
    )


def _transaction(options: OptionParser) -> tuple[str, int] | None:
    app, version = options.text("txnAppId"), options.number("txnVersion", minimum=0)
    if (app is None) != (version is None):
        raise ConfigError("txnAppId and txnVersion belong together: set both or none")
    return (check_identifier("txnAppId", app), version) if app is not None and version is not None else None
