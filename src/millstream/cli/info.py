"""`millstream info`: shows the streams in Redis, their readers and the readers' lag."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import typer

from millstream.admin.consumption_summary import ReaderKind, ReaderReport, summarize_readers
from millstream.admin.inspection import inspect
from millstream.admin.reports import HandlerReport, Inspection, StreamReport
from millstream.cli.options import DEFAULT_URL, Duration, Json, Url, duration
from millstream.cli.terminal import format_age, pluralize, print_json, print_line, print_message, print_table
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import stage_of

_LARGEST = 2


class _Rates(NamedTuple):
    """Entries per second: added to the streams of a reader, and completed by it; None if unknown."""

    arriving: float
    done: float | None


_RatesByName = Mapping[tuple[ReaderKind, str], _Rates]


def info(
    app: Annotated[str | None, typer.Argument(help="Only this app's handlers, stages and streams; its name.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows of each table.")] = 50,
    over: Annotated[Duration | None, duration("--over", "Measure rates, too, over this time.")] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Show readers, their lag, live workers and dead letters.

    First handlers, stages and other groups, summed up over their streams; then handlers stream by stream; then the
    streams.

    A > before a number marks a lower bound, as counting was cut short; ? means unknown.
    """
    with Client(url) as client:
        found, rates = _inspect(client, app, None if over is None else over.ms)
    summed = summarize_readers(found)
    if as_json:
        print_json({"readers": [_row(one, rates) for one in summed], **asdict(found)})
        return
    _print_hidden(found)
    if app is not None and not summed:
        print_message(f"no handler or stage of an app named {app!r} has run on this Redis")
    _show_readers(summed, rates, limit)
    _show_breakers(found.handlers)
    _show_handlers(found.handlers, limit)
    _show_streams(found, limit)


def _inspect(client: Client, app: str | None, over_ms: int | None) -> tuple[Inspection, _RatesByName | None]:
    began_s = time.monotonic()
    found = inspect(client, app)
    if over_ms is None:
        return found, None
    before = {(one.kind, one.name): one for one in summarize_readers(found)}
    time.sleep(max(0.0, began_s + over_ms / 1000 - time.monotonic()))
    seconds, found = time.monotonic() - began_s, inspect(client, app)
    rates = {}
    for one in summarize_readers(found):
        key = one.kind, one.name
        if (old := before.get(key)) is not None and old.streams == one.streams:
            done = None if old.done is None or one.done is None else (one.done - old.done) / seconds
            rates[key] = _Rates((one.added - old.added) / seconds, done)
    return found, rates


# --- Readers ---


def _row(reader: ReaderReport, rates: _RatesByName | None) -> dict[str, Any]:
    row = asdict(reader)
    row["largest_lags"] = [{"stream": stream, "lag": lag} for stream, lag in reader.largest_lags]
    if rates is not None:
        rate = rates.get((reader.kind, reader.name))
        row |= {"arriving_per_s": rate and rate.arriving, "done_per_s": rate and rate.done}
    return row


def _show_readers(found: Sequence[ReaderReport], rates: _RatesByName | None, limit: int) -> None:
    if not found:
        return
    # Readers that need attention come first.
    worst = sorted(found, key=lambda one: (-one.dead_letters, -one.parked, -(one.lag or 0)))[:limit]
    columns = (
        "reader", "mode", ">alive", ">streams", ">lag", ">min", ">avg", ">max", "largest lags", ">oldest",
        ">pending", ">parked keys", ">dead letters",
    )  # fmt: skip
    print_table(
        (*columns, *((">arriving/s", ">done/s") if rates is not None else ())),
        [(*_cells(one), *(_rate_cells(rates.get((one.kind, one.name))) if rates is not None else ())) for one in worst],
    )
    _print_more(len(found) - len(worst), "reader")
    print_line("")


def _cells(one: ReaderReport) -> tuple[str, ...]:
    largest = ", ".join(f"{escape(stream)} ({count:,})" for stream, count in one.largest_lags[:_LARGEST])
    return (
        escape(one.name),
        "; ".join(one.modes) + (f", {pluralize(one.paused, 'stream')} paused" if one.paused else ""),
        f"{one.alive:,}",
        f"{one.streams:,}",
        _number(one.lag, exact=one.lag_exact),
        _number(one.lag_min),
        "?" if one.lag_avg is None else f"{one.lag_avg:,.1f}",
        _number(one.lag_max),
        largest or "-",
        format_age(one.oldest_age_ms),
        f"{one.pending:,}",
        f"{one.parked:,}" if one.kind == "handler" else "-",
        f"{one.dead_letters:,}" if one.kind == "handler" else "-",
    )


def _rate_cells(rates: _Rates | None) -> tuple[str, str]:
    if rates is None:
        return "?", "?"
    return f"{rates.arriving:,.1f}", "?" if rates.done is None else f"{rates.done:,.1f}"


def _number(count: int | None, *, exact: bool = True) -> str:
    if count is None:
        return "?"
    return f"{'' if exact else '>'}{count:,}"


def _show_breakers(handlers: Sequence[HandlerReport]) -> None:
    """Show why breakers have paused handlers, once for each handler."""
    by_handler = {f"{one.app}.{one.handler}": one.pause for one in handlers if one.pause and one.pause.by == "breaker"}
    for label, pause in by_handler.items():
        print_line(f"{label} is {pause.describe(label)}")
    if by_handler:
        print_line("")


# --- Handlers, stream by stream ---


def _show_handlers(handlers: tuple[HandlerReport, ...], limit: int) -> None:
    if not handlers:
        return
    worst = sorted(handlers, key=lambda handler: (-handler.dead_letters, -(handler.lag or 0)))[:limit]
    print_table(
        (
            "handler",
            "stream",
            ">lag",
            ">oldest",
            "engine",
            ">pending",
            ">committed",
            ">written",
            ">refused",
            ">dead letters",
            "committed id",
        ),
        [
            (
                f"{handler.app}.{handler.handler}",
                escape(handler.stream),
                _number(handler.lag, exact=handler.lag_exact),
                format_age(handler.oldest_age_ms),
                _engine(handler),
                f"{handler.pending:,}" if handler.engine == "workers" or handler.pending else "-",
                f"{handler.committed:,}",
                f"{handler.written:,}",
                f"{handler.refused:,}",
                f"{handler.dead_letters:,}",
                "unreadable" if handler.problem is not None else handler.committed_id or "-",
            )
            for handler in worst
        ],
    )
    for handler in worst:
        if handler.problem is not None:
            print_message(
                f"{handler.app}.{handler.handler} on {escape(handler.stream)} is unreadable: {handler.problem}"
            )
    _print_more(len(handlers) - len(worst), "handler")
    print_line("")


def _engine(handler: HandlerReport) -> str:
    name = f"{handler.engine} ({handler.consumers:,})"
    return f"{name}, paused" if handler.paused else name


# --- Streams ---


def _show_streams(found: Inspection, limit: int) -> None:
    if not found.streams:
        print_message("there are no streams")
        return
    longest = sorted(found.streams, key=lambda stream: -stream.length)[:limit]
    print_table(
        ("stream", ">entries", ">oldest", "first id", "last id", "groups (consumers, pending)"),
        [
            (
                escape(stream.name),
                f"{stream.length:,}",
                format_age(stream.oldest_age_ms),
                stream.first_id or "-",
                stream.last_id or "-",
                _groups(stream),
            )
            for stream in longest
        ],
    )
    _print_more(len(found.streams) - len(longest), "stream")


def _groups(stream: StreamReport) -> str:
    # The tables above show the groups of handlers and stages.
    foreign = [group for group in stream.groups if group.has_lag and stage_of(group.name) is None]
    return ", ".join(f"{escape(group.name)} ({group.consumers:,}, {group.pending:,})" for group in foreign) or "-"


def _print_hidden(found: Inspection) -> None:
    things = (
        (found.hidden_streams, "stream", "streams"),
        (found.hidden_handlers, "handler on a stream", "handlers on streams"),
    )
    if hidden := [pluralize(*one) for one in things if one[0]]:
        print_message(f"not shown: {' and '.join(hidden)} that this Redis user may not access")


def _print_more(number: int, thing: str) -> None:
    if number:
        print_message(f"{pluralize(number, f'more {thing}')}; use --limit or --json to show them")
