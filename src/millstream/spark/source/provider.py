"""RedisStreamsSource: the `redis-streams` data source that Spark calls, and its readers. Writers are in `spark/sink/`.

Spark creates `RedisStreamsSource` in a planning process. A stream reader plans in a process of its own that lives as
long as the query; `read` runs in executors, in Python workers that Spark reuses from batch to batch. Modules that need
Redis or Arrow are imported there only, so the lookup of the source stays cheap.
"""

import time
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from millstream.errors import ConfigError
from millstream.spark.error_boundary import clean_tracebacks, end_process_if_disconnected
from millstream.spark.option_parser import OptionParser
from millstream.spark.sink.options import NAMES as SINK_NAMES
from millstream.spark.sink.options import is_for_writing, parse_sink
from millstream.spark.source.batch_limits import Advance, BatchLimits, NoAdvance
from millstream.spark.source.offset_ranges import to_columns
from millstream.spark.source.offsets import Offsets, Positions, dump, load
from millstream.spark.source.options import NAMES, SourceOptions, parse
from millstream.spark.source.reader_base import DELAY_POLL_S, ReaderBase, idle_wait
from millstream.spark.source.schema import check_schema, default_schema, shown_columns
from millstream.spark.versions import (
    HAS_FILTERS,
    HAS_LIMITS,
    SPARK_VERSION,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

    from millstream.spark.source.filters import ReadFilter
    from millstream.spark.source.group_reader import RedisGroupReader
    from millstream.spark.source.progress_group import ProgressGroup
    from millstream.spark.source.read_range import ReadRange

_BATCH_PATIENCE_MS = 60_000.0


class RedisStreamsSource(DataSource):
    """Redis Streams as a Spark data source and sink, `format("redis-streams")`.

    `docs/spark-source.md` and `docs/spark-sink.md` describe the options. Raises ConfigError for wrong options: at
    `load()`, or when writing begins.
    """

    @clean_tracebacks
    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._parsed = self._parse() if self._is_for_reading() else None

    def _is_for_reading(self) -> bool:
        """True if the options are for reading: Spark does not say so yet. The writer checks options for writing.

        Raises ConfigError for an option that neither the source nor the sink has.
        """
        names = {name.lower() for name in self.options}
        if any(name.startswith("subscribe") for name in names):
            return True
        if is_for_writing(self.options, NAMES):
            return False
        known = tuple(dict.fromkeys((*NAMES, *SINK_NAMES)))
        OptionParser.read(self.options, known, "reading and writing", len(known))
        return bool(names - {name.lower() for name in SINK_NAMES})

    def _parse(self) -> SourceOptions:
        from millstream.redis_client.deployments import parse_route

        names = {name.lower() for name in self.options}
        if is_for_writing(self.options, NAMES) and not names & {"subscribe", "subscribepattern"}:
            raise ConfigError('these options are for writing: to read, name streams by option("subscribe", "a,b")')
        options = parse(self.options)
        _check_version(options)
        parse_route(options.url, timeout_ms=0)  # checks the URL, connects to nothing
        return options

    @property
    def _options(self) -> SourceOptions:
        return self._parsed or self._parse()

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "redis-streams"

    @clean_tracebacks
    def schema(self) -> StructType:
        """The columns; Spark asks only if the user sets no schema."""
        columns = self._options.columns
        schema = default_schema(columns)
        check_schema(columns, schema)
        return schema

    @clean_tracebacks
    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of `spark.read`."""
        # Spark refuses a reader with `pushFilters` unless its setting for filter pushdown is on.
        return (FilteringReader if self._options.push_down else RedisBatchReader)(self._options, schema)

    @clean_tracebacks
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """The reader of `spark.readStream`."""
        reader = self._limited_reader(schema)
        if HAS_LIMITS:
            return reader
        from millstream.spark.source.tracking_reader import TrackingReader

        return TrackingReader(reader, self._options.available_now)

    def _limited_reader(self, schema: StructType) -> "RedisStreamReader | RedisGroupReader":
        if self._options.sharing is None:
            return RedisStreamReader(self._options, schema)
        from millstream.spark.source.group_reader import RedisGroupReader

        return RedisGroupReader(self._options, schema)

    @clean_tracebacks
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """The writer of `df.write`."""
        from millstream.spark.sink.upsert_writer import UpsertBatchWriter
        from millstream.spark.sink.writer import RedisBatchWriter

        options = parse_sink(self.options)
        kind = RedisBatchWriter if options.target == "stream" else UpsertBatchWriter
        return kind(options, schema, overwrite)

    @clean_tracebacks
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """The writer of `df.writeStream`."""
        from millstream.spark.sink.upsert_writer import UpsertStreamWriter
        from millstream.spark.sink.writer import RedisStreamWriter

        options = parse_sink(self.options)
        options.check_streaming()
        if options.target != "stream":
            return UpsertStreamWriter(options, schema)
        return RedisStreamWriter(options, schema, overwrite)


def _check_version(options: SourceOptions) -> None:
    """Raise ConfigError for an option that this version of Spark cannot serve, or makes needless."""
    if options.push_down and not HAS_FILTERS:
        raise ConfigError(
            f"option pushDownPredicate needs Spark 4.1 or later, this is {SPARK_VERSION}: limit what is read by "
            "startingOffsets, endingOffsets and the streams of subscribe"
        )
    if options.limits.target_ms is not None and options.available_now is None and not HAS_LIMITS:
        raise ConfigError(
            f"option targetBatchDuration: Spark {SPARK_VERSION} ends Trigger.AvailableNow and Trigger.Once after the first "
            "batch, which is small then: set option availableNow, to false for a query that goes on"
        )
    if options.available_now is not None and HAS_LIMITS:
        raise ConfigError("option availableNow is for Spark 4.0 and 4.1: set the trigger, .trigger(availableNow=True)")


class RedisBatchReader(ReaderBase, DataSourceReader):
    """Reads the subscribed streams once, between offsets that are fixed when the query is planned."""

    @cached_property
    def _read_range(self) -> "ReadRange":
        from millstream.spark.source.read_range import ReadRange

        return ReadRange()

    @clean_tracebacks
    def partitions(self) -> list[InputPartition]:
        """Plan one partition a task. Raises ConfigError, DataLoss, or RedisError after a minute without Redis."""
        self._options.check_batch()
        check_schema(self._options.columns, self._schema)
        tasks = self._with_retry(lambda: self._planner.plan_batch_read(self._read_range), limit_ms=_BATCH_PATIENCE_MS)
        return [InputPartition(to_columns(ranges)) for ranges in tasks]

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """Yield the rows of one partition."""
        return self._read(partition, limit_ms=_BATCH_PATIENCE_MS)


class FilteringReader(RedisBatchReader):
    """Reads once, and only entries that Spark's filters on stream, id and time let through."""

    @cached_property
    def _read_range(self) -> "ReadFilter":
        from millstream.spark.source.filters import ReadFilter

        shown = shown_columns(self._options.columns, self._schema)
        return ReadFilter({column: what for what, column in shown.items()})

    def pushFilters(self, filters: "list[Filter]") -> "Iterator[Filter]":  # noqa: N802
        """Push down the filters that the source supports; yield those that Spark has to apply to the rows."""
        for condition in filters:
            if not self._read_range.add(condition):
                yield condition


class RedisStreamReader(ReaderBase, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the subscribed streams in micro-batches; its whole state is in the offsets of Spark's checkpoint."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: Positions | None = None
        # Parsing the offsets of 100,000 streams takes a good part of a second; comparing with known ones is fast.
        self._recent_offsets: list[tuple[dict[str, Any], Offsets]] = []
        self._latest: tuple[int, dict[str, Any] | None] = (0, None)

    @cached_property
    def _progress_group(self) -> "ProgressGroup":
        from millstream.spark.source.progress_group import ProgressGroup

        return ProgressGroup(
            self._client, self._options.group or "", is_handler_group=self._options.handler is not None
        )

    @clean_tracebacks
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit of a batch. Spark's first call, so it raises ConfigError for options that only a batch read has."""
        self._options.check_streaming()
        check_schema(self._options.columns, self._schema)
        limits = self._options.limits
        if limits.max_per_trigger is not None:
            return ReadMaxRows(limits.max_per_trigger)
        return ReadAllAvailable() if limits.min_per_trigger is None else ReadMinRows(limits.min_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of the query at the newest entries of now."""
        self._target = self._with_retry(self._planner.latest_offsets)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """The starting offsets of a query without a checkpoint."""
        return self._initial_offsets

    @cached_property
    def _initial_offsets(self) -> dict[str, Any]:
        # Spark calls twice and uses the second result: "latest" must not move in between.
        return dump(self._with_retry(lambda: self._planner.starting_offsets("latest")).positions)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end offsets of the batch that begins at `start`; after a short wait `start` itself, if nothing is
        new.

        The sink has committed everything up to `start`, so this call moves the progress group there.
        """
        began = time.monotonic()
        start_offsets = self._parse_offsets(start)
        planned = self._with_retry(lambda: self._plan_next(start_offsets, limit))
        if isinstance(planned, Advance):
            end = dump(planned.end.positions)
            self._remember(end, planned.end)
            self._on_planned(planned.entries)
            return end
        if self._target is not None or not HAS_LIMITS:
            self._with_retry(self._progress_group.publish_rest)  # this may be the last call
        if planned.delay_ms:
            time.sleep(min(planned.delay_ms / 1000, DELAY_POLL_S))
        elif self._target is None:
            idle_wait(began)
        return start

    def _plan_next(self, start: Offsets, limit: ReadLimit) -> Advance[Offsets] | NoAdvance:
        self._progress_group.publish(start)
        limits = BatchLimits(
            max_entries=self._most_entries(limit.max_rows) if isinstance(limit, ReadMaxRows) else None,
            target=self._target,
            # Trigger.Once and Trigger.AvailableNow have no later batch, so a small one must not wait.
            may_delay=self._target is None and not isinstance(limit, ReadAllAvailable),
        )
        return self._planner.plan_next(start, limits)

    def _parse_offsets(self, raw: dict[str, Any]) -> Offsets:
        for known, offsets in self._recent_offsets:
            if known == raw:
                return offsets
        return self._remember(raw, load(raw))

    def _remember(self, raw: dict[str, Any], offsets: Offsets) -> Offsets:
        self._recent_offsets = [*self._recent_offsets[-1:], (raw, offsets)]
        return offsets

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The latest offsets as of the last `latestOffset` call, for Spark's progress reports."""
        version, newest = self._planner.cached_latest_offsets()
        if version != self._latest[0]:
            offsets = newest()
            known = next((raw for raw, recent in self._recent_offsets if recent == offsets), None)
            self._latest = (version, known or dump(offsets))
        return self._latest[1]

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Plan the tasks of one batch. After a restart Spark may call it first, for a batch that it planned before."""
        tasks = self._with_retry(
            lambda: self._planner.plan_tasks(self._parse_offsets(start).positions, self._parse_offsets(end).positions)
        )
        return [InputPartition(to_columns(ranges)) for ranges in tasks]

    def stop(self) -> None:
        """End the query: leave no seek behind that has begun."""
        if "_planner" in vars(self):
            self._planner.close()
        end_process_if_disconnected()

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """Yield the rows of one partition, waiting for Redis as long as it takes."""
        return self._read(partition, limit_ms=None)
