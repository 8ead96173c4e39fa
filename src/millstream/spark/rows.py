"""Chooses how entries become rows: by the options, and by the schema that Spark asks for."""

from functools import partial

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from millstream.spark.arrow import BatchMaker, json_columns, map_columns, packed_columns, pair_columns, typed_columns
from millstream.spark.options import Columns
from millstream.spark.schema import is_default, shown_columns


def batch_maker(columns: Columns, schema: StructType) -> BatchMaker:
    """Return what makes record batches of exactly `schema`."""
    arrow = to_arrow_schema(schema, timezone="UTC")
    meta = shown_columns(columns, schema)
    if not is_default(columns, schema):
        names = [name for name in schema.names if name not in meta.values()]
        return BatchMaker(arrow, meta, partial(typed_columns, schema=arrow, names=names, failfast=columns.failfast))
    if columns.packed:
        key = columns.key_field.encode() if columns.key_field is not None else None
        return BatchMaker(arrow, meta, partial(packed_columns, key_field=key))
    if columns.fields_as == "json":
        return BatchMaker(arrow, meta, json_columns)
    return BatchMaker(arrow, meta, partial(map_columns if columns.fields_as == "map" else pair_columns, schema=arrow))
