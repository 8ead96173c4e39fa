"""Firing times: the instants at which a schedule fires, from a cron expression in a time zone, or from an interval."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Protocol
from zoneinfo import ZoneInfo

from millstream.errors import ConfigError
from millstream.handlers.cron_expression import CronExpression

_INTERVAL = re.compile(r"([0-9]{1,9})([smhd])")
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
LONGEST_MS = 366 * _UNIT_MS["d"]
"""The longest interval, and the longest delay of a timer."""

_DAY = timedelta(days=1)
_DAY_S = 86_400
_MOST_DAYS = 41 * 366
"""No expression that fires at all fires more rarely: 29 February on one weekday, past a year such as 2100."""


class FiringTimes(Protocol):
    """When a schedule fires, in Unix milliseconds."""

    def last_between(self, after_ms: int, until_ms: int, most: int) -> Sequence[int]:
        """Return the firings later than `after_ms`, up to and with `until_ms`, in order: the last `most` of them."""

    def count_between(self, after_ms: int, until_ms: int) -> int:
        """Return how many firings are later than `after_ms`, up to and with `until_ms`."""

    def next_after(self, after_ms: int) -> int:
        """Return the first firing later than `after_ms`."""

    def local_time(self, unix_ms: int) -> datetime:
        """Return a time in the schedule's time zone."""


class Interval:
    """Fires whenever the Unix time is a multiple of `period_ms` milliseconds, so all processes agree."""

    def __init__(self, period_ms: int) -> None:
        self._period_ms = period_ms

    def last_between(self, after_ms: int, until_ms: int, most: int) -> Sequence[int]:
        """See FiringTimes."""
        return range(self.next_after(after_ms), until_ms + 1, self._period_ms)[-most:]

    def count_between(self, after_ms: int, until_ms: int) -> int:
        """See FiringTimes."""
        return len(range(self.next_after(after_ms), until_ms + 1, self._period_ms))

    def next_after(self, after_ms: int) -> int:
        """See FiringTimes."""
        return (after_ms // self._period_ms + 1) * self._period_ms

    def local_time(self, unix_ms: int) -> datetime:
        """See FiringTimes."""
        return datetime.fromtimestamp(unix_ms / 1000, UTC)


class CronTimes:
    """Fires at the local times that a cron expression selects.

    A local time that a change of the clock skips fires at the first instant after the gap, together with others that
    fall there: once. A local time that occurs twice fires at its first occurrence.
    """

    def __init__(self, expression: CronExpression, zone: tzinfo) -> None:
        self._expression = expression
        self._zone = zone

    def last_between(self, after_ms: int, until_ms: int, most: int) -> Sequence[int]:
        """See FiringTimes. Its cost follows `most`, not the length of the time."""
        latest_first: list[int] = []
        # Where the clock has been set back over midnight, a firing of the next local date may lie before `until_ms`.
        day, first_day = self.local_time(until_ms).date() + _DAY, self.local_time(after_ms).date()
        before_ms = until_ms + 1
        while day >= first_day and len(latest_first) < most:
            firings = self._of_day(day)
            found = firings[bisect_right(firings, after_ms) : bisect_left(firings, before_ms)]
            if found:
                before_ms = found[0]
                latest_first += reversed(found)
            day -= _DAY
        return latest_first[:most][::-1]

    def count_between(self, after_ms: int, until_ms: int) -> int:
        """See FiringTimes."""
        count = 0
        for firings in self._days_after(after_ms):
            count += bisect_right(firings, until_ms)
            if firings[-1] > until_ms:
                break
        return count

    def next_after(self, after_ms: int) -> int:
        """See FiringTimes. Raises ConfigError if it never fires."""
        found = next(self._days_after(after_ms), None)
        if found is None:
            raise ConfigError("it never fires: no month that it names has such a day")
        return found[0]

    def local_time(self, unix_ms: int) -> datetime:
        """See FiringTimes."""
        return datetime.fromtimestamp(unix_ms / 1000, self._zone)

    def _days_after(self, after_ms: int) -> Iterator[Sequence[int]]:
        """Yield the firings later than `after_ms`, of one day after the other that has any."""
        day, days_without = self.local_time(after_ms).date(), 0
        while days_without < _MOST_DAYS:
            days_without += 1
            firings = self._of_day(day)
            firings = firings[bisect_right(firings, after_ms) :]
            if firings:
                after_ms, days_without = firings[-1], 0
                yield firings
            day += _DAY

    def _of_day(self, day: date) -> Sequence[int]:
        """Return the firings of a local date, in order."""
        if not self._expression.selects(day):
            return ()
        begin_s, end_s = (self._unix_s(datetime.combine(one, time())) for one in (day, day + _DAY))
        if end_s - begin_s == _DAY_S:  # the clock is not changed: no need of the zone's data for each firing
            return [(begin_s + 3_600 * hour + 60 * minute) * 1_000 for hour, minute in self._expression.times]
        times = (datetime.combine(day, time(hour, minute)) for hour, minute in self._expression.times)
        return sorted({self._unix_s(one) * 1_000 for one in times})

    def _unix_s(self, local: datetime) -> int:
        """Return the first occurrence of a local time, or the first second after the gap that it falls in."""
        first = int(local.replace(tzinfo=self._zone).timestamp())
        if datetime.fromtimestamp(first, self._zone).replace(tzinfo=None) == local:
            return first
        # In a gap, fold=0 takes the offset before the change, and so lies after it; fold=1 lies before (PEP 495).
        before, after = int(local.replace(tzinfo=self._zone, fold=1).timestamp()), first
        offset = self._offset(after)
        while after - before > 1:
            middle = (before + after) // 2
            if self._offset(middle) == offset:
                after = middle
            else:
                before = middle
        return after

    def _offset(self, unix_s: int) -> timedelta | None:
        return datetime.fromtimestamp(unix_s, self._zone).utcoffset()


def parse_firing_times(when: str, timezone: str | None) -> FiringTimes:
    """Return the firing times of a cron expression in a time zone (None: UTC), or of an interval such as "30s".

    Raises ConfigError with one line on what to change.
    """
    period_ms = parse_interval_ms(when)
    if period_ms is None:
        times = CronTimes(CronExpression.parse(when), _zone("UTC" if timezone is None else timezone))
        times.next_after(0)
        return times
    if timezone is not None:
        raise ConfigError("an interval has no time zone: leave timezone out")
    if not 0 < period_ms <= LONGEST_MS:
        raise ConfigError("an interval is 1s to 366d")
    return Interval(period_ms)


def parse_interval_ms(text: str) -> int | None:
    """Return an interval such as "30s", "5m", "2h" or "7d" in milliseconds; None if it is none."""
    found = _INTERVAL.fullmatch(text.strip())
    return None if found is None else int(found[1]) * _UNIT_MS[found[2]]


def _zone(name: str) -> tzinfo:
    if name == "UTC":  # needs no data of the system
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:  # as zoneinfo raises for unknown, malformed and folders' names
        raise ConfigError(
            f"unknown time zone {name!r}; use a name such as 'Europe/Berlin', and where the system has no time zones, "
            "install the package tzdata"
        ) from error
