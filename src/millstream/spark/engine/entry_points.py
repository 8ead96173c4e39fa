"""One partition of a micro-batch, in an executor's Python worker."""

import asyncio
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark import TaskContext

from millstream.redis_client.client import Client, shared_client
from millstream.spark.engine.batch_task import BatchTask
from millstream.spark.engine.task import Job, PartitionTask


def run_partition(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Process one partition and yield one row per stream that says what was done (for `mapInArrow`)."""
    task = _task_here(job)
    asyncio.run(task.process(batches))
    yield task.report()


def run_deferred(job: Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run lines that were set aside, one row of `batches` each, and yield what `run_partition` does (for `mapInArrow`)."""
    task = _task_here(job)
    asyncio.run(task.catch_up(batches))
    yield task.report()


def _task_here(job: Job) -> PartitionTask:
    context = TaskContext.get()
    return task_of(job, shared_client(job.url), retried=context is not None and context.attemptNumber() > 0)


def task_of(job: Job, client: Client, *, retried: bool) -> PartitionTask:
    """The task that runs the job's handler. `retried`: an earlier attempt of it has died."""
    return (BatchTask if job.handler.in_batches else PartitionTask)(job, client, retried=retried)
