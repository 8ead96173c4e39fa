"""Dead letters that are new by the totals: how many, since when, and whether that is a lower bound."""

from collections.abc import Sequence

import msgspec
import pytest

from millstream.admin.figure_history import MOST_HANDLERS, STEP_MS, HandlerSample, Sample
from millstream.admin.total_checks import letters_elsewhere

pytestmark = [pytest.mark.cli]

FIGURES = HandlerSample(streams=7, added=90, done=40, dead=0, lag=0, oldest_ms=None, dead_letters=5, stuck=0)


def samples_of(dead: Sequence[int | None]) -> list[Sample]:
    """A sample a minute, with these totals of dead letters."""
    return [
        Sample(at_ms=minute * STEP_MS, handlers={"shop.rare": msgspec.structs.replace(FIGURES, dead=one)})
        for minute, one in enumerate(dead)
    ]


@pytest.mark.parametrize(
    ("dead", "told", "minute"),
    [
        ([1, 1, 2, 4], ", 3 of them new within 15 min", 2),
        ([0, 40], ", 5 of them new within 15 min", 1),
        ([3, 4, 1, 2], ", 2 or more of them new within 15 min", 1),
        ([1, None, 2], ", 1 or more of them new within 15 min", 2),
    ],
    ids=["grown", "some were redriven", "a stream was forgotten", "a stream was unreadable"],
)
def test_new_dead_letters_are_the_growth_of_a_total(dead: Sequence[int | None], told: str, minute: int) -> None:
    samples = samples_of(dead)
    (found,) = letters_elsewhere(samples, {}, samples[-1])
    assert (found.what, found.since_ms) == (f"shop.rare: 5 dead letters{told}", minute * STEP_MS)


@pytest.mark.parametrize("dead", [[2], [2, 2], [2, 1], [2, None]])
def test_a_total_that_does_not_grow_has_no_new_dead_letters(dead: Sequence[int | None]) -> None:
    samples = samples_of(dead)
    assert list(letters_elsewhere(samples, {}, samples[-1])) == []


@pytest.mark.parametrize("others", [0, 2 * MOST_HANDLERS], ids=["room was left", "samples were full"])
def test_the_first_dead_letters_of_a_handler_that_the_history_left_out_are_new_if_there_was_room(others: int) -> None:
    left_out = Sample(at_ms=0, is_partial=True, handlers={f"a.{n}": FIGURES for n in range(others)})
    samples = [left_out, *samples_of([7, 7])[1:]]
    found = [(one.what, one.since_ms) for one in letters_elsewhere(samples, {}, samples[-1])]
    shown = [("shop.rare: 5 dead letters, 5 of them new within 15 min", STEP_MS)]
    assert [one for one in found if "shop.rare" in one[0]] == ([] if others else shown)
