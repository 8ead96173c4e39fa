"""`millstream partitions`: streams that keys are spread over, and more of them."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from millstream.admin.inspection import handler_of
from millstream.cli.options import DEFAULT_URL, Json, Url, family
from millstream.cli.terminal import counted, say, say_json, table, talk
from millstream.errors import GroupMissing
from millstream.groups import groups_of
from millstream.partitions.key_migration import KeyMigration, UndrainedPartition
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import visible
from millstream.redis_client.key_names import HandlerKeys

Base = Annotated[str, typer.Argument(help="The base: orders, if the partitions are {orders.0}, {orders.1} ...")]
Count = Annotated[int, typer.Argument(help="How many partitions there are to be.")]

partitions = family("Show and grow the partitions that keys are spread over.")


@partitions.command()
def show(base: Base, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show the generations of partitions, where each was sealed, and whether keys still move between them."""
    with Client(url) as client:
        layout = Partitions(client, base).found()
        lengths = client.pipeline([("XLEN", stream) for stream in layout.streams])
        moves = {
            f"{one.app}.{one.handler}": KeyMigration(client, layout, app=one.app, handler=one.handler).unsettled()
            for one in _handlers(client, layout)
        }
    if as_json:
        say_json(_as_json(layout, lengths, moves))
        return
    growing = "" if layout.growing is None else f"; a growth to {layout.growing:,} was begun and has not ended"
    say(f"{base}: {counted(layout.count, 'partition')}, generation {layout.generation}{growing}")
    table(
        ("partition", ">entries", ">since generation", "last sealed at"),
        [
            (visible(stream), f"{length:,}", str(layout.born(place)), _last_seal(layout, place) or "-")
            for place, (stream, length) in enumerate(zip(layout.streams, lengths, strict=True))
        ],
    )
    for handler, some in moves.items():
        for one in some:
            say(f"{handler}: {_words(one)}")
        if not some:
            talk(f"{handler}: no key moves")


@partitions.command()
def grow(base: Base, count: Count, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Have more partitions. Each key stays in order; producers and workers go along by themselves.

    May be repeated, and must be if it was broken off.
    """
    with Client(url) as client:
        layout = Partitions(client, base).grow(count)
    if as_json:
        say_json(_as_json(layout, None, {}))
    else:
        say(f"{base} has {counted(layout.count, 'partition')}")


@partitions.command()
def create(base: Base, count: Count, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Make partitions where there are none; the first producer or worker does it otherwise."""
    with Client(url) as client:
        layout = Partitions(client, base).made(count)
    if layout.count != count:
        talk(f"there were partitions before: millstream partitions grow {visible(base)} {count} has more of them")
    if as_json:
        say_json(_as_json(layout, None, {}))
    else:
        say(f"{base} has {counted(layout.count, 'partition')}")


def _handlers(client: Client, layout: PartitionMap) -> list[HandlerKeys]:
    """The handlers that read the first partition, which all do that read any."""
    try:
        found = groups_of(client, layout.stream(0))
    except GroupMissing:
        return []
    return [keys for one in found if (keys := handler_of(layout.stream(0), one.name)) is not None]


def _last_seal(layout: PartitionMap, place: int) -> str | None:
    return next((seals[place] for seals in reversed(layout.seals) if place < len(seals)), None)


def _words(one: UndrainedPartition) -> str:
    parts = []
    if one.since is not None:
        parts.append(
            f"keys that left {one.stream} with generation {one.since} may still have messages or a state there"
        )
    if one.coming:
        parts.append(f"{counted(one.coming, 'key')} of {one.stream} wait until they have left older partitions")
    return "; ".join(parts)


def _as_json(
    layout: PartitionMap, lengths: list[int] | None, moves: dict[str, list[UndrainedPartition]]
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "base": layout.base,
        "generation": layout.generation,
        "counts": list(layout.counts),
        "growing": layout.growing,
        "partitions": [
            {"stream": stream, "since": layout.born(place), "seal": _last_seal(layout, place)}
            for place, stream in enumerate(layout.streams)
        ],
    }
    if lengths is not None:
        for one, length in zip(found["partitions"], lengths, strict=True):
            one["entries"] = length
        found["moves"] = {handler: [asdict(one) for one in some] for handler, some in moves.items()}
    return found
