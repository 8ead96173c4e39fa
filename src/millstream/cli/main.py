"""The command `millstream`: dispatches to the command families, and maps errors to one line and an exit code.

The module of a family is imported only when it is used, so help and light commands start fast.
"""

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from millstream import __version__
from millstream.cli.options import MARKUP
from millstream.cli.terminal import log_to_stderr, print_message, print_message_text, redact_uncaught_exceptions
from millstream.errors import AccessDenied, ConfigError, MillstreamError, ServerError, Unavailable
from millstream.redis_client.escaping import escape_lines
from millstream.redis_client.redaction import redact_text

COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("millstream.cli.run:run", "Run an app as a Spark pipeline."),
    "worker": ("millstream.cli.worker:worker", "Run an app on low-latency workers."),
    "master": ("millstream.cli.master:master", "Delegate messages to consumers in any language."),
    "consumer": ("millstream.cli.consumer:consumer", "Run a function as a consumer of a master."),
    "check": ("millstream.cli.check:check", "Run handlers on real entries and commit nothing."),
    "serve": ("millstream.cli.serve:serve", "Serve streams live to browsers."),
    "dev": ("millstream.cli.dev:dev", "Run a local redis-server for development."),
    "demo": ("millstream.cli.demo:demo", "Run a pipeline over real flights and verify it."),
    "publish": ("millstream.cli.publish:publish", "Publish a CSV or JSON lines file to a stream."),
    "delayed": ("millstream.cli.delayed:delayed", "List and cancel delayed messages."),
    "tail": ("millstream.cli.tail:tail", "Print the entries of streams as they arrive."),
    "info": ("millstream.cli.info:info", "Show readers, their lag, live workers and dead letters."),
    "state": ("millstream.cli.state:state", "Show, list and reset the state of keys."),
    "groups": ("millstream.cli.groups:groups", "List and change consumer groups."),
    "pending": ("millstream.cli.pending:pending", "Show the pending entries of a group."),
    "claim": ("millstream.cli.claim:claim", "Claim pending entries for a consumer."),
    "acl": ("millstream.cli.acl:acl", "Print the ACL rights that Redis users need."),
    "pause": ("millstream.cli.pause:pause", "Stop a handler's workers from reading new messages."),
    "resume": ("millstream.cli.pause:resume", "Resume a paused handler."),
    "keys": ("millstream.cli.keys:keys", "Show the queued keys of a handler and why they wait."),
    "park": ("millstream.cli.keys:park", "Park a key until an operator unparks it."),
    "unpark": ("millstream.cli.keys:unpark", "Resume a parked key."),
    "skip": ("millstream.cli.keys:skip", "Dead-letter the first message of a key."),
    "streams": ("millstream.cli.streams:streams", "Show which consumer leases which stream."),
    "announce": ("millstream.cli.streams:announce", "Add a stream to a service."),
    "release": ("millstream.cli.streams:release", "Release leases, so that streams are reassigned."),
    "done": ("millstream.cli.streams:done", "Remove finished streams from a service."),
    "partitions": ("millstream.cli.partitions:partitions", "Show and grow the partitions of a base."),
    "dlq": ("millstream.cli.dlq:dlq", "List, show, redrive and purge dead letters."),
}

FAILED, USAGE_ERROR, NO_REDIS, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141

_EPILOG = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 Redis cannot be reached or refuses access, "
    "130 interrupted."
)


def exit_code(error: MillstreamError) -> int:
    """The exit code for `error`."""
    if isinstance(error, ConfigError):
        return USAGE_ERROR
    return NO_REDIS if isinstance(error, (Unavailable, AccessDenied)) else FAILED


@contextmanager
def error_boundary(*, debug: bool) -> Iterator[None]:
    """Map an exception to an exit code and at most one line of output; with `debug`, a traceback too."""
    try:
        yield
        sys.stdout.flush()
    except MillstreamError as error:
        if debug:
            print_message_text(traceback.format_exc())
        say_error = (
            print_message_text if isinstance(error, ServerError) else print_message
        )  # a ServerError quotes lines of redis.log
        say_error(f"error: {error}")
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(INTERRUPTED) from interrupt
    except BrokenPipeError as error:
        # The reader has closed the pipe. Buffered output must go somewhere when Python exits (Python docs, "SIGPIPE").
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from error
    except Exception as error:
        # A usage error: Typer shows it, with the arguments.
        if hasattr(error, "format_message") and hasattr(error, "message"):
            error.message = escape_lines(redact_text(error.message))
        raise


class _CommandGroup(TyperGroup):
    """The families by name. A listing uses their one-line summaries; only running one imports its module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=summary) for name, (_, summary) in COMMANDS.items()}

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        name, found, rest = super().resolve_command(ctx, args)
        return name, _load(name) if found and name else found, rest

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        with error_boundary(debug=ctx.params["debug"]):
            return super().invoke(ctx)


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        command, found = found, typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
        found.command(name)(command)
    loaded = get_command(found)
    loaded.name = name
    return loaded


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"millstream {__version__}\n")
        raise typer.Exit


class _Program(typer.Typer):
    """The command `millstream` as a process."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        redact_uncaught_exceptions()
        return get_command(self)(*args, **options)


main = _Program(
    cls=_CommandGroup,
    name="millstream",
    epilog=_EPILOG,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=MARKUP,
    pretty_exceptions_enable=False,
)


@main.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="MILLSTREAM_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[  # noqa: ARG001 - handled by its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Redis Streams processed reliably: in order per key on Apache Spark, and in milliseconds on workers."""
    log_to_stderr(debug=debug)


if __name__ == "__main__":
    main()
