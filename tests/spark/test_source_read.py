"""`spark.read` of Redis Streams: the rows are what was written, in every form that they can be asked for."""

import base64
import json
from datetime import datetime

import msgspec
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.types import Row

from millstream.errors import Unavailable
from millstream.model import EntryId
from millstream.spark.key_blocks import unpack_block
from millstream.spark.source import provider as source
from millstream.spark.source.options import parse
from millstream.spark.source.schema import default_schema
from millstream.spark.versions import HAS_FILTERS
from tests.support.sources import Bench

pytestmark = [pytest.mark.spark]

ODD: list[list[str | bytes]] = [
    [b"binary", bytes(range(256))],
    [b"empty", b"", b"", b"no name"],
    [b"\xff\xfe", b"\xc3\x28"],
    [b"twice", b"1", b"twice", b"2", b"twice", b"1"],
    ["megabyte", b"x" * (1 << 20)],
    [part for n in range(500) for part in (f"f{n}", str(n))],
    ["crlf", b"\r\n*3\r\n"],
]


def flat(row: Row) -> list[bytes]:
    return [bytes(part) for pair in row["fields"] for part in pair]


def as_bytes(entry: list[str | bytes]) -> list[bytes]:
    return [part if isinstance(part, bytes) else part.encode() for part in entry]


def test_entries_arrive_byte_for_byte_with_their_ids_and_times(bench: Bench) -> None:
    ids = bench.add_raw("odd", ODD)
    rows = bench.read("odd").orderBy("id_ms", "id_seq").collect()
    assert [flat(row) for row in rows] == [as_bytes(entry) for entry in ODD]
    assert [row["id"] for row in rows] == ids
    assert [(row["id_ms"], row["id_seq"]) for row in rows] == [tuple(EntryId.parse(entry_id)) for entry_id in ids]
    assert {row["stream"] for row in rows} == {"odd"}
    times = bench.read("odd").selectExpr("unix_millis(timestamp) - id_ms as off").distinct().collect()
    assert [row["off"] for row in times] == [0]


def test_the_source_needs_no_registration_and_reads_several_streams_and_missing_ones(bench: Bench) -> None:
    bench.add("a", 3)
    bench.add("b", 2)
    counts = bench.read("a,b,missing").groupBy("stream").count().collect()
    assert {row["stream"]: row["count"] for row in counts} == {"a": 3, "b": 2}
    assert bench.read("missing").count() == 0
    frame = bench.spark.read.format("redis-streams").options(url=bench.url, subscribePattern="[ab]").load()
    assert frame.count() == 5


def test_a_frame_keeps_the_entries_that_its_first_action_has_planned(bench: Bench) -> None:
    bench.add("in", 2)
    frame = bench.read("in")
    bench.add("in", 1)
    assert frame.count() == 3
    bench.add("in", 1)
    found = 3 if HAS_FILTERS else 4  # 4.0 plans each action anew
    assert (frame.count(), len(frame.collect()), frame.select("id").count()) == (found, found, found)
    assert bench.read("in").count() == 4


def test_entries_that_were_redriven_to_a_handler_may_be_left_out(bench: Bench) -> None:
    bench.add_raw(
        "s", [["n", "0"], ["millstream.redrive", "app.handle", "n", "0"], ["n", "1", "millstream.redrive", "x"]]
    )
    bench.add_raw("only", [["millstream.redrive", "app.handle", "n", "0"]])
    assert bench.read("s,only").count() == 4
    assert [flat(row) for row in bench.read("s,only", redriven="skip").collect()] == [
        [b"n", b"0"],
        [b"n", b"1", b"millstream.redrive", b"x"],
    ]


def test_fields_as_a_map_keep_the_last_of_a_repeated_name(bench: Bench) -> None:
    bench.add_raw("odd", ODD)
    maps = [row["fields"] for row in bench.read("odd", fieldsAs="map").orderBy("id_ms", "id_seq").collect()]
    assert bytes(maps[0]["binary"]) == bytes(range(256))
    assert {name: bytes(value) for name, value in maps[1].items()} == {"empty": b"", "": b"no name"}
    assert {name: bytes(value) for name, value in maps[2].items()} == {"\ufffd\ufffd": b"\xc3\x28"}
    assert {name: bytes(value) for name, value in maps[3].items()} == {"twice": b"1"}


def test_fields_as_json_lose_nothing_but_the_first_of_a_repeated_name(bench: Bench) -> None:
    bench.add_raw("odd", [*ODD, ["text", 'quotes " \\ and\nlines', "é", "\u2028"]])
    rows = bench.read("odd", fieldsAs="json").orderBy("id_ms", "id_seq").collect()
    objects = [json.loads(row["fields"]) for row in rows]
    assert base64.b64decode(objects[0]["binary"]["base64"]) == bytes(range(256))
    assert objects[1] == {"empty": "", "": "no name"}
    assert objects[2] == {"\ufffd\ufffd": {"base64": base64.b64encode(b"\xc3\x28").decode()}}
    assert objects[3] == {"twice": "1"}
    assert objects[5] == {f"f{n}": str(n) for n in range(500)}
    assert objects[-1] == {"text": 'quotes " \\ and\nlines', "é": "\u2028"}
    frame = bench.read("odd", fieldsAs="json")
    assert frame.schema["fields"].dataType.simpleString() == "string"
    found = frame.selectExpr(
        "cast(from_json(fields, 'f7 string').f7 as int) as n",
        "unbase64(get_json_object(fields, '$.binary.base64')) as b",
    ).collect()
    assert [row["n"] for row in found if row["n"] is not None] == [7]
    assert [bytes(row["b"]) for row in found if row["b"] is not None] == [bytes(range(256))]


TYPED = (
    "_stream string, _id string, _id_ms long, _id_seq long, _timestamp timestamp, s string, i int, l long, d double, "
    "b boolean, raw binary, t timestamp, _own string"
)


def test_typed_columns_are_decoded_and_a_value_that_does_not_fit_is_null(bench: Bench) -> None:
    good: list[str | bytes] = [
        "s",
        "text",
        "i",
        "-7",
        "l",
        str(2**62),
        "d",
        "1.5e3",
        "b",
        "true",
        "raw",
        b"\xff",
        "_own",
        "mine",
    ]
    bad: list[str | bytes] = ["s", b"\xff", "i", str(2**31), "l", "1.5", "d", "ten", "b", "maybe", "t", "yesterday"]
    entries: list[list[str | bytes]] = [
        [*good, "t", "2013-01-01 05:17:00"],
        ["s", "", "i", "", "t", "2013-01-01T05:17:00.25+01:00"],
        ["other", "1"],
        bad,
        ["i", "1", "i", "2"],
    ]
    bench.add_raw("typed", entries, ids=(f"{n}-{n + 1}" for n in range(1, 6)))
    frame = bench.spark.read.format("redis-streams").options(url=bench.url, subscribe="typed").schema(TYPED).load()
    epochs = ("cast(t as double) as epoch", "unix_millis(_timestamp) as ms")
    rows = frame.selectExpr("*", *epochs).orderBy("_id_ms").collect()
    first, second, third, fourth, fifth = rows
    assert (first["_stream"], first["_id"], first["_id_ms"], first["_id_seq"], first["ms"]) == ("typed", "1-2", 1, 2, 1)
    assert [first[name] for name in ("s", "i", "l", "d", "b", "_own")] == ["text", -7, 2**62, 1500.0, True, "mine"]
    assert bytes(first["raw"]) == b"\xff"
    assert first["epoch"] == datetime.fromisoformat("2013-01-01T05:17:00+00:00").timestamp()
    assert (second["s"], second["i"]) == ("", None)
    assert second["epoch"] == datetime.fromisoformat("2013-01-01T04:17:00.25+00:00").timestamp()
    nothing = [None] * 7
    assert [third[name] for name in ("s", "i", "l", "d", "b", "raw", "t")] == nothing
    assert [fourth[name] for name in ("s", "i", "l", "d", "b", "raw", "t")] == nothing
    assert fifth["i"] == 2


def test_failfast_names_the_entry_the_field_and_the_value_that_does_not_fit(bench: Bench) -> None:
    bench.add_raw("first", [["i", "7"]])
    bench.add_raw("typed", [["i", "1"], ["i", ""], ["other", "x"], ["i", "one"]])
    entry_id = bench.client.execute("XREVRANGE", "typed", "+", "-", "COUNT", 1)[0][0].decode()
    reader = bench.spark.read.format("redis-streams").options(url=bench.url, subscribe="first,typed", mode="FAILFAST")
    with pytest.raises(PySparkException, match=f"entry {entry_id} of the stream 'typed': the field 'i' holds b'one'"):
        reader.schema("i int").load().collect()


def test_the_packed_layout_has_the_last_value_of_the_key_field_as_workers_do(bench: Bench) -> None:
    entries = [["k", "a", "v", "1"], ["v", "k", "k", "b"], ["v", "k"], ["k", "c", "k", "d"], ["v", "1", "k", ""]]
    bench.add_raw("s", entries)
    (row,) = bench.read("s", layout="packed", keyField="k").collect()
    found = dict(unpack_block(bytes(row["messages"])))
    assert list(found) == [b"a", b"b", None, b"d"]
    packed = [one for key in (b"a", b"b", None, b"d") for one in found[key][1::2]]
    expected = [entries[0], entries[1], entries[2], entries[4], entries[3]]  # an empty key is none
    assert [msgspec.msgpack.decode(one) for one in packed] == [as_bytes(list(entry)) for entry in expected]
    (row,) = bench.read("s", layout="packed").collect()
    assert [(key, len(messages)) for key, messages in unpack_block(bytes(row["messages"]))] == [(None, 10)]


def test_reading_begins_after_an_id_or_at_a_time_and_ends_at_either(bench: Bench) -> None:
    bench.add_raw("s", (["n", str(n)] for n in range(10)), ids=(f"{n}-1" for n in range(1, 11)))
    bench.add_raw("t", [["n", "1"], ["n", "2"]], ids=["5-0", "6-0"])

    def ids(**options: str) -> list[str]:
        rows = bench.read("s,t", **options).orderBy("stream", "id_ms").collect()
        return [f"{row['stream']}:{row['id']}" for row in rows]

    assert ids(startingOffsets="8-0", endingOffsets="9-1") == ["s:8-1", "s:9-1"]
    assert ids(startingTimestamp="9") == ["s:9-1", "s:10-1"]
    assert ids(endingTimestamp="2") == ["s:1-1"]
    assert ids(startingTimestamp="1970-01-01T00:00:00.010Z") == ["s:10-1"]
    assert ids(startingOffsets='{"s": ["9-1", 9], "t": "earliest"}', endingOffsets='{"t": "5-0"}') == [
        "s:10-1",
        "t:5-0",
    ]
    assert ids(startingOffsets='{"s": "10-1"}') == ["t:5-0", "t:6-0"]
    assert ids(startingOffsets="99-0") == []


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_big_stream_is_split_and_small_ones_packed_with_nothing_lost_or_doubled(bench: Bench, trimmed: bool) -> None:
    total = 20_000
    bench.add("big", total)
    for n in range(50):
        bench.add(f"small{n}", 7)
    if trimmed:
        bench.client.execute("XTRIM", "big", "MAXLEN", total - 1000)
    kept = total - 1000 * trimmed
    frame = (
        bench.spark.read.format("redis-streams").options(url=bench.url, subscribePattern="*", minPartitions="4").load()
    )
    assert 4 <= frame.rdd.getNumPartitions() <= 6
    found = frame.selectExpr("stream", "cast(fields[0].value as string) as n").collect()
    assert sorted(int(row["n"]) for row in found if row["stream"] == "big") == list(range(total - kept, total))
    assert len(found) == kept + 350
    limited = bench.read("big", maxRecordsPerPartition=3000)
    sizes = limited.rdd.mapPartitions(lambda rows: [sum(1 for _ in rows)]).collect()
    assert sum(sizes) == kept
    assert max(sizes) <= 3000


def test_entries_of_one_millisecond_are_split_too(bench: Bench) -> None:
    bench.add_raw("s", (["n", str(n)] for n in range(10_000)), ids=(f"5-{n + 1}" for n in range(10_000)))
    sizes = bench.read("s", minPartitions=2).rdd.mapPartitions(lambda rows: [sum(1 for _ in rows)]).collect()
    assert sum(sizes) == 10_000
    assert len(sizes) == 2
    assert min(sizes) > 3000


def test_an_id_that_spark_cannot_hold_is_a_clear_error_and_one_past_any_time_has_none(bench: Bench) -> None:
    bench.add_raw("nanoseconds", [["a", "1"]], ids=[f"{1_700_000_000_000_000_000}-{2**63 - 1}"])
    (row,) = bench.read("nanoseconds").collect()
    assert (row["id_ms"], row["id_seq"], row["timestamp"]) == (1_700_000_000_000_000_000, 2**63 - 1, None)
    bench.add_raw("huge", [["a", "1"]], ids=[f"5-{2**63}"])
    with pytest.raises(PySparkException, match=f"the entry id 5-{2**63} has a number beyond"):
        bench.read("huge").collect()


def test_another_type_at_the_key_is_a_clear_error(bench: Bench) -> None:
    bench.client.execute("SET", "text", "1")
    with pytest.raises(PySparkException, match="the key 'text' holds another type of value than a stream"):
        bench.read("text").collect()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"subscribe": "s", "startingOfsets": "earliest"}, "did you mean 'startingOffsets'"),
        ({}, "name the streams either by option"),
        ({"subscribe": "s", "maxOffsetsPerTrigger": "-1"}, "must be a whole number of 1 or more"),
        ({"subscribe": "s", "mode": "failfast"}, "mode=failfast is for typed columns"),
        ({"subscribe": "s", "url": "http://x"}, "ConfigError: 'http://x': the URL must begin with redis://"),
    ],
)
def test_wrong_options_are_refused_at_load_by_their_names(
    bench: Bench, options: dict[str, str], complaint: str
) -> None:
    for reader in (bench.spark.read, bench.spark.readStream):
        with pytest.raises(AnalysisException, match=complaint):
            reader.format("redis-streams").options(**{"url": bench.url} | options).load()


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ("_id_ms string", "the column _id_ms must be of type bigint"),
        ("a array<string>", "the column a cannot be of type array<string>"),
        ("a int not null", "the column a must be nullable"),
        ("a int, _idms long", "the column _idms looks like one about the entry: did you mean _id_ms"),
    ],
)
def test_an_unsupported_schema_is_refused(bench: Bench, schema: str, complaint: str) -> None:
    reader = bench.spark.read.format("redis-streams").options(url=bench.url, subscribe="s")
    with pytest.raises(PySparkException, match=complaint):
        reader.schema(schema).load().collect()


def test_the_error_of_a_redis_that_stays_away_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_BATCH_PATIENCE_MS", 100.0)
    options = parse({"url": "redis://127.0.0.1:1/0", "subscribe": "s"})
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        source.RedisBatchReader(options, default_schema(options.columns)).partitions()
