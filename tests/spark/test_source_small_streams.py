"""Many streams with few entries each: read as one run of entries, or one by one, they give the same rows and errors."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from millstream.errors import DataLoss, DecodeError, Unavailable, WrongType
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD
from millstream.redis_client.resp import Command, Reply, ReplySize
from millstream.spark.source.entry_runs import ManyStreams, Run
from millstream.spark.source.offset_ranges import OffsetRange
from millstream.spark.source.options import parse
from millstream.spark.source.partition_reader import PartitionReader
from millstream.spark.source.row_layout import batch_maker
from millstream.spark.source.schema import default_schema
from millstream.testing.topologies import cluster
from tests.support.reading import as_planned, by_stream

pytestmark = [pytest.mark.spark]

STREAMS = [f"s{n:04}" if n % 50 else f"größe {n}" for n in range(2_400)]
MIDDLE = STREAMS[1_500]

Rows = list[tuple[str, bytes]]


def entries_of(stream: str) -> int:
    """A few; one in a hundred streams has more than one round trip reads."""
    index = STREAMS.index(stream)
    return 2_500 if index % 800 == 799 else 1 + index % 7


@pytest.fixture
def planned(client: Client) -> list[OffsetRange]:
    """The ranges of all streams, of which each has one entry more since."""
    counts = {stream: entries_of(stream) for stream in STREAMS}
    commands = [
        ("XADD", stream, f"{n + 1}-{n}", "key", f"k{n % 3}", "n", n)
        for stream, count in counts.items()
        for n in range(count + 1)
    ]
    for start in range(0, len(commands), 5_000):
        client.pipeline(commands[start : start + 5_000])
    return [
        OffsetRange(stream, ZERO_ID, EntryId(count, count - 1), size=count + 1, rows=count, untouched=True)
        for stream, count in counts.items()
    ]


def rows(batches: Iterator[list[Run]]) -> Rows:
    return [(name, entry[0]) for runs in batches for name, entries in by_stream(runs) for entry in entries]


def read(client: Client, planned: list[OffsetRange], *, fail_on_data_loss: bool = True) -> Rows:
    reading = PartitionReader(client, as_planned(planned), limit_ms=5_000, fail_on_data_loss=fail_on_data_loss)
    return rows(reading.batches(list))


def read_one_by_one(client: Client, planned: list[OffsetRange], *, fail_on_data_loss: bool = True) -> Rows:
    reading = PartitionReader(client, iter(planned), limit_ms=5_000, fail_on_data_loss=fail_on_data_loss)
    return rows(reading.batches(list))


def expected(planned: list[OffsetRange]) -> Rows:
    return [(one.stream, b"%d-%d" % (n + 1, n)) for one in planned for n in range(one.rows or 0)]


def test_all_entries_are_read_in_the_order_of_their_streams_most_of_them_as_runs_of_many_streams(
    client: Client, planned: list[OffsetRange]
) -> None:
    kinds: list[bool] = []

    def noted(runs: list[Run]) -> list[Run]:
        kinds.extend(isinstance(streams, ManyStreams) for streams, entries in runs for _ in range(len(entries)))
        return runs

    reading = PartitionReader(client, as_planned(planned), limit_ms=5_000, fail_on_data_loss=True)
    assert rows(reading.batches(noted)) == expected(planned)
    small = sum(one.size - 1 for one in planned if one.size < 10)
    assert small / 2 < kinds.count(True) < len(kinds)


TYPED = StructType([StructField("key", StringType()), StructField("n", LongType())])


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({}, None),
        ({"layout": "packed", "keyField": "key", "buckets": "8"}, None),
        ({"layout": "packed"}, None),
        ({"redriven": "skip"}, None),
        ({}, TYPED),
    ],
)
def test_rows_are_those_of_streams_that_are_read_one_by_one(
    client: Client, planned: list[OffsetRange], given: dict[str, str], schema: StructType | None
) -> None:
    columns = parse({"url": client.url, "subscribePattern": "*", **given}, {}).columns
    make = batch_maker(columns, schema or default_schema(columns))
    tables = [
        pa.Table.from_batches(PartitionReader(client, ranges, limit_ms=5_000, fail_on_data_loss=True).batches(make))
        for ranges in (as_planned(planned), iter(planned))
    ]
    assert tables[0].num_rows
    assert tables[0].to_pylist() == tables[1].to_pylist()


def test_a_value_with_a_line_break_among_many_streams_changes_no_other(
    client: Client, planned: list[OffsetRange]
) -> None:
    client.execute("DEL", MIDDLE)
    client.execute("XADD", MIDDLE, "1-0", "a", "x\r\n*2\r\n$3\r\n9-9\r\n")
    found = {one.stream: one for one in planned}
    found[MIDDLE] = OffsetRange(MIDDLE, ZERO_ID, EntryId(1, 0), 1, 1)
    ranges = list(found.values())
    assert read(client, ranges) == expected(ranges)


def trim(client: Client) -> None:
    client.execute("XTRIM", MIDDLE, "MINID", "2-1")


def trim_all(client: Client) -> None:
    client.execute("XTRIM", MIDDLE, "MAXLEN", 0)


def delete(client: Client) -> None:
    client.execute("DEL", MIDDLE)


@pytest.mark.parametrize("lose", [trim, trim_all, delete])
def test_entries_that_one_of_many_streams_has_lost_are_reported_and_those_of_others_are_read(
    client: Client, planned: list[OffsetRange], lose: Callable[[Client], None], caplog: pytest.LogCaptureFixture
) -> None:
    lose(client)
    with pytest.raises(DataLoss, match=f"stream {MIDDLE!r} lost "):
        read(client, planned)
    found = read(client, planned, fail_on_data_loss=False)
    assert [one for one in found if one[0] != MIDDLE] == [one for one in expected(planned) if one[0] != MIDDLE]
    assert found == read_one_by_one(client, planned, fail_on_data_loss=False)
    assert f"stream {MIDDLE!r} lost " in caplog.text


@pytest.mark.parametrize("more", [0, 2])
def test_other_entries_in_the_place_of_those_that_were_planned_are_all_read(
    client: Client, planned: list[OffsetRange], more: int
) -> None:
    """As many as were planned, or more, none of which has the id of the last one."""
    count = entries_of(MIDDLE)
    assert count > 1
    client.execute("DEL", MIDDLE)
    client.pipeline([("XADD", MIDDLE, f"1-{n}", "a", "b") for n in range(count + more)])
    found = read(client, planned)
    assert found.count((MIDDLE, b"1-%d" % (count + more - 1))) == 1
    assert sorted(found) == sorted(read_one_by_one(client, planned))


def test_a_key_of_another_type_among_many_streams_is_named(client: Client, planned: list[OffsetRange]) -> None:
    client.execute("SET", MIDDLE, "text")
    with pytest.raises(WrongType, match=MIDDLE):
        read(client, planned)


def test_a_value_that_does_not_fit_its_column_is_reported_with_its_stream_and_entry(
    client: Client, planned: list[OffsetRange]
) -> None:
    client.execute("DEL", MIDDLE)
    client.execute("XADD", MIDDLE, "5-5", "n", "none")
    ranges = [OffsetRange(MIDDLE, ZERO_ID, EntryId(5, 5), 1, 1) if one.stream == MIDDLE else one for one in planned]
    columns = parse({"url": client.url, "subscribePattern": "*", "mode": "failfast"}, {}).columns
    make = batch_maker(columns, TYPED)
    with pytest.raises(DecodeError, match=f"the entry 5-5 of the stream {MIDDLE!r}: the field 'n' holds b'none'"):
        list(PartitionReader(client, as_planned(ranges), limit_ms=5_000, fail_on_data_loss=True).batches(make))


def test_redriven_entries_of_many_streams_are_skipped(client: Client, planned: list[OffsetRange]) -> None:
    redriven = STREAMS[100:200]
    for stream in redriven:
        client.execute("DEL", stream)
        client.execute("XADD", stream, "1-0", REDRIVE_FIELD, "handler", "a", "b")
    ranges = [
        OffsetRange(one.stream, ZERO_ID, EntryId(1, 0), 1, 1) if one.stream in redriven else one for one in planned
    ]
    columns = parse({"url": client.url, "subscribePattern": "*", "redriven": "skip"}, {}).columns
    make = batch_maker(columns, default_schema(columns))
    table = pa.Table.from_batches(
        PartitionReader(client, as_planned(ranges), limit_ms=5_000, fail_on_data_loss=True).batches(make)
    )
    assert set(table.column("stream").to_pylist()) == set(STREAMS) - set(redriven)


class Flaky(Client):
    """A client that loses the replies of every third round trip."""

    trips = 0

    def pipeline(self, commands: "list[Command]", meter: ReplySize | None = None) -> list[Reply]:  # type: ignore[override]
        replies = super().pipeline(commands, meter)
        self.trips += 1
        if self.trips % 3 == 0:
            raise Unavailable("the reply was lost")
        return replies


def test_lost_replies_of_many_streams_are_asked_for_again_and_no_row_is_read_twice(
    client: Client, planned: list[OffsetRange]
) -> None:
    with closing(Flaky(client.url)) as flaky:
        assert read(flaky, planned) == expected(planned)
        assert flaky.trips > 6


def test_many_streams_of_a_cluster_whose_replies_come_server_by_server_are_read_whole() -> None:
    with cluster() as deployed, Client(deployed.url) as there:
        ranges = [OffsetRange(f"s{n}", ZERO_ID, EntryId(2, 1), 2, 2) for n in range(3_000)]
        there.pipeline([("XADD", one.stream, f"{n + 1}-{n}", "a", "b") for one in ranges for n in range(2)])
        assert sorted(read(there, ranges)) == sorted(expected(ranges))
