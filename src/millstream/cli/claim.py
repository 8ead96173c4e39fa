"""`millstream claim`: pending entries change hands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

import typer

from millstream.admin.inspection import handler_of
from millstream.cli.groups import say_gone
from millstream.cli.options import DEFAULT_URL, DryRun, Json, Url, parse_duration_ms
from millstream.cli.terminal import counted, say, say_json, talk
from millstream.errors import ConfigError
from millstream.groups import Group, PendingEntry
from millstream.model import EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.escaping import visible
from millstream.redis_client.key_names import to_wire

_PAGE = 500


@dataclass(slots=True)
class _Claimed:
    """Entry ids: now held by the new consumer; gone from the stream; not idle for so long; pending with nobody."""

    claimed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)
    not_pending: list[str] = field(default_factory=list)


def claim(
    stream: Annotated[str, typer.Argument(help="The stream.")],
    group: Annotated[str, typer.Argument(help="The group.")],
    consumer: Annotated[str, typer.Argument(help="Who is to hold them.")],
    entry_ids: Annotated[list[str] | None, typer.Argument(help="Entry ids.", metavar="[ID]...")] = None,
    min_idle: Annotated[
        str | None, typer.Option(help="Only what was left alone for so long: 30s, 5m, 2h, 1d. Without ids: all of it.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Make the consumer, if there is none of this name.")] = False,
    dry_run: DryRun = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Have a consumer hold pending entries of others. Delivery counts stay; how long they were left alone begins anew.

    It finds them by reading its own pending entries again. Entries that are gone from the stream are taken off the
    list and named. Exit code 1: of the ids that were given, some were neither.
    """
    if not entry_ids and min_idle is None:
        raise ConfigError("say which entries: their ids, or --min-idle 60s for all that were left alone for so long")
    ids = [str(EntryId.parse(entry_id)) for entry_id in entry_ids or ()]
    idle_ms = parse_duration_ms(min_idle) if min_idle else 0
    with Client(url) as client:
        of = Group(client, stream, group)
        if not create and consumer not in {one.name for one in of.consumers()}:
            raise ConfigError(
                f"there is no consumer {consumer!r} in group {group!r}, so nobody may ever find what it holds: see "
                "`millstream groups consumers`, or add --create"
            )
        if ids:
            done = _claim_ids(client, of, consumer, ids, idle_ms, dry_run=dry_run)
        elif dry_run:
            done = _would_claim(client, stream, of.pending.walk(min_idle_ms=idle_ms))
        else:
            done = _claim_idle(of, consumer, idle_ms)
    if handler_of(stream, group):
        talk(
            "the workers of this handler adopt by themselves what is left alone; whom an entry is taken from cannot commit it"
        )
    _report(done, consumer, dry_run=dry_run, as_json=as_json)
    if done.busy or done.not_pending:
        raise typer.Exit(1)


def _claim_idle(of: Group, consumer: str, idle_ms: int) -> _Claimed:
    done = _Claimed()
    for page in of.pending.auto_claim_ids(consumer, min_idle_ms=idle_ms, count=_PAGE):
        done.claimed += map(bytes.decode, page.ids)
        done.gone += map(bytes.decode, page.gone)
    return done


def _claim_ids(
    client: Client, of: Group, consumer: str, ids: Sequence[str], idle_ms: int, *, dry_run: bool
) -> _Claimed:
    held = {one.id.decode(): one for entry_id in ids for one in of.pending.entries(entry_id, entry_id, count=1)}
    idle = {entry_id: one for entry_id, one in held.items() if one.idle_ms >= idle_ms}
    done = _would_claim(client, of.stream, idle.values())
    done.busy = [entry_id for entry_id in ids if entry_id in held and entry_id not in idle]
    done.not_pending = [entry_id for entry_id in ids if entry_id not in held]
    if not dry_run:
        # XCLAIM takes what is gone off the list without naming it.
        claimed = set(of.pending.claim_ids(list(idle), consumer=consumer, min_idle_ms=idle_ms))
        done.busy += [entry_id for entry_id in done.claimed if entry_id.encode() not in claimed]
        done.claimed = [entry_id for entry_id in done.claimed if entry_id.encode() in claimed]
    return done


def _would_claim(client: Client, stream: str, entries: Iterable[PendingEntry]) -> _Claimed:
    done = _Claimed()
    rest = iter(entries)
    while page := list(islice(rest, _PAGE)):
        found = client.pipeline([("XRANGE", to_wire(stream), one.id, one.id) for one in page])
        for one, entry in zip(page, found, strict=True):
            (done.claimed if raise_if_error(entry) else done.gone).append(one.id.decode())
    return done


def _report(done: _Claimed, consumer: str, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        figures = {"claimed": done.claimed, "gone": done.gone, "busy": done.busy, "not_pending": done.not_pending}
        say_json({"consumer": consumer, **figures, "dry_run": dry_run})
        return
    what = counted(len(done.claimed), "entry", "entries")
    say(f"{what} would pass to {visible(consumer)}" if dry_run else f"{what} passed to {visible(consumer)}")
    say_gone(done.gone)
    for ids, why in ((done.busy, "was not left alone for so long"), (done.not_pending, "is not pending")):
        for entry_id in ids:
            talk(f"{entry_id} {why}")
