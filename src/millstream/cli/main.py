"""The command `millstream`: knows the families of commands, and turns errors into a line and an exit code.

A family's module is imported when it is used, so that help and light commands start fast.
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
from millstream.cli.terminal import log_to_stderr, show_mistakes_redacted, talk, talk_lines
from millstream.errors import AccessDenied, ConfigError, MillstreamError, ServerError, Unavailable
from millstream.redis_client.escaping import harmless
from millstream.redis_client.redaction import redacted

FAMILIES: Mapping[str, tuple[str, str]] = {
    "run": ("millstream.cli.run:run", "Run an app as a Spark pipeline."),
    "worker": ("millstream.cli.worker:worker", "Run an app on low-latency workers."),
    "master": ("millstream.cli.master:master", "Delegate messages to consumers in any language."),
    "consumer": ("millstream.cli.consumer:consumer", "Run a function as a consumer of a master."),
    "serve": ("millstream.cli.serve:serve", "Let browsers follow streams live."),
    "dev": ("millstream.cli.dev:dev", "Run a redis-server here, for development."),
    "demo": ("millstream.cli.demo:demo", "Run a pipeline over real flights and check it."),
    "publish": ("millstream.cli.publish:publish", "Publish a CSV or JSON lines file to a stream."),
    "delayed": ("millstream.cli.delayed:delayed", "List and cancel delayed messages."),
    "tail": ("millstream.cli.tail:tail", "Show the entries of streams as they come."),
    "info": ("millstream.cli.info:info", "Show who reads, how far behind, who is at work, and what waits."),
    "state": ("millstream.cli.state:state", "Show, list and reset what handlers keep for a key."),
    "groups": ("millstream.cli.groups:groups", "List and change consumer groups."),
    "pending": ("millstream.cli.pending:pending", "Show what a group has handed out and nobody has acknowledged."),
    "claim": ("millstream.cli.claim:claim", "Have a consumer hold pending entries of others."),
    "acl": ("millstream.cli.acl:acl", "Print the rights that Redis users need."),
    "pause": ("millstream.cli.pause:pause", "Have a handler's workers read nothing new."),
    "resume": ("millstream.cli.pause:resume", "Have a paused handler's workers go on."),
    "keys": ("millstream.cli.keys:keys", "Show which keys wait on workers, and why."),
    "park": ("millstream.cli.keys:park", "Have a key's messages wait for a person."),
    "unpark": ("millstream.cli.keys:unpark", "Have a parked key go on."),
    "skip": ("millstream.cli.keys:skip", "Make the first message of a key a dead letter."),
    "streams": ("millstream.cli.streams:streams", "Show which consumer has a lease on which stream."),
    "announce": ("millstream.cli.streams:announce", "Have a service's consumers share one more stream."),
    "release": ("millstream.cli.streams:release", "Have somebody else take over leased streams."),
    "done": ("millstream.cli.streams:done", "Forget leased streams that have no more to come."),
    "partitions": ("millstream.cli.partitions:partitions", "Show and grow the partitions of a base."),
    "dlq": ("millstream.cli.dlq:dlq", "List, show, redrive and purge dead letters."),
}

FAILED, MISUSED, NO_REDIS, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141

_EPILOG = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 Redis cannot be reached or refuses access, "
    "130 interrupted."
)


def exit_code(error: MillstreamError) -> int:
    """The exit code that stands for `error`."""
    if isinstance(error, ConfigError):
        return MISUSED
    return NO_REDIS if isinstance(error, (Unavailable, AccessDenied)) else FAILED


@contextmanager
def error_boundary(*, debug: bool) -> Iterator[None]:
    """Turn what ends a command early into an exit code and at most one line; with `debug`, a traceback too."""
    try:
        yield
        sys.stdout.flush()
    except MillstreamError as error:
        if debug:
            talk_lines(traceback.format_exc())
        say_error = talk_lines if isinstance(error, ServerError) else talk  # that has the end of the server's log
        say_error(f"error: {error}")
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(INTERRUPTED) from interrupt
    except BrokenPipeError as error:
        # Nobody reads on. What is still buffered must go somewhere when Python ends (Python docs, "SIGPIPE").
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from error
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(
            error, "message"
        ):  # wrong usage; Typer shows it, and what was given
            error.message = harmless(redacted(error.message))
        raise


class _Families(TyperGroup):
    """The families by name. Listing them takes their one-line summaries, running one imports its module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=summary) for name, (_, summary) in FAMILIES.items()}

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        name, found, rest = super().resolve_command(ctx, args)
        return name, _load(name) if found and name else found, rest

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        with error_boundary(debug=ctx.params["debug"]):
            return super().invoke(ctx)


def _load(name: str) -> Any:
    module, _, attribute = FAMILIES[name][0].partition(":")
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
    """The whole of `millstream`, as a process of its own."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        show_mistakes_redacted()
        return get_command(self)(*args, **options)


main = _Program(
    cls=_Families,
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
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Redis Streams processed reliably: in order per key on Apache Spark, and in milliseconds on workers."""
    log_to_stderr(debug=debug)


if __name__ == "__main__":
    main()
