"""`millstream delayed`: lists and cancels delayed messages."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from millstream.admin.delayed_streams import DelayedStream, delayed_of, find_delayed_streams
from millstream.cli.options import DryRun, Json, JsonLines, OnlyCount, Url, Yes, command_group
from millstream.cli.recorded_action import named, recorded
from millstream.cli.terminal import confirm, print_json, print_line, print_message, print_table, truncate_on_screen
from millstream.delivery.delayed_messages import DelayedMessage, DelayedMessages
from millstream.errors import MillstreamError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, escape_fields, json_fields
from millstream.redis_client.formats import format_age, format_time, pluralize
from millstream.redis_client.pipelining import server_time_ms

_FIELD_CHARS = 60

Stream = Annotated[str, typer.Argument(help="Their destination stream.", metavar="STREAM")]

delayed = command_group("List and cancel delayed messages, which are added to their stream when they are due.")


@delayed.command("list")
def list_(
    stream: Annotated[
        str | None, typer.Argument(help="Only those of this stream; default: of all.", metavar="[STREAM]")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of messages.")] = 100,
    count: OnlyCount = False,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """List the delayed messages of a stream, in due order; or of all streams, that with the earliest first."""
    with Client(url) as client:
        now_ms = server_time_ms(client)
        if stream:
            DelayedMessages(client).count(stream)  # raises AccessDenied, where the next line would leave the stream out
            streams, is_partial = delayed_of(client, [stream]), False
        else:
            streams, is_partial = find_delayed_streams(client)
        found = [] if count else _first_messages(client, streams, limit)
    if as_json:
        for line in map(asdict, streams) if count else map(_as_json, found):
            print_json(line)
    elif not streams:
        print_message(f"there are no delayed messages{f' for {escape(stream)}' if stream else ''}")
    elif count:
        rows = [(escape(one.stream), f"{one.count:,}", *_due(one.due_ms, now_ms)) for one in streams]
        print_table(("~stream", ">messages", ">first due in", "first due at"), rows)
    else:
        print_table(("~stream", "id", ">due in", "due at", "+fields"), [_row(one, now_ms) for one in found])
    if is_partial:
        print_message("there may be more: Redis has too many keys to look at all of them; name a stream")
    if not count and (left := sum(one.count for one in streams) - len(found)) > 0:
        print_message(f"{left:,} more; use --limit to show them")


def _first_messages(client: Client, streams: Sequence[DelayedStream], limit: int) -> list[DelayedMessage]:
    messages, found = DelayedMessages(client), list[DelayedMessage]()
    for one in streams:
        if left := limit - len(found):
            found += messages.find(one.stream, limit=left)
    return found


def _as_json(one: DelayedMessage) -> dict[str, Any]:
    problem = {} if one.problem is None else {"problem": one.problem}
    return {"stream": one.stream, "id": one.id, "due_ms": one.due_ms, **problem, **json_fields(one.pairs)}


@delayed.command()
def cancel(
    stream: Stream,
    ids: Annotated[list[str], typer.Argument(help="Ids, as `list` shows them.", metavar="ID...")],
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Cancel delayed messages that are not due yet, so they are never added to the stream."""
    if not dry_run:
        confirm(f"Cancel {pluralize(len(ids), 'delayed message')} of {escape(stream)} for good?", yes=yes)
    with Client(url) as client:
        cancelled = DelayedMessages(client).count_waiting(stream, ids) if dry_run else _cancel(client, stream, ids)
    if as_json:
        print_json({"stream": stream, "asked": len(ids), "cancelled": cancelled, "dry_run": dry_run})
    else:
        print_line(f"{pluralize(cancelled, 'delayed message')} {'would be cancelled' if dry_run else 'cancelled'}")
    if cancelled < len(ids):
        raise MillstreamError(
            f"{len(ids) - cancelled:,} of {len(ids):,} {'would not be' if dry_run else 'were not'} cancelled: "
            "they were added to the stream or cancelled before"
        )


def _cancel(client: Client, stream: str, ids: Sequence[str]) -> int:
    with recorded(client, "delayed cancel", stream=escape(stream), id=named(ids)) as action:
        cancelled = DelayedMessages(client).cancel(stream, ids)
        action.result = f"{cancelled:,} of {len(ids):,} cancelled"
        if len(ids) == 1:
            action.result = "cancelled" if cancelled else "was moved or cancelled before"
    return cancelled


def _row(one: DelayedMessage, now_ms: int) -> tuple[str, ...]:
    shown = escape_fields(one.pairs) if one.problem is None else f"unreadable: {one.problem}"
    return (
        escape(one.stream),
        escape(one.id),
        *_due(one.due_ms, now_ms),
        truncate_on_screen(shown, _FIELD_CHARS),
    )


def _due(due_ms: int, now_ms: int) -> tuple[str, str]:
    """In how long, and when."""
    return format_age(due_ms - now_ms) if due_ms > now_ms else "overdue", format_time(due_ms) or "-"
