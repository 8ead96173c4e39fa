"""Options shared by several commands, and the parsers of their values."""

import re
import sys
import time
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer
from typer.core import TyperGroup

from millstream.errors import ConfigError
from millstream.model import ZERO_ID, EntryId

DEFAULT_URL = "redis://127.0.0.1:6379/0"
MARKUP: Literal["rich"] | None = "rich" if sys.stdout.isatty() else None
"""Markup of help texts: rich only in a terminal."""

Url = Annotated[str, typer.Option("--url", envvar="MILLSTREAM_URL", help="URL of Redis.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Connections = Annotated[int, typer.Option("--connections", help="Maximum number of connections.", min=1)]
RequestS = Annotated[
    float, typer.Option("--request-s", help="Seconds within which a request must arrive on a connection.", min=0.1)
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

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_ID = re.compile(r"(?!\d{8}$)\d+(-\d+)?")  # eight digits alone are a date, like 20130131
_AGO = re.compile(r"(\d+)([smhd])")


def command_group(help_text: str, *, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """A family of commands, such as `millstream dlq`. `cls` parses its arguments."""
    return typer.Typer(help=help_text, no_args_is_help=True, add_completion=False, rich_markup_mode=MARKUP, cls=cls)


def parse_time_ms(text: str) -> int:
    """Unix milliseconds of `15m`, `2h`, `3d` (ago) or an ISO 8601 time, UTC by default.

    Raises ConfigError for anything else.
    """
    ago = _AGO.fullmatch(text)
    if ago:
        return int((time.time() - int(ago[1]) * _UNITS_S[ago[2]]) * 1000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is not a time: write 15m, 2h or 3d (ago), or ISO 8601, like 2013-01-31T06:00"
        ) from error
    with_zone = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(with_zone.timestamp() * 1000)


def parse_duration_ms(text: str) -> int:
    """Milliseconds of `30s`, `5m`, `2h` or `1d`. Raises ConfigError for anything else."""
    found = _AGO.fullmatch(text)
    if not found:
        raise ConfigError(f"{text!r} is not a duration: write 30s, 5m, 2h or 1d")
    return int(found[1]) * _UNITS_S[found[2]] * 1000


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
