"""Row encoder: turns Arrow record batches into rows for streams: the id, then names and values.

Every value has the text that the source, and a handler's model, parses (`millstream.handlers.decoding`): a null is a
missing field, nested values are JSON.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from millstream.errors import ConfigError, OutputError
from millstream.handlers.encoding import encode_output, raw
from millstream.producer.session import MAX_FIELDS
from millstream.redis_client.key_names import check_stream
from millstream.spark.sink import Row
from millstream.spark.sink.options import Layout
from millstream.spark.sink.staging import Part

_PLAIN_TYPES = (
    StringType,
    BinaryType,
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    DecimalType,
    DateType,
    TimestampType,
    TimestampNTZType,
    NullType,
)
_NAME_TYPES = (StringType, BinaryType)
_CASTABLE = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_date)
_UTC = pa.timestamp("us", tz="UTC")


def check_columns(layout: Layout, schema: StructType) -> None:
    """Raise ConfigError, naming the column, if a frame of `schema` cannot be written as `layout` says."""
    if layout.stream_column is not None and layout.stream_column not in schema.names:
        raise ConfigError(
            f"there is no column {layout.stream_column!r} to name each row's stream: set one stream by "
            'option("stream", "a"), or another column by option("streamColumn", "c")'
        )
    for option, name in (("streamColumn", layout.stream_column), ("idColumn", layout.id_column)):
        if name is not None:
            checked_column(schema, option, name, StringType)
    if layout.fields_column is not None:
        check_fields_column(checked_column(schema, "fieldsColumn", layout.fields_column))
        return
    fields = field_columns(layout, schema)
    if not fields:
        raise ConfigError("no column is left for the fields of entries: select at least one more column")
    if len(fields) > MAX_FIELDS:
        raise ConfigError(f"an entry has at most {MAX_FIELDS:,} fields: write the rows with fieldsAs=json")
    for field in fields:
        check_type(field.name, field.dataType)


def checked_column(schema: StructType, option: str, name: str, data_type: type[DataType] | None = None) -> StructField:
    """The column that an option names. Raises ConfigError if it does not exist, or is of another type."""
    if name not in schema.names:
        raise ConfigError(f"option {option}: there is no column {name!r} among {', '.join(schema.names)}")
    if data_type is not None and not isinstance(schema[name].dataType, data_type):
        found = schema[name].dataType.simpleString()
        raise ConfigError(f"option {option}: the column {name!r} is of type {found}; cast it to {data_type.typeName()}")
    return schema[name]


def field_columns(layout: Layout, schema: StructType) -> list[StructField]:
    """The columns that become fields: all but those of stream and id."""
    return [field for field in schema.fields if field.name not in (layout.stream_column, layout.id_column)]


def check_type(name: str, data_type: DataType) -> None:
    """Raise ConfigError if values of this type cannot be written as text."""
    if isinstance(data_type, StructType):
        for field in data_type.fields:
            check_type(f"{name}.{field.name}", field.dataType)
    elif isinstance(data_type, ArrayType):
        check_type(f"{name}[]", data_type.elementType)
    elif isinstance(data_type, MapType):
        if not isinstance(data_type.keyType, StringType):
            raise ConfigError(f"the column {name} is a map whose keys are not strings, which JSON needs: cast them")
        check_type(f"{name}[]", data_type.valueType)
    elif not isinstance(data_type, _PLAIN_TYPES):
        raise ConfigError(
            f"the column {name} is of type {data_type.simpleString()}, which cannot be written: cast it to string"
        )


def check_fields_column(field: StructField) -> None:
    """Raise ConfigError if a column cannot hold the names and values of entries."""
    kind = field.dataType
    pair = kind.elementType.fields if isinstance(kind, ArrayType) and isinstance(kind.elementType, StructType) else []
    types = [kind.keyType, kind.valueType] if isinstance(kind, MapType) else [part.dataType for part in pair]
    if len(types) != 2 or not isinstance(types[0], _NAME_TYPES):
        raise ConfigError(
            f"the column {field.name} is of type {kind.simpleString()}: fieldsAs=fields needs a map from text, or "
            "an array of (name, value) like that of the source"
        )
    check_type(f"{field.name}[]", types[1])


class RowMaker:
    """Makes rows from record batches of `schema`. Raises OutputError, naming the column, for values it cannot write."""

    def __init__(self, layout: Layout, schema: StructType) -> None:
        self._layout = layout
        self._names = [field.name for field in field_columns(layout, schema)]

    def __call__(self, batch: pa.RecordBatch) -> Iterator[tuple[str, list[Row]]]:
        """Yield the rows of each stream, in their order."""
        layout = self._layout
        ids = repeat("*") if layout.id_column is None else _non_null_texts(batch, layout.id_column)
        if layout.fields_column is not None:
            rows = _rows_of_fields(batch.column(layout.fields_column), layout.fields_column, ids)
        elif layout.fields_as == "json":
            objects = batch.select(self._names).to_pylist(maps_as_pydicts="strict")
            rows = [(i, layout.json_field, json_text(one)) for i, one in zip(ids, objects, strict=False)]
        else:
            rows = self._rows_of_columns(batch, ids)
        if layout.stream is not None:
            yield layout.stream, rows
            return
        by_stream: dict[str, list[Row]] = {}
        for stream, row in zip(_non_null_texts(batch, layout.stream_column or ""), rows, strict=True):
            by_stream.setdefault(stream, []).append(row)
        for stream in by_stream:
            if not stream:
                raise OutputError(f"the column {layout.stream_column} is empty in a row: every row needs a stream")
            check_stream(stream)
        yield from by_stream.items()

    def _rows_of_columns(self, batch: pa.RecordBatch, ids: Any) -> list[Row]:
        arrays = [batch.column(name) for name in self._names]
        pairs = chain.from_iterable(
            (repeat(name), column_texts(array, name)) for name, array in zip(self._names, arrays, strict=True)
        )
        rows: list[Row] = list(zip(ids, *pairs, strict=False))
        if any(array.null_count for array in arrays):
            rows = [_without_nulls(row) if None in row else row for row in rows]
        return rows


def _without_nulls(row: Sequence[Part | None]) -> Row:
    parts: list[Part] = [row[0] or "*"]
    for at in range(1, len(row), 2):
        name, value = row[at], row[at + 1]
        if name is not None and value is not None:
            parts += (name, value)
    if len(parts) == 1:
        raise OutputError("every column of a row is null: an entry needs a field; fill one, or filter out such rows")
    return parts


def _rows_of_fields(array: pa.Array, name: str, ids: Any) -> list[Row]:
    if array.null_count:
        raise OutputError(f"the column {name} is null in a row: an entry needs fields; filter out such rows")
    is_map = pa.types.is_map(array.type)
    names = column_texts(array.keys if is_map else array.values.field(0), name)
    values = column_texts(array.items if is_map else array.values.field(1), name)
    flat: list[Any] = [None] * (2 * len(names))
    flat[0::2], flat[1::2] = names, values
    offsets = array.offsets.to_numpy()
    rows: list[Row] = []
    for entry_id, start, end in zip(ids, offsets, offsets[1:], strict=False):
        row = (entry_id, *flat[2 * start : 2 * end])
        if not 0 < end - start <= MAX_FIELDS:
            raise OutputError(
                f"the column {name} has {end - start:,} fields in a row: an entry has 1 to {MAX_FIELDS:,}"
            )
        rows.append(_without_nulls(row) if None in row else row)
    return rows


def _non_null_texts(batch: pa.RecordBatch, name: str) -> list[str]:
    array = batch.column(name)
    if array.null_count:
        raise OutputError(f"the column {name} is null in a row: fill it, or filter out such rows")
    values: list[str] = array.to_pylist()
    return values


def column_texts(array: pa.Array, name: str, *, binary: Callable[[bytes], Any] = raw) -> list[Any]:
    """The values of a column as text, None where it is null; bytes are converted by `binary`.

    Raises OutputError for a value that has no text.
    """
    data_type = array.type
    if pa.types.is_string(data_type):
        return list(array.to_pylist())
    if pa.types.is_binary(data_type):
        return [None if value is None else binary(value) for value in array.to_pylist()]
    if any(fits(data_type) for fits in _CASTABLE):
        return list(array.cast(pa.string()).to_pylist())
    if pa.types.is_timestamp(data_type) and data_type.tz is not None:
        array = array.cast(_UTC)
    elif pa.types.is_floating(data_type) and not np.isfinite(array.drop_null().to_numpy()).all():
        raise OutputError(
            f"the column {name} holds NaN or an infinity, which is not a number: write null, or filter it out"
        )
    return [None if value is None else _text(value, name) for value in array.to_pylist(maps_as_pydicts="strict")]


def _text(value: object, name: str) -> str:
    return encode_output({name: value})[1].decode()


def json_text(value: object) -> str:
    """A row, or a value, as JSON. Raises OutputError for NaN and infinities."""
    return encode_output({"json": value})[1].decode()
