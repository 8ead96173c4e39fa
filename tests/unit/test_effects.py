"""Effects: how commit units are split into calls."""

from operator import itemgetter

import pytest

from millstream.delivery.effects import Effects, chunk_by_size

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


def test_a_call_has_at_most_eight_megabytes_unless_one_unit_has_more() -> None:
    half = 4 * 2**20
    assert sizes_of_chunks(unit(1, half), unit(1, half), unit(1)) == [2, 1]
    assert sizes_of_chunks(unit(1, 4 * half), unit(1)) == [1, 1]
