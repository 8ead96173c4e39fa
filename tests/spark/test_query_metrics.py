"""Figures of queries for Prometheus: rows, seconds, how far behind, and what a handler's batches did."""

import math

import pytest
from pyspark.sql.streaming.listener import QueryProgressEvent

from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.spark.run.offsets_behind import entries_behind
from millstream.spark.run.query_metrics import QueryMetrics
from millstream.spark.versions import HAS_LIMITS
from tests.support.sources import Bench
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]


def test_the_lag_of_a_query_follows_from_the_counts_in_two_offsets() -> None:
    latest = '{"a": ["9-0", 9], "b": ["5-0", 5], "new": ["3-0", 3], "odd": ["1-0", null]}'
    end = '{"a": ["4-0", 4], "b": ["6-0", 6], "odd": ["1-0", 1], "old": ["8-0", 8]}'
    assert entries_behind(end, latest) == {"a": 5, "b": 0, "new": 3, "odd": None}
    for other in (None, "", "7", '{"topic": {"0": 12}}', "[1, 2]"):
        assert entries_behind(end, other) == entries_behind(other, latest) == {}


class Reporting(QueryMetrics):
    """QueryMetrics that says of which batch it has reported all."""

    reported = -1

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        super().onQueryProgress(event)
        if event.progress.name == "shown":  # progress of the query before may still be reported
            self.reported = event.progress.batchId


class Figures:
    """What one query reports."""

    def __init__(self, recorder: Recorder, query: str) -> None:
        self.recorder = recorder
        self.query = query

    def behind(self) -> dict[str, float]:
        return {of: self.recorder.value(m.SPARK_BEHIND, query=self.query, of=of) for of in ("min", "avg", "max", "sum")}

    def streams(self) -> dict[str, float]:
        found = {}
        for family in self.recorder.collect():
            for sample in family.samples:
                if sample.name == m.SPARK_STREAM_BEHIND.name and sample.labels["query"] == self.query:
                    found[sample.labels["stream"]] = sample.value
        return found


@pytest.mark.skipif(not HAS_LIMITS, reason="Spark reports the newest offset since 4.2")
def test_a_query_exports_its_rows_seconds_and_lag(bench: Bench) -> None:
    recorder = Recorder()
    listener = Reporting(recorder, streams=2)
    bench.spark.streams.addListener(listener)
    for stream, count in (("a", 700), ("b", 200), ("c", 100)):
        bench.add(stream, count)
    figures = Figures(recorder, "shown")
    frame = bench.stream("a,b,c", startingOffsets="earliest", maxOffsetsPerTrigger=500)
    states = []

    def check(batch: object, number: int) -> None:
        if number:
            eventually(lambda: listener.reported == number - 1, "Spark has reported")
            states.append((figures.behind(), figures.streams()))

    writer = frame.writeStream.queryName("shown").foreachBatch(check)
    query = writer.option("checkpointLocation", str(bench.folder / "c")).start()
    try:
        eventually(lambda: listener.reported == 1, "both batches")
        assert recorder.value(m.SPARK_BATCH_SECONDS, query="shown") == 2
        assert states == [
            ({"min": 50, "avg": 500 / 3, "max": 350, "sum": 500}, {"a": 350, "b": 100}),
        ]
        assert figures.behind() == {"min": 0, "avg": 0, "max": 0, "sum": 0}
    finally:
        query.stop()
        eventually(lambda: figures.streams() == {}, "a query that has ended has no streams")
        bench.spark.streams.removeListener(listener)
    assert not math.isnan(figures.behind()["sum"])
