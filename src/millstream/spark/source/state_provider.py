"""RedisStateSource: the `redis-state` data source, which reads the states of a handler as a table, and its reader.

Modules that need Redis or Arrow are imported where they are used, so the lookup of the source stays cheap.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from millstream.spark.error_boundary import clean_traceback, clean_tracebacks
from millstream.spark.source.state_options import StateOptions, parse_state_options

if TYPE_CHECKING:
    import pyarrow as pa

_PATIENCE_MS = 60_000.0


class RedisStateSource(DataSource):
    """The states of a handler as a Spark data source, `format("redis-state")`; `docs/spark-state.md` describes it.

    Raises ConfigError for wrong options, at `load()`.
    """

    @clean_tracebacks
    def __init__(self, options: Any) -> None:
        from millstream.redis_client.deployments import parse_route

        super().__init__(options)
        self._parsed = parse_state_options(self.options)
        parse_route(self._parsed.url, timeout_ms=0)  # checks the URL, connects to nothing

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "redis-state"

    def schema(self) -> StructType:
        """The columns; Spark asks only if the user sets no schema."""
        return self._parsed.schema

    @clean_tracebacks
    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of `spark.read`."""
        self._parsed.check_schema(schema)
        return RedisStateReader(self._parsed, schema)


class RedisStateReader(DataSourceReader):
    """Reads all states of a handler once; each task reads those of some streams."""

    def __init__(self, options: StateOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    @clean_tracebacks
    def partitions(self) -> list[InputPartition]:
        """Plan one partition a task, of streams with about as many states. Raises MillstreamError."""
        from millstream.admin.state_scan import state_hashes
        from millstream.redis_client.client import shared_client
        from millstream.spark.source.state_partitions import assign_hashes

        options, client = self._options, shared_client(self._options.url)
        hashes = client.retry_while_unavailable(
            lambda: state_hashes(client, options.app, options.handler, options.streams),
            what="the redis-state source",
            limit_ms=_PATIENCE_MS,
        )
        tasks = assign_hashes(hashes, min_partitions=options.min_partitions, cores=os.cpu_count() or 1)
        return [InputPartition(streams) for streams in tasks]

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """Yield the rows of one partition."""
        from millstream.admin.state_scan import scan_states
        from millstream.redis_client.client import shared_client
        from millstream.redis_client.key_names import HandlerKeys
        from millstream.spark.source.reader_base import planned
        from millstream.spark.source.state_partitions import record_batch

        options = self._options
        places = [HandlerKeys(options.app, options.handler, stream) for stream in planned(partition)]
        pages = scan_states(shared_client(options.url), places)
        return clean_traceback(record_batch(page, options, self._schema) for page in pages)
