"""`millstream top`: shows what handlers do now, and how much waits for them, all the time."""

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from millstream.admin.handler_activity import ActivityReader, HandlerActivity
from millstream.admin.handler_names import select_handlers
from millstream.admin.redis_metrics import REST, Places, by_handler
from millstream.admin.time_inputs import Duration
from millstream.cli.handler_names import HandlerNames
from millstream.cli.options import JsonLines, Url, duration
from millstream.cli.screen import show_repeatedly
from millstream.cli.terminal import ProblemCell, WarningCell, print_json, print_message, print_table
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.formats import format_age, format_count, pluralize

Interval = Annotated[Duration, duration("--interval", "How often it reads and shows the figures.", least="100ms")]
Once = Annotated[bool, typer.Option("--once", help="Show them once, with rates over one interval, and end.")]

_COLUMNS = ("~handler", ">done/s", ">waiting", ">unread", ">oldest", ">busy", ">parked", ">blocked", ">dead", ">alive")


def top(
    handlers: HandlerNames = None,
    interval: Interval = Duration("2s"),
    once: Once = False,
    url: Url = DEFAULT_URL,
    as_json: JsonLines = False,
) -> None:
    """Show what handlers do now: messages done per second, and those that wait, all the time.

    The figures come from Redis alone. In a pipe it shows them once, unless --json is given: then it prints a line for
    each interval. Reading takes at most a tenth of the time: with very many streams the interval is longer.
    """

    def discover(client: Client) -> Places:
        return by_handler(select_handlers(client, handlers, None))

    with Client(url) as client:
        activity = ActivityReader(client, discover)

        def show(found: Sequence[HandlerActivity]) -> None:
            if as_json:
                line = {"at_ms": round(time.time() * 1000), "handlers": [*map(_as_json, found)]}
                print_json(line | {"hidden_handlers": activity.hidden}, flush=True)
            else:
                _print(found, activity.hidden)

        is_once = once or not (as_json or sys.stdout.isatty())
        if is_once or as_json:
            activity.read()  # a rate needs two readings
            time.sleep(interval)
        if is_once:
            show(activity.read())
        else:
            show_repeatedly(interval, activity.read, show, as_json=as_json, rest=REST)


def _print(found: Sequence[HandlerActivity], hidden: int) -> None:
    if hidden:
        print_message(f"not shown: {pluralize(hidden, 'handler')} that this Redis user may not access")
    if not found:
        print_message("no handler has run on this Redis")
        return
    print_table(_COLUMNS, [_cells(one) for one in found])
    for one in found:
        if one.figures.paused:
            streams = pluralize(one.figures.paused, "stream")
            print_message(f"{one.handler} is paused on {streams}; to go on: millstream resume {one.handler}")


def _cells(one: HandlerActivity) -> tuple[str, ...]:
    figures = one.figures
    dead = figures.dead_letters.total()
    stands_still = not one.workers and figures.waiting > 0
    return (
        (WarningCell if one.is_paused else str)(one.handler),
        "?" if one.committed_per_s is None else format_count(one.committed_per_s),
        format_count(figures.waiting),
        format_count(figures.unread),
        format_age(figures.oldest_ms),
        format_count(figures.in_flight),
        (WarningCell if figures.keys["parked"] else str)(format_count(figures.keys["parked"])),
        (ProblemCell if one.blocked else str)(format_count(one.blocked)),
        (ProblemCell if dead else str)(format_count(dead)),
        (ProblemCell if stands_still else str)(format_count(one.workers)),
    )


def _as_json(one: HandlerActivity) -> dict[str, Any]:
    figures = one.figures
    return {
        "handler": one.handler,
        "streams": figures.streams,
        "paused": figures.paused,
        "committed": figures.committed,
        "committed_per_s": one.committed_per_s,
        "waiting": figures.waiting,
        "unread": figures.unread,
        "in_flight": figures.in_flight,
        "oldest_age_ms": figures.oldest_ms,
        "ready": figures.keys["ready"],
        "leased": figures.keys["leased"],
        "backing_off": figures.keys["backing_off"],
        "parked": figures.keys["parked"],
        "blocked": one.blocked,
        "dead_letters": figures.dead_letters.total(),
        "delayed": figures.delayed,
        "alive": one.workers,
        "p50_ms": one.runs.p50_ms,
        "p99_ms": one.runs.p99_ms,
        "retried_per_s": one.runs.retried_per_s,
        **({"query": msgspec.structs.asdict(one.query)} if one.query else {}),
    }
