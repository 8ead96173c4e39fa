"""Whether entries are missing is decided right, in every case that a stream's counters distinguish."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import AccessDenied, KeyMissing
from millstream.redis_client.resp import slot_of
from millstream.router.gap_detection import (
    MISSING,
    ZERO,
    ReadResult,
    StreamCounters,
    counters_of,
    detect_gap,
    id_as_numbers,
    id_before,
)
from millstream.router.policy import PoolPolicy

pytestmark = [pytest.mark.router]


def entry(n: int) -> list[object]:
    return [b"%d-0" % n, [b"n", b"1"]]


def facts(first: int, last: int, *, added: int) -> StreamCounters:
    """A stream whose ids are 1, 2, 3 ..., of which `first` to `last` are there."""
    there = range(first, last + 1)
    ends = (b"%d-0" % first, b"%d-0" % last) if there else (None, None)
    return StreamCounters(
        last_generated=b"%d-0" % added,
        first=ends[0],
        last=ends[1],
        length=len(there),
        entries_added=added,
        max_deleted=ZERO,
    )


def holed(first: int, last: int, *, added: int, deleted: int) -> StreamCounters:
    """The same, with a single entry deleted."""
    whole = facts(first, last, added=added)
    return whole._replace(last_generated=b"%d-0" % last, length=whole.length - 1, max_deleted=b"%d-0" % deleted)


def reading(position: int, ordinal: int | None, got: range, *, present: bool = False) -> ReadResult:
    return ReadResult(b"%d-0" % position, ordinal, ordinal is not None, present, [entry(n) for n in got], False)


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 60))
def test_the_number_of_entries_trimmed_unread_is_exact(position: int, more: int, trimmed: int) -> None:
    added = position + more
    trimmed = min(trimmed, added)
    got = range(max(position, trimmed) + 1, added + 1)
    there = facts(trimmed + 1, added, added=added)
    verdict = detect_gap(reading(position, position, got, present=trimmed < position), there)
    missed = max(0, trimmed - position)
    assert (verdict.kind, verdict.missed) == (("trimmed", missed) if missed else ("complete", None))
    assert verdict.ordinal == added


@pytest.mark.parametrize(
    ("read", "there", "what"),
    [
        (reading(0, None, range(0)), MISSING, "complete"),
        (reading(5, 5, range(0)), MISSING, "deleted"),
        (reading(5, 5, range(6, 8)), MISSING, "retry"),
        (reading(9, 9, range(0)), facts(1, 3, added=3), "diverged"),
        (reading(5, 5, range(6, 8)), facts(7, 8, added=8), "retry"),  # trimmed between the two answers
        (reading(5, 5, range(6, 8)), StreamCounters(b"7-0", b"6-0", b"7-0", 2, 2, ZERO), "recreated"),
        (reading(5, None, range(6, 8)), facts(6, 7, added=7), "trimmed"),
        (reading(5, None, range(6, 8)), StreamCounters(b"7-0", b"6-0", b"7-0", 2, 2, ZERO), "complete"),
        (reading(5, 5, range(6, 8)), holed(3, 7, added=7, deleted=5), "complete"),
        (reading(5, 5, range(6, 8)), holed(3, 9, added=9, deleted=8), "complete"),  # and an unread one too
        (reading(5, 5, range(6, 8)), holed(3, 7, added=6, deleted=5), "diverged"),
        (reading(5, 5, range(6, 8)), holed(3, 7, added=9, deleted=5), "diverged"),
        (
            reading(5, None, range(6, 8)),
            StreamCounters(b"7-0", b"3-0", b"7-0", 5, 5, ZERO),
            "complete",
        ),  # an id that was no entry
        (reading(5, 5, range(6, 8)), StreamCounters(b"7-0", b"3-0", b"7-0", 7, 7, ZERO), "diverged"),
        (reading(5, 5, range(6, 8)), facts(3, 7, added=7), "complete"),  # as Redis 8.2 trims: out of turn
        (reading(5, 5, range(0)), facts(3, 7, added=7), "retry"),
    ],
)
def test_each_kind_of_gap_is_distinguished(read: ReadResult, there: StreamCounters, what: str) -> None:
    if read.position == b"0-0":
        read = ReadResult(ZERO, None, False, True, [], False)
    assert detect_gap(read, there).kind == what


@given(st.integers(0, 3), st.integers(0, 3))
def test_reading_after_the_id_before_finds_the_entry_itself(ms: int, seq: int) -> None:
    place = b"%d-%d" % (ms, seq)
    assert id_as_numbers(id_before(place)) < id_as_numbers(place) or place == ZERO
    assert id_before(b"5-0") == b"4-18446744073709551615"


def test_counters_are_understood_in_both_protocols() -> None:
    named = {
        b"length": 1,
        b"last-generated-id": b"2-0",
        b"max-deleted-entry-id": b"1-0",
        b"entries-added": 2,
        b"first-entry": entry(2),
        b"last-entry": entry(2),
    }
    expected = StreamCounters(
        last_generated=b"2-0", first=b"2-0", last=b"2-0", length=1, entries_added=2, max_deleted=b"1-0"
    )
    assert counters_of(named) == counters_of([part for pair in named.items() for part in pair]) == expected
    assert counters_of(KeyMissing("a read: no such key")) is MISSING
    assert counters_of(AccessDenied("no")) is None


def test_slots_are_those_of_the_cluster() -> None:
    assert [slot_of(key) for key in (b"foo", b"{foo}:1", b"{}x", b"123456789")] == [
        12182,
        12182,
        slot_of(b"{}x"),
        12739,
    ]


def test_a_pool_policy_that_makes_no_sense_is_refused() -> None:
    for wrong in ({"workers": 0}, {"workers": 5, "max_workers": 4}, {"streams": 0}, {"block_ms": 0}):
        with pytest.raises(Exception, match="PoolPolicy"):
            PoolPolicy(**wrong)
