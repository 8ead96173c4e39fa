"""Writers of `target=hash` and `target=json`: tasks write each row unless its key holds one with a greater guard."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import IntegralType, StringType, StructField, StructType

from millstream.errors import ConfigError, OutputError
from millstream.spark.sink.options import SinkOptions, UpsertLayout
from millstream.spark.versions import DataSourceStreamArrowWriter

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.spark.sink.upserts import UpsertRow as Row

_GUARD_PATTERN = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")
_BATCH_PATIENCE_MS = 60_000.0


@dataclass(frozen=True)
class Upserted(WriterCommitMessage):
    """Number of rows of a task that were older than the stored ones."""

    older_rows: int


class _UpsertWriter:
    """Checks and writes of both writers."""

    patience_ms: float | None

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        from millstream.spark.sink.row_encoder import check_type, checked_column

        assert options.upsert is not None
        assert options.target != "stream"
        self._url = options.url
        self._kind: Literal["hash", "json"] = options.target
        self._upsert: UpsertLayout = options.upsert
        for option, name in (("keyColumn", self._upsert.key_column), ("guardColumn", self._upsert.guard_column)):
            _check_key_type(option, checked_column(schema, option, name))
        self._names = [name for name in schema.names if name != self._upsert.key_column]
        for name in self._names:
            check_type(name, schema[name].dataType)

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> Upserted:
        """Write the rows of one task."""
        from millstream.redis_client.client import shared_client
        from millstream.spark.sink.upserts import upsert

        client, older = shared_client(self._url), 0
        for batch in iterator:
            rows = self._rows(batch)
            older += upsert(client, self._kind, self._upsert.guard_field, rows, patience_ms=self.patience_ms)
        return Upserted(older)

    def commit(self, messages: Sequence[WriterCommitMessage | None], *_: int) -> None:
        """Do nothing: the tasks have written all rows."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], *_: int) -> None:
        """Do nothing: the next attempt writes the same rows, or newer ones, again."""

    def _rows(self, batch: "pa.RecordBatch") -> "Iterator[Row]":
        from millstream.spark.sink.row_encoder import column_texts, json_text

        names, prefix = self._names, self._upsert.key_prefix
        keys = self._identities(batch, self._upsert.key_column)
        guards = self._identities(batch, self._upsert.guard_column)
        if self._kind == "json":
            objects = batch.select(names).to_pylist(maps_as_pydicts="strict")
            for key, guard, row in zip(keys, guards, objects, strict=True):
                yield prefix + key, guard, (json_text({self._upsert.guard_field: guard, **row}),)
            return
        columns: list[list[Any]] = [column_texts(batch.column(name), name, binary=bytes) for name in names]
        for key, guard, *values in zip(keys, guards, *columns, strict=True):
            nulls = [name for name, value in zip(names, values, strict=True) if value is None]
            items = [item for pair in zip(names, values, strict=True) if pair[1] is not None for item in pair]
            yield prefix + key, guard, (len(nulls), *nulls, *items)

    def _identities(self, batch: "pa.RecordBatch", name: str) -> list[str]:
        from millstream.spark.sink.row_encoder import column_texts

        values: list[str | None] = column_texts(batch.column(name), name)
        for value in values:
            if value is None or not value:
                raise OutputError(f"the column {name} is null or empty in a row: fill it, or filter out such rows")
            if name == self._upsert.guard_column and not _GUARD_PATTERN.fullmatch(value):
                raise OutputError(
                    f"the column {name} holds {value[:40]!r}: a guard must be a whole number of 0 or more, "
                    "or an entry id"
                )
        return [value for value in values if value is not None]


class UpsertBatchWriter(_UpsertWriter, DataSourceArrowWriter):
    """The writer of `df.write`: waits a minute for an unavailable Redis."""

    patience_ms = _BATCH_PATIENCE_MS

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise ConfigError(f"target={options.target} replaces single keys, not all: use mode append")
        super().__init__(options, schema)


class UpsertStreamWriter(_UpsertWriter, DataSourceStreamArrowWriter):
    """The writer of `df.writeStream`: waits for an unavailable Redis for ever."""

    patience_ms = None


def _check_key_type(option: str, field: StructField) -> None:
    if not isinstance(field.dataType, (StringType, IntegralType)):
        raise ConfigError(
            f"option {option}: the column {field.name!r} is of type {field.dataType.simpleString()}; it must be text "
            "or a whole number, such as unix_micros(t) of a timestamp"
        )
