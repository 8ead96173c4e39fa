"""ReaderBase: client, planner and task reading that all readers of the source share."""

import os
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from millstream.redis_client.gc_pause import gc_paused
from millstream.spark.error_boundary import clean_traceback, clean_tracebacks
from millstream.spark.source.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.redis_client.client import Client
    from millstream.spark.source.batch_planner import BatchPlanner
    from millstream.spark.source.batch_sizer import BatchSizer
    from millstream.spark.source.replica_reads import Replicas

T = TypeVar("T")

DELAY_POLL_S = 0.5
"""Seconds between polls of Redis while a small batch is delayed."""

_PARENT = os.getppid()
_IDLE_MS = (50.0, 500.0)
_IDLE_SHARE = 2.0


def _is_orphan() -> bool:
    """True if the query's Java process is gone, so a result has no receiver."""
    return os.getppid() != _PARENT


class ReaderBase:
    """Options, schema and connections of a reader. Spark pickles it into every task, without the connections."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self.planned_entries: int | None = None

    def __reduce__(self) -> tuple[type, tuple[SourceOptions, StructType]]:
        return type(self), (self._options, self._schema)

    @cached_property
    def _client(self) -> "Client":
        from millstream.redis_client.client import shared_client

        return shared_client(self._options.url)

    @cached_property
    def _planner(self) -> "BatchPlanner":
        from millstream.spark.source.batch_planner import BatchPlanner

        return BatchPlanner(self._client, self._options, cores=os.cpu_count() or 1)

    @cached_property
    def _sizer(self) -> "BatchSizer | None":
        """Sizes the batches by their duration; None: maxOffsetsPerTrigger alone does."""
        from millstream.clock import SYSTEM_CLOCK
        from millstream.spark.source.batch_sizer import BatchSizer

        target_ms = self._options.limits.target_ms
        return None if target_ms is None else BatchSizer(target_ms, clock=SYSTEM_CLOCK)

    def _most_entries(self, maximum: int) -> int:
        """The most entries of the next batch, at most `maximum`."""
        return maximum if self._sizer is None else self._sizer.max_entries(maximum)

    def _on_planned(self, entries: int | None) -> None:
        """Record that a batch of so many entries begins now; None = an unknown number."""
        self.planned_entries = entries
        if self._sizer is not None:
            self._sizer.on_planned(entries)

    @cached_property
    def _replicas(self) -> "Replicas | None":
        """The replicas that tasks read entries from; None: tasks read from primaries."""
        from millstream.spark.source.replica_reads import replicas_of

        return replicas_of(self._client) if self._options.from_replicas else None

    @clean_tracebacks
    def _with_retry(self, plan: Callable[[], T], *, limit_ms: float | None = None) -> T:
        with gc_paused():
            what = "the redis-streams source"
            return self._client.retry_while_unavailable(plan, what=what, limit_ms=limit_ms, give_up=_is_orphan)

    def _read(self, partition: InputPartition, *, limit_ms: float | None) -> "Iterator[pa.RecordBatch]":
        from millstream.spark.source.partition_reader import PartitionReader
        from millstream.spark.source.planned_ranges import PlannedRanges
        from millstream.spark.source.row_layout import batch_maker, takes_segments

        columns = planned(partition)
        reader = PartitionReader(
            self._client,
            PlannedRanges(columns) if columns else (),  # taken in `batches`, which pauses the garbage collector
            limit_ms=limit_ms,
            fail_on_data_loss=self._options.fail_on_data_loss,
            replicas=self._replicas,
            as_segments=takes_segments(self._options.columns),
        )
        return clean_traceback(reader.batches(batch_maker(self._options.columns, self._schema)))


def planned(partition: InputPartition | None) -> Any:
    """Return what was planned for a task; nothing for the task that Spark adds to an empty batch (4.0: as None)."""
    return (partition.value if partition is not None else None) or []


def idle_wait(began_s: float) -> None:
    """Sleep after a poll that found nothing new and began at `began_s`, in seconds of `time.monotonic`.

    Spark polls again at once, 90 times a second. The sleep is twice as long as the poll took, 50 to 500 ms.
    """
    least_ms, max_ms = _IDLE_MS
    time.sleep(min(max((time.monotonic() - began_s) * _IDLE_SHARE, least_ms / 1000), max_ms / 1000))
