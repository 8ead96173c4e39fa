"""`spark.readStream` of Redis Streams: batches, restarts, discovery, and progress that any Redis tool can see."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.spark.source import reader_base as side
from millstream.spark.source.options import parse
from millstream.spark.source.partition_reader import PartitionReader
from millstream.spark.source.planned_ranges import PlannedRanges
from millstream.spark.source.provider import RedisStreamReader, RedisStreamsSource
from millstream.spark.source.row_layout import batch_maker
from millstream.spark.versions import HAS_LIMITS, ReadAllAvailable, ReadMaxRows
from tests.support.sources import Bench, Streams
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]


def test_available_now_ends_at_the_entries_of_its_start_and_a_restart_reads_each_entry_once(bench: Bench) -> None:
    bench.add("s", 500)
    frame = bench.stream("s", startingOffsets="earliest")
    assert bench.collect(frame).numbers == list(range(500))
    bench.add("s", 250, start=500)
    assert bench.collect(bench.stream("s", startingOffsets="earliest")).numbers == list(range(500, 750))
    assert bench.collect(frame).rows == []


def test_a_new_query_begins_after_the_latest_entry_by_default(bench: Bench) -> None:
    bench.add("s", 5)
    collected = bench.start(bench.stream("s"))
    eventually(lambda: bench.groups("s").get("progress"), "the query has begun")
    bench.add("s", 5, start=5)
    eventually(lambda: len(collected.rows) >= 5, "the new entries were read")
    assert collected.numbers == [5, 6, 7, 8, 9]


def test_no_batch_is_larger_than_asked_and_streams_share_it_by_backlog(bench: Bench) -> None:
    for stream, count in (("big", 800), ("small", 90), ("tiny", 10)):
        bench.add(stream, count)
    frame = bench.stream("big,small,tiny", startingOffsets="earliest", maxOffsetsPerTrigger=100)
    collected = bench.collect(frame)
    assert collected.numbers == sorted([*range(800), *range(90), *range(10)])
    assert collected.sizes == [100] * 9
    first = [row["stream"] for row in collected.batches[0]]
    assert {stream: first.count(stream) for stream in set(first)} == {"big": 89, "small": 10, "tiny": 1}
    assert set(bench.groups("big")) == {"progress"}, "planning leaves no groups behind"


def test_more_streams_than_a_batch_may_hold_are_read_in_rotation(bench: Bench) -> None:
    for n in range(7):
        bench.add(f"s{n}", 3)
    frame = bench.stream(subscribePattern="s*", startingOffsets="earliest", maxOffsetsPerTrigger=3)
    collected = bench.collect(frame)
    assert collected.sizes == [3] * 7
    assert len(collected.rows) == 21
    assert [sorted({row["stream"] for row in batch}) for batch in collected.batches[:3]] == [
        ["s0", "s1", "s2"],
        ["s3", "s4", "s5"],
        ["s0", "s1", "s6"],
    ]


def test_streams_that_appear_while_the_query_runs_are_read_from_their_beginning(bench: Bench) -> None:
    bench.add("orders:1", 2)
    collected = bench.start(bench.stream(subscribePattern="orders:*"))
    eventually(lambda: bench.groups("orders:1").get("progress"), "the query has begun")
    bench.add("orders:2", 3, start=100)
    bench.add("other", 3)
    eventually(lambda: len(collected.rows) >= 3, "the new stream was read")
    bench.add("orders:1", 1, start=7)
    eventually(lambda: len(collected.rows) >= 4, "the old stream was read on")
    assert collected.numbers == [7, 100, 101, 102]


def test_a_listed_stream_may_be_created_later(bench: Bench) -> None:
    bench.add("here", 1)
    collected = bench.start(bench.stream("here,later"))
    eventually(lambda: bench.groups("here").get("progress"), "the query has begun")
    bench.add("later", 4)
    eventually(lambda: len(collected.rows) >= 4, "the late stream was read")
    assert {row["stream"] for row in collected.rows} == {"later"}


def test_an_idle_query_makes_no_batches_and_asks_about_no_stream(bench: Bench) -> None:
    bench.add("s", 3)
    collected = bench.start(bench.stream("s", startingOffsets="earliest"))
    eventually(lambda: len(collected.rows) == 3, "the entries were read")
    before = bench.calls("client|tracking")
    eventually(lambda: bench.calls("client|tracking") >= before + 3, "a look, after which all is known")
    before, asked = bench.calls("client|tracking"), bench.calls("xinfo|stream")
    eventually(lambda: bench.calls("client|tracking") >= before + 10, "more looks")
    assert len(collected.batches) == 1
    assert bench.calls("xinfo|stream") == asked, "only what has changed is asked about"


@pytest.mark.parametrize(("took_s", "rests_s"), [(0.0, 0.05), (0.125, 0.25), (5.0, 0.5)])
def test_an_idle_query_waits_between_two_checks(monkeypatch: pytest.MonkeyPatch, took_s: float, rests_s: float) -> None:
    waits: list[float] = []
    monkeypatch.setattr(side, "time", SimpleNamespace(monotonic=lambda: 100.0 + took_s, sleep=waits.append))
    side.idle_wait(100.0)
    assert waits == [rests_s]


# --- progress in Redis ---


def test_the_group_shows_the_lag_and_no_lag_at_the_end(bench: Bench) -> None:
    bench.add("s", 100)
    frame = bench.stream("s", startingOffsets="earliest", maxOffsetsPerTrigger=40, group="mine")
    query = frame.writeStream.foreachBatch(fail_in_the_third_batch)
    with pytest.raises(StreamingQueryException):
        query.option("checkpointLocation", str(bench.folder / "c")).start().awaitTermination()
    group = bench.groups("s")["mine"]
    assert (group["entries-read"], group["lag"], group["pending"], group["consumers"]) == (80, 20, 0, 0)
    assert group["last-delivered-id"].decode() == bench.offsets("c")[1]["s"][0]
    bench.collect(frame, "c")
    assert bench.groups("s")["mine"]["lag"] == 0
    bench.add("s", 7)
    assert bench.groups("s")["mine"]["lag"] == 7


def fail_in_the_third_batch(frame: object, batch_id: int) -> None:
    if batch_id == 2:
        raise RuntimeError("as planned")


def test_a_group_of_other_consumers_is_refused_and_stays_as_it_is(bench: Bench) -> None:
    bench.add("s", 10)
    bench.client.execute("XGROUP", "CREATE", "s", "workers", "0")
    bench.client.execute("XREADGROUP", "GROUP", "workers", "w1", "COUNT", 4, "STREAMS", "s", ">")
    before = bench.groups("s")["workers"]
    with pytest.raises(
        StreamingQueryException, match="the group 'workers' of stream 's' has 1 consumers and 4 pending"
    ):
        bench.collect(bench.stream("s", startingOffsets="earliest", group="workers"))
    assert bench.groups("s")["workers"] == before
    collected = bench.collect(bench.stream("s", startingOffsets="earliest", group=""), "other")
    assert len(collected.rows) == 10
    assert set(bench.groups("s")) == {"workers"}


@pytest.mark.skipif(not HAS_LIMITS, reason="Spark reports the newest offset since 4.2")
def test_the_progress_of_the_query_names_the_newest_entries(bench: Bench) -> None:
    ids = bench.add("s", 30)
    collected = bench.start(bench.stream("s", startingOffsets="earliest", maxOffsetsPerTrigger=10))
    eventually(lambda: len(collected.rows) == 30, "all was read")
    progress = [p for p in collected.query.recentProgress if p.numInputRows]
    assert progress[0].sources[0].latestOffset == f'{{"s": ["{ids[-1]}", 30]}}'


# --- what a restart relies on ---


def reader_of(streams: Streams, **options: str) -> RedisStreamReader:
    given = {"url": streams.url, "subscribe": "s", **options}
    return RedisStreamReader(parse(given, {}), RedisStreamsSource(given).schema())


def test_the_latest_entry_is_asked_for_once_however_often_spark_calls(streams: Streams) -> None:
    streams.add("s", 3)
    reader = reader_of(streams)
    first = reader.initialOffset()
    streams.add("s", 3)
    assert reader.initialOffset() == first
    assert reader.latestOffset(first, ReadAllAvailable())["s"][1] == 6


def test_available_now_does_not_read_later_entries(streams: Streams) -> None:
    streams.add("s", 5)
    reader = reader_of(streams, startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    streams.add("s", 5)
    streams.add("later", 5)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert end["s"][1] == 5
    assert reader.latestOffset(end, ReadAllAvailable()) is end
    assert set(reader.reportLatestOffset() or {}) == {"s"}


def test_fresh_readers_plan_and_read_the_same_rows_from_offsets_alone(streams: Streams) -> None:
    for n in range(3):
        streams.add(f"s{n}", 5000, start=n * 5000)
    given = {"url": streams.url, "subscribePattern": "s*", "startingOffsets": "earliest", "minPartitions": "3"}
    source = RedisStreamsSource(given)
    schema = source.schema()

    def reader() -> RedisStreamReader:
        return RedisStreamReader(parse(given, {}), schema)

    first = reader()
    start = first.initialOffset()
    middle = first.latestOffset(start, ReadMaxRows(7000))
    end = reader().latestOffset(middle, ReadMaxRows(100_000))
    streams.add("s1", 1000, start=90_000)

    def rows(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, int, int]]:
        maker = batch_maker(parse(given, {}).columns, schema)
        parts = [part.value for part in reader().partitions(a, b)]
        with Client(streams.url) as client:
            batches = [
                batch
                for sent in parts
                for batch in PartitionReader(
                    client, PlannedRanges(sent), limit_ms=1000, fail_on_data_loss=True
                ).batches(maker)
            ]
        return sorted((row["stream"], row["id_ms"], row["id_seq"]) for batch in batches for row in batch.to_pylist())

    one, two = rows(start, middle), rows(middle, end)
    assert (len(one), len(two)) == (7000, 8000)
    assert len(set(one) | set(two)) == 15_000
    assert rows(start, middle) == one
    assert rows(middle, end) == two
    assert rows(end, end) == []


def test_a_query_survives_a_restart_of_redis(
    spark: SparkSession, millstream_fresh_server: EmbeddedServer, tmp_path: Path
) -> None:
    with Client(millstream_fresh_server.url) as client:
        bench = Bench(client, spark, tmp_path)
        bench.add("s", 100)
        collected = bench.start(bench.stream("s", startingOffsets="earliest", maxOffsetsPerTrigger=60))
        eventually(lambda: len(collected.rows) == 100, "the first entries were read")
        millstream_fresh_server.kill()
        threading.Event().wait(1.5)  # so that it polls in vain
        assert collected.query.isActive
        millstream_fresh_server.start()
        client.retry_while_unavailable(lambda: bench.add("s", 100, start=100), what="the test")
        eventually(lambda: len(collected.rows) >= 200, "the later entries were read")
        assert collected.numbers == list(range(200))
        collected.query.stop()


def test_a_query_with_options_of_a_batch_read_or_without_a_group_is_refused(bench: Bench) -> None:
    with pytest.raises(StreamingQueryException, match=r"endingOffsets and endingTimestamp are for spark\.read"):
        bench.collect(bench.stream("s", endingOffsets="latest"))
    without_group = bench.spark.readStream.format("redis-streams").options(url=bench.url, subscribe="s").load()
    with pytest.raises(StreamingQueryException, match="for each query of a stream another"):
        bench.collect(without_group)


def test_a_key_of_another_type_is_a_clear_error(bench: Bench) -> None:
    bench.client.execute("SET", "text", "1")
    with pytest.raises(StreamingQueryException, match="the key 'text' holds another type of value than a stream"):
        bench.collect(bench.stream("text"))


def test_a_checkpoint_of_another_source_is_detected(bench: Bench) -> None:
    rate = bench.spark.readStream.format("rate").load()
    started = rate.writeStream.format("noop").option("checkpointLocation", str(bench.folder / "checkpoint")).start()
    eventually(lambda: started.lastProgress is not None, "a batch was made")
    started.stop()
    with pytest.raises(StreamingQueryException, match="may be those of another source"):
        bench.collect(bench.stream("s"))
