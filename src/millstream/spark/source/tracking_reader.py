"""TrackingReader: runs our stream readers on Spark 4.0 and 4.1, which call `latestOffset` without start and limit."""

import logging
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from millstream.errors import ConfigError
from millstream.spark.source.reader_base import idle_wait
from millstream.spark.versions import SPARK_VERSION, ReadLimit, ReadMaxRows

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

Offset = dict[str, Any]


class LimitedReader(Protocol):
    """A stream reader as Spark 4.2 calls it."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's names
        """The limit of a batch."""

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of the query."""

    def initialOffset(self) -> Offset:  # noqa: N802
        """The starting offset of a query without a checkpoint."""

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The end of the batch that begins at `start`."""

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The tasks of a batch."""

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """The rows of a task."""

    def stop(self) -> None:
        """End the query."""

    @property
    def planned_entries(self) -> int | None:
        """How many entries the last planned batch has; None if unknown."""


class TrackingReader(DataSourceStreamReader):
    """Passes `reader` the start and the limit of each batch; Spark 4.0 and 4.1 call it without them.

    A batch begins where the last one ended: each end that `latestOffset` returns becomes a batch before Spark calls it
    again (MicroBatchExecution, constructNextBatch). After a restart Spark first asks for the tasks between the newest
    offset of its log and itself (PythonMicroBatchStream, setLatestSeenOffset).

    `available_now`: end at the entries that are there at first. None: not set, so that a first batch that the limit
    cuts off is logged: Trigger.AvailableNow and Trigger.Once run this batch only.
    """

    def __init__(self, reader: LimitedReader, available_now: bool | None) -> None:
        self._reader = reader
        self._available_now = available_now
        self._end: Offset | None = None
        self._is_first_batch = True
        self._is_first_batch_planned = True

    def __reduce__(self) -> tuple[type, tuple[LimitedReader, bool | None]]:
        return type(self), (self._reader, self._available_now)

    @cached_property
    def _limit(self) -> ReadLimit:
        """The limit of a batch; the first use also fixes the end of the query, if it has one."""
        limit = self._reader.getDefaultReadLimit()
        if self._available_now:
            self._reader.prepareForTriggerAvailableNow()
        return limit

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's names
        """The starting offset of a query without a checkpoint."""
        return self._reader.initialOffset()

    def latestOffset(self) -> Offset:  # type: ignore[override] # noqa: N802
        """The end of the next batch; after a short wait that of the last one, if nothing is new."""
        began_s, limit = time.monotonic(), self._limit
        if self._end is None:
            self._end = self._reader.initialOffset()
            self._is_first_batch_planned = False
        elif not self._is_first_batch_planned:
            # Either the sink has read nothing of the first batch, or Spark asks for its metrics, while that batch is
            # still to come (AvailableNowDataStreamWrapper): then it may not count as committed.
            self._is_first_batch_planned = True
            return self._end
        start, self._end = self._end, self._reader.latestOffset(self._end, limit)
        if self._end == start:
            if self._available_now:
                idle_wait(began_s)
        elif self._is_first_batch:
            self._is_first_batch = False
            self._warn_if_full(limit)
        return self._end

    def _warn_if_full(self, limit: ReadLimit) -> None:
        if self._available_now is None and isinstance(limit, ReadMaxRows):
            count = self._reader.planned_entries
            if count is not None and count >= limit.max_rows:
                logger.warning(
                    "the first batch has as many entries as it may have (%d), so there may be more: on Spark %s "
                    "Trigger.AvailableNow and Trigger.Once end after this batch; to read all that is there, see "
                    "option availableNow",
                    limit.max_rows,
                    SPARK_VERSION,
                )

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Plan the tasks of a batch; of none if `start` is `end`: Spark then passes the query's offset."""
        self._is_first_batch_planned = True
        if self._end is None:
            self._end = end
        elif start == end != self._end:
            raise ConfigError(
                "Spark has requested a batch before it passed the query's offset: set "
                "spark.sql.streaming.triggerAvailableNowWrapper.enabled to false"
            )
        return [] if start == end else self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """Yield the rows of one partition."""
        return self._reader.read(partition)

    def stop(self) -> None:
        """End the query."""
        self._reader.stop()
