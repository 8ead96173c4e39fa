"""RateOverride: the rate of a handler that an operator has set at run time, as it is stored in Redis."""

import math
import re

import msgspec

from millstream.errors import ConfigError
from millstream.handlers.handler import BAD_RATE, is_rate
from millstream.redis_client.formats import format_time

_STORED = re.compile(rb"([\d.e+-]{1,32}) (\d{1,14})")  # as commit/reserve_rate.lua reads it
_WRITTEN = re.compile(r"([\d.e+-]+)(?:/(s|m|h|d))?")
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class RateOverride(msgspec.Struct, frozen=True, kw_only=True):
    """The rate of a handler on one stream that holds in place of the one in code.

    * `rate`: messages a second; `at_ms`: since when, in Unix milliseconds
    """

    rate: float
    at_ms: int

    def encode(self) -> bytes:
        """Return it as it is stored."""
        return f"{self.rate!r} {self.at_ms}".encode()

    @property
    def source(self) -> str:
        """The rate, who set it, and since when, in one line."""
        return f"{format_rate(self.rate)}, set by an operator, since {format_time(self.at_ms)}"


def parse_rate_override(stored: bytes | None) -> RateOverride | None:
    """Parse a stored rate; None if there is none, or another program wrote it: then the rate in code holds."""
    found = _STORED.fullmatch(stored or b"")
    try:
        rate = float(found[1]) if found else math.nan
    except ValueError:
        return None
    return RateOverride(rate=rate, at_ms=int(found[2])) if found and is_rate(rate) else None


def parse_rate(text: str) -> float:
    """Parse messages a second as operators write them: `50`, `0.5`, `60/m`, `100/h`. Raises ConfigError."""
    found = _WRITTEN.fullmatch(text.strip())
    try:
        rate = float(found[1]) / _UNITS_S[found[2] or "s"] if found else math.nan
    except ValueError:
        rate = math.nan
    if not is_rate(rate):
        raise ConfigError(f"{text!r}: {BAD_RATE}, or have a unit, such as 60/m, 100/h or 5/d")
    return rate


def format_rate(rate: float) -> str:
    """Return a rate in the largest number of messages below 1,000 that a unit gives, such as 50/s or 6/m."""
    unit = next((unit for unit, of_s in _UNITS_S.items() if rate * of_s >= 1), "d")
    return f"{rate * _UNITS_S[unit]:,.6g}/{unit}"
