"""Schema: the columns of the source, as Spark types."""

import difflib
from datetime import date, datetime
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millstream.errors import ConfigError
from millstream.handlers.decoding import wire_types
from millstream.spark.source.options import Columns, FieldsAs

ENTRY_COLUMNS: dict[str, DataType] = {
    "stream": StringType(),
    "id": StringType(),
    "id_ms": LongType(),
    "id_seq": LongType(),
    "timestamp": TimestampType(),
}
"""Columns about the entry itself. A user's schema names them with a leading underscore."""

_PAIR = StructType([StructField("name", BinaryType(), False), StructField("value", BinaryType(), False)])
_FIELDS: dict[FieldsAs, DataType] = {
    "array": ArrayType(_PAIR, containsNull=False),
    "map": MapType(StringType(), BinaryType(), False),
    "json": StringType(),
}
_BLOCK = StructType(
    [
        StructField("bucket", IntegerType(), False),
        StructField("stream", StringType(), False),
        StructField("first_id", BinaryType(), False),
        StructField("messages", BinaryType(), False),
    ]
)
"""As in `key_blocks.py`."""
_FIELD_TYPES = (
    StringType,
    BinaryType,
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    DateType,
    TimestampType,
)
_OF_MODELS: dict[object, DataType] = {
    bytes: BinaryType(),
    bool: BooleanType(),
    int: LongType(),
    float: DoubleType(),
    date: DateType(),
    datetime: TimestampType(),
}
_LOOKALIKE = 0.88  # finds `_timestmp` and `_idms`, but not `_state`, `_index`, `_time`, `_ids` and `_uid`
_WITH_MODELS = ("stream", "id", "timestamp")


def schema_of(wanted: Any) -> StructType | str:
    """The schema of `wanted`: text and a StructType are schemas; a model has its fields, and `_stream`, `_id` and
    `_timestamp` of the entry.

    A field without a Spark type of its own, such as a decimal, a UUID, an enum or a nested model, is the published
    text. Raises ConfigError for anything else.
    """
    if isinstance(wanted, str | StructType):
        return wanted
    fields = [StructField(name, _OF_MODELS.get(kind, StringType())) for name, kind in wire_types(wanted).items()]
    return StructType([*fields, *(StructField(f"_{name}", ENTRY_COLUMNS[name]) for name in _WITH_MODELS)])


def default_schema(columns: Columns) -> StructType:
    """The schema of a source whose user sets none."""
    if columns.packed:
        return _BLOCK
    entry = (StructField(name, kind, name == "timestamp") for name, kind in ENTRY_COLUMNS.items())
    return StructType([*entry, StructField("fields", _FIELDS[columns.fields_as], False)])


def is_default(columns: Columns, schema: StructType) -> bool:
    """True if `schema` is the default one, not typed columns of a user. Ignores nullability, which Spark may change."""
    return schema.simpleString() == default_schema(columns).simpleString()


def meta_columns(schema: StructType) -> dict[str, str]:
    """Map names of ENTRY_COLUMNS to the columns that show them in a user's schema."""
    return {name: f"_{name}" for name in ENTRY_COLUMNS if f"_{name}" in schema.names}


def _refuse_lookalikes(schema: StructType) -> None:
    """Raise ConfigError for a column that is read from a field but resembles a column about the entry.

    Entries rarely have such a field, so the column would be null without a warning.
    """
    ours = [f"_{name}" for name in ENTRY_COLUMNS]
    for name in schema.names:
        found = difflib.get_close_matches(name.lower(), ours, n=1, cutoff=_LOOKALIKE)
        if name.startswith("_") and name not in ours and found:
            raise ConfigError(
                f"the column {name} looks like one about the entry: did you mean {found[0]}? If a field is called "
                f"{name}, read it without .schema(...), from the column fields"
            )


def shown_columns(columns: Columns, schema: StructType) -> dict[str, str]:
    """Map names of ENTRY_COLUMNS to the columns that show them."""
    return (
        {name: name for name in ENTRY_COLUMNS if name in schema.names}
        if is_default(columns, schema)
        else meta_columns(schema)
    )


def check_schema(columns: Columns, schema: StructType) -> None:
    """Raise ConfigError if `schema` does not fit `columns`, or is probably a mistake."""
    if is_default(columns, schema):
        if columns.failfast:
            raise ConfigError("mode=failfast is for typed columns: set them by .schema(...), or remove mode")
        return
    if columns.packed:
        raise ConfigError("layout=packed has columns of its own: remove .schema(...)")
    if columns.fields_as != "array":
        raise ConfigError(f"fieldsAs={columns.fields_as} and .schema(...) both set the columns of fields: remove one")
    _refuse_lookalikes(schema)
    for name in meta_columns(schema).values():
        wanted = ENTRY_COLUMNS[name[1:]]
        if schema[name].dataType != wanted:
            raise ConfigError(f"the column {name} must be of type {wanted.simpleString()} in the schema")
    for field in schema.fields:
        if not isinstance(field.dataType, _FIELD_TYPES):
            raise ConfigError(
                f"the column {field.name} cannot be of type {field.dataType.simpleString()}: fields are decoded to "
                f"{', '.join(kind.typeName() for kind in _FIELD_TYPES)}; read others as a string, and cast it"
            )
        if not field.nullable and field.name not in meta_columns(schema).values():
            raise ConfigError(f"the column {field.name} must be nullable: an entry need not have that field")
