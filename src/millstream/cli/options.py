"""Options shared by several commands, and the parsers of their values."""

import os
import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer.main import get_command

from millstream.admin.time_inputs import Duration
from millstream.errors import ConfigError

T = TypeVar("T")

MARKUP: Literal["rich"] | None = "rich" if sys.stdout.isatty() else None
"""Markup of help texts: rich only in a terminal."""


def duration(name: str, help_text: str, *, least: str = "0s") -> Any:
    """An option that takes a Duration of `least` or longer."""

    def parse(text: str | float) -> Duration:
        found = Duration(text)
        if found < Duration(least):
            raise ConfigError(f"{text!r} is less than {least}")
        return found

    return typer.Option(name, help=help_text, parser=parser_of(parse), metavar="DURATION")


def parser_of(parse: Callable[[Any], T]) -> Callable[[Any], T]:
    """The parser of an option: the ConfigError of `parse` becomes a usage error that names the option."""

    def parser(value: Any) -> T:
        try:
            return parse(value)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error

    return parser


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


def parameters_of(function: Callable[..., None]) -> list[Any]:
    """The parameters that typer makes of a function's annotations, to be added to other commands."""
    carrier = typer.Typer(add_completion=False)
    carrier.command()(function)
    return list(get_command(carrier).params)


def with_options_of(command: Callable[..., None], function: Callable[..., object]) -> Callable[..., None]:
    """`command`, whose `**options` are the keyword-only parameters of `function`, as typer sees it."""
    own = [one for one in signature(command).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    added = [one for one in signature(function).parameters.values() if one.kind is Parameter.KEYWORD_ONLY]
    vars(command)["__signature__"] = Signature([*own, *added])
    return command


def parse_fields(words: Sequence[str]) -> dict[bytes, bytes]:
    """The fields that these NAME=VALUE are, byte for byte as they were given. Raises ConfigError for anything else."""
    fields: dict[bytes, bytes] = {}
    for one in words:
        name, separator, value = os.fsencode(one).partition(b"=")
        if not (name and separator):
            raise ConfigError(f"{one!r} is not a field: write NAME=VALUE, such as amount=10")
        if name in fields:
            raise ConfigError(f"{one!r}: this name is given twice")
        fields[name] = value
    return fields


def command_group(help_text: str) -> typer.Typer:
    """A family of commands, such as `millstream dlq`."""
    return typer.Typer(help=help_text, no_args_is_help=True, add_completion=False, rich_markup_mode=MARKUP)


def parse_address(text: str) -> tuple[str, int] | None:
    """Host and port of `[HOST:]PORT`, such as 9464, 0.0.0.0:9464 or [::]:9464; None for "". Raises ConfigError."""
    if not text:
        return None
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit() and int(port) < 65_536) or (":" in host and host != f"[{bare}]"):
        raise ConfigError(f"{text!r} is not an address: write PORT, HOST:PORT or [HOST]:PORT, such as 0.0.0.0:9464")
    return bare or "127.0.0.1", int(port)
