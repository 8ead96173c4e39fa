"""Cron expression: the five standard fields, parsed strictly (crontab of POSIX, with the steps and names of Vixie cron)."""

import re
from collections.abc import Sequence
from datetime import date

import msgspec

from millstream.errors import ConfigError

_PART = re.compile(r"(\*|([0-9A-Za-z]+)(?:-([0-9A-Za-z]+))?)(?:/([0-9]+))?")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_SUNDAY = 7


class _Field(msgspec.Struct, frozen=True, kw_only=True):
    """One of the five fields: its name, its least and greatest value, and the names of values from the least on."""

    name: str
    least: int
    most: int
    names: Sequence[str] = ()

    def values(self, text: str) -> frozenset[int]:
        """Return the values that `text` selects. Raises ConfigError."""
        return frozenset(value for part in text.split(",") for value in self._range(part))

    def _range(self, part: str) -> range:
        found = _PART.fullmatch(part)
        if found is None:
            raise ConfigError(f"the {self.name} {part!r} is none of: *, a value, a range 1-5, a step */2 or 1-9/2")
        whole, first, last, step = found.groups()
        if step is not None and (int(step) < 1 or (whole != "*" and last is None)):
            raise ConfigError(f"the {self.name} {part!r}: a step is at least 1, of a range or of *, as in */{step}")
        if whole == "*":
            return range(self.least, self.most + 1, int(step or 1))
        low = self._value(first)
        high = low if last is None else self._value(last)
        if high == 0 < low and self.most == _SUNDAY:  # "fri-sun"
            high = _SUNDAY
        if high < low:
            raise ConfigError(f"the {self.name} {part!r}: the range ends before it begins; write two, with a comma")
        return range(low, high + 1, int(step or 1))

    def _value(self, text: str) -> int:
        if text.lower() in self.names:
            return self.least + self.names.index(text.lower())
        if not text.isdecimal() or not self.least <= int(text) <= self.most:
            names = f", or {self.names[0]} to {self.names[-1]}" if self.names else ""
            raise ConfigError(f"the {self.name} {text!r} must be {self.least} to {self.most}{names}")
        return int(text)


_FIELDS = (
    _Field(name="minute", least=0, most=59),
    _Field(name="hour", least=0, most=23),
    _Field(name="day of the month", least=1, most=31),
    _Field(name="month", least=1, most=12, names=_MONTHS),
    _Field(name="day of the week", least=0, most=_SUNDAY, names=_WEEKDAYS),
)


class CronExpression(msgspec.Struct, frozen=True, kw_only=True):
    """The values that an expression selects.

    * `times`: hours and minutes of the selected times of a day, in order
    * `weekdays`: 0 is Sunday
    * `either_day`: both days are restricted, so a date needs to match one of them only, as in every cron; a field that
      begins with `*` restricts nothing
    """

    times: tuple[tuple[int, int], ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either_day: bool

    @classmethod
    def parse(cls, text: str) -> "CronExpression":
        """Parse `minute hour day-of-month month day-of-week`. Raises ConfigError with one line on what to change."""
        parts = text.split()
        if len(parts) != len(_FIELDS):
            raise ConfigError(
                f"it has {len(parts)} fields of 5: minute, hour, day of the month, month, day of the week, as in "
                '"0 6 * * mon-fri"; an interval is "30s", "5m", "2h" or "1d"'
            )
        minutes, hours, days, months, weekdays = (
            field.values(part) for field, part in zip(_FIELDS, parts, strict=True)
        )
        return cls(
            times=tuple((hour, minute) for hour in sorted(hours) for minute in sorted(minutes)),
            days=days,
            months=months,
            weekdays=frozenset(weekday % _SUNDAY for weekday in weekdays),
            either_day=not parts[2].startswith("*") and not parts[4].startswith("*"),
        )

    def selects(self, day: date) -> bool:
        """True if it selects times of the date `day`."""
        if day.month not in self.months:
            return False
        of_month, of_week = day.day in self.days, day.isoweekday() % _SUNDAY in self.weekdays
        return of_month or of_week if self.either_day else of_month and of_week
