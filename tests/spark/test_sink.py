"""`df.write` and `df.writeStream` into Redis Streams: what arrives, once, and what is said about what cannot."""

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.functions import lit

from millstream.redis_client.key_names import SinkKeys
from millstream.redis_client.replies import mapping_of
from tests.support.sources import Bench, pairs
from tests.support.triggers import await_end, run_to_end, start_to_end

pytestmark = [pytest.mark.sink, pytest.mark.spark]


def save(bench: Bench, frame: DataFrame, *, mode: str = "append", **options: Any) -> None:
    frame.write.format("redis-streams").options(url=bench.url, **options).mode(mode).save()


def run(bench: Bench, frame: DataFrame, checkpoint: str = "checkpoint", mode: str = "append", **options: Any) -> str:
    """Write what is there now; return the id of the query."""
    writer = frame.writeStream.format("redis-streams").options(url=bench.url, **options).outputMode(mode)
    writer = writer.option("checkpointLocation", str(bench.folder / checkpoint)).queryName("mine")
    query = start_to_end(writer)
    bench.queries.append(query)
    await_end(query)
    return query.id


def entries(bench: Bench, stream: str) -> list[dict[str, bytes]]:
    found = bench.client.execute("XRANGE", stream, "-", "+")
    return [dict(zip([name.decode() for name in e[::2]], e[1::2], strict=True)) for _, e in found]


def numbers(bench: Bench, stream: str) -> list[int]:
    return [int(entry["n"]) for entry in entries(bench, stream)]


def complaint(caught: pytest.ExceptionInfo[Exception]) -> str:
    """Our own line of a Spark error."""
    lines = [line for line in str(caught.value).splitlines() if line.startswith("millstream.errors.")]
    return lines[-1] if lines else str(caught.value)


# --- Values ---


def test_typed_columns_are_unchanged_after_a_write_and_a_read(bench: Bench) -> None:
    schema = "s string, b binary, yes boolean, i int, l long, x double, d date, t timestamp"
    rows: list[tuple[Any, ...]] = [
        ("ü", b"\xff\x00", True, -1, 2**60, 0.1, date(2024, 2, 29), datetime(2024, 2, 29, 1, 2, 3, 456, UTC)),
        ("", b"", False, 0, 0, -1e300, date(1969, 1, 1), datetime(1969, 1, 1, tzinfo=UTC)),
        ("only", None, None, None, None, None, None, None),
    ]
    frame = bench.spark.createDataFrame(rows, schema).coalesce(1)
    save(bench, frame, stream="typed")
    assert entries(bench, "typed")[2] == {"s": b"only"}
    options = {"url": bench.url, "subscribe": "typed"}
    back = bench.spark.read.format("redis-streams").schema(schema).options(**options).load()
    assert back.collect() == frame.collect()


def test_columns_of_the_source_can_be_written_unchanged_with_their_ids(bench: Bench) -> None:
    bench.add_raw("in", [[b"\xff", b"\x00", "b", "1", "b", "2"], ["a", "1"], ["a", "2"]])
    for fields_as in ("array", "map"):
        frame = bench.read("in", fieldsAs=fields_as).withColumn("stream", lit(fields_as))
        save(bench, frame, fieldsAs="fields", idColumn="id")
    assert bench.client.execute("XRANGE", "array", "-", "+") == bench.client.execute("XRANGE", "in", "-", "+")
    assert bench.client.execute("XRANGE", "map", "-", "+")[1:] == bench.client.execute("XRANGE", "in", "-", "+")[1:]
    with pytest.raises(PySparkException) as caught:
        save(bench, bench.read("in").withColumn("stream", lit("array")), fieldsAs="fields", idColumn="id")
    assert "the sink must be the only writer" in complaint(caught)
    again = bench.read("in").withColumn("stream", lit("array"))
    save(bench, again, fieldsAs="fields", idColumn="id", existingIds="skip")
    assert bench.client.execute("XLEN", "array") == 3


# --- Streams ---


def test_rows_go_to_the_streams_that_a_column_names_in_the_order_of_their_partition(bench: Bench) -> None:
    frame = bench.spark.range(0, 30_000, numPartitions=3).selectExpr("concat('s', id % 7) where", "id n")
    save(bench, frame, streamColumn="where")
    for place in range(7):
        assert numbers(bench, f"s{place}") == [n for n in range(30_000) if n % 7 == place]
    assert bench.client.execute("KEYS", "millstream:*") == []


def test_overwriting_replaces_entries_and_keeps_groups_and_a_failed_write_leaves_all_as_it_was(bench: Bench) -> None:
    bench.add("out", 5, start=100)
    bench.client.execute("XGROUP", "CREATE", "out", "g", "$")
    frame = bench.spark.range(4_000).selectExpr("if(id = 3999, 1/0, id) n")
    with pytest.raises(PySparkException):
        save(bench, frame, mode="overwrite", stream="out")
    assert numbers(bench, "out") == list(range(100, 105))
    save(bench, bench.spark.range(3).selectExpr("id n"), mode="overwrite", stream="out")
    assert numbers(bench, "out") == [0, 1, 2]
    save(bench, bench.spark.range(0).selectExpr("id n"), mode="overwrite", stream="out")
    assert numbers(bench, "out") == []
    assert set(bench.groups("out")) == {"g"}
    left = bench.client.execute("KEYS", "millstream:*")
    assert all(bench.client.execute("TTL", key) > 0 for key in left), "what killed tasks have staged expires"
    with pytest.raises(PySparkException, match="Append"):
        save(bench, frame, mode="error", stream="out")


def test_a_write_with_a_number_is_made_once(bench: Bench) -> None:
    frame = bench.spark.range(100).selectExpr("id n")
    for _ in range(2):
        save(bench, frame, stream="out", txnAppId="nightly", txnVersion=7, maxlen=150, exactTrim="true")
    assert len(numbers(bench, "out")) == 100
    save(bench, frame, stream="out", txnAppId="nightly", txnVersion=8, maxlen=150, exactTrim="true")
    save(bench, frame, stream="out", txnAppId="nightly", txnVersion=7)
    assert len(numbers(bench, "out")) == 150


# --- Queries ---


def test_a_query_writes_each_row_once_and_in_order_over_restarts_and_a_repeated_last_batch(
    bench: Bench,
) -> None:
    bench.add("in", 300)
    frame = bench.stream("in", startingOffsets="earliest", maxOffsetsPerTrigger=100, schema="n int")
    query = run(bench, frame, stream="out")
    assert numbers(bench, "out") == list(range(300))
    (bench.folder / "checkpoint" / "commits" / "2").unlink()
    (bench.folder / "checkpoint" / "commits" / ".2.crc").unlink()
    bench.add("in", 600, start=300)
    assert run(bench, bench.stream("in", schema="n int", minPartitions=3), stream="out") == query
    assert numbers(bench, "out") == list(range(900)), "in order, though three tasks have read the stream"
    record = SinkKeys(query).record
    assert bench.client.execute("HGET", record, "batch") == b"3"
    assert bench.client.execute("KEYS", "millstream:*:sink:*.*") == []


def test_a_checkpoint_that_was_set_back_stops_the_query(bench: Bench) -> None:
    bench.add("in", 30)
    frame = bench.stream("in", startingOffsets="earliest", maxOffsetsPerTrigger=10, schema="n int")
    run(bench, frame, stream="out")
    for folder in ("commits", "offsets"):
        for file in (bench.folder / "checkpoint" / folder).glob("*[12]*"):
            file.unlink()
    with pytest.raises(StreamingQueryException) as caught:
        run(bench, frame, stream="out")
    assert "the checkpoint was set back" in complaint(caught)
    assert sorted(numbers(bench, "out")) == list(range(30))


def test_a_task_that_fails_and_is_retried_doubles_nothing(bench: Bench) -> None:
    def fail_at_first(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() < 2:
            raise RuntimeError("as planned")

    bench.add("in", 5_000)
    frame = bench.stream("in", startingOffsets="earliest", schema="n int").mapInArrow(fail_at_first, "n int")
    run(bench, frame, stream="out")
    assert sorted(numbers(bench, "out")) == list(range(5_000))


def test_complete_mode_replaces_the_stream_with_each_batch(bench: Bench) -> None:
    bench.add("in", 10)
    frame = bench.stream("in", startingOffsets="earliest", maxOffsetsPerTrigger=5, schema="n int")
    run(bench, frame.selectExpr("n % 2 k").groupBy("k").count(), mode="complete", stream="out")
    assert sorted((e["k"], e["count"]) for e in entries(bench, "out")) == [(b"0", b"5"), (b"1", b"5")]


def test_counts_that_change_are_upserted_batch_by_batch(bench: Bench) -> None:
    bench.add("in", 10)
    frame = bench.stream("in", startingOffsets="earliest", maxOffsetsPerTrigger=5, schema="n int")
    counts = frame.selectExpr("cast(n % 2 as string) k").groupBy("k").count()

    def write(changed: DataFrame, _: int) -> None:
        save(bench, changed, target="hash", keyColumn="k", keyPrefix="count:", guardColumn="count")

    query = counts.writeStream.outputMode("update").foreachBatch(write)
    run_to_end(query.option("checkpointLocation", str(bench.folder / "c")))
    assert [bench.client.execute("HGET", f"count:{k}", "count") for k in (0, 1)] == [b"5", b"5"]


def test_a_write_with_a_number_in_foreach_batch_is_made_once(bench: Bench) -> None:
    bench.add("in", 20)

    def write(frame: DataFrame, batch_id: int) -> None:
        for _ in range(2):
            save(bench, frame, stream="out", txnAppId="each", txnVersion=batch_id)

    frame = bench.stream("in", startingOffsets="earliest", schema="n int")
    query = frame.writeStream.foreachBatch(write).option("checkpointLocation", str(bench.folder / "c"))
    run_to_end(query)
    assert sorted(numbers(bench, "out")) == list(range(20))
    assert pairs(bench.read("in").collect()[0])[b"n"] == b"0"


# --- Queryable state ---


def test_hashes_and_json_hold_the_newest_row_of_each_key(bench: Bench) -> None:
    frame = bench.spark.range(0, 2_000, numPartitions=4).selectExpr(
        "concat('u', id % 10) user", "concat(id, '-1') version", "if(id < 1000, id, null) early", "cast(id as double) x"
    )
    options = {"keyColumn": "user", "keyPrefix": "user:", "guardColumn": "version"}
    for _ in range(2):
        save(bench, frame, target="hash", **options)
        save(bench, frame.where("x < 500"), target="hash", **options)
    found = bench.client.execute("HGETALL", "user:u3")
    assert mapping_of(found) == {
        b"millstream.guard": b"1993-1",
        b"version": b"1993-1",
        b"x": b"1993.0",
    }
    bench.add("in", 100)
    rows = bench.stream("in", startingOffsets="earliest", schema="_id string, n int").selectExpr("'all' k", "_id", "n")
    run(bench, rows, target="json", keyColumn="k", guardColumn="_id")
    assert json.loads(bench.client.execute("GET", "all"))["n"] == 99
    with pytest.raises(PySparkException) as caught:
        save(bench, frame, mode="overwrite", target="hash", **options)
    assert "use mode append" in complaint(caught)
    with pytest.raises(PySparkException) as caught:
        save(bench, frame, target="hash", **{**options, "guardColumn": "x"})
    assert "the column 'x' is of type double; it must be text or a whole number" in complaint(caught)


# --- What cannot be written ---


@pytest.mark.parametrize(
    ("query", "options", "text"),
    [
        ("select 1 n", {"stream": "a", "maxlne": "5"}, "did you mean 'maxlen'?"),
        ("select 1 n", {"strem": "a"}, "did you mean 'stream'?"),
        ("select 1 stream, 1 n", {}, "the column 'stream' is of type int; cast it to string"),
        ("select cast(null as string) stream, 1 n", {}, "the column stream is null in a row: fill it"),
    ],
)
def test_unwritable_rows_are_an_error_of_one_line_and_write_nothing(
    bench: Bench, query: str, options: dict[str, str], text: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        save(bench, bench.spark.sql(query), **options)
    assert text in complaint(caught)
    assert bench.client.execute("DBSIZE") == 0


def test_options_for_writing_are_refused_when_reading_and_those_of_a_batch_when_streaming(bench: Bench) -> None:
    with pytest.raises(PySparkException) as caught:
        bench.spark.read.format("redis-streams").options(url=bench.url, stream="a").load()
    assert "these options are for writing" in complaint(caught)
    bench.add("in", 1)
    frame = bench.stream("in", startingOffsets="earliest", schema="n int")
    with pytest.raises(PySparkException) as caught:
        run(bench, frame, stream="out", txnAppId="a", txnVersion=1)
    assert "txnAppId and txnVersion are for df.write" in complaint(caught)
    with pytest.raises(PySparkException, match="does not support async progress tracking"):
        run(bench, frame, "other", stream="out", asyncProgressTrackingEnabled="true")
