"""The command `millstream`: dispatches to the command families, and maps errors to one line and an exit code.

The module of a family is imported only when it is used, so help and light commands start fast.
"""

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from millstream import __version__
from millstream.cli.config_file import add_settings
from millstream.cli.held_gc import hold_gc, release_gc
from millstream.cli.log_options import COMMANDS as LOGGING_COMMANDS
from millstream.cli.log_options import add_log_options
from millstream.cli.log_output import LogSettings, start_logging
from millstream.cli.options import MARKUP
from millstream.cli.terminal import print_message, print_message_text, redact_uncaught_exceptions
from millstream.errors import UNREACHABLE_HINT, AccessDenied, ConfigError, MillstreamError, ServerError, Unavailable

RUN, INSPECT, REPAIR = "Run", "Inspect", "Repair"
STREAMS, SET_UP = "Streams and groups", "Set-up"

COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "worker": ("millstream.cli.worker:worker", RUN, "Run an app on low-latency workers."),
    "run": ("millstream.cli.run:run", RUN, "Run an app as a Spark pipeline."),
    "auto": ("millstream.cli.auto:auto", RUN, "Run an app on workers or on Spark, by its lag."),
    "serve": ("millstream.cli.serve:serve", RUN, "Serve streams live to browsers."),
    "master": ("millstream.cli.master:master", RUN, "Delegate messages to consumers in any language."),
    "consumer": ("millstream.cli.consumer:consumer", RUN, "Run a function as a consumer of a master."),
    "exporter": ("millstream.cli.exporter:exporter", RUN, "Serve what Redis shows of all handlers to Prometheus."),
    "console": ("millstream.cli.console:console", RUN, "Serve the operators' console as web pages."),
    "mcp": ("millstream.cli.mcp:mcp", RUN, "Serve the commands that only read as tools to an assistant."),
    "relay": ("millstream.cli.relay:relay", RUN, "Move the rows of an outbox table to a stream."),
    "dev": ("millstream.cli.dev:dev", RUN, "Run a local redis-server for development."),
    "demo": ("millstream.cli.demo:demo", RUN, "Run a pipeline over real flights and verify it."),
    "info": ("millstream.cli.info:info", INSPECT, "Show readers, their lag, live workers and dead letters."),
    "top": ("millstream.cli.top:top", INSPECT, "Show what handlers do now, all the time."),
    "history": ("millstream.cli.history:history", INSPECT, "Show the figures of handlers over the last 24 hours."),
    "why": ("millstream.cli.why:why", INSPECT, "Say why the messages of a key wait or not."),
    "find": ("millstream.cli.find:find", INSPECT, "Find a handler, a stream, a key or an entry."),
    "check": ("millstream.cli.check:check", INSPECT, "Run handlers on real entries and commit nothing."),
    "replay": (
        "millstream.cli.replay:replay",
        INSPECT,
        "Run a handler on the history of a key; compare two versions.",
    ),
    "doctor": (
        "millstream.cli.doctor:doctor",
        INSPECT,
        "Check Redis, the machine and the data for problems.",
    ),
    "audit": ("millstream.cli.audit:audit", INSPECT, "List what operators have changed, and who did it."),
    "tail": ("millstream.cli.tail:tail", INSPECT, "Print the entries of streams as they arrive."),
    "dlq": ("millstream.cli.dlq:dlq", REPAIR, "List, show, redrive, edit and purge dead letters."),
    "key": ("millstream.cli.key:key", REPAIR, "List the keys that wait, and why; park, unpark and skip."),
    "state": ("millstream.cli.state:state", REPAIR, "Show, list, export and reset the state of keys."),
    "pause": (
        "millstream.cli.pause:pause",
        REPAIR,
        "Stop a handler from reading new messages.",
    ),
    "resume": ("millstream.cli.pause:resume", REPAIR, "Resume a paused handler."),
    "rate": ("millstream.cli.rate:rate", REPAIR, "Show, set and clear the rate of a handler while it runs."),
    "drain": ("millstream.cli.drain:drain", REPAIR, "Let a worker finish its messages and end."),
    "forget": ("millstream.cli.forget:forget", REPAIR, "Remove what a handler or an app has left in Redis."),
    "publish": (
        "millstream.cli.publish:publish",
        STREAMS,
        "Publish a CSV or JSON lines file, or one entry, to a stream.",
    ),
    "delayed": ("millstream.cli.delayed:delayed", STREAMS, "List and cancel delayed messages."),
    "group": ("millstream.cli.group:group", STREAMS, "List and change consumer groups, and their pending entries."),
    "lease": ("millstream.cli.lease:lease", STREAMS, "List, add, release and remove leased streams."),
    "partition": ("millstream.cli.partition:partition", STREAMS, "Show, create and grow the partitions of a base."),
    "bench": ("millstream.cli.bench:bench", SET_UP, "Measure what this machine and this Redis do."),
    "class-archive": (
        "millstream.cli.class_archive:class_archive",
        SET_UP,
        "Make the starts of Spark on this machine quicker.",
    ),
    "init": ("millstream.cli.init:init", SET_UP, "Write a starter project: an app, its test and the commands."),
    "acl": ("millstream.cli.acl:acl", SET_UP, "Print the ACL rights that Redis users need."),
}
"""Where each command is, its panel in the help, and its summary."""

_OTHER_WORDS: Mapping[str, str] = {
    "keys": "key list",
    "park": "key park",
    "unpark": "key unpark",
    "skip": "key skip",
    "streams": "lease list",
    "announce": "lease add",
    "release": "lease release",
    "done": "lease remove",
    "groups": "group list",
    "pending": "group pending",
    "claim": "group claim",
    "partitions": "partition show",
    "explain": "why",
    "search": "find",
    "rewind": "group set-id",
    "export": "dlq show",
    "benchmark": "bench",
    "status": "info",
    "lag": "info",
    "deadletters": "dlq list",
    "redrive": "dlq redrive",
}
"""What users may look for, and its command."""

_NAME = "millstream"
"""The variable by which a shell asks for completions."""

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
def error_boundary(*, debug: bool, context: Any = None) -> Iterator[None]:
    """Map an exception to an exit code and at most one line of output; with `debug`, a traceback too.

    `context`: that of the command line.
    """
    try:
        yield
        sys.stdout.flush()
    except MillstreamError as error:
        if debug:
            print_message_text(traceback.format_exc())
        say_error = (
            print_message_text if isinstance(error, ServerError) else print_message
        )  # a ServerError quotes lines of redis.log
        hint = UNREACHABLE_HINT if isinstance(error, Unavailable) and error.unreachable else ""
        say_error(f"error: {error}{hint}")
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(INTERRUPTED) from interrupt
    except BrokenPipeError as error:
        # The reader has closed the pipe. Buffered output must go somewhere when Python exits (Python docs, "SIGPIPE").
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from error
    except Exception as error:
        # A usage error. Its class is that of click, which newer versions of Typer have a copy of.
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        print_message(f"error: {_describe_usage_error(error, context)}")
        raise typer.Exit(USAGE_ERROR) from error


def _describe_usage_error(error: Any, context: Any) -> str:
    from millstream.cli.usage_errors import describe_usage_error  # a right usage needs none of it

    _name_source(error)
    family = context.invoked_subcommand if context is not None else None
    return describe_usage_error(error, f"{_NAME} {family}" if family else _NAME)


def _name_source(error: Any) -> None:
    """Let an error about a value name the variable or the file that it comes from, and not the option."""
    parameter, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if parameter is None or context is None:
        return
    source = getattr(context.get_parameter_source(parameter.name), "name", "")
    if source == "ENVIRONMENT":
        error.param_hint = f"the environment variable {parameter.envvar}"
    elif source == "DEFAULT_MAP":
        error.param_hint = f"{parameter.opts[0].removeprefix('--').replace('-', '_')!r} in the configuration file"


class _CommandGroup(TyperGroup):
    """The families by name. A listing uses their one-line summaries; only running one imports its module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {
            name: TyperCommand(name, help=summary, rich_help_panel=panel)
            for name, (_, panel, summary) in COMMANDS.items()
        }

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        if args[0] in _OTHER_WORDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. Did you mean 'millstream {_OTHER_WORDS[args[0]]}'?")
        name, found, rest = super().resolve_command(ctx, args)
        command = load_command(name) if found and name else found
        release_gc()
        return name, command, rest

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with error_boundary(debug=False):  # the options before the command
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        with error_boundary(debug=ctx.params["debug"], context=ctx):
            return super().invoke(ctx)


_METAVARS = {"INTEGER": "N", "INT": "N", "FLOAT": "NUMBER", "STRING": "TEXT", "STR": "TEXT"}
"""The placeholders of values, by what versions of Typer call their type."""


@cache  # it is the same each time that one process asks
def load_command(name: str) -> Any:
    """The command or family `name`, with its module imported."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        command, found = found, typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
        found.command(name)(command)
    loaded = get_command(found)
    loaded.name = name
    if name in LOGGING_COMMANDS:
        add_log_options(loaded)
    add_settings(loaded, (name,))
    _show_parameters_as_written(loaded)
    return loaded


def _show_parameters_as_written(command: Any) -> None:
    """Let help show `STREAM...`, `[FILE]` and `N`, where Typer shows `{STREAM...}...`, `[[FILE]]` and `<int range>`."""
    for one in getattr(command, "commands", {}).values():
        _show_parameters_as_written(one)
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = parameter.metavar or parameter.name.upper()
            shown = name if parameter.required or name.startswith("[") else f"[{name}]"
            parameter.get_usage_pieces = lambda _, shown=shown: [shown]
        elif not parameter.is_flag:
            parameter.metavar = parameter.metavar or _metavar(parameter.type)


def _metavar(kind: Any) -> str:
    if choices := getattr(kind, "choices", None):
        return f"{{{','.join(map(str, choices))}}}"
    word: str = kind.name.partition(" ")[0].upper()
    return _METAVARS.get(word, word)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"millstream {__version__}\n")
        raise typer.Exit


class _Program(typer.Typer):
    """The command `millstream` as a process."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        redact_uncaught_exceptions()
        hold_gc()
        try:
            return get_command(self)(*args, **{"prog_name": _NAME, **options})
        finally:
            release_gc()  # help and wrong usage load no command


main = _Program(
    cls=_CommandGroup,
    name=_NAME,
    epilog=_EPILOG,
    add_completion=True,
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
    start_logging(LogSettings(debug=debug))


if __name__ == "__main__":
    main()
