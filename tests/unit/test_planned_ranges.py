"""Ranges of a task: one by one as they were planned, and many small ones at once with the commands that read them."""

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.model import EntryId
from millstream.redis_client.resp import PackedCommands, pack_all, pack_command
from millstream.spark.source.offset_ranges import OffsetRange
from tests.support.reading import as_planned

pytestmark = [pytest.mark.spark]

LAST = 2**64 - 1

ids = st.builds(EntryId, st.integers(0, LAST), st.integers(0, LAST))
counts = st.one_of(st.integers(1, 999), st.none(), st.integers(1_000, 5_000))
ranges = st.builds(
    lambda stream, after, until, rows: OffsetRange(stream, after, until, 7, rows),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
    ids,
    ids,
    counts,
)


def small(stream: str, rows: int | None) -> OffsetRange:
    return OffsetRange(stream, EntryId(1, 2), EntryId(3, 4), rows or 7, rows)


def command(one: OffsetRange) -> tuple[str | bytes | int, ...]:
    return ("XRANGE", one.stream, b"(%d-%d" % one.after, b"%d-%d" % one.until, "COUNT", one.rows or 0)


@settings(deadline=None)
@given(st.lists(ranges, max_size=40), st.integers(1, 3_000), st.integers(1, 3_000))
def test_ranges_keep_their_order_whether_one_by_one_or_many_at_once(
    planned: list[OffsetRange], least: int, most: int
) -> None:
    taking = as_planned(planned)
    taken: list[OffsetRange] = []
    while len(taken) < len(planned):
        found = taking.small(least=least, most=most)
        if found is None:
            taken.append(next(taking))
            continue
        some = planned[len(taken) : len(taken) + len(found)]
        assert all(one.rows is not None and one.rows <= 999 for one in some)
        assert least <= sum(one.rows or 0 for one in some) <= most
        assert found.commands.data == b"".join(pack_command(command(one)) for one in some)
        assert found.last_ids.to_pylist() == [b"%d-%d" % one.until for one in some]
        assert found.streams.names.to_pylist() == [one.stream for one in some]
        assert found.streams.counts.tolist() == [one.rows for one in some]
        taking.skip(len(found))
        taken += some
    assert taken == planned
    assert taking.small(least=1, most=5_000) is None
    assert next(taking, None) is None


def test_small_ranges_end_before_one_whose_entries_are_many_or_unknown() -> None:
    for other in (small("other", None), small("other", 1_000)):
        taking = as_planned([small("a", 10), small("b", 20), other, small("c", 30)])
        found = taking.small(least=1, most=2_000)
        assert found is not None
        assert found.streams.names.to_pylist() == ["a", "b"]
        taking.skip(2)
        assert taking.small(least=1, most=2_000) is None
        assert next(taking) == other
        found = taking.small(least=1, most=2_000)
        assert found is not None
        assert found.streams.names.to_pylist() == ["c"]


def test_at_most_1_000_commands_are_sent_at_once_and_no_range_is_left_out() -> None:
    planned = [small(f"s{n}", 1) for n in range(9_500)]
    taking = as_planned(planned)
    sizes, names = [], []
    while (found := taking.small(least=1, most=2_000)) is not None:
        sizes.append(len(found))
        names += found.streams.names.to_pylist()
        taking.skip(len(found))
    assert max(sizes) == 1_000
    assert names == [one.stream for one in planned]


def test_packed_commands_are_unpacked_for_messages_about_them() -> None:
    commands = [("XRANGE", name, "-", "+") for name in ("a", "b\udcff", "c")]
    packed = PackedCommands(pack_all(commands), 3)
    assert [*map(tuple, packed)] == commands
    assert [tuple(packed[index]) for index in (0, 2, -1)] == [commands[0], commands[2], commands[2]]
    assert [*map(tuple, packed[1:])] == commands[1:]
    assert packed[0:1_000] is packed
    assert pack_all(packed) == b"".join(map(pack_command, commands))
    reader = hiredis.Reader()
    reader.feed(pack_all(packed))
    assert reader.gets() == [b"XRANGE", b"a", b"-", b"+"]
    with pytest.raises(IndexError):
        packed[3]
