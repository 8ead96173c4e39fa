"""`millstream history`: the figures of handlers over the last 24 hours, as a console has recorded them."""

from typing import Annotated

import typer
from msgspec.structs import asdict

from millstream.admin.figure_history import WHICH_HANDLERS, FigureHistory, HandlerSample
from millstream.admin.handler_names import select_handlers
from millstream.admin.time_inputs import parse_time_ms
from millstream.cli.handler_names import HandlerNames
from millstream.cli.options import JsonLines, Url
from millstream.cli.terminal import print_json, print_message, print_table
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.formats import format_age, format_count, format_time

Since = Annotated[str, typer.Option("--since", help="Only samples since: 15m (ago), 2h, 1d, or an ISO 8601 time.")]


def history(
    handlers: HandlerNames = None, since: Since = "1h", url: Url = DEFAULT_URL, as_json: JsonLines = False
) -> None:
    """Show the recorded figures of handlers, the oldest first. `millstream console` records them, once a minute."""
    rows: list[tuple[str, ...]] = []
    is_partial = False
    with Client(url) as client:
        for one in FigureHistory(client).scan(parse_time_ms(since)):
            shown = {name: figures for name, figures in one.handlers.items() if _is_of(name, handlers)}
            if as_json:
                by_handler = {name: asdict(figures) for name, figures in shown.items()}
                sample = {"at_ms": one.at_ms, "step_ms": one.step_ms, "partial": one.is_partial, "age_ms": one.age_ms}
                print_json({**sample, "handlers": by_handler})
            else:
                rows += [_row(one.at_ms, name, figures) for name, figures in shown.items()]
                is_partial |= one.is_partial
        if not rows and not as_json and handlers is not None:
            select_handlers(client, handlers, None)  # the name may be misspelt
    if as_json:
        return
    if rows:
        columns = ("when", "~handler", ">added", ">done", ">lag", ">oldest", ">dead letters", ">stuck keys")
        print_table(columns, rows)
    else:
        print_message("there are no such samples since then: `millstream console` records them while it runs")
    if is_partial:
        print_message(f"the history has {WHICH_HANDLERS}")


def _is_of(name: str, handlers: str | None) -> bool:
    return handlers is None or handlers in (name, name.partition(".")[0])


def _row(at_ms: int, name: str, one: HandlerSample) -> tuple[str, ...]:
    totals = ("?" if value is None else format_count(value) for value in (one.added, one.done, one.lag))
    numbers = map(format_count, (one.dead_letters, one.stuck))
    return format_time(at_ms) or "-", name, *totals, format_age(one.oldest_ms), *numbers
