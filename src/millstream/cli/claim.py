"""`millstream group claim`: claims pending entries for a consumer."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Annotated

import typer

from millstream.admin.inspection import handler_of
from millstream.admin.time_inputs import Duration
from millstream.cli.group_names import GroupName, Stream, find_group
from millstream.cli.options import DryRun, Json, Url, Yes, duration
from millstream.cli.recorded_action import named, recorded
from millstream.cli.terminal import confirm, print_json, print_line, print_message
from millstream.errors import ConfigError, MillstreamError
from millstream.groups import Group, PendingEntry
from millstream.model import EntryId
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import pluralize
from millstream.redis_client.key_names import to_wire

_PAGE = 500


@dataclass(slots=True)
class _Claimed:
    """Ids of entries: claimed; deleted from the stream; not idle for long enough; not pending."""

    claimed: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    not_idle: list[str] = field(default_factory=list)
    not_pending: list[str] = field(default_factory=list)


def claim(
    stream: Stream,
    group: GroupName,
    consumer: Annotated[str, typer.Argument(help="The consumer that gets them.", metavar="CONSUMER")],
    entry_ids: Annotated[list[str] | None, typer.Argument(help="Entry ids.", metavar="[ID...]")] = None,
    min_idle: Annotated[
        Duration | None, duration("--min-idle", "Only entries idle for this long. Without ids: all of them.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the consumer if it does not exist.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Claim pending entries for a consumer. Delivery counts stay; idle times are reset.

    The consumer finds the entries by reading its own pending entries again. Entries deleted from the stream are removed
    from the pending list and printed. Exit code 1: some of the given ids were not idle long enough, or not pending.
    """
    if not entry_ids and min_idle is None:
        raise ConfigError("give the entries: their ids, or --min-idle 60s for all that are idle for that long")
    ids = [str(EntryId.parse(entry_id)) for entry_id in entry_ids or ()]
    idle_ms = min_idle.ms if min_idle else 0
    with Client(url) as client:
        find_group(client, stream, group)
        of = Group(client, stream, group)
        if not create and consumer not in {one.name for one in of.consumers()}:
            raise MillstreamError(
                f"there is no consumer {consumer!r} in group {group!r}, so claimed entries might never be processed: "
                "see `millstream group consumers`, or add --create"
            )
        if not ids and not dry_run:
            confirm(f"Claim all entries of {group} on {stream} that are idle for {min_idle}, for {consumer}?", yes=yes)
        if dry_run and ids:
            done = _claim_ids(client, of, consumer, ids, idle_ms, dry_run=True)
        elif dry_run:
            done = _would_claim(client, stream, of.pending.iter_entries(min_idle_ms=idle_ms))
        else:
            about = {"stream": escape(stream), "group": escape(group), "consumer": escape(consumer)}
            idle = None if min_idle is None else str(min_idle)
            with recorded(client, "group claim", **about, id=named(ids) or None, min_idle=idle) as action:
                done = (
                    _claim_ids(client, of, consumer, ids, idle_ms, dry_run=False)
                    if ids
                    else _claim_idle(of, consumer, idle_ms)
                )
                action.result = f"{pluralize(len(done.claimed), 'entry', 'entries')} claimed"
    if handler_of(stream, group):
        print_message(
            "the workers of this handler claim idle entries by themselves; "
            "a worker that loses an entry cannot commit it"
        )
    _report(done, consumer, dry_run=dry_run, as_json=as_json)
    if done.not_idle or done.not_pending:
        raise typer.Exit(1)


def _claim_idle(of: Group, consumer: str, idle_ms: int) -> _Claimed:
    done = _Claimed()
    for page in of.pending.auto_claim_ids(consumer, min_idle_ms=idle_ms, count=_PAGE):
        done.claimed += map(bytes.decode, page.ids)
        done.deleted += map(bytes.decode, page.gone)
    return done


def _claim_ids(
    client: Client, of: Group, consumer: str, ids: Sequence[str], idle_ms: int, *, dry_run: bool
) -> _Claimed:
    pending = {one.id.decode(): one for entry_id in ids for one in of.pending.entries(entry_id, entry_id, count=1)}
    idle = {entry_id: one for entry_id, one in pending.items() if one.idle_ms >= idle_ms}
    done = _would_claim(client, of.stream, idle.values())
    done.not_idle = [entry_id for entry_id in ids if entry_id in pending and entry_id not in idle]
    done.not_pending = [entry_id for entry_id in ids if entry_id not in pending]
    if not dry_run:
        # XCLAIM removes deleted entries from the pending list without returning their ids.
        claimed = set(of.pending.claim_ids(list(idle), consumer=consumer, min_idle_ms=idle_ms))
        done.not_idle += [entry_id for entry_id in done.claimed if entry_id.encode() not in claimed]
        done.claimed = [entry_id for entry_id in done.claimed if entry_id.encode() in claimed]
    return done


def _would_claim(client: Client, stream: str, entries: Iterable[PendingEntry]) -> _Claimed:
    done = _Claimed()
    rest = iter(entries)
    while page := list(islice(rest, _PAGE)):
        found = client.pipeline([("XRANGE", to_wire(stream), one.id, one.id) for one in page])
        for one, entry in zip(page, found, strict=True):
            (done.claimed if raise_if_error(entry) else done.deleted).append(one.id.decode())
    return done


def _report(done: _Claimed, consumer: str, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        print_json({"consumer": consumer, **asdict(done), "dry_run": dry_run})
        return
    entries = pluralize(len(done.claimed), "entry", "entries")
    print_line(f"{entries} {'would be claimed' if dry_run else 'claimed'} for {escape(consumer)}")
    print_deleted(done.deleted)
    for ids, why in ((done.not_idle, "was not idle for that long"), (done.not_pending, "is not pending")):
        for entry_id in ids:
            print_message(f"{entry_id} {why}")


def print_deleted(ids: Sequence[str]) -> None:
    """Print the ids of pending entries that were deleted, so that they can never be processed."""
    if ids:
        print_message(
            f"{pluralize(len(ids), 'pending entry was', 'pending entries were')} trimmed or deleted from the stream:"
        )
        for entry_id in ids:
            print_message(f"  {entry_id}")
