"""`millstream delayed`: lists and cancels delayed messages."""

from typing import Annotated

import typer

from millstream.cli.options import DryRun, Json, JsonLines, Url, Yes, command_group
from millstream.cli.terminal import confirm, print_json, print_line, print_message, print_table, truncate_on_screen
from millstream.delivery.delayed_messages import DelayedMessage, DelayedMessages
from millstream.errors import MillstreamError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape, json_fields
from millstream.redis_client.formats import format_age, format_time, pluralize
from millstream.redis_client.pipelining import server_time_ms
from millstream.redis_client.replies import pairs_of

_FIELD_CHARS = 60

Stream = Annotated[str, typer.Argument(help="Their destination stream.", metavar="STREAM")]

delayed = command_group("List and cancel delayed messages, which are added to their stream when they are due.")


@delayed.command("list")
def list_(
    stream: Stream,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of messages.")] = 100,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """List the delayed messages of a stream, in due order."""
    with Client(url) as client:
        now_ms = server_time_ms(client)
        messages = DelayedMessages(client)
        found, count = messages.find(stream, limit=limit), messages.count(stream)
    if as_json:
        for one in found:
            problem = {} if one.problem is None else {"problem": one.problem}
            print_json({"stream": stream, "id": one.id, "due_ms": one.due_ms, **problem, **json_fields(one.pairs)})
        return
    if not found:
        print_message(f"there are no delayed messages for {escape(stream)}")
        return
    print_table(("id", ">due in", "due at", "+fields"), [_row(one, now_ms) for one in found])
    if count > len(found):
        print_message(f"{count - len(found):,} more; use --limit to show them")


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
        messages = DelayedMessages(client)
        cancelled = messages.count_waiting(stream, ids) if dry_run else messages.cancel(stream, ids)
    if as_json:
        print_json({"stream": stream, "asked": len(ids), "cancelled": cancelled, "dry_run": dry_run})
    else:
        print_line(f"{pluralize(cancelled, 'delayed message')} {'would be cancelled' if dry_run else 'cancelled'}")
    if cancelled < len(ids):
        raise MillstreamError(
            f"{len(ids) - cancelled:,} of {len(ids):,} {'would not be' if dry_run else 'were not'} cancelled: "
            "they were added to the stream or cancelled before"
        )


def _row(one: DelayedMessage, now_ms: int) -> tuple[str, str, str, str]:
    wait_ms = one.due_ms - now_ms
    due_at = format_time(one.due_ms) or "-"
    fields = " ".join(f"{escape(name)}={escape(value)}" for name, value in pairs_of(one.pairs))
    shown = fields if one.problem is None else f"unreadable: {one.problem}"
    return (
        escape(one.id),
        format_age(wait_ms) if wait_ms > 0 else "overdue",
        due_at,
        truncate_on_screen(shown, _FIELD_CHARS),
    )
