"""`millstream partition`: shows, creates and grows the partitions of a base."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from millstream.admin.inspection import handler_of
from millstream.cli.options import DryRun, Json, Url, Yes, command_group
from millstream.cli.recorded_action import recorded
from millstream.cli.terminal import confirm, print_json, print_line, print_message, print_table
from millstream.errors import GroupMissing, MillstreamError
from millstream.groups import groups_of
from millstream.partitions.key_migration import KeyMigration, UndrainedPartition
from millstream.partitions.partition_map import PartitionMap, check_growth
from millstream.partitions.partitions import Partitions
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import pluralize
from millstream.redis_client.key_names import HandlerKeys

Base = Annotated[
    str, typer.Argument(help="The base: orders, if the partitions are {orders.0}, {orders.1} ...", metavar="BASE")
]
Count = Annotated[int, typer.Argument(help="The number of partitions.", metavar="NUMBER")]

partition = command_group("Show, create and grow the partitions of a base.")


class _Growth:
    """What a growth to `count` partitions changes."""

    def __init__(self, before: PartitionMap, count: int) -> None:
        self.added = [before.stream(number) for number in range(before.count, count)]
        self.moved_share = round(len(self.added) / count, 4)  # that of a jump hash: no key moves needlessly
        self.is_new = bool(self.added) and before.growing_to != count

    def __str__(self) -> str:
        if not self.added:
            return "Nothing changes."
        names = self.added[0] if len(self.added) == 1 else f"{self.added[0]} to {self.added[-1]}"
        return f"About {self.moved_share:.0%} of its keys move, to {names}; the number can never shrink."


@partition.command()
def show(base: Base, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show the partitions, where each was last closed, and the keys that still move between them."""
    with Client(url) as client:
        partition_map = _existing(client, base).require()
        lengths = client.pipeline([("XLEN", stream) for stream in partition_map.streams])
        undrained = {
            one.label: KeyMigration(client, partition_map, app=one.app, handler=one.handler).undrained()
            for one in _handlers(client, partition_map)
        }
    if as_json:
        print_json(_as_json(partition_map, lengths, undrained))
        return
    growing = (
        ""
        if partition_map.growing_to is None
        else f"; a growth to {partition_map.growing_to:,} was started and has not ended"
    )
    print_line(f"{base}: {pluralize(partition_map.count, 'partition')}, generation {partition_map.generation}{growing}")
    print_table(
        ("~partition", ">entries", ">since generation", "last closed at"),
        [
            (
                escape(stream),
                f"{length:,}",
                str(partition_map.created_in(number)),
                _last_close(partition_map, number) or "-",
            )
            for number, (stream, length) in enumerate(zip(partition_map.streams, lengths, strict=True))
        ],
    )
    for handler, some in undrained.items():
        for one in some:
            print_line(f"{handler}: {_describe(one)}")
        if not some:
            print_message(f"{handler}: no keys are moving")


@partition.command()
def grow(
    base: Base, count: Count, dry_run: DryRun = False, yes: Yes = False, url: Url = DEFAULT_URL, as_json: Json = False
) -> None:
    """Grow to a greater number of partitions. Each key stays in order; producers and workers follow by themselves.

    The number can never shrink. Idempotent; repeat the command if it was interrupted.
    """
    with Client(url) as client:
        partitions = _existing(client, base)
        before = partitions.require()
        check_growth(before, count)
        plan = _Growth(before, count)
        if not dry_run:
            if plan.is_new:
                confirm(f"Grow {base} to {pluralize(count, 'partition')}? {plan}", yes=yes)
            with recorded(client, "partition grow", base=escape(base), partitions=f"{count:,}") as action:
                after = partitions.grow(count)
                action.result = _result(after)
    if as_json:
        print_json(
            {
                **_as_json(before if dry_run else after, None, {}),
                "added": plan.added,
                "moved_share": plan.moved_share,
                "dry_run": dry_run,
            }
        )
    elif dry_run:
        print_line(f"{base} would have {pluralize(count, 'partition')} instead of {before.count:,}. {plan}")
    else:
        print_line(f"{base} has {pluralize(count, 'partition')}")


@partition.command()
def create(base: Base, count: Count, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Create the partitions of a new base; otherwise the first producer or worker creates them."""
    with Client(url) as client:
        partitions = Partitions(client, base)
        with recorded(client, "partition create", base=escape(base), partitions=f"{count:,}") as action:
            partition_map = partitions.create(count)
            action.result = _result(partition_map)
    if partition_map.count != count:
        print_message(f"the partitions exist already; to grow them: millstream partition grow {escape(base)} {count}")
    if as_json:
        print_json(_as_json(partition_map, None, {}))
    else:
        print_line(f"{base} has {pluralize(partition_map.count, 'partition')}")


def _result(partition_map: PartitionMap) -> str:
    return f"has {pluralize(partition_map.count, 'partition')}, generation {partition_map.generation}"


def _existing(client: Client, base: str) -> Partitions:
    found = Partitions(client, base)
    if found.load() is None:
        raise MillstreamError(f"{base!r} has no partitions on this Redis; see: millstream partition create")
    return found


def _handlers(client: Client, partition_map: PartitionMap) -> list[HandlerKeys]:
    """The handlers of the base: each reads all partitions, so those of the first are all."""
    try:
        found = groups_of(client, partition_map.stream(0))
    except GroupMissing:
        return []
    return [keys for one in found if (keys := handler_of(partition_map.stream(0), one.name)) is not None]


def _last_close(partition_map: PartitionMap, number: int) -> str | None:
    return next((closed[number] for closed in reversed(partition_map.close_ids) if number < len(closed)), None)


def _describe(one: UndrainedPartition) -> str:
    parts = []
    if one.since is not None:
        parts.append(
            f"keys that left {one.stream} with generation {one.since} may still have messages or a state there"
        )
    if one.awaiting:
        parts.append(f"{pluralize(one.awaiting, 'key')} of {one.stream} wait for older partitions to be drained")
    return "; ".join(parts)


def _as_json(
    partition_map: PartitionMap, lengths: list[int] | None, undrained: dict[str, list[UndrainedPartition]]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "base": partition_map.base,
        "generation": partition_map.generation,
        "counts": list(partition_map.counts),
        "growing": partition_map.growing_to,
        "partitions": [
            {
                "stream": stream,
                "since": partition_map.created_in(number),
                "closed_at": _last_close(partition_map, number),
            }
            for number, stream in enumerate(partition_map.streams)
        ],
    }
    if lengths is not None:
        for one, length in zip(found["partitions"], lengths, strict=True):
            one["entries"] = length
        found["undrained"] = {handler: [asdict(one) for one in some] for handler, some in undrained.items()}
    return found
