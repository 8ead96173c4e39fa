"""Row decoder: turns raw stream entries into Arrow record batches, a column at a time.

Every batch has exactly the schema that Spark expects: Spark checks the first one only, and a later mismatch kills the
query without an explanation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import ConfigError, DecodeError
from millstream.spark.greatest_numbers import MAX_LONG, MAX_TIMESTAMP_MS
from millstream.spark.source.entry_runs import Run, chunks, stream_column, streams_of
from millstream.spark.source.entry_segment import Entry, EntrySegment
from millstream.spark.source.field_name_case import warn_of_other_case

Fields = EntrySegment | list[list[bytes]]
"""The names and values of entries."""

TIMESTAMP = pa.timestamp("us", tz="UTC")

ColumnMaker = Callable[[Fields], dict[str, pa.Array]]
"""Makes the columns of the entries' fields: {name: column}."""


class _InvalidValue(Exception):
    """A value of the `row`-th entry does not fit the type of its column."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(text)
        self.row = row


class BatchMaker:
    """Makes record batches of `schema`: columns about the entry itself, and those of `make_columns`.

    `meta` maps stream, id, id_ms, id_seq and timestamp of an entry to the column that shows it.
    """

    def __init__(self, schema: pa.Schema, meta: dict[str, str], make_columns: ColumnMaker) -> None:
        self._schema = schema
        self._meta = meta
        self._make_columns = make_columns

    def __call__(self, runs: Sequence[Run]) -> pa.RecordBatch:
        """Return one batch with the entries of `runs`, in their order. Raises DecodeError, which names the entry."""
        made: list[dict[str, pa.Array]] = []
        row = 0
        for chunk in chunks(runs):
            ids, fields = _ids_and_fields(chunk)
            try:
                made.append(self._id_columns(ids) | self._make_columns(fields))
            except _InvalidValue as misfit:
                owners = (stream for stream, count in streams_of(runs) for _ in range(count))
                stream = next(islice(owners, row + misfit.row, None))
                entry_id = ids[misfit.row].as_py().decode()
                raise DecodeError(f"the entry {entry_id} of the stream {stream!r}: {misfit}") from None
            row += len(ids)
        columns = {name: pa.concat_arrays([one[name] for one in made]) for name in made[0]}
        if "stream" in self._meta:
            columns[self._meta["stream"]] = stream_column(runs)
        return pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)

    def _id_columns(self, ids: pa.Array) -> dict[str, pa.Array]:
        meta = self._meta
        columns: dict[str, pa.Array] = {}
        if "id" in meta:
            columns[meta["id"]] = ids.cast(pa.string())
        if meta.keys() & {"id_ms", "id_seq", "timestamp"}:
            ms, seq = split_ids(ids)
            columns |= {meta[name]: numbers for name, numbers in (("id_ms", ms), ("id_seq", seq)) if name in meta}
            if "timestamp" in meta:
                columns[meta["timestamp"]] = _timestamps(ms)
        return columns


def _ids_and_fields(entries: EntrySegment | list[Entry]) -> tuple[pa.Array, Fields]:
    """The ids, as binary, and the names and values."""
    if isinstance(entries, EntrySegment):
        return entries.ids, entries
    return pa.array([entry[0] for entry in entries], pa.binary()), [entry[1] for entry in entries]


def split_ids(ids: pa.Array | list[bytes]) -> tuple[pa.Array, pa.Array]:
    """Return the two numbers of each id as int64. Raises ConfigError if one does not fit."""
    parts = pc.split_pattern(pa.array(ids, pa.binary()).cast(pa.string()), "-").flatten().cast(pa.uint64())
    if len(ids) and pc.max(parts).as_py() > MAX_LONG:
        texts = (one.as_py() for one in pa.array(ids, pa.binary()))
        too_great = next(entry_id for entry_id in texts if max(map(int, entry_id.split(b"-"))) > MAX_LONG)
        raise ConfigError(
            f"the entry id {too_great.decode()} has a number beyond {MAX_LONG}, the greatest of Spark's type "
            "long: exclude its stream, or begin after it"
        )
    numbers = parts.view(pa.int64()).to_numpy()
    return pa.array(numbers[0::2]), pa.array(numbers[1::2])


def _timestamps(ms: pa.Array) -> pa.Array:
    # Ids need not be times: one that is too great for a timestamp becomes null.
    fits = pc.less_equal(ms, MAX_TIMESTAMP_MS)
    ms = ms if pc.all(fits).as_py() in (True, None) else pc.if_else(fits, ms, pa.scalar(None, pa.int64()))
    return pc.multiply(ms, 1000).cast(TIMESTAMP)


# --- Columns of fields ------------------------------------------------------------------------------------------


def pair_columns(fields: Fields, *, schema: pa.Schema) -> dict[str, pa.Array]:
    """All fields as an array of (name, value), byte-exact, repeated names included."""
    wanted = schema.field("fields").type
    if isinstance(fields, EntrySegment):
        bounds, columns = fields.bounds, [fields.names(), fields.values()]
    else:
        lists = pa.array(fields, pa.list_(pa.binary()))
        flat, bounds = lists.values, lists.offsets.to_numpy()
        columns = [flat.take(pa.array(np.arange(first, len(flat), 2, dtype=np.int32))) for first in (0, 1)]
    pairs = pa.StructArray.from_arrays(columns, fields=list(wanted.value_type))
    return {"fields": pa.ListArray.from_arrays(pa.array(bounds // 2), pairs, type=wanted)}


def map_columns(fields: Fields, *, schema: pa.Schema) -> dict[str, pa.Array]:
    """All fields as a map; of a repeated name the last value counts, invalid UTF-8 in names is replaced."""
    maps = [dict(zip(some[0::2], some[1::2], strict=True)) for some in _lists(fields)]
    sizes = np.cumsum([0, *map(len, maps)]).astype(np.int32)
    names = pa.array([name.decode("utf-8", "replace") for one in maps for name in one], pa.string())
    values = pa.array([value for one in maps for value in one.values()], pa.binary())
    return {"fields": pa.MapArray.from_arrays(pa.array(sizes), names, values, type=schema.field("fields").type)}


def json_columns(fields: Fields) -> dict[str, pa.Array]:
    """All fields of an entry as one JSON object; a value that is not UTF-8 becomes {"base64": ...}."""
    encode = msgspec.json.Encoder().encode
    return {"fields": pa.array([encode(_json_fields(some)) for some in _lists(fields)], pa.binary()).cast(pa.string())}


def _json_fields(items: list[bytes]) -> dict[str, object]:
    try:
        return dict(
            zip(
                [str(name, "utf-8") for name in items[0::2]],
                [str(value, "utf-8") for value in items[1::2]],
                strict=True,
            )
        )
    except UnicodeDecodeError:
        return {
            str(name, "utf-8", "replace"): _text(value) for name, value in zip(items[0::2], items[1::2], strict=True)
        }


def _text(value: bytes) -> object:
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        return {"base64": value}  # msgspec encodes bytes as base64


def typed_columns(fields: Fields, *, schema: pa.Schema, names: Sequence[str], failfast: bool) -> dict[str, pa.Array]:
    """One column per name in `names`, decoded to its type in `schema`; of a repeated name the last value counts.

    A missing field is null, and so is an empty one unless its column is text. A value that does not fit the type is
    null too, or with `failfast` raises DecodeError in BatchMaker.
    """
    wire_names = [name.encode() for name in names]
    if isinstance(fields, EntrySegment):
        raw_columns = [fields.last_values(name) for name in wire_names]
    else:
        raw_columns = [pa.array(raw, pa.binary()) for raw in _raw_columns(fields, wire_names)]
    columns = dict(zip(names, raw_columns, strict=True))
    if absent := [name for name, raw in columns.items() if raw.null_count == len(fields)]:
        warn_of_other_case(fields, absent)
    return {
        name: decode(raw, schema.field(name).type, failfast=name if failfast else None) for name, raw in columns.items()
    }


def _lists(fields: Fields) -> list[list[bytes]]:
    return fields.fields if isinstance(fields, EntrySegment) else fields


def _raw_columns(fields: list[list[bytes]], names: Sequence[bytes]) -> list[Sequence[bytes | None]]:
    width = len(fields[0]) if fields else 0
    flat = list(chain.from_iterable(fields))
    layout = flat[:width:2]
    if set(map(len, fields)) == {width} and flat[0::2] == layout * len(fields):
        # The usual case, four times as fast: every entry has the same names in the same order.
        places = {name: 2 * i + 1 for i, name in enumerate(layout)}
        nothing: list[bytes | None] = [None] * len(fields)
        return [flat[places[name] :: width] if name in places else nothing for name in names]
    maps = [dict(zip(some[0::2], some[1::2], strict=True)) for some in fields]
    return [[one.get(name) for one in maps] for name in names]


def decode(raw: pa.Array, wanted: pa.DataType, *, failfast: str | None) -> pa.Array:
    """Decode binary values to the type `wanted`; a value that does not fit is null, or an error naming `failfast`."""
    if pa.types.is_binary(wanted):
        return raw
    if not pa.types.is_string(wanted):
        raw = pc.if_else(pc.equal(pc.binary_length(raw), 0), pa.scalar(None, pa.binary()), raw)
    convert = _to_timestamp if pa.types.is_timestamp(wanted) else partial(_to, wanted=wanted)
    decoded = pa.chunked_array(_convert_valid(raw, convert), type=wanted).combine_chunks()
    if failfast is not None and decoded.null_count > raw.null_count:
        row = pc.index(pc.and_(pc.is_null(decoded), pc.is_valid(raw)), True).as_py()
        raise _InvalidValue(
            row, f"the field {failfast!r} holds {raw[row].as_py()[:100]!r}, which is not a value of type {wanted}"
        )
    return decoded


def _to(raw: pa.Array, *, wanted: pa.DataType) -> pa.Array:
    return raw.cast(pa.string()).cast(wanted)


def _to_timestamp(raw: pa.Array) -> pa.Array:
    """ISO 8601; without a zone it is UTC. Arrow parses either kind, but not both in one go."""
    text = raw.cast(pa.string())
    zoned = pc.match_substring_regex(text, r"(Z|[+-]\d\d:?\d\d)$")
    nothing = pa.scalar(None, pa.string())
    with_zone = pc.if_else(zoned, text, nothing).cast(TIMESTAMP)
    without = pc.if_else(zoned, nothing, text).cast(pa.timestamp("us")).cast(TIMESTAMP)
    return pc.coalesce(with_zone, without)


def _convert_valid(raw: pa.Array, convert: Callable[[pa.Array], pa.Array]) -> list[pa.Array]:
    """Convert valid values, and others to null: halves a part with an invalid value until it has that value only."""
    try:
        return [convert(raw)]
    except pa.ArrowInvalid:
        if len(raw) == 1:
            return [convert(pa.nulls(1, raw.type))]
        half = len(raw) // 2
        return _convert_valid(raw[:half], convert) + _convert_valid(raw[half:], convert)
