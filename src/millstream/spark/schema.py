"""The columns of the source, as Spark types."""

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
from millstream.spark.options import Columns, FieldsAs

META: dict[str, DataType] = {
    "stream": StringType(),
    "id": StringType(),
    "id_ms": LongType(),
    "id_seq": LongType(),
    "timestamp": TimestampType(),
}
"""What is known about every entry. A user's schema names these with an underscore in front."""

_PAIR = StructType([StructField("name", BinaryType(), False), StructField("value", BinaryType(), False)])
_FIELDS: dict[FieldsAs, DataType] = {
    "array": ArrayType(_PAIR, containsNull=False),
    "map": MapType(StringType(), BinaryType(), False),
    "json": StringType(),
}
_FIELD_TYPES = (
    StringType, BinaryType, BooleanType, ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType, DateType,
    TimestampType,
)  # fmt: skip


def default_schema(columns: Columns) -> StructType:
    """The schema of a source whose user gave none."""
    if columns.packed:
        names: tuple[str, ...] = ("stream", "id_ms", "id_seq")
        rest = [StructField("key", BinaryType()), StructField("fields", BinaryType(), False)]
    else:
        names = tuple(META)
        rest = [StructField("fields", _FIELDS[columns.fields_as], False)]
    return StructType([*(StructField(name, META[name], name == "timestamp") for name in names), *rest])


def is_default(columns: Columns, schema: StructType) -> bool:
    """True if `schema` is not a schema of typed columns from a user. Spark may have changed what is nullable."""
    return schema.simpleString() == default_schema(columns).simpleString()


def meta_columns(schema: StructType) -> dict[str, str]:
    """Of a user's schema: which column shows which entry of META."""
    return {name: f"_{name}" for name in META if f"_{name}" in schema.names}


def shown_columns(columns: Columns, schema: StructType) -> dict[str, str]:
    """Which column shows which entry of META: {entry: column}."""
    return (
        {name: name for name in META if name in schema.names} if is_default(columns, schema) else meta_columns(schema)
    )


def check_schema(columns: Columns, schema: StructType) -> None:
    """Raise ConfigError if `schema` is a user's and cannot be served."""
    if is_default(columns, schema):
        return
    if columns.packed:
        raise ConfigError("layout=packed has columns of its own: leave .schema(...) out")
    for name in meta_columns(schema).values():
        wanted = META[name[1:]]
        if schema[name].dataType != wanted:
            raise ConfigError(f"the column {name} must be of type {wanted.simpleString()} in the schema")
    for field in schema.fields:
        if not isinstance(field.dataType, _FIELD_TYPES):
            raise ConfigError(
                f"the column {field.name} cannot be of type {field.dataType.simpleString()}: fields are decoded to "
                f"{', '.join(kind.typeName() for kind in _FIELD_TYPES)}"
            )
        if not field.nullable and field.name not in meta_columns(schema).values():
            raise ConfigError(f"the column {field.name} must be nullable: an entry need not have that field")
