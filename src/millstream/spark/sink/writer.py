"""RedisBatchWriter, RedisStreamWriter: the writers that Spark calls in tasks and on the driver.

Spark creates a writer for every batch, once to plan it and once to commit it, so only commit messages pass from tasks
to commits. MicroBatchExecution sets the query, batch and run of a task in its local properties. `docs/spark-sink.md`
describes the protocol.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from millstream.errors import ConfigError
from millstream.spark.error_boundary import clean_tracebacks
from millstream.spark.sink.manifest import StagedPart, StagedTask
from millstream.spark.sink.options import SinkOptions
from millstream.spark.versions import DataSourceStreamArrowWriter

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.spark.sink import Publication

_BATCH_PATIENCE_MS = 60_000.0
_QUERY, _BATCH, _RUN = "sql.streaming.queryId", "streaming.sql.batchId", "spark.jobGroup.id"


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """The commit message of one task: the sink, and the rows that the task has staged for it."""

    sink: str
    task: StagedTask


@dataclass(frozen=True, kw_only=True)
class Job:
    """The batch that a task belongs to. `run` is None for a write without a batch number."""

    sink: str
    batch: int
    run: str | None
    patience_ms: float | None


class _StagingWriter:
    """Staging and publication of both writers."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        from millstream.spark.sink.row_encoder import check_columns

        check_columns(options.layout, schema)
        self._options = replace(options, write_options=replace(options.write_options, overwrite=overwrite))
        self._schema = schema

    def _stage(self, batches: "Iterator[pa.RecordBatch]", job: Job) -> Staged:
        from millstream.redis_client.client import shared_client
        from millstream.spark.sink import Stage, begin, token_of
        from millstream.spark.sink.row_encoder import RowMaker

        context = TaskContext.get()
        assert context is not None
        partition_id = context.partitionId()
        client = shared_client(self._options.url)
        epoch = 0
        if job.run is not None:
            epoch = client.retry_while_unavailable(
                partial(begin, client, job.sink, job.run), what=f"the sink {job.sink}", limit_ms=job.patience_ms
            )
        token = token_of(epoch, job.batch, partition_id, context.taskAttemptId())
        stage = Stage(client, job.sink, token, indexed=job.run is not None, patience_ms=job.patience_ms)
        rows_of = RowMaker(self._options.layout, self._schema)
        if self._options.layout.stream is not None and self._options.write_options.overwrite:
            stage.include(self._options.layout.stream)
        try:
            for batch in batches:
                stage.add(rows_of(batch), batch.nbytes)
            return Staged(job.sink, stage.finish(partition_id, epoch))
        except BaseException:  # of any kind: staged rows of a failed task would use memory until they expire
            stage.discard()
            raise

    def _publication(self, sink: str, patience_ms: float | None) -> "Publication":
        from millstream.redis_client.client import shared_client
        from millstream.spark.sink import Publication

        return Publication(shared_client(self._options.url), sink, self._options.write_options, patience_ms=patience_ms)


class RedisBatchWriter(_StagingWriter, DataSourceArrowWriter):
    """The writer of `df.write`: tasks stage, the driver publishes when all have ended; once, with a `txnVersion`."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        self._name = f"write-{secrets.token_hex(8)}"

    @property
    def _job(self) -> Job:
        numbered = self._options.transaction
        sink, batch = numbered or (self._name, 0)
        return Job(sink=sink, batch=batch, run=self._name if numbered else None, patience_ms=_BATCH_PATIENCE_MS)

    @clean_tracebacks
    def write(self, iterator: "Iterator[pa.RecordBatch]") -> Staged:
        """Stage the rows of one task."""
        return self._stage(iterator, self._job)

    @clean_tracebacks
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish the rows that the tasks have staged."""
        job, tasks = self._job, _staged_tasks(messages)
        stream = self._options.layout.stream
        if not tasks and stream is not None and self._options.write_options.overwrite:
            tasks = [StagedTask("0.0.0.0", 0, 0, {stream: StagedPart(0)})]
        publication = self._publication(job.sink, job.patience_ms)
        if job.run is None:
            publication.publish_once(tasks)
        elif tasks:
            publication.publish(tasks, batch=job.batch, epoch=tasks[0].epoch, before="skip")

    @clean_tracebacks
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete the staged rows, unless the batch is decided."""
        job, tasks = self._job, _staged_tasks(messages)
        publication = self._publication(job.sink, job.patience_ms)
        if job.run is None:
            publication.discard(tasks)
        elif tasks:
            publication.withdraw(tasks)


class RedisStreamWriter(_StagingWriter, DataSourceStreamArrowWriter):
    """The writer of `df.writeStream`: publishes each batch once, however often and by whichever run it is repeated."""

    @clean_tracebacks
    def write(self, iterator: "Iterator[pa.RecordBatch]") -> Staged:
        """Stage the rows of one task."""
        context = TaskContext.get()
        assert context is not None
        query, batch, run = (context.getLocalProperty(name) for name in (_QUERY, _BATCH, _RUN))
        if query is None or batch is None or run is None:
            raise ConfigError(
                f"Spark has not set the query, batch and run of this task ({_QUERY}, {_BATCH}, {_RUN}), so the sink "
                "cannot recognize a repeated batch: write in foreachBatch, with txnAppId and txnVersion"
            )
        return self._stage(iterator, Job(sink=query, batch=int(batch), run=run, patience_ms=None))

    @clean_tracebacks
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish the batch, unless it is published. After a crash before its own commit log Spark calls it again."""
        if tasks := _staged_tasks(messages):
            self._publication(_sink(messages), None).publish(tasks, batch=batchId, epoch=tasks[0].epoch)

    @clean_tracebacks
    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Delete the staged rows, unless the batch is decided: then the next run publishes the rest."""
        if tasks := _staged_tasks(messages):
            self._publication(_sink(messages), _BATCH_PATIENCE_MS).withdraw(tasks)


def _staged_tasks(messages: Sequence[WriterCommitMessage | None]) -> list[StagedTask]:
    return [message.task for message in messages if isinstance(message, Staged)]


def _sink(messages: Sequence[WriterCommitMessage | None]) -> str:
    return next(message.sink for message in messages if isinstance(message, Staged))
