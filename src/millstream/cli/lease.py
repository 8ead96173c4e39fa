"""`millstream lease`: shows and changes the leases on the streams of a service."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from millstream.admin.inspection import inspect_handlers
from millstream.admin.service_names import find_service, resolve_service
from millstream.balancer.protocol import announce_all, end_leases
from millstream.balancer.service_status import ServiceState, StreamState, fetch_service_state
from millstream.cli.options import DryRun, Json, JsonLines, Url, Yes, command_group
from millstream.cli.recorded_action import named, recorded
from millstream.cli.terminal import confirm, print_json, print_line, print_message, print_table
from millstream.errors import AccessDenied, ConfigError, GroupMissing, MillstreamError, WrongType
from millstream.groups import groups_of
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, pluralize
from millstream.redis_client.key_names import HandlerKeys, ServiceKeys, from_wire

Service = Annotated[str, typer.Argument(help="The service, or APP.HANDLER.", metavar="SERVICE")]
Streams = Annotated[list[str], typer.Argument(metavar="STREAM...")]
Announced = Annotated[
    list[str], typer.Argument(help="Their names; - reads them from standard input, one per line.", metavar="STREAM...")
]
Limit = Annotated[int, typer.Option(min=1, help="Maximum number of streams to list, unassigned ones first.")]
Count = Annotated[bool, typer.Option("--count", help="Only count them, and show the consumers.")]
Group = Annotated[str | None, typer.Option(help="The consumer group whose lag is shown; default: that of the handler.")]
Info = Annotated[str, typer.Option(help="JSON passed to consumers with each stream.")]

lease = command_group("List, add, release and remove the leased streams of a service or handler.")


@dataclass(frozen=True)
class _Lag:
    """The lag of a group on a stream; None if unknown. A lower bound unless `exact`."""

    count: int | None = None
    exact: bool = False


@lease.command("list")
def list_(
    service: Service,
    limit: Limit = 20,
    group: Group = None,
    count: Count = False,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """List a service's consumers with their shares, and its streams with their owners, lease ages and lags."""
    with Client(url) as client:
        name = resolve_service(client, service)
        found = fetch_service_state(client, name)
        shown = [] if count else found.streams[:limit]
        lags = _lags_of(client, name, [one.name for one in shown], group)
    if group is not None and shown and all(lag.count is None for lag in lags.values()):
        print_message(f"none of these streams has a group {group!r}; see: millstream group list STREAM")
    if as_json:
        for row in [_counts(name, found)] if count else [_as_json(one, lags.get(one.name, _Lag())) for one in shown]:
            print_json(row)
        return
    now_ms = time.time() * 1000
    _print_consumers(service, name, found, now_ms)
    if count:
        return
    print_line("")
    print_table(
        ("~stream", "state", "~consumer", ">lease age", ">lag"),
        [_row(one, lags.get(one.name, _Lag()), now_ms) for one in shown],
    )
    for one in shown:
        if one.excluded_reason is not None:
            print_message(f"{escape(one.name)} is excluded until a retry succeeds: {one.excluded_reason}")
    if len(found.streams) > limit:
        print_message(f"{len(found.streams) - limit:,} more; use --limit to show them")


def _print_consumers(service: str, name: str, found: ServiceState, now_ms: float) -> None:
    owned = _count_owned(found)
    print_line(
        f"{pluralize(len(found.streams), 'stream')}: {owned:,} with an owner, {len(found.streams) - owned:,} free; "
        f"{found.unread:,} announced but not read yet, {pluralize(found.dead, 'dead letter')}"
    )
    if found.dead:
        print_message(
            "dead letters are unreadable announcements, and streams whose owners were lost too often. To see why: "
            f"millstream tail --no-follow '{ServiceKeys(name).dead}'; "
            f"to add a stream again: millstream lease add {service} STREAM"
        )
    rows = [
        (
            escape(one.name),
            f"{one.streams:,}",
            "unreadable" if one.unreadable else f"{one.weight:g}",
            f"{one.limit:,}" if one.limit else "-",
            format_age(max(0.0, one.until_ms - now_ms)),
        )
        for one in found.consumers
    ]
    print_table(("~consumer", ">streams", ">weight", ">limit", ">lease left"), rows)


def _count_owned(found: ServiceState) -> int:
    return sum(one.consumer is not None for one in found.streams)


def _row(one: StreamState, lag: _Lag, now_ms: float) -> tuple[str, ...]:
    held_ms = None if one.since_ms is None else now_ms - one.since_ms
    behind = "-" if lag.count is None else f"{'' if lag.exact else '>'}{lag.count:,}"
    return escape(one.name), _state_of(one), one.consumer or "-", format_age(held_ms), behind


def _state_of(one: StreamState) -> str:
    if one.unreadable:
        return "unreadable"
    if one.consumer is None:
        return "free"
    return "owned" if one.excluded_reason is None else "excluded"


def _counts(name: str, found: ServiceState) -> dict[str, Any]:
    consumers = [
        {
            "name": one.name,
            "streams": one.streams,
            "weight": one.weight,
            "limit": one.limit,
            "until_ms": one.until_ms,
            "unreadable": one.unreadable,
        }
        for one in found.consumers
    ]
    return {
        "service": name,
        "streams": len(found.streams),
        "owned": _count_owned(found),
        "unread": found.unread,
        "dead_letters": found.dead,
        "consumers": consumers,
    }


def _as_json(one: StreamState, lag: _Lag) -> dict[str, Any]:
    return {
        "stream": one.name,
        "state": _state_of(one),
        "excluded_reason": one.excluded_reason,
        "consumer": one.consumer,
        "since_ms": one.since_ms,
        "token": one.token,
        "lag": lag.count,
        "lag_exact": lag.exact,
    }


def _lags_of(client: Client, service: str, names: Sequence[str], group: str | None) -> Mapping[str, _Lag]:
    """The lag of `group`, or of the handler whose workers share the streams, on each stream."""
    label = client.execute("HGET", ServiceKeys(service).meta, "handler")
    if group is not None or label is None:
        counts = {name: _lag_in_group(client, name, group or service) for name in names}
        return {name: _Lag(count, exact=count is not None) for name, count in counts.items()}
    app, _, handler = from_wire(label).partition(".")
    found = []
    for name in names:
        with suppress(ConfigError):  # not a valid stream name, so no handler can read it
            found.append(HandlerKeys(app, handler, name))
    try:
        return {one.stream: _Lag(one.lag, exact=one.lag_exact) for one in inspect_handlers(client, found)}
    except AccessDenied:
        return {}  # this user may not access any of them


def _lag_in_group(client: Client, stream: str, group: str) -> int | None:
    try:
        return next((one.lag for one in groups_of(client, stream) if one.name == group), None)
    except (GroupMissing, WrongType, AccessDenied):
        return None  # the stream does not exist yet, has another type, or this user may not access it


@lease.command()
def add(service: Service, names: Announced, info: Info = "null", url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Add streams to a service, whose consumers share them. Idempotent."""
    try:
        about = json.loads(info)
    except ValueError as error:
        raise ConfigError(f"--info is not JSON ({error}); quote text as JSON, like '\"night\"'") from error
    wanted = [one for name in names for one in (_from_input() if name == "-" else [name])]
    with Client(url) as client:
        name: str | None = service
        with suppress(AccessDenied):  # without the right to look it up, announce to the service of this very name
            name = find_service(client, service)
        if name is None:
            print_message(
                f"{service!r} is a new service: start its consumers, or a pipeline with announced=... for it. "
                "If it is a handler whose workers never ran, start them and announce again"
            )
        label = ServiceKeys(name or service).label
        with recorded(client, "lease add", service=escape(label), stream=named(wanted)) as action:
            ids = announce_all(client, name or service, wanted, about)
            action.result = f"{pluralize(len(ids), 'stream')} announced"
    to = label if label == service else f"{label}, the service of {service}"
    for stream, entry_id in zip(wanted, ids, strict=True):
        if as_json:
            print_json({"service": name or service, "stream": stream, "id": entry_id})
        else:
            print_line(f"{escape(stream)} is announced to {to}")


def _from_input() -> list[str]:
    """The lines of standard input. Names that are not UTF-8 are decoded as on the command line (PEP 383)."""
    return [from_wire(line) for line in sys.stdin.buffer.read().split(b"\n") if line]


@lease.command()
def release(
    service: Service,
    names: Streams,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Release the leases of streams: they are reassigned at once, with a new token."""
    _end(service, names, "released", url, dry_run=dry_run, yes=yes, as_json=as_json)


@lease.command()
def remove(
    service: Service,
    names: Streams,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Remove finished streams from a service, so that they are leased no more. Their entries stay."""
    _end(service, names, "removed", url, dry_run=dry_run, yes=yes, as_json=as_json)


def _end(
    service: str,
    names: Sequence[str],
    how: Literal["removed", "released"],
    url: str,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    if not dry_run:
        verb = "Remove" if how == "removed" else "Release"
        confirm(f"{verb} {pluralize(len(names), 'stream')} of {service}?", yes=yes)
    with Client(url) as client:
        name = resolve_service(client, service)
        if dry_run:
            unknown = set(names) - {one.name for one in fetch_service_state(client, name).streams}
        else:
            command = "lease remove" if how == "removed" else "lease release"
            about = {"service": escape(ServiceKeys(name).label), "stream": named(names)}
            with recorded(client, command, **about) as action:
                unknown = end_leases(client, name, "done" if how == "removed" else how, names)
                action.result = f"{len(names) - len(unknown):,} of {pluralize(len(names), 'stream')} {how}"
    ended = [one for one in names if one not in unknown]
    if as_json:
        print_json({"service": name, how: ended, "unknown": sorted(unknown), "dry_run": dry_run})
    for one in () if as_json else ended:
        print_line(f"{escape(one)} {'would be' if dry_run else 'is'} {how}")
    if unknown:
        raise MillstreamError(
            f"unknown streams of {service}: {', '.join(map(repr, sorted(unknown)))} "
            f"(not added, not read yet, or removed); see: millstream lease list {service}"
        )
