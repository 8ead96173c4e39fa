"""Entries that are gone before they were read: an error that says so, or an exact count."""

import pytest
from pyspark.errors import StreamingQueryException

from millstream.errors import DataLoss
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.spark.source.data_loss import LossPolicy, detect_loss
from millstream.spark.source.offset_ranges import OffsetRange
from millstream.spark.source.offsets import Position
from millstream.spark.source.partition_reader import PartitionReader
from millstream.spark.source.stream_info import StreamInfo, fetch
from tests.support.sources import Bench, Streams

pytestmark = [pytest.mark.spark]


def test_a_trimmed_range_fails_with_the_exact_count_or_is_left_out(bench: Bench) -> None:
    bench.add("s", 100)
    assert len(bench.collect(bench.stream("s", startingOffsets="earliest")).rows) == 100
    bench.add("s", 100, start=100)
    bench.client.execute("XTRIM", "s", "MAXLEN", 58)
    with pytest.raises(StreamingQueryException, match=r"stream 's' lost 42 entries after .* set failOnDataLoss=false"):
        bench.collect(bench.stream("s"))
    collected = bench.collect(bench.stream("s", failOnDataLoss=False))
    assert collected.numbers == list(range(142, 200))
    bench.add("s", 1, start=200)
    assert bench.collect(bench.stream("s")).numbers == [200], "what was counted is over: it is not reported again"


def test_a_range_that_is_trimmed_before_its_batch_is_repeated_fails_too(bench: Bench) -> None:
    bench.add("s", 5)
    frame = bench.stream("s", startingOffsets="earliest")
    bench.collect(frame)
    bench.add("s", 50, start=5)
    query = frame.writeStream.foreachBatch(fail).option("checkpointLocation", str(bench.folder / "checkpoint"))
    with pytest.raises(StreamingQueryException, match="as planned"):
        query.start().awaitTermination()
    bench.client.execute("XTRIM", "s", "MAXLEN", 20)
    with pytest.raises(StreamingQueryException, match="lost 30 entries"):
        bench.collect(frame)
    assert bench.collect(bench.stream("s", failOnDataLoss=False)).numbers == list(range(35, 55))


def fail(frame: object, batch_id: int) -> None:
    raise RuntimeError("as planned")


def test_entries_trimmed_before_the_query_began_are_no_loss(bench: Bench) -> None:
    bench.add("s", 100)
    bench.client.execute("XTRIM", "s", "MAXLEN", 30)
    frame = bench.stream("s", startingOffsets="earliest", maxOffsetsPerTrigger=10)
    collected = bench.collect(frame)
    assert collected.numbers == list(range(70, 100))
    assert bench.offsets()[0]["s"][1] == 80
    bench.client.execute("XTRIM", "s", "MAXLEN", 0)
    assert bench.collect(frame).rows == [], "what was read may be trimmed"
    bench.add("s", 1)
    assert len(bench.collect(frame).rows) == 1


def test_deleted_single_entries_are_no_loss_while_older_ones_are_left(bench: Bench) -> None:
    ids = bench.add("s", 20)
    frame = bench.stream("s", startingOffsets="earliest", maxOffsetsPerTrigger=6)
    bench.client.execute("XDEL", "s", ids[3], ids[8], ids[19])
    assert bench.collect(frame).numbers == [n for n in range(20) if n not in (3, 8, 19)]
    bench.add("s", 5, start=20)
    assert bench.collect(frame).numbers == [20, 21, 22, 23, 24]


@pytest.mark.parametrize("recreated", [True, False])
def test_a_deleted_stream_fails_or_is_read_from_the_beginning_of_its_successor(bench: Bench, recreated: bool) -> None:
    bench.add("s", 30)
    bench.add("other", 1)
    assert len(bench.collect(bench.stream("s,other", startingOffsets="earliest")).rows) == 31
    bench.client.execute("DEL", "s")
    if recreated:
        bench.add("s", 40, start=100)
    with pytest.raises(StreamingQueryException, match="stream 's' was deleted or recreated"):
        bench.collect(bench.stream("s,other"))
    lenient = bench.stream("s,other", failOnDataLoss=False)
    collected = bench.collect(lenient)
    assert collected.numbers == (list(range(100, 140)) if recreated else [])
    bench.add("s", 3, start=500)
    assert bench.collect(lenient).numbers == [500, 501, 502]


def test_a_query_with_a_pattern_detects_that_a_stream_is_gone(bench: Bench) -> None:
    bench.add("a:1", 3)
    bench.add("a:2", 3)
    frame = bench.stream(subscribePattern="a:*", startingOffsets="earliest")
    bench.collect(frame)
    bench.client.execute("DEL", "a:1")
    with pytest.raises(StreamingQueryException, match="stream 'a:1' was deleted or recreated"):
        bench.collect(frame)


def test_entries_that_vanish_between_planning_and_reading_are_detected(
    streams: Streams, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [EntryId.parse(entry_id) for entry_id in streams.add("s", 10)]
    piece = OffsetRange("s", ids[1], ids[7], 6, 6)
    whole, half = [list(range(2, 8)), list(range(5, 8))]

    def read(piece: OffsetRange, *, fail_on_data_loss: bool = True) -> list[int]:
        reading = PartitionReader(streams.client, [piece], limit_ms=1000, fail_on_data_loss=fail_on_data_loss)
        return [int(entry[1][1]) for batch in reading.batches(lambda runs: runs) for _, run in batch for entry in run]

    assert read(piece) == whole
    streams.client.execute("XDEL", "s", str(ids[4]))
    assert read(piece) == [2, 3, 5, 6, 7], "single deletions are no loss"
    streams.client.execute("XTRIM", "s", "MAXLEN", 5)
    for gone in (piece, piece._replace(rows=None, untouched=True)):
        with pytest.raises(
            DataLoss, match=r"lost (3|an unknown number of) entries between .* while they were being read"
        ):
            read(gone)
    assert read(piece, fail_on_data_loss=False) == half
    assert "lost 3 entries" in caplog.text


def test_a_loss_is_reported_once_and_added_up_even_if_it_grows(caplog: pytest.LogCaptureFixture) -> None:
    policy = LossPolicy(fail=False)
    for start, first in ((3, 8), (3, 8), (3, 11), (3, 11), (5, 12), (3, 8)):
        facts = StreamInfo(Position(EntryId(19, 0), 19), EntryId(first, 0), EntryId(0, 0), 20 - first)
        loss = detect_loss("s", Position(EntryId(start, 0), start), facts)
        assert loss is not None
        policy.report(loss)
    totals = [int(record.getMessage().partition("(")[2].partition(" ")[0]) for record in caplog.records]
    assert totals == [4, 7, 13, 17], "the last one is new: the query has gone on since"


@pytest.mark.parametrize(
    ("commands", "verdict"),
    [
        ([], "fine"),
        ([("XTRIM", "s", "MAXLEN", 5)], "fine"),
        ([("XTRIM", "s", "MAXLEN", 0), ("XADD", "s", "20-0", "a", 1)], "lost 5"),
        ([("XTRIM", "s", "MAXLEN", 4)], "lost 1"),
        ([("XDEL", "s", "6-0")], "fine"),
        ([("XDEL", "s", "3-0"), ("XTRIM", "s", "MAXLEN", 3)], "lost 2"),
        ([("XTRIM", "s", "MAXLEN", 5), ("XDEL", "s", "8-0")], "lost 1"),
        ([("DEL", "s")], "reset"),
        ([("DEL", "s"), ("XADD", "s", "1-0", "a", 1)], "reset, lower ids"),
        ([("DEL", "s"), *(("XADD", "s", f"{n}-0", "a", 1) for n in range(20, 40))], "reset"),
        (
            [("DEL", "s"), *(("XADD", "s", f"{n}-0", "a", 1) for n in range(20, 40)), ("XTRIM", "s", "MAXLEN", 17)],
            "reset",
        ),
        ([("DEL", "s"), *(("XADD", "s", f"{n}-0", "a", 1) for n in range(1, 5))], "reset, lower ids"),
    ],
)
def test_a_loss_follows_from_the_counters_of_redis(
    client: Client, commands: list[tuple[str | int, ...]], verdict: str
) -> None:
    client.pipeline([("XADD", "s", f"{n}-0", "a", 1) for n in range(1, 11)])
    client.pipeline(commands)
    loss = detect_loss("s", Position(EntryId(5, 0), 5), fetch(client, ["s"])["s"])
    assert ("fine" if loss is None else "reset" if loss.resets else f"lost {loss.count}") == verdict.partition(",")[0]
    uncounted = detect_loss("s", Position(EntryId(5, 0), None), fetch(client, ["s"])["s"])
    assert (uncounted is not None) == (fetch(client, ["s"])["s"] is None or "lower ids" in verdict)
