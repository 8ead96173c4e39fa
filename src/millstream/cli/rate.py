"""`millstream rate`: shows, sets and clears the rate of a handler while it runs."""

from typing import Annotated, Any

import typer

from millstream.admin.handler_names import find_handler, select_handlers
from millstream.cli.handler_names import HandlerName, HandlerNames, OnStream
from millstream.cli.options import DryRun, Json, JsonLines, Url, command_group
from millstream.cli.recorded_action import on_stream, recorded
from millstream.cli.terminal import print_json, print_line, print_message, print_table
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.rate_override import RateOverride, format_rate, parse_rate, parse_rate_override
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_time, pluralize
from millstream.redis_client.key_names import HandlerKeys, to_wire
from millstream.redis_client.pipelining import call_all

Rate = Annotated[
    str, typer.Argument(help="Messages a second of each stream, or with a unit: 50, 60/m, 100/h, 5/d.", metavar="RATE")
]

rate = command_group("Show, set and clear the rate of a handler while it runs.")


@rate.command("set")
def set_(
    handler: HandlerName,
    rate: Rate,
    stream: OnStream = None,
    dry_run: DryRun = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Set the rate of a handler, in place of the one in code. Workers, and runs on Spark, follow it within seconds."""
    _set(handler, stream, url, parse_rate(rate), dry_run=dry_run, as_json=as_json)


@rate.command()
def clear(
    handler: HandlerName,
    stream: OnStream = None,
    dry_run: DryRun = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Go back to the rate in code."""
    _set(handler, stream, url, None, dry_run=dry_run, as_json=as_json)


@rate.command()
def show(
    handler: HandlerNames = None, stream: OnStream = None, url: Url = DEFAULT_URL, as_json: JsonLines = False
) -> None:
    """Show which handlers have a rate that an operator has set, and since when."""
    with Client(url) as client:
        places = select_handlers(client, handler, stream)
        stored = call_all(client, [("HGET", to_wire(one.meta), "rate") for one in places])
    found = [(keys, parse_rate_override(value)) for keys, value in zip(places, stored, strict=True)]
    if as_json:
        for keys, override in found:
            print_json(_as_json(keys, override))
    elif not found:
        print_message("no handler has run on this Redis")
    else:
        print_table(("~handler", "~stream", ">rate", "set at"), [_row(*one) for one in found])


def _set(name: str, stream: str | None, url: str, wanted: float | None, *, dry_run: bool, as_json: bool) -> None:
    with Client(url) as client:
        found = find_handler(client, name, stream)
        if not dry_run:
            about = {
                "handler": name,
                "stream": on_stream(stream),
                "rate": None if wanted is None else format_rate(wanted),
            }
            with recorded(client, "rate clear" if wanted is None else "rate set", **about) as action:
                store = CommitStore(client, app=found[0].app, handler=found[0].handler)
                store.set_rate([one.stream for one in found], wanted)
                action.result = f"{'cleared' if wanted is None else 'set'} on {pluralize(len(found), 'stream')}"
    if as_json:
        streams = [one.stream for one in found]
        handler = {"app": found[0].app, "handler": found[0].handler, "streams": streams}
        print_json({**handler, "rate": wanted, "dry_run": dry_run})
        return
    has = "would have" if dry_run else "has"
    for one in found:
        shown = "its rate in code" if wanted is None else f"the rate {format_rate(wanted)}"
        print_line(f"{one.label} {has} {shown} on {escape(one.stream)}")


def _as_json(keys: HandlerKeys, override: RateOverride | None) -> dict[str, Any]:
    return {
        "handler": keys.label,
        "stream": keys.stream,
        "rate": None if override is None else override.rate,
        "at_ms": None if override is None else override.at_ms,
    }


def _row(keys: HandlerKeys, override: RateOverride | None) -> tuple[str, ...]:
    if override is None:
        return keys.label, escape(keys.stream), "as in code", "-"
    return keys.label, escape(keys.stream), format_rate(override.rate), format_time(override.at_ms) or "-"
