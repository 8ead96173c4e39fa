"""The tables of `millstream info`: compact ones, which fit 80 columns, and wide ones."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millstream.admin.consumption_summary import ReaderKind, ReaderReport
from millstream.admin.reports import HandlerReport, Inspection, StreamReport
from millstream.cli.terminal import ProblemCell, WarningCell, print_line, print_message, print_table
from millstream.delivery.long_runs import LongRun
from millstream.delivery.restarts import RecentRestarts
from millstream.redis_client.escaping import escape
from millstream.redis_client.formats import format_age, format_count, pluralize
from millstream.redis_client.key_names import stage_of

_LARGEST = 2
_STALLED_S = 10
_STATUS_CELLS: Mapping[str, type[str]] = {
    "unreadable": ProblemCell,
    "not running": ProblemCell,
    "crash loop": ProblemCell,
    "paused": WarningCell,
    "partly paused": WarningCell,
    "no progress": WarningCell,
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Entries per second: added to the streams of a reader, and completed by it; None if unknown.

    `stalled_s`: for how long entries have waited and none was completed, as far as was seen.
    """

    arriving: float
    done: float | None
    stalled_s: float


RatesByReader = Mapping[tuple[ReaderKind, str], Rates]


def status_of(reader: ReaderReport, rates: Rates | None) -> str:
    """The status of a reader; "no progress" if it is running, and has completed nothing for ten seconds or longer."""
    is_stalled = reader.status == "running" and rates is not None and rates.stalled_s >= _STALLED_S
    return "no progress" if is_stalled else reader.status


def print_tables(
    found: Inspection,
    readers: Sequence[ReaderReport],
    rates: RatesByReader | None,
    *,
    wide: bool,
    limit: int,
) -> None:
    """Print an inspection with at most `limit` rows of each table."""
    print_hidden(found)
    # Readers that need attention come first.
    worst = sorted(
        readers,
        key=lambda one: (not one.needs_attention, -one.dead_letters, -one.parked - one.blocked, -(one.lag or 0)),
    )[:limit]
    if worst:
        _print_readers(worst, rates, wide=wide)
        _print_more(len(readers) - len(worst), "reader")
        print_line("")
    _print_settings(found.handlers)
    _print_restarts(found.restarts)
    _print_long_runs(found.long_runs, limit)
    if wide:
        _print_handlers(found.handlers, limit)
    _print_unreadable(found.handlers, limit)
    _print_streams(found, limit, wide=wide)
    if count := sum(one.needs_attention for one in readers):
        print_message(f"{pluralize(count, 'reader needs', 'readers need')} attention; see: millstream doctor")


# --- Readers ---


def _print_readers(readers: Sequence[ReaderReport], all_rates: RatesByReader | None, *, wide: bool) -> None:
    rates = [None if all_rates is None else all_rates.get((one.kind, one.name)) for one in readers]
    if wide:
        columns = (
            "~reader",
            "status",
            "mode",
            ">alive",
            ">streams",
            ">lag",
            ">min",
            ">avg",
            ">max",
            "~largest lags",
            ">oldest",
            ">pending",
            ">parked keys",
            ">backing off",
            ">dead letters",
            *((">arriving/s", ">done/s") if all_rates is not None else ()),
        )
        cells = [_wide_cells(one, rate) for one, rate in zip(readers, rates, strict=True)]
    else:
        with_rates = (">in/s", ">done/s") if all_rates is not None else ()
        columns = ("~reader", "status", ">alive", ">lag", ">oldest", ">stuck", ">dead", *with_rates)
        cells = [_compact_cells(one, rate) for one, rate in zip(readers, rates, strict=True)]
    if all_rates is not None:
        cells = [(*row, *_rate_cells(rate, wide=wide)) for row, rate in zip(cells, rates, strict=True)]
    print_table(columns, cells)


def _compact_cells(one: ReaderReport, rates: Rates | None) -> tuple[str, ...]:
    stuck = one.parked + one.backing_off
    return (
        escape(one.name),
        _status_cell(one, rates),
        format_count(one.alive),
        "?" if one.lag is None else f"{'' if one.lag_exact else '>'}{format_count(one.lag)}",
        format_age(one.oldest_age_ms),
        (ProblemCell if one.blocked else WarningCell if stuck else str)(format_count(stuck))
        if one.kind == "handler"
        else "-",
        (ProblemCell if one.dead_letters else str)(format_count(one.dead_letters)) if one.kind == "handler" else "-",
    )


def _status_cell(one: ReaderReport, rates: Rates | None) -> str:
    status = status_of(one, rates)
    return _STATUS_CELLS.get(status, str)(status)


def _wide_cells(one: ReaderReport, rates: Rates | None) -> tuple[str, ...]:
    largest = ", ".join(f"{escape(stream)} ({count:,})" for stream, count in one.largest_lags[:_LARGEST])
    return (
        escape(one.name),
        _status_cell(one, rates),
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
        *(f"{n:,}" if one.kind == "handler" else "-" for n in (one.parked, one.backing_off, one.dead_letters)),
    )


def _rate_cells(rates: Rates | None, *, wide: bool) -> tuple[str, str]:
    if rates is None:
        return "?", "?"
    shown = [
        None if one is None else f"{one:,.1f}" if wide else format_count(one) for one in (rates.arriving, rates.done)
    ]
    return shown[0] or "?", shown[1] or "?"


def _number(count: int | None, *, exact: bool = True) -> str:
    if count is None:
        return "?"
    return f"{'' if exact else '>'}{count:,}"


def _print_settings(handlers: Sequence[HandlerReport]) -> None:
    """Print why, and since when, handlers are paused, and the rates that operators have set, once for each handler."""
    _print_lines({one.label: f"is {one.pause.describe(one.label)}" for one in handlers if one.pause})
    _print_lines(
        {
            one.label: f"has the rate {one.rate_override.source}; to go back to its code: millstream rate clear {one.label}"
            for one in handlers
            if one.rate_override
        }
    )


def _print_lines(by_handler: Mapping[str, str]) -> None:
    for label, text in by_handler.items():
        print_line(f"{label} {text}")
    if by_handler:
        print_line("")


def _print_restarts(restarts: Sequence[RecentRestarts]) -> None:
    for one in restarts:
        print_line(one.describe())
    if restarts:
        print_line("")


def _print_long_runs(runs: Sequence[LongRun], limit: int) -> None:
    now_ms = time.time() * 1000
    for one in runs[:limit]:
        print_line(one.describe(now_ms))
    _print_more(len(runs) - limit, "long run")
    if runs:
        print_line("")


# --- Handlers, stream by stream ---


def _worst(handlers: Sequence[HandlerReport], limit: int) -> Sequence[HandlerReport]:
    return sorted(handlers, key=lambda one: (one.problem is None, -one.dead_letters, -(one.lag or 0)))[:limit]


def _print_handlers(handlers: Sequence[HandlerReport], limit: int) -> None:
    if not handlers:
        return
    columns = (
        "~handler",
        "~stream",
        ">lag",
        ">oldest",
        "engine",
        ">pending",
        ">processed",
        ">written",
        ">refused",
        ">dead letters",
        "committed id",
    )
    print_table(columns, [_handler_cells(one) for one in _worst(handlers, limit)])
    _print_more(len(handlers) - limit, "handler")
    print_line("")


def _handler_cells(handler: HandlerReport) -> tuple[str, ...]:
    return (
        handler.label,
        escape(handler.stream),
        _number(handler.lag, exact=handler.lag_exact),
        format_age(handler.oldest_age_ms),
        _engine(handler),
        f"{handler.pending:,}" if handler.engine == "workers" or handler.pending else "-",
        f"{handler.processed:,}",
        f"{handler.written:,}",
        f"{handler.refused:,}",
        f"{handler.dead_letters:,}",
        "unreadable" if handler.problem is not None else handler.committed_id or "-",
    )


def _print_unreadable(handlers: Sequence[HandlerReport], limit: int) -> None:
    for one in _worst(handlers, limit):
        if one.problem is not None:
            print_message(f"{one.label} on {escape(one.stream)} is unreadable: {one.problem}")


def _engine(handler: HandlerReport) -> str:
    name = f"{handler.engine} ({handler.consumers:,})"
    return f"{name}, paused" if handler.paused else name


# --- Streams ---


def _print_streams(found: Inspection, limit: int, *, wide: bool) -> None:
    if not found.streams:
        print_message("there are no streams")
        return
    longest = sorted(found.streams, key=lambda stream: -stream.length)[:limit]
    ids = ("first id", "last id") if wide else ()
    print_table(
        ("~stream", ">entries", ">oldest", *ids, "~groups (consumers, pending)"),
        [
            (
                escape(one.name),
                f"{one.length:,}",
                format_age(one.oldest_age_ms),
                *((one.first_id or "-", one.last_id or "-") if wide else ()),
                _groups(one),
            )
            for one in longest
        ],
    )
    _print_more(len(found.streams) - len(longest), "stream")


def _groups(stream: StreamReport) -> str:
    # The tables above show the groups of handlers and stages.
    foreign = [group for group in stream.groups if group.has_lag and stage_of(group.name) is None]
    return ", ".join(f"{escape(group.name)} ({group.consumers:,}, {group.pending:,})" for group in foreign) or "-"


def print_hidden(found: Inspection) -> None:
    """Print how many streams and handlers this user may not see."""
    things = (
        (found.hidden_streams, "stream", "streams"),
        (found.hidden_handlers, "handler on a stream", "handlers on streams"),
    )
    if hidden := [pluralize(*one) for one in things if one[0]]:
        print_message(f"not shown: {' and '.join(hidden)} that this Redis user may not access")


def _print_more(number: int, thing: str) -> None:
    if number > 0:
        print_message(f"{pluralize(number, f'more {thing}')}; use --limit or --json to show them")
