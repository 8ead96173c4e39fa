"""Entry points of tasks: an executor's Python worker calls one for each partition of a batch or of a deferred job."""

import asyncio
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark import TaskContext

from millstream.redis_client.client import Client, shared_client
from millstream.redis_client.redaction import redact_own_records
from millstream.spark.engine.batch_task import BatchTask
from millstream.spark.engine.key_list_task import KeyListTask
from millstream.spark.engine.task import Job, PartitionTask


def run_partition(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Process one partition and yield its metrics, one row per stream (for `mapInArrow`)."""
    task = _current_task(job)
    asyncio.run(task.process(batches))
    yield task.report()


def run_deferred(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run deferred keys, one per row of `batches`, and yield metrics as `run_partition` does (for `mapInArrow`)."""
    task = _current_task(job)
    asyncio.run(task.process_deferred(batches))
    yield task.report()


def _current_task(job: Job) -> PartitionTask:
    redact_own_records()
    context = TaskContext.get()
    return task_of(job, shared_client(job.url), retried=context is not None and context.attemptNumber() > 0)


def task_of(job: Job, client: Client, *, retried: bool) -> PartitionTask:
    """Return the task that runs the job's handler. `retried`: an earlier attempt of the Spark task failed."""
    if not job.handler.in_batches:
        return PartitionTask(job, client, retried=retried)
    return (BatchTask if job.handler.key is None else KeyListTask)(job, client, retried=retried)
