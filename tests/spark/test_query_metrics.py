"""Figures of queries for Prometheus: rows, seconds, how far behind, and what a handler's batches did."""

import math
import urllib.request
from pathlib import Path

import pytest

from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.spark.run.offsets_behind import entries_behind
from millstream.spark.run.query_metrics import QueryMetrics
from millstream.spark.versions import HAS_LIMITS
from tests.support.commandline import free_port
from tests.support.drivers import Driver
from tests.support.sources import Bench
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.spark]


def test_the_lag_of_a_query_follows_from_the_counts_in_two_offsets() -> None:
    latest = '{"a": ["9-0", 9], "b": ["5-0", 5], "new": ["3-0", 3], "odd": ["1-0", null]}'
    end = '{"a": ["4-0", 4], "b": ["6-0", 6], "odd": ["1-0", 1], "old": ["8-0", 8]}'
    assert entries_behind(end, latest) == {"a": 5, "b": 0, "new": 3, "odd": None}
    for other in (None, "", "7", '{"topic": {"0": 12}}', "[1, 2]"):
        assert entries_behind(end, other) == entries_behind(other, latest) == {}


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
    listener = QueryMetrics(recorder, streams=2)
    bench.spark.streams.addListener(listener)
    for stream, count in (("a", 700), ("b", 200), ("c", 100)):
        bench.add(stream, count)
    figures = Figures(recorder, "shown")
    frame = bench.stream("a,b,c", startingOffsets="earliest", maxOffsetsPerTrigger=500)
    states = []

    def check(batch: object, number: int) -> None:
        if number:
            eventually(lambda: recorder.value(m.SPARK_BATCH_SECONDS, query="shown") == number, "Spark has reported")
            states.append((figures.behind(), figures.streams()))

    writer = frame.writeStream.queryName("shown").foreachBatch(check)
    query = writer.option("checkpointLocation", str(bench.folder / "c")).start()
    try:
        eventually(lambda: recorder.value(m.SPARK_BATCH_SECONDS, query="shown") == 2, "both batches")
        assert states == [
            ({"min": 50, "avg": 500 / 3, "max": 350, "sum": 500}, {"a": 350, "b": 100}),
        ]
        assert figures.behind() == {"min": 0, "avg": 0, "max": 0, "sum": 0}
    finally:
        query.stop()
        eventually(lambda: figures.streams() == {}, "a query that has ended has no streams")
        bench.spark.streams.removeListener(listener)
    assert not math.isnan(figures.behind()["sum"])


TELLER = """
from millstream import App, Message, Reject

app = App("app")

@app.handler("in", key="k")
def tell(message: Message) -> None:
    if message.fields["k"] == b"7":
        raise Reject("no sevens")
"""


@pytest.mark.drivers
def test_the_run_command_serves_its_metrics(millstream_url: str, tmp_path: Path) -> None:
    (tmp_path / "teller.py").write_text(TELLER)
    port = free_port()
    options = ("--metrics-address", str(port))
    driver = Driver(str(tmp_path / "teller.py"), url=millstream_url, folder=tmp_path, options=options)
    with Client(millstream_url) as client:
        client.pipeline([("XADD", "in", "*", "k", n) for n in range(10)])

    def page() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=FAIL_SAFE_S) as answer:
            text: str = answer.read().decode()
            return text

    driver.start()
    try:
        eventually(lambda: driver.has_emitted("batch"), "a batch", log=driver.errors)
        eventually(lambda: 'spark_rows_total{query="app.tell"} 10.0' in page(), "Spark has reported", log=driver.errors)
        text = page()
        behind = (
            'millstream_spark_behind_messages{of="max",query="app.tell"} 0.0',
            'millstream_spark_stream_behind_messages{query="app.tell",stream="in"} 0.0',
        )
        for line in (
            'millstream_messages_read_total{handler="app.tell"} 10.0',
            'millstream_messages_committed_total{handler="app.tell"} 10.0',
            'millstream_messages_dead_lettered_total{handler="app.tell",reason=""} 1.0',
            'millstream_spark_rows_total{query="app.tell"} 10.0',
            *(behind if HAS_LIMITS else ()),
        ):
            assert line in text, text
    finally:
        if driver.alive:
            assert driver.stop() == 0
    assert driver.errors().count("WARNING app.tell: dead letter (rejected): message ") == 1
