"""The options --log-level and --log-format, of the commands that run until they are stopped."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer

from millstream.cli.log_output import Format, Level, settings, start_logging
from millstream.cli.options import parameters_of

COMMANDS = ("worker", "run", "auto", "serve", "master", "consumer", "console")
"""The commands that have them."""


def add_log_options(command: Any) -> None:
    """Add --log-level and --log-format to a command; its own module need not know them."""

    def chosen(name: str) -> Callable[[typer.Context, Any], None]:
        def choose(context: typer.Context, value: Any) -> None:
            if value is not None and not context.resilient_parsing:
                start_logging(replace(settings(), **{name: value}))

        return choose

    def options(
        log_level: Annotated[
            Level | None,
            typer.Option(
                "--log-level",
                callback=chosen("level"),
                expose_value=False,
                envvar="MILLSTREAM_LOG_LEVEL",
                help="What is logged; default: as the app configures it, else warning.",
            ),
        ] = None,
        log_format: Annotated[
            Format | None,
            typer.Option(
                "--log-format",
                callback=chosen("format"),
                expose_value=False,
                envvar="MILLSTREAM_LOG_FORMAT",
                help="How it is logged to stderr; default: as the app configures it, else text.",
            ),
        ] = None,
    ) -> None: ...

    command.params += [one for one in parameters_of(options) if one.name in ("log_level", "log_format")]
