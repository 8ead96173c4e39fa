"""Schedules: what expressions select, what changes of the clock do, and what is refused when an app is loaded."""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import App
from millstream.errors import ConfigError
from millstream.handlers.cron_expression import CronExpression
from millstream.handlers.firing_times import CronTimes, parse_firing_times
from millstream.producer.schedule_loop import LATE_MS, MOST_MISSED

pytestmark = [pytest.mark.worker]

BERLIN = "Europe/Berlin"
DAY_MS = 86_400_000
ANY = 1_000_000
CHANGES: Mapping[str, tuple[str, ...]] = {
    BERLIN: ("2026-03-29", "2026-10-25"),
    "America/Sao_Paulo": ("2018-11-04", "2018-02-18"),  # at midnight
    "America/St_Johns": ("2006-04-02", "2006-10-29"),  # a minute after it
    "Australia/Lord_Howe": ("2026-10-04", "2026-04-05"),  # by half an hour
    "Pacific/Apia": ("2011-12-31", "2011-09-24"),  # by a day
}
"""Days on which the clock of a zone is set forward or back."""
ELEMENTS = (
    ("*", "0", "59", "*/15", "10-30/7", "5,50"),
    ("*", "0", "23", "*/6", "8-17", "1,2"),
    ("*", "1", "31", "*/10", "10-12", "13,28"),
    ("*", "1", "12", "*/5", "jan-mar", "2,Dec"),
    ("*", "0", "7", "*/3", "mon-fri", "fri-sun", "sat,tue"),
)


def unix_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1_000)


def fired(when: str, after: str, until: str, timezone: str | None = None) -> list[str]:
    """The firings between two times of UTC, as times of UTC."""
    found = parse_firing_times(when, timezone).last_between(unix_ms(after), unix_ms(until), ANY)
    return [datetime.fromtimestamp(one / 1_000, UTC).strftime("%m-%d %H:%M") for one in found]


@given(text=st.tuples(*map(st.sampled_from, ELEMENTS)).map(" ".join), day=st.integers(0, 1_500))
def test_an_expression_fires_at_exactly_the_minutes_that_it_selects(text: str, day: int) -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=day)
    expression = CronExpression.parse(text)
    minutes = [begin + timedelta(minutes=n) for n in range(2 * 1_440)]
    selected = [m for m in minutes if expression.selects(m.date()) and (m.hour, m.minute) in expression.times]
    begin_ms = int(begin.timestamp() * 1_000)
    times = parse_firing_times(text, None)
    found = times.last_between(begin_ms - 1, begin_ms + 2 * DAY_MS - 1, ANY)
    assert list(found) == [int(m.timestamp() * 1_000) for m in selected]
    assert times.next_after(begin_ms - 1) == next(iter(found), times.next_after(begin_ms + 2 * DAY_MS - 1))


def selected_by_clock(text: str, zone: str, begin: datetime, minutes: int) -> Iterator[int]:
    """Watch the clock of a zone minute by minute: it fires when the clock first passes times that are selected."""
    expression = CronExpression.parse(text)
    shown = (begin - timedelta(minutes=1)).astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    for n in range(minutes):
        moment = begin + timedelta(minutes=n)
        local = moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
        passed = [shown + timedelta(minutes=m + 1) for m in range(int((local - shown).total_seconds()) // 60)]
        if any(expression.selects(one.date()) and (one.hour, one.minute) in expression.times for one in passed):
            yield int(moment.timestamp() * 1_000)
        shown = max(shown, local)


@given(
    time=st.tuples(*map(st.sampled_from, ELEMENTS[:2])).map(" ".join),
    days=st.sampled_from(["* * *", "*/2 * *", "* * sat,sun"]),
    change=st.sampled_from([(zone, day) for zone, days in CHANGES.items() for day in days]),
    begin_minutes=st.integers(-2 * 1_440, -1_440),
    minutes=st.integers(1_440, 3 * 1_440),
    most=st.sampled_from([1, 100, ANY]),
)
def test_around_a_change_of_the_clock_it_fires_when_the_clock_first_passes_a_selected_time(
    time: str, days: str, change: tuple[str, str], begin_minutes: int, minutes: int, most: int
) -> None:
    text, (zone, day) = f"{time} {days}", change
    begin = datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(minutes=begin_minutes)
    expected = list(selected_by_clock(text, zone, begin, minutes))
    times, begin_ms = parse_firing_times(text, zone), int(begin.timestamp() * 1_000)
    span = (begin_ms - 1, begin_ms + minutes * 60_000 - 1)
    assert list(times.last_between(*span, most)) == expected[-most:]
    assert times.count_between(*span) == len(expected)
    assert not expected or times.next_after(begin_ms - 1) == expected[0]


class CountedZone(tzinfo):
    """Berlin, with the number of conversions."""

    def __init__(self) -> None:
        self.conversions = 0
        self._zone = ZoneInfo(BERLIN)

    def utcoffset(self, moment: datetime | None) -> timedelta | None:
        self.conversions += 1
        return None if moment is None else self._zone.utcoffset(moment.replace(tzinfo=self._zone))

    def dst(self, moment: datetime | None) -> timedelta | None:
        return None if moment is None else self._zone.dst(moment.replace(tzinfo=self._zone))

    def tzname(self, moment: datetime | None) -> str:
        return BERLIN

    def fromutc(self, moment: datetime) -> datetime:
        self.conversions += 1
        return self._zone.fromutc(moment.replace(tzinfo=self._zone)).replace(tzinfo=self)


@pytest.mark.parametrize("most", [1, MOST_MISSED])
def test_the_last_firings_of_a_long_downtime_cost_no_more_than_those_of_a_short_one(most: int) -> None:
    conversions = []
    for days in (2, 365):
        zone = CountedZone()
        until_ms = unix_ms("2026-09-01T12:00")
        times = CronTimes(CronExpression.parse("* * * * *"), zone)
        assert len(times.last_between(until_ms - days * DAY_MS, until_ms, most)) == most
        conversions.append(zone.conversions)
    assert conversions[0] == conversions[1]


def test_the_firings_of_a_year_are_counted_without_a_conversion_for_each() -> None:
    zone = CountedZone()
    times = CronTimes(CronExpression.parse("* * * * *"), zone)
    count = times.count_between(unix_ms("2025-09-01T12:00"), unix_ms("2026-09-01T12:00"))
    assert count == 365 * 1_440 - 60, "less the hour that was repeated: what it skipped fires once"
    assert zone.conversions < count / 20


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("0 6 * * mon-fri", ["11-02", "11-03", "11-04", "11-05", "11-06"]),
        ("0 6 * * fri-sun", ["11-01", "11-06", "11-07"]),
        ("0 6 * * 7", ["11-01"]),
        ("0 6 3 * *", ["11-03"]),
        ("0 6 3 * wed", ["11-03", "11-04"]),
        ("0 6 */2 * wed", []),
        ("0 6 2-6/2 nov *", ["11-02", "11-04", "11-06"]),
        ("0 6 * dec *", []),
    ],
)
def test_days_are_selected_as_in_every_cron(text: str, days: list[str]) -> None:
    assert fired(text, "2026-11-01", "2026-11-08") == [f"{day} 06:00" for day in days]


def test_a_rare_day_is_found_and_one_that_never_comes_is_an_error() -> None:
    leap = parse_firing_times("0 0 29 2 *", None)
    assert leap.next_after(unix_ms("2096-03-01")) == unix_ms("2104-02-29")
    with pytest.raises(ConfigError, match="never fires"):
        parse_firing_times("0 0 30 2 *", None)


def test_a_local_time_that_does_not_exist_fires_once_at_the_first_instant_after_the_gap() -> None:
    assert fired("30 2 * * *", "2026-03-28", "2026-03-30", BERLIN) == ["03-28 01:30", "03-29 01:00"]
    assert fired("*/20 2,3 * * *", "2026-03-29", "2026-03-29T02:00", BERLIN) == [
        "03-29 01:00",
        "03-29 01:20",
        "03-29 01:40",
    ]


def test_a_day_that_a_zone_skips_fires_once_at_the_next_midnight() -> None:
    assert fired("0 6,18 * * *", "2011-12-29T10:00", "2011-12-31T10:00", "Pacific/Apia") == [
        "12-29 16:00",
        "12-30 04:00",
        "12-30 10:00",
        "12-30 16:00",
        "12-31 04:00",
    ]


def test_a_local_time_that_occurs_twice_fires_at_its_first_occurrence() -> None:
    assert fired("30 2 * * *", "2026-10-24T12:00", "2026-10-26", BERLIN) == ["10-25 00:30"]
    assert fired("0,30 1-3 * * *", "2026-10-24T22:59", "2026-10-25T02:30", BERLIN) == [
        "10-24 23:00",
        "10-24 23:30",
        "10-25 00:00",
        "10-25 00:30",
        "10-25 02:00",
        "10-25 02:30",
    ]


def test_a_firing_of_the_next_date_is_found_after_the_clock_was_set_back_over_midnight() -> None:
    assert fired("0 0 * * *", "2006-10-29T02:00", "2006-10-29T03:00", "America/St_Johns") == ["10-29 02:30"]


def test_a_firing_in_the_repeated_hour_is_followed_by_the_next_day() -> None:
    times = parse_firing_times("30 2 * * *", BERLIN)
    for after in ("2026-10-25T00:30", "2026-10-25T01:00", "2026-10-25T01:30"):
        assert times.next_after(unix_ms(after)) == unix_ms("2026-10-26T01:30")


def test_intervals_are_multiples_of_the_unix_time_whatever_the_clocks_of_a_zone_do() -> None:
    times = parse_firing_times("30s", None)
    assert list(times.last_between(59_999, 120_000, ANY)) == [60_000, 90_000, 120_000]
    assert list(times.last_between(59_999, 120_000, 2)) == [90_000, 120_000]
    assert times.next_after(60_000) == 90_000
    assert parse_firing_times("1h", None).count_between(unix_ms("2026-10-24"), unix_ms("2026-10-26")) == 48
    assert parse_firing_times("2d", None).next_after(0) == 2 * DAY_MS


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"when": "0 6 * *"}, "4 fields of 5"),
        ({"when": "@daily"}, "1 fields of 5"),
        ({"when": "60 6 * * *"}, "minute '60' must be 0 to 59"),
        ({"when": "0 6 * * someday"}, "day of the week 'someday' must be 0 to 7, or sun to sat"),
        ({"when": "0 6 0 * *"}, "day of the month '0' must be 1 to 31"),
        ({"when": "0 22-2 * * *"}, "hour '22-2': the range ends before it begins"),
        ({"when": "*/0 * * * *"}, "a step is at least 1"),
        ({"when": "5/15 * * * *"}, "a step is at least 1, of a range"),
        ({"when": "0 6 ? * *"}, r"day of the month '\?' is none of"),
        ({"when": "0 6,, * * *"}, "hour '' is none of"),
        ({"when": "0s"}, "an interval is 1s to 366d"),
        ({"when": "367d"}, "an interval is 1s to 366d"),
        ({"when": "30s", "timezone": "UTC"}, "an interval has no time zone"),
        ({"timezone": "Europe/Berln"}, "unknown time zone 'Europe/Berln'"),
        ({"timezone": "../etc/passwd"}, "unknown time zone"),
        ({"timezone": "Europe"}, "unknown time zone"),
        ({"timezone": ""}, "unknown time zone"),
        ({"missed": "never"}, "missed must be one of once, all, skip"),
        ({"stream": ""}, "stream must be the name of one stream"),
        ({"stream": "reports*"}, "stream must be the name of one stream"),
        ({"name": "a b"}, "schedule name 'a b' must be"),
    ],
)
def test_a_bad_schedule_is_an_error_when_the_app_is_loaded(options: dict[str, Any], match: str) -> None:
    schedule = {"when": "0 6 * * *", "stream": "reports", "name": "report", **options}
    with pytest.raises(ConfigError, match=match):
        App("shop").every(**schedule)(lambda: None)


async def coroutine() -> None:
    """Not a plain function."""


def generator() -> Any:
    yield {}


async def async_generator() -> Any:
    yield {}


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (coroutine, "neither async nor a generator"),
        (generator, "neither async"),
        (async_generator, "neither async"),
        (lambda *, time: None, "by position"),
        (lambda a, b: None, "it has 2 parameters"),
    ],
)
def test_a_function_that_cannot_make_a_message_is_refused(function: Callable[..., Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        App("shop").every("5m", stream="reports", name="report")(function)


def test_a_function_may_take_the_time_of_its_firing_in_the_zone_of_the_schedule() -> None:
    app = App("shop")
    app.every("0 6 * * *", stream="reports", timezone=BERLIN, name="with-time")(lambda time: {"at": time.isoformat()})
    app.every("30s", stream="reports", name="without")(lambda: {"n": 1})
    summer = unix_ms("2026-07-01T04:00")
    assert app.schedules["with-time"].message(summer) == {"at": "2026-07-01T06:00:00+02:00"}
    assert app.schedules["without"].message(summer) == {"n": 1}


def test_two_schedules_of_one_name_are_an_error_and_a_part_of_an_app_keeps_its_schedules() -> None:
    app = App("shop")
    app.handler("orders", name="work")(lambda message: None)
    app.every("5m", stream="reports", name="report")(lambda: None)
    with pytest.raises(ConfigError, match="two schedules named 'report'"):
        app.every("1h", stream="reports", name="report")(lambda: None)
    assert list(app.only(["work"]).schedules) == ["report"]


def test_the_bounds_of_missed_firings_that_are_documented_are_those_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    for text in (" ".join((App.every.__doc__ or "").split()), page):
        assert f"at most the last {MOST_MISSED:,}" in text
        assert f"at most {LATE_MS // 1_000} seconds" in text
