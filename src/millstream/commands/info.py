"""`millstream info`: what is in Redis, and how far the handlers are."""

from dataclasses import asdict
from typing import Annotated

import typer

from millstream.client import Client
from millstream.commands.options import DEFAULT_URL, Json, Url
from millstream.commands.terminal import age, counted, say, say_json, table, talk
from millstream.escaping import visible
from millstream.inspection import HandlerReport, Inspection, StreamReport, inspect
from millstream.naming import PREFIX


def info(
    app: Annotated[str | None, typer.Argument(help="Only this app's handlers and streams; its name.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most lines in each table.")] = 50,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Show streams, handlers, how far they lag, and what waits in their dead-letter boxes.

    A lag with > before it was not counted to its end; ? means that it cannot be known.
    """
    with Client(url) as client:
        found = inspect(client, app)
    if as_json:
        say_json(asdict(found))
        return
    if app is not None and not found.handlers:
        talk(f"no handler of an app named {app!r} has run on this Redis")
    _show_handlers(found.handlers, limit)
    _show_streams(found, limit)


def _show_handlers(handlers: tuple[HandlerReport, ...], limit: int) -> None:
    if not handlers:
        return
    # Those that need a look come first.
    worst = sorted(handlers, key=lambda handler: (-handler.waiting, -(handler.lag or 0)))[:limit]
    table(
        (
            "handler",
            "stream",
            ">lag",
            ">oldest waits",
            "runs on",
            ">in hand",
            ">committed",
            ">written",
            ">refused",
            ">dead letters",
            "frontier",
        ),
        [
            (
                f"{handler.app}.{handler.handler}",
                visible(handler.stream),
                _lag(handler),
                age(handler.oldest_age_ms),
                _engine(handler),
                f"{handler.pending:,}" if handler.engine == "workers" else "-",
                f"{handler.committed:,}",
                f"{handler.written:,}",
                f"{handler.refused:,}",
                f"{handler.waiting:,}",
                handler.frontier or "-",
            )
            for handler in worst
        ],
    )
    _say_more(len(handlers) - len(worst), "handler")
    say("")


def _lag(handler: HandlerReport) -> str:
    if handler.lag is None:
        return "?"
    return f"{'' if handler.lag_exact else '>'}{handler.lag:,}"


def _engine(handler: HandlerReport) -> str:
    name = f"workers ({handler.consumers:,})" if handler.engine == "workers" else handler.engine
    return f"{name}, paused" if handler.paused else name


def _show_streams(found: Inspection, limit: int) -> None:
    if not found.streams:
        talk("there are no streams")
        return
    longest = sorted(found.streams, key=lambda stream: -stream.length)[:limit]
    table(
        ("stream", ">entries", ">oldest", "first id", "last id", "groups (consumers, pending)"),
        [
            (
                visible(stream.name),
                f"{stream.length:,}",
                age(stream.oldest_age_ms),
                stream.first_id or "-",
                stream.last_id or "-",
                _groups(stream),
            )
            for stream in longest
        ],
    )
    _say_more(len(found.streams) - len(longest), "stream")


def _groups(stream: StreamReport) -> str:
    # The table of handlers shows our own.
    foreign = [group for group in stream.groups if not group.name.startswith(f"{PREFIX}:")]
    return ", ".join(f"{visible(group.name)} ({group.consumers:,}, {group.pending:,})" for group in foreign) or "-"


def _say_more(number: int, thing: str) -> None:
    if number:
        talk(f"and {counted(number, f'more {thing}')}; --limit or --json shows them")
