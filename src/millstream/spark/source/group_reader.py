"""RedisGroupReader: the stream reader of `readAs=group`, for a consumer group that the query shares with others.

The driver fetches entries through the group, records the ids of each batch, and acknowledges it. Tasks only read.
"""

import os
import time
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from millstream.spark.error_boundary import clean_traceback, clean_tracebacks, end_process_if_disconnected
from millstream.spark.source.batch_limits import Advance, BatchLimits
from millstream.spark.source.group_offsets import BEFORE_FIRST_BATCH, dump, load
from millstream.spark.source.offsets import Positions
from millstream.spark.source.options import SourceOptions
from millstream.spark.source.reader_base import DELAY_POLL_S, ReaderBase, idle_wait, planned
from millstream.spark.source.schema import check_schema
from millstream.spark.versions import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.spark.source.group_batch_planner import GroupBatchPlanner
    from millstream.spark.source.group_partition_reader import GroupPartition


class RedisGroupReader(ReaderBase, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads micro-batches through a consumer group; its state is in Spark's checkpoint and in Redis."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: Positions | None = None

    @cached_property
    def _group_planner(self) -> "GroupBatchPlanner":
        from millstream.spark.source.group_batch_planner import GroupBatchPlanner

        sharing = self._options.sharing
        assert sharing is not None
        return GroupBatchPlanner(self._client, self._options, sharing, cores=os.cpu_count() or 1)

    @clean_tracebacks
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The limit of a batch. Spark's first call, so it raises ConfigError for options that only a batch read has."""
        self._options.check_streaming()
        check_schema(self._options.columns, self._schema)
        return ReadMaxRows(self._max_entries)

    @property
    def _max_entries(self) -> int:
        return self._options.limits.max_per_trigger or 1

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of the query at the newest entries of now."""
        self._target = self._with_retry(self._group_planner.latest_offsets)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """The offset before the first batch, which begins after the group's last delivered id."""
        return dump(BEFORE_FIRST_BATCH)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end offset of the batch after `start`; after a short wait `start` itself, if there are no entries.

        The sink has committed the batch that ends at `start`, so this call acknowledges it. Spark's own commit call
        comes later, and never for the last batch. The limit is always that of the options, also with `Trigger.Once`:
        entries that are pending here are not delivered to other consumers.
        """
        began = time.monotonic()
        start_offset, target = load(start), self._target
        limits = BatchLimits(max_entries=self._most_entries(self._max_entries), target=target, may_delay=target is None)
        planned = self._with_retry(lambda: self._group_planner.plan_next(start_offset, limits))
        if isinstance(planned, Advance):
            end = dump(planned.end)
            self._on_planned(planned.entries)
            return end
        if planned.delay_ms:
            time.sleep(min(planned.delay_ms / 1000, DELAY_POLL_S))
        elif target is None:
            idle_wait(began)
        return start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Plan the tasks of one batch. After a restart Spark calls it first, for the last batch."""
        tasks = self._with_retry(lambda: self._group_planner.plan_tasks(load(start), load(end)))
        return [InputPartition(portions) for portions in tasks]

    def stop(self) -> None:
        """End the query: stop renewing its claims."""
        self._group_planner.close()
        end_process_if_disconnected()

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """Yield the rows of one partition, waiting for Redis as long as it takes."""
        from millstream.spark.source.group_partition_reader import GroupPartitionReader
        from millstream.spark.source.row_layout import batch_maker

        portions: list[GroupPartition] = planned(partition)
        fail_on_data_loss = self._options.fail_on_data_loss
        reader = GroupPartitionReader(
            self._client, portions, limit_ms=None, fail_on_data_loss=fail_on_data_loss, replicas=self._replicas
        )
        return clean_traceback(reader.batches(batch_maker(self._options.columns, self._schema)))
