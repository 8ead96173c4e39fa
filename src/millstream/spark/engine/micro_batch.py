"""Engine: the driver's side of the handler engine, from a micro-batch's blocks to committed effects.

Every batch: shuffle blocks of messages by key (`key_blocks.py`), sort them by entry id, run the handler in the executors
(`task.py`), then advance the committed offset of each stream to the end of the batch. Spark may repeat a batch, wholly or
in part, after any crash: the key offsets and the committed offset exclude committed messages, so nothing takes effect
twice.
"""

import time
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from millstream.delivery.commit_store import CommitStore
from millstream.errors import DecodeError
from millstream.handlers.handler import Handler
from millstream.model import EntryId, Message
from millstream.observability.failure_log import FailureLog
from millstream.redis_client.client import shared_client
from millstream.spark.engine.deferred_jobs import DeferredJobs
from millstream.spark.engine.entry_points import run_partition
from millstream.spark.engine.key_run import unpack_fields
from millstream.spark.engine.run_breaker import Rows, RunBreaker
from millstream.spark.engine.task import Job
from millstream.spark.engine.task_metrics import METRICS_SCHEMA, BatchTotals, log_failures, sum_counters
from millstream.spark.key_blocks import SORT_COLUMNS, ByKey, bucket_count, group_by_key, make_blocks, unpack_block
from millstream.spark.versions import ArrowFunction, spark_schema

_TRIED_NUMBERS = 40
"""So many numbers a partition: that none of them is hashed to it has a chance of e^-40."""


class Engine:
    """Processes the micro-batches of one handler; pass it to `DataStreamWriter.foreachBatch`.

    The keys are spread over as many tasks as there are cores. Every finished batch calls `on_batch`; `deferred_jobs` is
    notified of the streams on which it deferred messages, `failures` logs what failed, and `breaker` waits while the
    handler is paused. `give_up` returns True once waiting for Redis is pointless.
    """

    def __init__(
        self,
        job: Job,
        *,
        on_batch: Callable[[BatchTotals], None],
        deferred_jobs: DeferredJobs,
        failures: FailureLog,
        breaker: RunBreaker,
        give_up: Callable[[], bool],
    ) -> None:
        self._job = job
        self._failures = failures
        self._breaker = breaker
        self._deferred_jobs = deferred_jobs
        self._give_up = give_up
        self._on_batch = on_batch
        self._shuffle = Shuffle()
        self._tasks = Tasks()
        self._client = shared_client(job.url)
        self._commit_store = CommitStore(self._client, app=job.handler.app, handler=job.handler.name, token=job.token)

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Process one micro-batch completely. Raises whatever fails it, so that Spark repeats it."""
        self._deferred_jobs.wait_for_capacity()
        began_s = time.monotonic()
        rows = self._breaker.run(lambda job: self._run(job, frame))
        self._deferred_jobs.notify(rows)
        self._advance(rows)
        seconds = time.monotonic() - began_s
        self._on_batch(
            BatchTotals(handler=self._job.handler.name, batch=batch_id, seconds=seconds, **sum_counters(rows))
        )

    def _run(self, job: Job, frame: DataFrame) -> Rows:
        if job.handler.key is not None:
            # Read for each batch, since a cluster's executors come and go.
            cores = frame.sparkSession.sparkContext.defaultParallelism
            if callable(job.handler.key):
                frame = frame.mapInArrow(_GroupByFunction(job.handler, bucket_count(cores)), frame.schema)
            frame = self._shuffle(frame, cores)
        rows = self._tasks.run(job, frame)
        log_failures(self._failures, rows)
        return rows

    def _advance(self, rows: Rows) -> None:
        ends: dict[str, EntryId] = {}
        for row in rows:
            last = EntryId.parse(row["last_id"])
            ends[row["stream"]] = max(last, ends.get(row["stream"], last))
        self._client.retry_while_unavailable(
            lambda: self._commit_store.advance_committed(ends), what=self._job.handler.label, give_up=self._give_up
        )


class Tasks:
    """The tasks of the batches of a query. Their function stays the same while the job does."""

    def __init__(self) -> None:
        self._function: tuple[Job, ArrowFunction] | None = None

    def run(self, job: Job, frame: DataFrame) -> Rows:
        """Run the job on the blocks of `frame`, a task for each partition; return the reports of the tasks."""
        if self._function is None or self._function[0] is not job:

            def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                return run_partition(job, batches)

            self._function = (job, ArrowFunction(run, frame.columns, spark_schema(METRICS_SCHEMA)))
        return [row.asDict() for row in self._function[1].on(frame).collect()]


class Shuffle:
    """Moves whole buckets to partitions, about as many to each, and sorts the blocks of each partition.

    It keeps the expressions for that: PySpark makes one in some ten calls of the JVM.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, Column] = {}
        self._order: list[Column] = []

    def __call__(self, frame: DataFrame, partitions: int) -> DataFrame:
        """Move the blocks of `frame` to so many partitions."""
        if partitions not in self._numbers:
            self._numbers[partitions] = F.expr(_partition_text(frame.sparkSession, partitions))
            self._order = [F.col(name) for name in SORT_COLUMNS]
        return frame.repartition(partitions, self._numbers[partitions]).sortWithinPartitions(*self._order)


def _partition_text(spark: SparkSession, partitions: int) -> str:
    if partitions not in _partition_texts:
        numbers = ", ".join(map(str, _numbers_of_partitions(spark, partitions)))
        # As one text: a column for each number would be a call of the JVM each.
        _partition_texts[partitions] = f"array({numbers})[cast(bucket % {partitions} as int)]"
    return _partition_texts[partitions]


_partition_texts: dict[int, str] = {}
"""In SQL, by the number of partitions: the number that moves a block to the partition of its bucket."""


def _numbers_of_partitions(spark: SparkSession, count: int) -> list[int]:
    """Return a number for each of `count` partitions that Spark's repartition, which hashes its columns, moves there."""
    hashes = f"transform(sequence(0, {_TRIED_NUMBERS * count}), number -> pmod(hash(number), {count}))"
    row = spark.sql(f"select {hashes} as hashes").first()
    assert row is not None
    return [row["hashes"].index(partition) for partition in range(count)]


class _GroupByFunction:
    """Groups the messages of blocks by key, for a handler whose key is a function."""

    def __init__(self, handler: Handler, buckets: int) -> None:
        self._handler = handler
        self._buckets = buckets

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for at in range(len(batch)):  # one block has up to 16 MB
                (row,) = batch.slice(at, 1).to_pylist()
                by_key = self._by_key(row["stream"], row["messages"])
                yield make_blocks([(row["stream"], by_key, row["first_id"])], self._buckets)

    def _by_key(self, stream: str, block: bytes) -> ByKey:
        messages = [part for _, some in unpack_block(block) for part in some]
        ids, packed = messages[::2], messages[1::2]
        return group_by_key([self._key(stream, *one) for one in zip(ids, packed, strict=True)], ids, packed)

    def _key(self, stream: str, entry_id: bytes, packed: bytes) -> bytes | None:
        message = Message(stream, entry_id.decode(), unpack_fields(packed)[0])
        try:
            return self._handler.key_of(message)
        except DecodeError:
            return None  # the task meets the same error and dead-letters the message
