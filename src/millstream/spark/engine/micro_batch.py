"""Engine: the driver's side of the handler engine, from a micro-batch's rows to committed effects.

Every batch: shuffle by key, sort by entry id, run the handler in the executors (`task.py`), then advance the committed
offset of each stream to the end of the batch. Spark may repeat a batch, wholly or in part, after any crash: the key
offsets and the committed offset exclude committed messages, so nothing takes effect twice.
"""

import time
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
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
from millstream.spark.versions import spark_schema


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
        if callable(job.handler.key):
            frame = frame.mapInArrow(_KeyColumn(job.handler), frame.schema)
        if job.handler.key is not None:
            # Messages without a key are spread by their ids, not gathered under one null key.
            shuffle_key = F.expr("coalesce(nullif(key, X''), cast(concat(id_ms, '-', id_seq) as binary))")
            # Read for each batch, since a cluster's executors come and go.
            cores = frame.sparkSession.sparkContext.defaultParallelism
            frame = frame.repartition(cores, shuffle_key, F.col("stream"))
            frame = frame.sortWithinPartitions("stream", "key", "id_ms", "id_seq")

        def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return run_partition(job, batches)

        rows = [row.asDict() for row in frame.mapInArrow(run, spark_schema(METRICS_SCHEMA)).collect()]
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


class _KeyColumn:
    """Fills the key column for a handler whose key is a function."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = [batch.column(name).to_pylist() for name in ("stream", "id_ms", "id_seq", "fields")]
            keys = [self._key(*row) for row in zip(*columns, strict=True)]
            index = batch.schema.get_field_index("key")
            yield batch.set_column(index, batch.schema.field(index), pa.array(keys, pa.binary()))

    def _key(self, stream: str, ms: int, seq: int, packed: bytes) -> bytes | None:
        message = Message(stream, f"{ms}-{seq}", unpack_fields(packed)[0])
        try:
            return self._handler.key_of(message)
        except DecodeError:
            return None  # the task meets the same error and dead-letters the message
