"""The history checker finds the runs that a limit should not have permitted, and no others."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import Limit
from millstream.errors import ConfigError
from millstream.testing.history import Event, Report, check

pytestmark = [pytest.mark.worker, pytest.mark.keys]

TWO = {"h": Limit(at_once=2)}
RATE = {"h": Limit(per="tenant", rate="10/s")}
"""A message takes 100 ms of it."""


def run(number: int, begin: float, end: float | None, **more: Any) -> list[Event]:
    options = {"limited": "a", "worker": f"w{number}", **more}
    one = Event(kind="started", stream="s", id=f"5-{number}", handler="h", at=begin, **options)
    return [one] if end is None else [one, replace(one, kind="ended", at=end, limited="")]


def found(report: Report) -> list[tuple[str, ...]]:
    assert len(report.over_limit) == sum(len(report.findings(f)) for f in ("over_limit", "lost", "unexpected"))
    return [one.ids for one in report.over_limit]


def begun(*times: float, **more: Any) -> list[Event]:
    return [one for number, at in enumerate(times) for one in run(number, at, None, **more)]


def test_more_runs_at_once_than_the_limit_are_found() -> None:
    log = [*run(1, 0, 10), *run(2, 5, 12), *run(3, 9, 11)]
    (finding,) = check(log, limits=TWO).over_limit
    assert (finding.ids[0], {*finding.ids[1:]}) == ("5-3", {"5-1", "5-2"})
    assert str(finding).endswith("expected at most 2 runs of a at once, found 3")
    assert check(log).over_limit == []
    assert check(log, limits={"other": Limit(at_once=1)}).over_limit == []


def test_runs_that_only_touch_are_not_at_once_and_the_most_is_counted() -> None:
    report = check([*run(1, 0, 10), *run(2, 5, 12), *run(3, 10, 11)], limits=TWO)
    assert report.over_limit == []
    assert report.summary().endswith(", 2 most at once)")


@pytest.mark.parametrize("other", [{"limited": "b"}, {"stream": "s2"}, {"handler": "g"}])
def test_each_value_stream_and_handler_has_a_limit_of_its_own(other: dict[str, Any]) -> None:
    third = [replace(one, **other) for one in run(3, 6, 7)]
    assert found(check([*run(1, 0, 10), *run(2, 5, 12), *third], limits={**TWO, "g": TWO["h"]})) == []


def test_a_run_that_was_killed_counts_at_its_start_and_up_to_the_end_that_is_recorded_for_it() -> None:
    log = [*run(1, 0, 10), *run(2, 0, 10), *run(3, 5, None)]
    assert [ids[0] for ids in found(check(log, limits=TWO))] == ["5-3"]
    log = [*run(1, 0, None), *run(2, 0, None), *run(3, 5, 6)]
    assert found(check(log, limits=TWO)) == []
    log = [*run(1, 0, 7), *run(2, 0, 7), *run(3, 5, 6)]
    assert [ids[0] for ids in found(check(log, limits=TWO))] == ["5-3"]


def test_a_run_in_which_its_entry_began_again_had_lost_its_lease_and_does_not_count() -> None:
    again = run(1, 4, 8, worker="other")
    log = [*run(1, 0, 10), *again, *run(2, 5, 12)]
    assert found(check(log, limits=TWO)) == []
    assert [ids[0] for ids in found(check([*log, *run(3, 6, 7)], limits=TWO))] == ["5-3"]


def test_runs_without_times_are_ordered_as_they_are_given() -> None:
    log = [*run(1, 0, 10)[:1], *run(2, 0, 10)[:1], *run(1, 0, 10)[1:], *run(3, 0, 10)]
    assert found(check([replace(one, at=None) for one in log], limits=TWO)) == []
    assert found(check([replace(one, at=None) for one in log], limits={"h": Limit(at_once=1)})) != []


def test_a_rate_may_be_exceeded_by_one_message_and_what_is_allowed_and_no_more() -> None:
    assert found(check(begun(0, 100, 200, 300), limits=RATE)) == []
    assert found(check(begun(0, 0, 100, 200), limits=RATE)) == []
    assert found(check(begun(0, 0, 99), limits=RATE)) == [("5-2", "5-0")]
    assert found(check(begun(0, 50, 150), limits=RATE, rate_excess_ms=0)) == [("5-1", "5-0"), ("5-2", "5-0")]
    assert found(check(begun(0, 100, 200), limits=RATE, rate_excess_ms=0)) == []


def test_a_time_without_messages_is_not_caught_up_on() -> None:
    assert found(check(begun(0, 5_000, 5_000, 5_100), limits=RATE)) == []
    assert found(check(begun(0, 5_000, 5_000, 5_050, 5_200), limits=RATE)) == [("5-3", "5-1")]


def test_the_cost_of_each_message_counts() -> None:
    assert found(check(begun(0, 200, 400, cost=2), limits=RATE, rate_excess_ms=0)) == []
    assert found(check(begun(0, 200, 399, cost=2), limits=RATE, rate_excess_ms=0)) == [("5-2", "5-1")]
    assert found(check(begun(0, 0, 0, cost=0), limits=RATE, rate_excess_ms=0)) == []


def test_a_run_was_permitted_at_any_time_since_it_was_asked_for() -> None:
    late = [replace(begun(90)[0], asked=0.0), *run(1, 100, None), *run(2, 200, None)]
    assert found(check(late, limits=RATE, rate_excess_ms=0)) == []
    certain = [replace(one, asked=one.at) for one in late]
    assert found(check(certain, limits=RATE, rate_excess_ms=0)) == [("5-1", "5-0"), ("5-2", "5-0")]


def test_a_rate_needs_times() -> None:
    with pytest.raises(ConfigError, match="5-0 has no time; give it `at`"):
        check([replace(one, at=None) for one in begun(0, 1)], limits=RATE)


@given(seed=st.integers(0, 2**32))
def test_what_the_algorithm_permits_is_no_finding_however_late_it_was_recorded(seed: int) -> None:
    rng = Random(seed)
    free_at, now, log = 0.0, 1_000.0, list[Event]()
    for number in range(40):
        now += rng.choice((0, 1, 30, 100, 400))
        now = max(now, free_at)
        cost = rng.choice((0.5, 1, 1, 2))
        free_at = max(free_at, now - rng.choice((0, 100))) + cost * 100
        log += [
            replace(one, asked=now - rng.random() * 50, cost=cost) for one in run(number, now + rng.random() * 50, None)
        ]
    rng.shuffle(log)
    assert found(check(log, limits=RATE)) == []


def test_twice_the_rate_is_found_although_each_permit_is_known_to_50_ms_only() -> None:
    rng = Random(1)
    log = [
        replace(one, asked=number * 50 - rng.random() * 50)
        for number in range(40)
        for one in run(number, number * 50 + rng.random() * 50, None)
    ]
    assert len(found(check(log, limits=RATE))) > 30


def test_a_long_history_of_a_rate_is_checked_in_linear_time() -> None:
    assert found(check(begun(*range(0, 2_000_000, 100)), limits=RATE)) == []
    slowly = [replace(one, asked=float(20_000 - number)) for number, one in enumerate(begun(*range(0, 2_000_000, 100)))]
    assert check(slowly, limits=RATE).started == 20_000
