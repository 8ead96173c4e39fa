"""Row layout: chooses the row decoder by the options, and by the schema that Spark asks for."""

from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa
from pyspark.sql.types import StructType

from millstream.redis_client.key_names import REDRIVE_FIELD, to_wire
from millstream.spark.source.block_maker import BlockMaker
from millstream.spark.source.entry_runs import Run, split
from millstream.spark.source.entry_segment import Entries, RawEntries
from millstream.spark.source.options import Columns
from millstream.spark.source.row_decoder import BatchMaker, json_columns, map_columns, pair_columns, typed_columns
from millstream.spark.source.schema import is_default, shown_columns
from millstream.spark.versions import arrow_schema

MakeBatch = Callable[[Sequence[Run]], pa.RecordBatch]


def batch_maker(columns: Columns, schema: StructType) -> MakeBatch:
    """Return the function that makes record batches of exactly `schema`."""
    make = _maker(columns, schema)
    return (lambda runs: make(_without_redriven(runs))) if columns.skip_redriven else make


def takes_segments(columns: Columns) -> bool:
    """True if the row decoder needs no Python object for each name and value."""
    return columns.fields_as == "array"


def _without_redriven(runs: Sequence[Run]) -> list[Run]:
    """Skip entries that are for one handler alone: dead letters that were redriven, and messages of timers."""
    found: list[Run] = []
    for run in runs:
        if isinstance(run[1], RawEntries) and not run[1].begins_with(REDRIVE_FIELD):
            found.append(run)
        else:
            found += [(stream, _without(REDRIVE_FIELD, entries)) for stream, entries in split(run)]
    return found


def _without(first_name: bytes, entries: Entries) -> Entries:
    if isinstance(entries, RawEntries) and not entries.begins_with(first_name):
        return entries
    return [entry for entry in entries if entry[1][0] != first_name]


def _maker(columns: Columns, schema: StructType) -> MakeBatch:
    arrow = arrow_schema(schema)
    meta = shown_columns(columns, schema)
    if not is_default(columns, schema):
        names = [name for name in schema.names if name not in meta.values()]
        return BatchMaker(arrow, meta, partial(typed_columns, schema=arrow, names=names, failfast=columns.failfast))
    if columns.packed:
        key = to_wire(columns.key_field) if columns.key_field is not None else None
        return BlockMaker(key, columns.buckets)
    if columns.fields_as == "json":
        return BatchMaker(arrow, meta, json_columns)
    return BatchMaker(arrow, meta, partial(map_columns if columns.fields_as == "map" else pair_columns, schema=arrow))
