"""`millstream pending`: what a group has handed out and nobody has acknowledged."""

from collections.abc import Sequence
from typing import Annotated

import typer

from millstream.cli.options import DEFAULT_URL, Json, Url, parse_duration_ms
from millstream.cli.terminal import age, counted, say, say_json, table, talk
from millstream.groups import Group, PendingEntry, PendingSummary
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import visible


def pending(
    stream: Annotated[str, typer.Argument(help="The stream.")],
    group: Annotated[str, typer.Argument(help="The group.")],
    consumer: Annotated[str | None, typer.Option(help="Only what this consumer holds.")] = None,
    min_idle: Annotated[str | None, typer.Option(help="Only what was left alone for so long: 30s, 5m, 2h, 1d.")] = None,
    start: Annotated[str, typer.Option(help="The first id; ( before it leaves it out.", metavar="ID")] = "-",
    end: Annotated[str, typer.Option(help="The last id; ( before it leaves it out.", metavar="ID")] = "+",
    count: Annotated[int, typer.Option(min=1, help="Most entries to show.")] = 100,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Show the pending entries of a group: how many each consumer holds, and the first of them one by one."""
    idle_ms = parse_duration_ms(min_idle) if min_idle else 0
    with Client(url) as client:
        of = Group(client, stream, group).pending
        summary = of.summary()
        found = of.entries(start, end, count=count + 1, consumer=consumer, min_idle_ms=idle_ms)
    shown = found[:count]
    if as_json:
        entries = [{**one._asdict(), "id": one.id.decode()} for one in shown]
        say_json({"stream": stream, "group": group, **_figures(summary), "entries": entries})
    else:
        _show(summary, shown)
    if len(found) > count:
        talk("there are more; --count or --start shows them")


def _figures(summary: PendingSummary) -> dict[str, object]:
    ends = {"lowest": summary.lowest, "highest": summary.highest}
    found = {name: None if entry_id is None else entry_id.decode() for name, entry_id in ends.items()}
    return {"count": summary.count, **found, "by_consumer": dict(summary.by_consumer)}


def _show(summary: PendingSummary, shown: Sequence[PendingEntry]) -> None:
    if not summary.count or summary.lowest is None or summary.highest is None:
        talk("nothing is pending")
        return
    what = counted(summary.count, "pending entry", "pending entries")
    say(f"{what}, from {summary.lowest.decode()} to {summary.highest.decode()}")
    table(("consumer", ">pending"), [(visible(name), f"{held:,}") for name, held in summary.by_consumer.items()])
    say("")
    rows = [(one.id.decode(), visible(one.consumer), age(one.idle_ms), f"{one.deliveries:,}") for one in shown]
    table(("entry", "consumer", ">left alone for", ">deliveries"), rows)
