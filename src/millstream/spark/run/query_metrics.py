"""QueryMetrics: reports the progress of Spark's queries to millstream's metrics."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from millstream.handlers.handler import Handler
from millstream.observability import metrics as m
from millstream.spark.run.offsets_behind import entries_behind
from millstream.spark.versions import HAS_LIMITS


class QueryMetrics(StreamingQueryListener):
    """Reports the progress of every query of a session: `spark.streams.addListener(QueryMetrics(recorder))`.

    Metrics label a query with its name, or its id without one. Only the `streams` most lagging streams of a query have
    a metric of their own.
    """

    def __init__(self, metrics: m.Metrics, *, streams: int = 20) -> None:
        self._metrics = metrics
        self._streams = streams
        self._names: dict[str, str] = {}
        self._reported: dict[str, set[str]] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's names
        """Store the query's name, which the termination event lacks; its counters exist from now on."""
        query = self._names[str(event.runId)] = event.name or str(event.id)
        m.init_series(self._metrics, m.SPARK_ROWS, m.SPARK_BATCH_SECONDS, query=query)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """Report a batch, and the query's lag after it."""
        progress = event.progress
        query = progress.name or str(progress.id)
        if "addBatch" in progress.durationMs:
            self._metrics.count(m.SPARK_ROWS, self._rows_of(progress), query=query)
            self._metrics.observe(m.SPARK_BATCH_SECONDS, progress.batchDuration / 1000, query=query)
        if lags := _lags(progress):
            self._report_lag(query, lags)

    def _rows_of(self, progress: StreamingQueryProgress) -> int:
        return progress.numInputRows

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """Do nothing: the last values stay valid."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """Remove the query's metrics of streams."""
        query = self._names.pop(str(event.runId), str(event.id))
        for stream in self._reported.pop(query, ()):
            self._metrics.remove(m.SPARK_STREAM_BEHIND, query=query, stream=stream)

    def _report_lag(self, query: str, lags: Mapping[str, int | None]) -> None:
        known = {stream: count for stream, count in lags.items() if count is not None}
        counts: list[float] = list(known.values()) or [math.nan]
        figures = {
            "min": min(counts),
            "avg": sum(counts) / len(counts),
            "max": max(counts),
            "sum": sum(counts) if len(known) == len(lags) else math.nan,
        }
        for of, value in figures.items():
            self._metrics.set(m.SPARK_BEHIND, value, query=query, of=of)
        worst = set(sorted(known, key=lambda stream: (-known[stream], stream))[: self._streams])
        for stream in self._reported.get(query, set()) - worst:
            self._metrics.remove(m.SPARK_STREAM_BEHIND, query=query, stream=stream)
        for stream in worst:
            self._metrics.set(m.SPARK_STREAM_BEHIND, known[stream], query=query, stream=stream)
        self._reported[query] = worst


class RunMetrics(QueryMetrics):
    """The metrics of a run's queries. Of `handlers` (`app.name`) Spark counts blocks, so `report_batch` counts the rows."""

    def __init__(self, metrics: m.Metrics, handlers: Collection[str]) -> None:
        super().__init__(metrics)
        self._handlers = handlers

    def _rows_of(self, progress: StreamingQueryProgress) -> int:
        return 0 if progress.name in self._handlers else super()._rows_of(progress)


def _lags(progress: StreamingQueryProgress) -> dict[str, int | None]:
    """Return the lag of the query in each stream of all its sources.

    Before Spark 4.2 it is unknown: a report there has the end of the batch as the newest offset.
    """
    if not HAS_LIMITS:
        return {}
    found: dict[str, int | None] = {}
    for source in progress.sources:
        found |= entries_behind(source.endOffset, source.latestOffset)
    return found


def init_run(metrics: m.Metrics, handlers: Iterable[Handler]) -> None:
    """Create the counters of a run before anything happens."""
    for one in handlers:
        counters = (m.READ, m.COMMITTED, m.HEAD_OF_LINE_AVOIDED, m.RETRIED, m.LIMITED, m.REFUSED)
        m.init_series(metrics, *counters, handler=one.label)
        m.init_series(metrics, m.DEAD_LETTERED, handler=one.label, reason="")
        m.init_series(metrics, m.SPARK_ROWS, m.SPARK_BATCH_SECONDS, query=one.label)


def report_batch(metrics: m.Metrics, handler: str, batch: Mapping[str, Any]) -> None:
    """Count the totals of a finished batch of `handler` (`app.name`): see `BatchTotals`."""
    metrics.count(m.READ, batch["messages"], handler=handler)
    metrics.count(m.SPARK_ROWS, batch["messages"], query=handler)
    metrics.count(m.COMMITTED, batch["committed"], handler=handler)
    metrics.count(m.HEAD_OF_LINE_AVOIDED, batch["head_of_line_avoided"], handler=handler)
    metrics.count(m.RETRIED, batch["retries"], handler=handler)
    metrics.count(m.LIMITED, batch["limited"], handler=handler)
    metrics.count(m.REFUSED, batch["refused"], handler=handler)
    metrics.count(m.DEAD_LETTERED, batch["dead"], handler=handler, reason="")
