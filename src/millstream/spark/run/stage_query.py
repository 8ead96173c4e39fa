"""StageQuery: a stage's query, built by its function from streaming DataFrames and checked before it starts."""

import traceback
from collections.abc import Mapping
from typing import Any, ClassVar

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millstream.errors import ConfigError, PipelineFailed
from millstream.handlers.stage import Input, Stage
from millstream.model import ZERO_ID
from millstream.redis_client.key_names import stage_group
from millstream.spark.run.early_checks import text_of_option
from millstream.spark.run.failures import failure_of
from millstream.spark.run.query import Batch, RunContext, SupervisedQuery
from millstream.spark.source.options import parse
from millstream.spark.source.progress_group import GroupPosition, group_positions
from millstream.spark.source.schema import schema_of


class StageQuery(SupervisedQuery):
    """Runs one stage. Spark runs its batches; their results are known from Spark's progress reports."""

    kind: ClassVar[str] = "stage"

    def __init__(self, context: RunContext, stage: Stage) -> None:
        super().__init__(context, stage.app, stage.name)
        self._stage = stage
        self._group = stage_group(stage.app, stage.name)
        self._writer: DataStreamWriter | None = None
        self._last_batch = -1
        self._batch_count = 0

    @property
    def group(self) -> str:
        """See SupervisedQuery."""
        return self._group

    def streams(self) -> list[str]:
        """The streams that its inputs name, or that match their patterns now."""
        scan = self._context.client.scan_streams
        return [name for one in self._stage.inputs for name in (one.streams or scan(one.pattern or "*"))]

    def prepare(self) -> None:
        """Compare the checkpoint with the progress group, and build the query."""
        # The query's metadata exists from its start; offsets only from its first batch, which may come much later.
        self._check_checkpoint("metadata")
        known = {} if self.resumed or self._context.settings.start != "resume" else self._group_positions()
        for stream, found in known.items():
            if found.position.id > ZERO_ID:
                raise ConfigError(
                    f"{self.label} has read {stream!r} up to {found.position.id}, but the checkpoint {self.checkpoint!r} "
                    "is new: use --from-committed to continue there, without the state of its windows and joins, "
                    "--reprocess to start from the beginning, or give the old --checkpoint"
                )
        try:
            self._writer = self._build_writer()
        except ConfigError as error:
            if not failure_of(error).is_worker_late:  # otherwise each start of the query builds it again
                raise

    def _group_positions(self) -> Mapping[str, GroupPosition]:
        return group_positions(self._context.client, self._group, self.streams())

    def _starting_offsets(self) -> str:
        """Where Spark starts without a checkpointed offset: a position that the group has shown does not move."""
        continues = self.resumed or self.has_started or self._context.settings.start == "from-committed"
        return "group" if continues and self._group_positions() else self._context.settings.start_at

    def progress_count(self) -> int:
        """How many batches have succeeded in this run."""
        self.watch()
        return self._batch_count

    def start(self) -> StreamingQuery:
        """Start the query that `prepare` built; every later start builds it again."""
        try:
            writer, self._writer = self._writer or self._build_writer(), None
        except ConfigError as error:  # it could be built before: something that its function needs may be unavailable
            raise PipelineFailed(str(error)) from error
        try:
            return self._start_query(writer)
        except AnalysisException as error:
            raise ConfigError(failure_of(error).reason) from error

    def watch(self) -> None:
        """Emit events for finished batches, and for one that takes long."""
        query = self.query
        if query is None:
            return
        for progress in query.recentProgress:
            if progress.batchId > self._last_batch and "addBatch" in progress.durationMs:
                self._last_batch, self.batch_started, self.failures, self.batch = progress.batchId, True, 0, None
                self._batch_count += 1
                seconds = progress.batchDuration / 1000
                self.emit("batch", batch=progress.batchId, messages=progress.numInputRows, seconds=seconds)
        status = query.status
        if not (query.isActive and status["isTriggerActive"] and status["isDataAvailable"]):
            self.batch = None
        elif self.batch is None:
            self.batch = Batch(None, self._context.clock.monotonic_ms())
        super().watch()

    # --- Building the query ---

    def _build_writer(self) -> DataStreamWriter:
        stage, begins_at = self._stage, self._context.retry_while_unavailable(self._starting_offsets, self.label)
        try:
            result = stage.function(*[self._read_input(one, begins_at) for one in stage.inputs])
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            raise ConfigError(f"{self.label} cannot be built: {_error_line(error, stage)}") from error
        return self._check_result(result)

    def _read_input(self, one: Input, begins_at: str) -> DataFrame:
        options = self._source_options()
        options |= {"subscribe": ",".join(one.streams)} if one.streams else {"subscribePattern": one.pattern}
        # A redriven entry is meant for the handler that failed on it, and the stage has read the original. One of a
        # timer is meant for the handler that has set the timer.
        options |= {"group": self._group, "startingOffsets": begins_at, "redriven": "skip"}
        options |= one.options
        options = {name: value for name, value in options.items() if value is not None}  # as Spark 4.3 does
        # Checked now: Spark parses the options only when the query starts.
        parse({name: text_of_option(value) for name, value in options.items()})
        reader = self._context.spark.readStream.format("redis-streams").options(**options)
        return (reader if one.schema is None else reader.schema(schema_of(one.schema))).load()

    def _check_result(self, result: Any) -> DataStreamWriter:
        """Return the writer to start. Raises ConfigError for any other result."""
        where, into = f"{self.label} ", self._stage.into
        if isinstance(result, StreamingQuery):
            result.stop()
            raise ConfigError(f"{where}has started a query: return the writer, without .start() or .toTable()")
        if result is None:
            raise ConfigError(f"{where}returns nothing: return a DataFrame, or df.writeStream with a format")
        if isinstance(result, DataFrame):
            if not result.isStreaming:
                raise ConfigError(
                    f"{where}returns a DataFrame that is not streaming: build it from the DataFrames of its parameters"
                )
            if into is None:
                raise ConfigError(
                    f'{where}returns a DataFrame, so its rows need a stream: give it into="stream", or return '
                    "df.writeStream with a format and its options"
                )
            result = result.writeStream
        if not isinstance(result, DataStreamWriter):
            raise ConfigError(f"{where}returns a {type(result).__name__}: return a DataFrame, or df.writeStream ...")
        if into is None:
            return result
        return result.format("redis-streams").options(url=self._context.settings.url, stream=into)


def _error_line(error: BaseException, stage: Stage) -> str:
    """Return the error in one line, with the line of the stage's file that it passed."""
    reason = failure_of(error).reason
    code = getattr(stage.function, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f"{reason} ({lines[-1].filename}, line {lines[-1].lineno})" if lines else reason
