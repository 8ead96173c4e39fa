"""Effects: how commit units are split into calls."""

from operator import itemgetter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.delivery.effects import Effects, chunk_by_size, last_ids_of, split_bare

pytestmark = [pytest.mark.worker, pytest.mark.keys]


def unit(outputs: int, size: int = 1) -> tuple[Effects]:
    effects = Effects(b"i1-1", b"")
    effects.add_outputs([b"x" * size] * outputs)
    return (effects,)


def sizes_of_chunks(*units: tuple[Effects]) -> list[int]:
    return [len(chunk) for chunk in chunk_by_size(units, itemgetter(0))]


def test_a_call_has_at_most_ten_thousand_outputs_unless_one_unit_has_more() -> None:
    assert sizes_of_chunks(unit(5_000), unit(5_000), unit(1)) == [2, 1]
    assert sizes_of_chunks(unit(20_000), unit(1), unit(0), unit(9_999)) == [1, 3]


def test_changes_of_timers_count_to_the_limit_of_a_call() -> None:
    timed = Effects(b"i1-1", b"", timers=[(b"t", "", b"")] * 4_000)
    assert sizes_of_chunks((timed,), (timed,), unit(2_000), unit(1)) == [3, 1]


def test_a_call_has_at_most_eight_megabytes_unless_one_unit_has_more() -> None:
    half = 4 * 2**20
    assert sizes_of_chunks(unit(1, half), unit(1, half), unit(1)) == [2, 1]
    assert sizes_of_chunks(unit(1, 4 * half), unit(1)) == [1, 1]


@given(
    st.lists(st.tuples(st.sampled_from([9, 10, 99, 100]), st.integers(0, 2**64 - 1) | st.integers(0, 120))),
    st.randoms(use_true_random=False),
)
def test_ids_alone_are_in_stream_order_whatever_order_their_runs_end_in(
    ids: list[tuple[int, int]], random: Random
) -> None:
    units = [f"{ms}-{sequence}".encode() for ms, sequence in ids]
    random.shuffle(units)
    bare, full = split_bare(units)
    assert full == []
    assert last_ids_of(bare) == [f"{ms}-{sequence}".encode() for ms, sequence in sorted(ids)]


def test_units_with_effects_come_after_those_that_are_acknowledged_only_in_the_order_of_their_runs() -> None:
    done = [Effects(b"", b"", last_id=f"1-{number}") for number in (10, 9)]
    first, second = unit(1)[0], unit(2)[0]
    assert split_bare([second, done[0], first, done[1]]) == ([done[1], done[0]], [second, first])
