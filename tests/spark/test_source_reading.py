"""What a task of the source asks Redis for, and what it makes of lost replies; on real Redis, without Spark."""

import gc
import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain, pairwise

import pytest

from millstream.errors import ConfigError, Unavailable
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.resp import Command, Reply, ReplySize
from millstream.spark.source.entry_runs import StreamEntries
from millstream.spark.source.entry_segment import RawEntries
from millstream.spark.source.offset_ranges import OffsetRange, to_columns
from millstream.spark.source.options import parse
from millstream.spark.source.partition_reader import PartitionReader
from millstream.spark.source.planned_ranges import PlannedRanges
from millstream.spark.source.row_decoder import split_ids
from millstream.spark.source.row_layout import batch_maker
from millstream.spark.source.schema import default_schema
from tests.support.reading import as_planned, by_stream

pytestmark = [pytest.mark.spark]

END = EntryId(10**9, 0)


class Watched(Client):
    """A client that notes the bytes of each trip's replies, and loses the replies of every `lose`-th trip."""

    def __init__(self, url: str, *, lose: int = 0) -> None:
        super().__init__(url)
        self.trips: list[int] = []
        self._lose = lose

    def pipeline(self, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
        replies = super().pipeline(commands, meter)
        self.trips.append(sum(len(item) for entries in replies for _, fields in entries for item in fields))
        if self._lose and len(self.trips) % self._lose == 0:
            raise Unavailable("the reply was lost")
        return replies


def fill(client: Client, stream: str, count: int, value: bytes = b"x") -> None:
    client.pipeline([("XADD", stream, f"{n + 1}-0", "a", value) for n in range(count)])


def read(client: Client, parts: Sequence[OffsetRange]) -> list[list[StreamEntries]]:
    reading = PartitionReader(client, as_planned(parts), limit_ms=5000, fail_on_data_loss=True)
    return list(reading.batches(by_stream))


def ids(batches: list[list[StreamEntries]], stream: str) -> list[bytes]:
    return [entry[0] for name, entries in chain.from_iterable(batches) if name == stream for entry in entries]


def test_large_entries_are_fetched_a_few_at_a_time_and_small_ones_many(client: Client) -> None:
    fill(client, "large", 64, b"x" * (1 << 20))
    fill(client, "small", 9000)
    with closing(Watched(client.url)) as watched:
        batches = read(watched, [OffsetRange("large", ZERO_ID, END, 64, 64)])
        assert len(ids(batches, "large")) == 64
        assert max(watched.trips) <= 4 << 20, "the first trip too, when no size is known yet"
        assert max(sum(len(run[1]) for run in batch) for batch in batches) <= 32, "and no batch holds them all"
    with closing(Watched(client.url)) as watched:
        assert len(ids(read(watched, [OffsetRange("small", ZERO_ID, END, 9000, 9000)]), "small")) == 9000
        assert len(watched.trips) <= 12


@pytest.mark.parametrize("fields_as", ["array", "map", "json"])
def test_large_entries_behind_small_ones_are_fetched_a_few_at_a_time(client: Client, fields_as: str) -> None:
    fill(client, "s", 4_000)
    client.pipeline([("XADD", "s", f"{n + 5_000}-0", "a", b"x" * (1 << 20)) for n in range(64)])
    options = parse({"url": client.url, "subscribe": "s", "fieldsAs": fields_as}, {})
    make = batch_maker(options.columns, default_schema(options.columns))
    reading = PartitionReader(
        client, [OffsetRange("s", ZERO_ID, END, 4_064, 4_064)], limit_ms=5000, fail_on_data_loss=True
    )
    batches = list(reading.batches(make))
    assert [one for batch in batches for one in batch.column("id_ms").to_pylist()] == [
        *range(1, 4_001),
        *range(5_000, 5_064),
    ]
    assert max(batch.nbytes for batch in batches) <= 40 << 20, "twice what a batch is meant to have, and what JSON adds"


def test_many_small_entries_stay_the_bytes_of_their_reply_unless_a_value_has_a_line_break(client: Client) -> None:
    fill(client, "plain", 9_000)
    fill(client, "broken", 9_000, b"a\r\nb")
    for stream, is_raw in (("plain", True), ("broken", False)):
        batches = read(client, [OffsetRange(stream, ZERO_ID, EntryId(9_000, 0), 9_000, 9_000)])
        assert ids(batches, stream) == [b"%d-0" % (n + 1) for n in range(9_000)]
        assert any(isinstance(run, RawEntries) for batch in batches for _, run in batch) == is_raw


def test_entries_of_alternating_sizes_are_fetched_a_few_at_a_time(client: Client) -> None:
    client.pipeline([("XADD", "s", f"{n + 1}-0", "a", b"x" * (1 << 20 if n % 2 else 1)) for n in range(128)])
    batches = read(client, [OffsetRange("s", ZERO_ID, END, 128, 128)])
    assert ids(batches, "s") == [b"%d-0" % (n + 1) for n in range(128)]
    sizes = [sum(len(fields[1]) for _, run in batch for _, fields in run) for batch in batches]
    assert max(sizes) <= 32 << 20


def test_a_redis_that_limits_its_output_buffer_is_asked_for_less(client: Client) -> None:
    fill(client, "s", 4_000)
    client.pipeline([("XADD", "s", f"{n + 5_000}-0", "a", b"x" * (1 << 18)) for n in range(64)])
    client.execute("CONFIG", "SET", "client-output-buffer-limit", "normal 4mb 0 0")
    try:
        assert len(ids(read(client, [OffsetRange("s", ZERO_ID, END, 4_064, 4_064)]), "s")) == 4_064
    finally:
        client.execute("CONFIG", "SET", "client-output-buffer-limit", "normal 0 0 0")


def test_small_streams_share_round_trips(client: Client) -> None:
    parts = []
    for n in range(500):
        fill(client, f"s{n:03}", 5)
        parts.append(OffsetRange(f"s{n:03}", ZERO_ID, EntryId(5, 0), 5, 5))
    with closing(Watched(client.url)) as watched:
        batches = read(watched, parts)
        assert len(watched.trips) <= 12
    assert all(ids(batches, piece.stream) == [b"%d-0" % n for n in range(1, 6)] for piece in parts)


def test_tasks_receive_ranges_as_objects_that_the_garbage_collector_ignores() -> None:
    last = EntryId(2**64 - 1, 2**64 - 1)
    ranges = [
        OffsetRange("s\udcff", EntryId(0, 0), last, 7, None),
        OffsetRange("t", EntryId(5, 6), EntryId(5, 7), 1, 1, untouched=True),
    ]
    columns = pickle.loads(pickle.dumps(to_columns(ranges)))
    assert not any(gc.is_tracked(item) for column in columns for item in column)
    assert [*PlannedRanges(columns)] == ranges
    assert all(type(one) is OffsetRange and type(one.after) is EntryId for one in PlannedRanges(columns))


def test_a_range_is_made_when_it_is_to_be_read(client: Client) -> None:
    """Objects of 100,000 ranges would be in the garbage collector's way while a task reads."""
    streams, taken = [f"s{n:05}" for n in range(30_000)], 0

    def ranges() -> Iterator[OffsetRange]:
        nonlocal taken
        for stream in streams:
            taken += 1
            yield OffsetRange(stream, ZERO_ID, EntryId(1, 0), 1, 1)

    client.pipeline([("XADD", stream, "1-0", "a", "x") for stream in streams])
    reading = PartitionReader(client, ranges(), limit_ms=5000, fail_on_data_loss=True)
    assert taken == 0
    taken_at_batches = [(taken, len(batch)) for batch in reading.batches(by_stream)]
    assert taken_at_batches[0][0] < 20_000, "those of the first batch, and of the round trips ahead"
    assert sum(count for _, count in taken_at_batches) == taken == len(streams)


@pytest.mark.parametrize("size", [1, 10, 500, 1_000])
def test_ranges_with_more_entries_than_estimated_keep_the_order_of_their_stream(client: Client, size: int) -> None:
    fill(client, "s", 5_000)
    fill(client, "t", 10)
    marks = (EntryId(0, 0), EntryId(4_000, 0), EntryId(4_500, 0), EntryId(5_000, 0))
    parts = [OffsetRange("s", after, until, size, None) for after, until in pairwise(marks)]
    batches = read(client, [*parts, OffsetRange("t", ZERO_ID, END, 10, 10)])
    assert ids(batches, "s") == [b"%d-0" % n for n in range(1, 5_001)]
    assert len(ids(batches, "t")) == 10


@pytest.mark.parametrize("size", [1, 10, 5000, 100_000])
def test_a_wrong_estimate_of_the_size_loses_nothing(client: Client, size: int) -> None:
    fill(client, "s", 5000)
    batches = read(client, [OffsetRange("s", EntryId(10, 0), EntryId(4990, 0), size, None)])
    assert ids(batches, "s") == [b"%d-0" % n for n in range(11, 4991)]


def test_lost_replies_are_asked_for_again_and_no_row_is_read_twice(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    fill(client, "s", 8000)
    with closing(Watched(client.url, lose=3)) as flaky:
        batches = read(flaky, [OffsetRange("s", ZERO_ID, EntryId(8000, 0), 8000, 8000)])
    assert ids(batches, "s") == [b"%d-0" % n for n in range(1, 8001)]
    assert "Redis is unavailable: " in caplog.text


class LosesSurvey(Client):
    """A client that loses the first answer to XINFO."""

    lost = False

    def pipeline(self, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
        replies = super().pipeline(commands, meter)
        if commands[0][0] == "XINFO" and not self.lost:
            self.lost = True
            raise Unavailable("the reply was lost")
        return replies


def test_a_lost_reply_to_the_check_for_missing_entries_is_asked_for_again(client: Client) -> None:
    fill(client, "s", 10)
    client.execute("XDEL", "s", "5-0")
    with closing(LosesSurvey(client.url)) as flaky:
        batches = read(flaky, [OffsetRange("s", EntryId(2, 0), EntryId(8, 0), 6, 6)])
        assert flaky.lost
    assert len(ids(batches, "s")) == 5


def test_an_id_that_no_column_holds_is_an_error_that_no_retry_can_mend() -> None:
    ms, seq = split_ids([b"5-%d" % (2**63 - 1)])
    assert (ms.to_pylist(), seq.to_pylist()) == ([5], [2**63 - 1])
    with pytest.raises(ConfigError, match=f"the entry id 5-{2**63} has a number beyond"):
        split_ids([b"5-1", b"5-%d" % 2**63])
