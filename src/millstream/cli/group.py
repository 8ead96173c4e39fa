"""`millstream group`: lists and changes the consumer groups of streams."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from millstream.admin.group_moves import move, plan_move, why_not_moved
from millstream.admin.inspection import engine_of, handler_of
from millstream.admin.time_inputs import Duration, parse_after
from millstream.cli.claim import claim, print_deleted
from millstream.cli.group_names import GroupName, Stream, find_group
from millstream.cli.options import DryRun, Json, JsonLines, Url, Yes, command_group, duration
from millstream.cli.pending import pending
from millstream.cli.recorded_action import named, recorded
from millstream.cli.terminal import confirm, print_json, print_line, print_message, print_table
from millstream.errors import ConfigError, GroupMissing, MillstreamError
from millstream.groups import END, ConsumerInfo, Group, GroupInfo, groups_of
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, pluralize
from millstream.redis_client.key_names import to_wire

After = Annotated[
    str,
    typer.Option(
        "--after",
        metavar="WHERE",
        help="Deliver the entries after this id, or from a time on: an id, earliest, latest, 15m (ago) or an ISO 8601 "
        "time, UTC by default.",
    ),
]

_NOT_CREATED = (
    "its workers and pipelines create it themselves; choose its start with --start of millstream worker or run"
)
_NOT_DELETED = (
    "the commit store has no committed id for it yet, so it would start again from the beginning. "
    "Start millstream worker once, then delete it"
)


group = command_group("List and change consumer groups, and their pending entries.")
group.command()(pending)
group.command()(claim)

# --- Lists ---


@group.command("list")
def list_(
    streams: Annotated[list[str] | None, typer.Argument(help="The streams.", metavar="[STREAM...]")] = None,
    pattern: Annotated[str | None, typer.Option(help="All streams that match this pattern, like orders*.")] = None,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """List the groups of streams. `lag` is as Redis reports it, - if unknown; `millstream info` counts instead."""
    if bool(streams) == bool(pattern):
        raise ConfigError("give either streams or --pattern")
    with Client(url) as client:
        found = [(name, one) for name in streams or () for one in groups_of(client, name)]
        for name in client.scan_streams(pattern) if pattern else ():
            try:
                found += [(name, one) for one in groups_of(client, name)]
            except GroupMissing:
                continue  # the stream was deleted meanwhile
        engines = [engine_of(client, handler_of(name, one.name)) for name, one in found]
    if as_json:
        for (name, one), engine in zip(found, engines, strict=True):
            print_json(_as_json(name, one, engine))
        return
    if not found:
        print_message("there are no groups")
        return
    print_table(
        ("~stream", "~group", ">consumers", ">pending", ">lag", "last delivered", "engine"),
        [
            (
                escape(name),
                escape(one.name),
                f"{one.consumers:,}",
                f"{one.pending:,}",
                "-" if one.lag is None else f"{one.lag:,}",
                one.last_delivered.decode(),
                engine or "-",
            )
            for (name, one), engine in zip(found, engines, strict=True)
        ],
    )


@group.command()
def consumers(stream: Stream, group: GroupName, url: Url = DEFAULT_URL, as_json: JsonLines = False) -> None:
    """List the consumers of a group, with their pending entries and idle times."""
    with Client(url) as client:
        find_group(client, stream, group)
        found = Group(client, stream, group).consumers()
    if as_json:
        for one in found:
            print_json(asdict(one))
    elif not found:
        print_message(f"group {group} of {stream} has no consumers")
    else:
        rows = [(escape(one.name), f"{one.pending:,}", format_age(one.idle_ms)) for one in found]
        print_table(("consumer", ">pending", ">idle"), rows)


def _as_json(stream: str, found: GroupInfo, engine: str | None) -> dict[str, Any]:
    return {"stream": stream, **asdict(found), "last_delivered": found.last_delivered.decode(), "engine": engine}


# --- Changes to groups ---


@group.command()
def create(
    stream: Stream,
    group: GroupName,
    after: After = "latest",
    mkstream: Annotated[bool, typer.Option("--mkstream", help="Create the stream too, if it does not exist.")] = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Create a group."""
    _refuse_handlers(stream, group, _NOT_CREATED)
    at = _group_id(after)
    with Client(url) as client:
        of = Group(client, stream, group)
        with recorded(client, "group create", stream=escape(stream), group=escape(group), after=after) as action:
            created = of.create(at, mkstream=mkstream)
            action.result = "created" if created else "existed already: not changed"
    if as_json:
        print_json({"stream": stream, "group": group, "created": created})
    else:
        print_line(
            f"group {escape(group)} created" if created else f"group {escape(group)} exists already: not changed"
        )


@group.command("set-id")
def set_id(
    stream: Stream,
    group: GroupName,
    after: After,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Set the last delivered id of a group: a lower one delivers again, a higher one skips. Pending entries stay."""
    if reason := why_not_moved(stream, group):
        raise ConfigError(reason)
    with Client(url) as client:
        planned = plan_move(client, stream, group, after)
        now = planned.before
        if not dry_run:
            confirm(f"Move group {group} of {stream} from {now} to {planned.to}: {planned.describe()}?", yes=yes)
            about = {"stream": escape(stream), "group": escape(group), "before": planned.before, "after": planned.to}
            with recorded(client, "group set-id", **about) as action:
                now = move(client, planned)
                action.result = f"moved from {planned.before} to {now}: {planned.describe()}"
    if as_json:
        figures = {name: getattr(planned, name) for name in ("to", "direction", "entries", "exact", "pending")}
        print_json(
            {"stream": stream, "group": group, "before": planned.before, **figures, "now": now, "dry_run": dry_run}
        )
    elif dry_run:
        print_line(f"group {escape(group)} would move from {now} to {planned.to}: {planned.describe()}")
    else:
        print_line(f"group {escape(group)} continues after {now}")


@group.command()
def delete(
    stream: Stream,
    group: GroupName,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Delete a group with its pending list. The entries stay in the stream.

    The workers of a handler create its group again at the committed id: nothing is lost or processed twice.
    """
    with Client(url) as client:
        found = find_group(client, stream, group)
        if keys := handler_of(stream, group):
            if not client.execute("HEXISTS", to_wire(keys.meta), "committed_id"):
                _refuse_handlers(stream, group, _NOT_DELETED)
            print_message(
                f"{keys.label} will continue after its committed id: "
                "its next worker or pipeline creates the group again"
            )
        entries, deleted = pluralize(found.pending, "pending entry", "pending entries"), False
        if not dry_run:
            confirm(f"Delete group {group} of {stream}, which has {entries}?", yes=yes)
            with recorded(client, "group delete", stream=escape(stream), group=escape(group)) as action:
                deleted = Group(client, stream, group).destroy()
                action.result = f"deleted, with {entries}" if deleted else "was deleted before"
    if as_json:
        figures = {"pending": found.pending, "deleted": deleted, "dry_run": dry_run}
        print_json({"stream": stream, "group": group, **figures})
    else:
        print_line(f"group {escape(group)} with {entries} " + ("would be deleted" if dry_run else "deleted"))


# --- Changes to consumers. Each commit checks which consumer has the entry, so these are safe for handlers too. ---


@group.command("delete-consumer")
def delete_consumer(
    stream: Stream,
    group: GroupName,
    consumer: Annotated[str, typer.Argument(help="The consumer. Stop its process first.", metavar="CONSUMER")],
    transfer_to: Annotated[str | None, typer.Option(help="The consumer that gets its pending entries.")] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Delete a consumer. Its pending entries are never dropped: --transfer-to gets them, with idle times and counts."""
    with Client(url) as client:
        find_group(client, stream, group)
        of = Group(client, stream, group)
        pending = next((one.pending for one in of.consumers() if one.name == consumer), None)
        if pending is None:
            raise MillstreamError(
                f"there is no consumer {consumer!r} in group {group!r}; see: millstream group consumers {stream} {group}"
            )
        entries = pluralize(pending, "pending entry", "pending entries")
        moved, gone = 0, list[str]()
        if not dry_run:
            confirm(f"Delete consumer {consumer} of group {group}, which has {entries}?", yes=yes)
            about = {"stream": escape(stream), "group": escape(group), "consumer": escape(consumer)}
            transfer = None if transfer_to is None else escape(transfer_to)
            with recorded(client, "group delete-consumer", **about, transfer_to=transfer) as action:
                done = of.delete_consumer(consumer, transfer_to=transfer_to)
                moved, gone = done.reassigned, [one.decode() for one in done.gone]
                action.result = f"deleted, {moved:,} of {entries} moved" if transfer_to else "deleted"
    if as_json:
        figures = {"pending": pending, "moved": moved, "gone": gone, "dry_run": dry_run}
        print_json({"stream": stream, "group": group, "consumer": consumer, "transfer_to": transfer_to, **figures})
    elif dry_run:
        print_line(f"consumer {escape(consumer)}, which has {entries}, would be deleted")
    else:
        transferred = f", {moved:,} of {entries} moved to {escape(transfer_to)}" if transfer_to else ""
        print_line(f"consumer {escape(consumer)} deleted{transferred}")
        print_deleted(gone)


@group.command()
def clean(
    stream: Stream,
    group: Annotated[str | None, typer.Argument(help="The group; by default all of them.", metavar="[GROUP]")] = None,
    idle: Annotated[Duration, duration("--idle", "Minimum idle time.")] = Duration("1h"),
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Delete idle consumers without pending entries. A blocking read counts as idle: choose --idle longer than it."""
    with Client(url) as client:
        names = [find_group(client, stream, group).name] if group else [one.name for one in groups_of(client, stream)]
        found = {name: _idle(Group(client, stream, name).consumers(), idle.ms) for name in names}
        number = sum(map(len, found.values()))
        if number and not dry_run:
            confirm(f"Delete {pluralize(number, 'consumer')} of {stream}?", yes=yes)
            about = {"stream": escape(stream), "group": named(names), "idle": str(idle)}
            with recorded(client, "group clean", **about) as action:
                found = {name: Group(client, stream, name).delete_idle_consumers(idle.ms) for name in names}
                action.result = f"{pluralize(sum(map(len, found.values())), 'consumer')} deleted"
    if as_json:
        print_json({"stream": stream, "consumers": found, "dry_run": dry_run})
        return
    what = "would be deleted" if dry_run else "deleted"
    for name, idle_ones in found.items():
        for consumer in idle_ones:
            print_line(f"consumer {escape(consumer)} of group {escape(name)} {what}")
    print_line(f"{pluralize(sum(map(len, found.values())), 'consumer')} {what}")


def _idle(found: Sequence[ConsumerInfo], idle_ms: int) -> list[str]:
    return [one.name for one in found if not one.pending and one.idle_ms >= idle_ms]


# --- Arguments ---


def _group_id(text: str) -> str:
    found = parse_after(text)
    return END if found is None else str(found)


def _refuse_handlers(stream: str, group: str, reason: str) -> None:
    if keys := handler_of(stream, group):
        raise ConfigError(f"this is the group of the handler {keys.label}: {reason}")
