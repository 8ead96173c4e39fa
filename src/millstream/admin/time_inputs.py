"""Durations, moments and places of a stream as operators write them."""

import math
import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from millstream.errors import ConfigError

if TYPE_CHECKING:  # every command has a duration, few have an id
    from millstream.model import EntryId

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_ID = re.compile(r"(?!\d{8}$)\d+(-\d+)?")  # eight digits alone are a date, like 20130131


class Duration(float):
    """A time in seconds, given as `500ms`, `30s`, `5m`, `2h` or `7d`, or as a plain number of seconds."""

    def __new__(cls, text: str | float) -> "Duration":
        """Raises ConfigError for what is no duration."""
        found = _DURATION.fullmatch(text) if isinstance(text, str) else None
        try:
            seconds = float(found[1]) * _UNITS_S[found[2]] if found else float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"{text!r} is not a duration: write 500ms, 30s, 5m, 2h or 7d, or a number of seconds")
        return super().__new__(cls, seconds)

    def __str__(self) -> str:
        """As a user writes it."""
        if not self:
            return "0s"
        unit = next((name for name in ("d", "h", "m", "s") if not self % _UNITS_S[name]), "ms")
        return f"{self / _UNITS_S[unit]:g}{unit}"

    @property
    def ms(self) -> int:
        """In milliseconds."""
        return round(self * 1000)


def parse_time_ms(text: str) -> int:
    """Unix milliseconds of `15m`, `2h`, `3d` (ago) or an ISO 8601 time, UTC by default; 0 for one before 1970.

    Raises ConfigError for anything else.
    """
    if _DURATION.fullmatch(text):
        return max(0, int((time.time() - Duration(text)) * 1000))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not a time: write 15m, 2h or 3d (ago), or ISO 8601, like 2013-01-31T06:00"
        ) from error
    with_zone = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0, int(with_zone.timestamp() * 1000))


def parse_after(text: str) -> "EntryId | None":
    """The id after which to deliver: an id itself, that before the first of all for `earliest`, or the last before a time.

    None for `latest`. Raises ConfigError for anything else.
    """
    found = parse_start(text)
    return found if found is None or _ID.fullmatch(text) else found.previous()


def parse_start(text: str) -> "EntryId | None":
    """The first id to read: an id, `earliest` or a time; None for `latest`. Raises ConfigError."""
    from millstream.model import ZERO_ID, EntryId

    if text == "latest":
        return None
    if text == "earliest":
        return ZERO_ID
    if _ID.fullmatch(text):
        return EntryId.parse(text)
    return EntryId(parse_time_ms(text), 0)


def parse_end(text: str) -> "EntryId":
    """The last id to read: an id, `latest` or a time; milliseconds alone include all their ids. Raises ConfigError."""
    from millstream.model import LAST_ID, EntryId

    if text == "latest":
        return LAST_ID
    if _ID.fullmatch(text):
        return EntryId.parse(text, default_seq=LAST_ID.seq)
    return EntryId(parse_time_ms(text), LAST_ID.seq)
