"""Key blocks: whatever way messages are packed, spread and sorted, those of a key stay together and in order."""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import pyarrow as pa
import pytest

from millstream.redis_client.key_names import REDRIVE_FIELD
from millstream.spark import key_blocks
from millstream.spark.key_blocks import SCHEMA, SORT_COLUMNS, Chunk, bucket_count, read_chunks
from millstream.spark.source.block_maker import BlockMaker
from millstream.spark.source.options import Columns
from millstream.spark.source.schema import default_schema
from millstream.spark.versions import arrow_schema

pytestmark = [pytest.mark.spark]

RawEntry = tuple[bytes, list[bytes]]


def entry(entry_id: str, key: bytes | None, value: bytes = b"1") -> RawEntry:
    return entry_id.encode(), [*((b"k", key) if key is not None else ()), b"v", value]


def shuffled(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """All blocks in the order that one partition has with Spark."""
    return pa.Table.from_batches(batches).sort_by([(name, "ascending") for name in SORT_COLUMNS])


def ids_by_key(chunks: Iterable[Chunk]) -> dict[tuple[str, bytes | None], list[str]]:
    found: dict[tuple[str, bytes | None], list[str]] = defaultdict(list)
    for chunk in chunks:
        for place, messages in chunk.messages.items():
            found[place] += map(bytes.decode, messages[::2])
    return dict(found)


def in_batches(entries: Sequence[RawEntry], size: int) -> list[Sequence[RawEntry]]:
    return [entries[at : at + size] for at in range(0, len(entries), size)]


def test_the_messages_of_a_key_stay_in_order_whatever_tasks_have_read_them() -> None:
    chance = random.Random(7)
    streams = {
        stream: [
            entry(f"{ms}-{seq}", b"%d" % chance.randrange(9)) for ms in (1, 9, 10, 255, 256, 2**63) for seq in range(20)
        ]
        for stream in ("one", "two")
    }
    make = BlockMaker(b"k", 4)
    batches = [make([(stream, part)]) for stream, entries in streams.items() for part in in_batches(entries, 7)]
    chance.shuffle(batches)
    found = ids_by_key(read_chunks(shuffled(batches).to_batches(max_chunksize=5)))
    expected = {
        (stream, b"%d" % key): [one[0].decode() for one in entries if one[1][1] == b"%d" % key]
        for stream, entries in streams.items()
        for key in range(9)
    }
    assert found == expected


def test_a_key_has_one_bucket_in_all_tasks_and_the_same_key_of_other_streams_another() -> None:
    make = BlockMaker(b"k", 1_000)
    first, second = (make([("one", [entry(f"{n}-0", b"a")])]) for n in (1, 2))
    others = make([(f"other-{n}", [entry("1-0", b"a")]) for n in range(50)])
    assert first["bucket"] == second["bucket"]
    assert len(set(others["bucket"].to_pylist())) > 40


def test_messages_without_a_key_and_with_an_empty_one_are_spread_over_the_buckets() -> None:
    entries = [entry(f"{n}-0", (None, b"")[n % 2]) for n in range(200)]
    batch = BlockMaker(b"k", 8)([("in", entries)])
    assert set(batch["bucket"].to_pylist()) == set(range(8))
    found = ids_by_key(read_chunks([batch]))
    assert list(found) == [("in", None)]
    assert sorted(found["in", None]) == sorted(f"{n}-0" for n in range(200))


def test_without_a_key_all_messages_are_in_one_bucket_in_the_order_of_their_stream() -> None:
    batch = BlockMaker(None, 1)([("in", [entry(f"{n}-0", b"a")]) for n in range(30)])
    assert len(batch) == 1
    assert ids_by_key(read_chunks([batch])) == {("in", None): [f"{n}-0" for n in range(30)]}


def test_of_a_repeated_field_the_last_value_is_the_key_and_all_fields_are_kept() -> None:
    pairs = [b"k", b"first", b"v", b"k", b"k", b"last"]
    (chunk,) = read_chunks([BlockMaker(b"k", 3)([("in", [[b"1-0", pairs]])])])
    assert list(chunk.messages) == [("in", b"last")]
    assert msgspec.msgpack.decode(chunk.messages["in", b"last"][1]) == pairs


def test_a_chunk_ends_between_two_buckets_once_it_is_half_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_blocks, "CHUNK_MESSAGES", 100)
    entries = [entry(f"{n}-0", b"%d" % (n % 40)) for n in range(1, 1_001)]
    make = BlockMaker(b"k", 20)
    chunks = list(read_chunks(shuffled(make([("in", part)]) for part in in_batches(entries, 50)).to_batches()))
    assert len([key for chunk in chunks for key in chunk.messages]) == 40  # no key is in two
    assert all(50 <= sum(map(len, chunk.messages.values())) / 2 <= 250 for chunk in chunks[:-1])


def test_a_bucket_that_is_larger_than_a_chunk_is_divided_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(f"{n}-0", b"hot", b"x" * 100) for n in range(1, 301)]
    table = shuffled(BlockMaker(b"k", 4)([("in", part)]) for part in in_batches(entries, 10))
    for limit, value in (("CHUNK_MESSAGES", 30), ("CHUNK_BYTES", 4_000)):
        with monkeypatch.context() as patch:
            patch.setattr(key_blocks, limit, value)
            chunks = list(read_chunks(table.to_batches()))
        assert len(chunks) >= 8
        assert ids_by_key(chunks) == {("in", b"hot"): [f"{n}-0" for n in range(1, 301)]}


def test_a_chunk_with_a_redriven_message_is_known_and_so_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_blocks, "CHUNK_MESSAGES", 1)
    redriven = (b"2-0", [REDRIVE_FIELD, b"app.other", b"k", b"a"])
    batches = [BlockMaker(b"k", 1)([("in", [one])]) for one in (entry("1-0", b"a"), redriven, entry("3-0", b"a"))]
    assert [chunk.may_be_redriven for chunk in read_chunks(batches)] == [False, True, False]


def test_a_block_is_never_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_blocks, "CHUNK_MESSAGES", 2)
    entries = [entry(f"{n}-0", b"%d" % (n % 5)) for n in range(1, 21)]
    entries.append((b"21-0", [REDRIVE_FIELD, b"app.other", b"k", b"4"]))
    chunks = list(read_chunks([BlockMaker(b"k", 1)([("in", entries)])]))
    assert [(len(chunk.messages), chunk.may_be_redriven) for chunk in chunks] == [(5, True)]


def test_no_entries_make_no_block_and_no_chunk() -> None:
    batch = BlockMaker(b"k", 4)([("in", []), ("other", [])])
    assert (len(batch), batch.schema) == (0, SCHEMA)
    assert list(read_chunks([batch])) == []


def test_the_source_announces_the_columns_of_blocks() -> None:
    assert arrow_schema(default_schema(Columns(packed=True))) == SCHEMA


def test_blocks_of_a_stream_are_sorted_by_id_not_by_its_text() -> None:
    ids = ["5-9", "5-10", "40-1", f"{2**64 - 1}-{2**64 - 1}"]
    batches = [BlockMaker(b"k", 1)([("in", [entry(one, b"a")])]) for one in ids]
    order = [bytes(one) for one in shuffled(reversed(batches))["first_id"].to_pylist()]
    assert order == [bytes(batch["first_id"][0].as_py()) for batch in batches]


@pytest.mark.parametrize("cores", [1, 2, 7, 64, 500])
def test_there_are_several_buckets_for_each_core(cores: int) -> None:
    assert bucket_count(cores) >= 8 * cores
    assert bucket_count(cores, may_grow=True) >= 512
