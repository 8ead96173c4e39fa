"""Options shared by several commands, and the parsers of their values."""

import math
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import typer
from typer.main import get_command

from millstream.errors import ConfigError
from millstream.model import ZERO_ID, EntryId

MARKUP: Literal["rich"] | None = "rich" if sys.stdout.isatty() else None
"""Markup of help texts: rich only in a terminal."""

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


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


def duration(name: str, help_text: str, *, least: str = "0s") -> Any:
    """An option that takes a Duration of `least` or longer."""

    def parse(text: str | float) -> Duration:
        try:
            found = Duration(text)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
        if found < Duration(least):
            raise typer.BadParameter(f"{text!r} is less than {least}")
        return found

    return typer.Option(name, help=help_text, parser=parse, metavar="DURATION")


Url = Annotated[str, typer.Option("--url", envvar="MILLSTREAM_URL", help="URL of Redis.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON, an object per line.")]
OnlyCount = Annotated[bool, typer.Option("--count", help="Only count them.")]
Connections = Annotated[int, typer.Option("--connections", help="Maximum number of connections.", min=1)]
RequestTimeout = Annotated[
    Duration, duration("--request-timeout", "Time within which a request must arrive on a connection.", least="100ms")
]
MetricsAddress = Annotated[
    str,
    typer.Option(
        "--metrics-address",
        metavar="[HOST:]PORT",
        show_default=False,
        help="Serve /metrics, /healthz and /readyz here; the host is 127.0.0.1 unless given, port 0 finds a free port.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; print what would be done.")]

_ID = re.compile(r"(?!\d{8}$)\d+(-\d+)?")  # eight digits alone are a date, like 20130131


def parameters_of(function: Callable[..., None]) -> list[Any]:
    """The parameters that typer makes of a function's annotations, to be added to other commands."""
    carrier = typer.Typer(add_completion=False)
    carrier.command()(function)
    return list(get_command(carrier).params)


def command_group(help_text: str) -> typer.Typer:
    """A family of commands, such as `millstream dlq`."""
    return typer.Typer(help=help_text, no_args_is_help=True, add_completion=False, rich_markup_mode=MARKUP)


def parse_time_ms(text: str) -> int:
    """Unix milliseconds of `15m`, `2h`, `3d` (ago) or an ISO 8601 time, UTC by default.

    Raises ConfigError for anything else.
    """
    if _DURATION.fullmatch(text):
        return int((time.time() - Duration(text)) * 1000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not a time: write 15m, 2h or 3d (ago), or ISO 8601, like 2013-01-31T06:00"
        ) from error
    with_zone = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(with_zone.timestamp() * 1000)


def parse_address(text: str) -> tuple[str, int] | None:
    """Host and port of `[HOST:]PORT`, such as 9464, 0.0.0.0:9464 or [::]:9464; None for "". Raises ConfigError."""
    if not text:
        return None
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit() and int(port) < 65_536) or (":" in host and host != f"[{bare}]"):
        raise ConfigError(f"{text!r} is not an address: write PORT, HOST:PORT or [HOST]:PORT, such as 0.0.0.0:9464")
    return bare or "127.0.0.1", int(port)


def parse_start(text: str) -> EntryId | None:
    """The first id to read: an id, `earliest` or a time; None for `latest`. Raises ConfigError."""
    if text == "latest":
        return None
    if text == "earliest":
        return ZERO_ID
    if _ID.fullmatch(text):
        return EntryId.parse(text)
    return EntryId(parse_time_ms(text), 0)
