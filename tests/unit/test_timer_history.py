"""The history checker finds each timer that is lost, doubled, early, late, overtaken or not canceled, and no other."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError
from millstream.testing.history import Event, Fault, Kind, Report, check

pytestmark = [pytest.mark.worker, pytest.mark.keys]


def event(kind: Kind, number: int, at: float, **more: Any) -> Event:
    options = {"key": b"k", "timer": "t", **more}
    return Event(kind=kind, stream="s", id=f"5-{number}", handler="h", at=at, **options)


def is_set(number: int, at: float, due: float, **more: Any) -> Event:
    return event("timer_set", number, at, due=due, **more)


def canceled(number: int, at: float, **more: Any) -> Event:
    return event("timer_canceled", number, at, **more)


def came(number: int, at: float, **more: Any) -> Event:
    return event("timer_came", number, at, **more)


def found(report: Report) -> dict[str, list[tuple[str, ...]]]:
    return {fault: [one.ids for one in report.findings(fault)] for fault in get_args(Fault) if report.findings(fault)}


def test_timers_that_come_once_and_in_time_are_counted_and_no_finding() -> None:
    log = [is_set(1, 10, 30), is_set(2, 11, 20, timer="u"), canceled(3, 12, timer="v"), came(2, 20, timer="u")]
    report = check([*log, came(1, 30)], late_ms=0)
    assert report.ok
    assert report.summary().endswith("0 retries, 2 timers set, 1 timers canceled, 2 timers came)")
    assert report.as_dict()["timers_came"] == 2


def test_a_timer_that_has_not_come_is_lost_once_the_stream_is_drained() -> None:
    assert found(check([is_set(1, 10, 30)])) == {"lost": [("5-1",)]}
    assert check([is_set(1, 10, 30)], drained=False).ok


def test_a_timer_that_comes_before_it_is_due_is_early() -> None:
    (finding,) = check([is_set(1, 10, 30), came(1, 29)]).early
    assert str(finding) == (
        "early: h s 5-1 of key k: expected the message of timer t at 30 or later, found it came at 29"
    )


def test_a_timer_is_late_only_beyond_what_is_allowed() -> None:
    log = [is_set(1, 10, 30), came(1, 81)]
    assert check(log).ok
    assert check(log, late_ms=51).ok
    assert found(check(log, late_ms=50)) == {"late": [("5-1",)]}


def test_a_timer_that_comes_twice_is_duplicated() -> None:
    assert found(check([is_set(1, 10, 30), came(1, 30), came(1, 31)])) == {"duplicated": [("5-1",)]}


@pytest.mark.parametrize("other", [{"key": b"other"}, {"timer": "other"}, {"id": "5-2"}])
def test_a_timer_that_was_never_set_is_unexpected(other: dict[str, Any]) -> None:
    log = [is_set(1, 10, 30), came(1, 30)]
    assert set(found(check([*log, replace(came(1, 31), **other)]))) == {"unexpected"}


@pytest.mark.parametrize("change", [canceled(2, 20), is_set(2, 20, 90)], ids=["canceled", "replaced"])
def test_a_timer_that_comes_after_it_was_canceled_or_replaced_is_found(change: Event) -> None:
    log = [is_set(1, 10, 15), change, *([came(2, 90)] if change.kind == "timer_set" else [])]
    assert check(log).ok
    assert found(check([*log, came(1, 21)])) == {"not_canceled": [("5-1",)]}
    assert check([*log, came(1, 19)]).ok
    assert check([*log, came(1, 20)]).ok, "in the same millisecond it may have come before"


def test_a_timer_that_is_set_again_after_a_cancellation_comes() -> None:
    log = [is_set(1, 10, 30), canceled(2, 20), is_set(3, 25, 40)]
    assert found(check(log)) == {"lost": [("5-3",)]}
    assert check([*log, came(3, 40)]).ok


def test_of_the_changes_of_one_commit_the_last_one_counts() -> None:
    assert check([canceled(1, 10), is_set(1, 10, 30), came(1, 30)]).ok
    assert check([is_set(1, 10, 30), canceled(1, 10)]).ok
    assert found(check([is_set(1, 10, 30), canceled(1, 10), came(1, 30)])) == {"unexpected": [("5-1",)]}


def test_a_timer_that_one_overtakes_that_was_set_later_with_the_same_delay_or_a_longer_one_is_out_of_order() -> None:
    log = [is_set(1, 10, 30), is_set(2, 20, 40, timer="u"), came(2, 50, timer="u")]
    assert found(check([*log, came(1, 51)])) == {"out_of_order": [("5-1", "5-2")]}
    assert found(check([*log, came(1, 50)])) == {"out_of_order": [("5-1", "5-2")]}, "by the order given"
    assert found(check(log)) == {"lost": [("5-1",)]}
    assert found(check(log, drained=False)) == {"out_of_order": [("5-1", "5-2")]}


def test_timers_that_are_set_in_the_same_millisecond_come_in_the_order_given() -> None:
    log = [is_set(1, 10, 30), is_set(2, 10, 30, timer="u"), came(1, 30), came(2, 30, timer="u")]
    assert check(log).ok
    assert found(check([*log[1::-1], *log[2:]])) == {"out_of_order": [("5-2", "5-1")]}


@pytest.mark.parametrize("other", [{"key": b"other"}, {"due": 29}, {"at": 9, "due": 59}, {"at": 9, "due": 29}])
def test_timers_of_other_keys_those_set_earlier_and_those_with_a_shorter_delay_may_overtake(
    other: dict[str, Any],
) -> None:
    log = [is_set(1, 10, 30), came(1, 60)]
    key = {"key": other.get("key", b"k")}
    assert check([*log, replace(is_set(2, 10, 30, timer="u"), **other), came(2, 59, timer="u", **key)]).ok
    assert not check([*log, is_set(2, 10, 30, timer="u"), came(2, 59, timer="u")]).ok


@pytest.mark.parametrize(
    "broken",
    [replace(is_set(1, 10, 30), due=None), replace(is_set(1, 10, 30), at=None), replace(came(1, 30), at=None)],
)
def test_an_event_of_a_timer_without_its_times_is_refused(broken: Event) -> None:
    with pytest.raises(ConfigError, match=r"5-1.*give it `"):
        check([broken])


@given(seed=st.integers(0, 2**32))
def test_overtaken_timers_are_those_that_a_comparison_of_each_with_each_finds(seed: int) -> None:
    rng = Random(seed)
    sets = [is_set(n, n // 3, n // 3 + rng.randrange(1, 9), timer=f"t{n}") for n in range(rng.randrange(1, 12))]
    arrivals = [came(n, rng.randrange(40, 60), timer=f"t{n}") for n in range(len(sets)) if rng.random() < 0.9]
    rng.shuffle(arrivals)
    expected = overtaken(sets, sorted(arrivals, key=lambda one: one.at or 0))
    assert {ids[0] for ids in found(check([*sets, *arrivals])).get("out_of_order", [])} == expected


def overtaken(sets: Sequence[Event], arrivals: Sequence[Event]) -> set[str]:
    """Those that came after one that was set later, with the same delay or a longer one."""
    place = {one.id: at for at, one in enumerate(arrivals)}
    delay = {one.id: (one.due or 0) - (one.at or 0) for one in sets}
    pairs = combinations([one.id for one in sets if one.id in place], 2)
    return {a for a, b in pairs if place[b] < place[a] and delay[b] >= delay[a]}


def test_a_long_history_of_timers_is_checked_in_linear_time() -> None:
    sets = [is_set(n, n, n + 100_000, timer=f"t{n}") for n in range(20_000)]
    arrivals = [came(n, n + 100_000, timer=f"t{n}") for n in range(20_000)]
    assert check([*sets, *arrivals]).ok
    late = [replace(one, at=300_000.0) for one in arrivals[::-1]]
    assert len(check([*sets, *late]).out_of_order) == 19_999
