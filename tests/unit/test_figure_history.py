"""The curves of a history: rates from totals, gaps that stay gaps, and charts without a style of their own."""

from dataclasses import replace

import msgspec
import pytest

from millstream.admin.figure_history import STEP_MS, HandlerSample, Sample
from millstream.admin.figure_points import FigurePoints, points_of
from millstream.services.console.charts import HEIGHT, WIDTH, Series, chart_of

pytestmark = [pytest.mark.cli]

ADDED = Series(name="added", value=lambda one: one.added, text=str)


def handler(total: int = 0, **other: int | None) -> HandlerSample:
    found = HandlerSample(
        streams=1, added=total, done=total, dead=total, lag=1, oldest_ms=5, dead_letters=total, stuck=0
    )
    return msgspec.structs.replace(found, **other)


def sample(minute: int, **handlers: HandlerSample) -> Sample:
    return Sample(at_ms=minute * STEP_MS, handlers={f"shop.{name}": one for name, one in handlers.items()})


def points(*samples: Sample, name: str | None = "shop.pay", minutes: int = 60, bucket: int = 1) -> FigurePoints:
    return points_of(samples, name, start_ms=0, end_ms=minutes * STEP_MS, bucket_ms=bucket * STEP_MS)


def rates(found: FigurePoints) -> list[list[float | None]]:
    return [[one.added for one in run] for run in found.runs]


def test_a_rate_is_the_growth_of_a_total_and_unknown_for_the_first_sample() -> None:
    found = points(sample(1, pay=handler(0)), sample(2, pay=handler(120)), minutes=3)
    assert rates(found) == [[None, 2.0]]
    assert [one.dead for one in found.runs[0]] == [None, 120.0]
    assert found.gaps == []


@pytest.mark.parametrize(
    "later",
    [handler(7), handler(600, streams=2), handler(600, added=None)],
    ids=["flushed", "another stream", "unreadable"],
)
def test_a_total_that_went_back_or_is_of_other_streams_gives_no_rate(later: HandlerSample) -> None:
    found = points(sample(1, pay=handler(600)), sample(2, pay=later))
    assert rates(found) == [[None, None]]


def test_time_without_a_sample_is_a_gap_and_gives_no_rate() -> None:
    found = points(*(sample(n, pay=handler(n * 60)) for n in (1, 2, 8, 9)), minutes=20)
    assert rates(found) == [[None, 1.0], [None, 1.0]]
    assert found.gaps == [(2 * STEP_MS, 8 * STEP_MS), (9 * STEP_MS, 20 * STEP_MS)]


def test_a_longer_step_that_was_announced_is_no_gap() -> None:
    some = [replace(sample(n, pay=handler(n * 60)), step_ms=10 * STEP_MS) for n in (5, 15, 25)]
    found = points(*some, minutes=30)
    assert rates(found) == [[None, 1.0, 1.0]]
    assert found.gaps == []


def test_a_handler_that_is_forgotten_has_a_gap_and_the_sums_go_on() -> None:
    some = (
        sample(1, pay=handler(60), bill=handler(60)),
        sample(2, bill=handler(120)),
        sample(3, pay=handler(0), bill=handler(180)),
    )
    assert rates(points(*some)) == [[None], [None]]
    assert rates(points(*some, name=None)) == [[None, 1.0, 1.0]]
    assert [one.dead_letters for one in points(*some, name=None).runs[0]] == [120, 120, 180]


def test_a_point_for_several_samples_has_the_mean_rate_and_the_largest_figures() -> None:
    some = [sample(n, pay=handler(total, lag=lag)) for n, total, lag in ((1, 0, 9), (2, 60, 3), (3, 240, 4))]
    found = points(*some, bucket=2)
    (run,) = found.runs
    assert [(one.at_ms // STEP_MS, one.added, one.lag) for one in run] == [(1, None, 9), (3, 2.0, 4)]
    assert found.newest is not None
    assert (found.newest.added, found.newest.lag) == (3.0, 4), "the newest sample, not its point"


def test_a_chart_has_no_part_over_a_gap_and_draws_a_single_point() -> None:
    found = points(*(sample(n, pay=handler(n * 60)) for n in (0, 1, 2, 8, 9)), minutes=10)
    chart = chart_of("rates", "Rates", found, (ADDED,))
    (curve,) = chart.curves
    assert curve.paths == ["60.0,4.0 120.0,4.0", "540.0,4.0 540.0,4.0"]
    assert chart.gaps == [("120.0", "360.0")]
    assert (curve.newest, curve.largest) == ("1.0", "1.0")


def test_a_chart_of_nothing_has_no_curve_and_one_gap() -> None:
    chart = chart_of("rates", "Rates", points(), (ADDED,))
    assert [one.paths for one in chart.curves] == [[]]
    assert chart.gaps == [("0.0", f"{WIDTH:.1f}")]
    assert HEIGHT < WIDTH
