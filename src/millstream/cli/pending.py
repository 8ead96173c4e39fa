"""`millstream group pending`: shows the pending entries of a group."""

from collections.abc import Sequence
from typing import Annotated

import typer

from millstream.admin.time_inputs import Duration
from millstream.cli.group_names import GroupName, Stream, find_group
from millstream.cli.options import JsonLines, OnlyCount, Url, duration
from millstream.cli.terminal import print_json, print_line, print_message, print_table
from millstream.errors import ConfigError
from millstream.groups import Group, PendingEntry, PendingSummary
from millstream.model import EntryId
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, pluralize


def pending(
    stream: Stream,
    group: GroupName,
    consumer: Annotated[str | None, typer.Option(help="Only entries of this consumer.")] = None,
    min_idle: Annotated[Duration, duration("--min-idle", "Only entries idle for this long.")] = Duration(0),
    start: Annotated[str | None, typer.Option("--from", help="Only entries from this id on.", metavar="ID")] = None,
    after: Annotated[str | None, typer.Option(help="Only entries after this id.", metavar="ID")] = None,
    to: Annotated[str | None, typer.Option(help="Only entries up to this id.", metavar="ID")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of entries to list.")] = 100,
    count: OnlyCount = False,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """List the pending entries of a group, and the number of each consumer's."""
    if start is not None and after is not None:
        raise ConfigError("--from and --after exclude each other: give only one")
    first = f"({EntryId.parse(after)}" if after else str(EntryId.parse(start)) if start else "-"
    last = str(EntryId.parse(to)) if to else "+"
    with Client(url) as client:
        find_group(client, stream, group)
        of = Group(client, stream, group).pending
        summary = of.summary()
        asked = 0 if count else limit + 1
        found = of.entries(first, last, count=asked, consumer=consumer, min_idle_ms=min_idle.ms) if asked else []
    shown = found[:limit]
    if as_json and count:
        print_json({"stream": stream, "group": group, **_figures(summary)})
    elif as_json:
        for one in shown:
            print_json({"stream": stream, "group": group, **one._asdict(), "id": one.id.decode()})
    else:
        _show(summary, shown)
    if len(found) > limit:
        print_message("there are more; use --limit or --after to show them")


def _figures(summary: PendingSummary) -> dict[str, object]:
    ends = {"lowest": summary.lowest, "highest": summary.highest}
    found = {name: None if entry_id is None else entry_id.decode() for name, entry_id in ends.items()}
    return {"count": summary.count, **found, "by_consumer": dict(summary.by_consumer)}


def _show(summary: PendingSummary, shown: Sequence[PendingEntry]) -> None:
    if not summary.count or summary.lowest is None or summary.highest is None:
        print_message("nothing is pending")
        return
    what = pluralize(summary.count, "pending entry", "pending entries")
    print_line(f"{what}, from {summary.lowest.decode()} to {summary.highest.decode()}")
    print_table(("~consumer", ">pending"), [(escape(name), f"{held:,}") for name, held in summary.by_consumer.items()])
    if not shown:
        return
    print_line("")
    rows = [(one.id.decode(), escape(one.consumer), format_age(one.idle_ms), f"{one.deliveries:,}") for one in shown]
    print_table(("entry", "~consumer", ">idle", ">deliveries"), rows)
