"""A stage's query: what its function makes of streaming DataFrames, checked before it starts."""

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
    """Runs one stage. Its batches are Spark's: what they did is known from its progress reports."""

    kind: ClassVar[str] = "stage"

    def __init__(self, around: RunContext, stage: Stage) -> None:
        super().__init__(around, stage.app, stage.name)
        self._stage = stage
        self._group = stage_group(stage.app, stage.name)
        self._writer: DataStreamWriter | None = None
        self._last = -1
        self._batches = 0

    def streams(self) -> list[str]:
        """Those its inputs name, or that fit their patterns now."""
        scan = self._around.client.scan_streams
        return [name for one in self._stage.inputs for name in (one.streams or scan(one.pattern or "*"))]

    def prepare(self) -> None:
        """Compare the checkpoint with the group, and have the stage make its query."""
        # Its query's id is there from the start; offsets only from the first batch on, which may be long in coming.
        self._look_at_checkpoint("metadata")
        known = {} if self.resumed or self._around.settings.start != "resume" else self._standings()
        for stream, standing in known.items():
            if standing.position.id > ZERO_ID:
                raise ConfigError(
                    f"{self.label} has read {stream!r} up to {standing.position.id}, but the checkpoint {self.checkpoint!r} is "
                    "new: use --from-frontier to go on there, without what its windows and joins held, --reprocess to "
                    "begin anew, or give the old --checkpoint"
                )
        try:
            self._writer = self._made()
        except ConfigError as error:
            if not failure_of(error).starved:  # else it is made when it is started, as often as it takes
                raise

    def _standings(self) -> Mapping[str, GroupPosition]:
        return group_positions(self._around.client, self._group, self.streams())

    def _begins_at(self) -> str:
        """Where Spark is to begin if its checkpoint has no place yet: a place that was shown once does not move."""
        goes_on = self.resumed or self.has_started or self._around.settings.start == "from-frontier"
        return "group" if goes_on and self._standings() else self._around.settings.start_at

    def achieved(self) -> int:
        """How many batches have ended well in this run."""
        self.watch()
        return self._batches

    def start(self) -> StreamingQuery:
        """Start what the stage has made; it is made anew each time but the first, and again if that fails."""
        try:
            writer, self._writer = self._writer or self._made(), None
        except ConfigError as error:  # it could be made before: what its function asks for may be away for now
            raise PipelineFailed(str(error)) from error
        try:
            return self._started(writer)
        except AnalysisException as error:
            raise ConfigError(failure_of(error).reason) from error

    def watch(self) -> None:
        """Tell of the batches that have ended, and of one that takes long."""
        query = self.query
        if query is None:
            return
        for progress in query.recentProgress:
            if progress.batchId > self._last and "addBatch" in progress.durationMs:
                self._last, self.began, self.failures, self.batch = progress.batchId, True, 0, None
                self._batches += 1
                seconds = progress.batchDuration / 1000
                self.tell("batch", batch=progress.batchId, messages=progress.numInputRows, seconds=seconds)
        status = query.status
        if not (query.isActive and status["isTriggerActive"] and status["isDataAvailable"]):
            self.batch = None
        elif self.batch is None:
            self.batch = Batch(None, self._around.clock.monotonic_ms())
        super().watch()

    # --- What the function makes ---

    def _made(self) -> DataStreamWriter:
        stage, begins_at = self._stage, self._around.wait_for(self._begins_at, self.label)
        try:
            made = stage.function(*[self._frame(one, begins_at) for one in stage.inputs])
        except Exception as error:  # the user's function may raise anything
            raise ConfigError(f"{self.label} cannot be made: {_said(error, stage)}") from error
        return self._checked(made)

    def _frame(self, one: Input, begins_at: str) -> DataFrame:
        options = self._source()
        options |= {"subscribe": ",".join(one.streams)} if one.streams else {"subscribePattern": one.pattern}
        # What is redriven is for the handler that could not process it: the stage has read it before.
        options |= {"group": self._group, "startingOffsets": begins_at, "redriven": "skip"}
        options |= one.options
        parse(
            {name: text_of_option(value) for name, value in options.items() if value is not None}
        )  # Spark does so much later
        reader = self._around.spark.readStream.format("redis-streams").options(**options)
        return (reader if one.schema is None else reader.schema(schema_of(one.schema))).load()

    def _checked(self, made: Any) -> DataStreamWriter:
        """What to start. Raises ConfigError for what is none."""
        where, into = f"{self.label} ", self._stage.into
        if isinstance(made, StreamingQuery):
            made.stop()
            raise ConfigError(f"{where}has started a query: return the writer, and leave .start() and .toTable() out")
        if made is None:
            raise ConfigError(f"{where}returns nothing: return a DataFrame, or df.writeStream with a format")
        if isinstance(made, DataFrame):
            if not made.isStreaming:
                raise ConfigError(
                    f"{where}returns a DataFrame that does not stream: make it from the DataFrames that it is given"
                )
            if into is None:
                raise ConfigError(
                    f'{where}returns a DataFrame, so its rows need a stream: give it into="stream", or return '
                    "df.writeStream with a format and its options"
                )
            made = made.writeStream
        if not isinstance(made, DataStreamWriter):
            raise ConfigError(f"{where}returns a {type(made).__name__}: return a DataFrame, or df.writeStream ...")
        if into is None:
            return made
        return made.format("redis-streams").options(url=self._around.settings.url, stream=into)


def _said(error: Exception, stage: Stage) -> str:
    """The error in one line, with the place in the stage's file that it came by."""
    reason = failure_of(error).reason
    code = getattr(stage.function, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f"{reason} ({lines[-1].filename}, line {lines[-1].lineno})" if lines else reason
