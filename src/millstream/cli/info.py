"""`millstream info`: shows the readers of streams, their lag, and the problems of each."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from typer.core import TyperCommand

from millstream.admin.consumption_summary import ReaderReport, summarize_readers
from millstream.admin.handler_names import unknown_app
from millstream.admin.inspection import inspect
from millstream.admin.reports import Inspection
from millstream.admin.server_checks import memory_problems
from millstream.admin.time_inputs import Duration
from millstream.cli.info_tables import Rates, RatesByReader, print_hidden, print_tables, status_of
from millstream.cli.options import MARKUP, Json, Url, duration
from millstream.cli.screen import show_repeatedly
from millstream.cli.terminal import print_json, print_message
from millstream.errors import ConfigError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client

_WATCH_EVERY = "2s"


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """The result of one inspection.

    * `at_s`: when it began; `rates`: since the one before, None if there was none
    * `problems`: why Redis refuses writes
    * `missing`: what to say if nothing of the app was found
    """

    at_s: float
    found: Inspection
    readers: Sequence[ReaderReport]
    problems: Sequence[str]
    missing: str
    rates: RatesByReader | None = None


def _take(client: Client, app: str | None, before: _Snapshot | None = None) -> _Snapshot:
    at_s = time.monotonic()
    found = inspect(client, app)
    readers = summarize_readers(found)
    rates = None if before is None else _rates(readers, before, at_s)
    missing = "" if app is None or readers else unknown_app(client, app)
    problems = memory_problems(client)
    return _Snapshot(at_s=at_s, found=found, readers=readers, problems=problems, missing=missing, rates=rates)


def _rates(readers: Sequence[ReaderReport], before: _Snapshot, at_s: float) -> RatesByReader:
    earlier = {(one.kind, one.name): one for one in before.readers}
    seconds = at_s - before.at_s
    rates = {}
    for one in readers:
        key = one.kind, one.name
        if (old := earlier.get(key)) is not None and old.streams == one.streams:
            done = None if old.done is None or one.done is None else (one.done - old.done) / seconds
            stalled_s = seconds if done == 0 and old.lag and one.lag else 0.0
            if stalled_s and before.rates and (last := before.rates.get(key)):
                stalled_s += last.stalled_s
            rates[key] = Rates(arriving=(one.added - old.added) / seconds, done=done, stalled_s=stalled_s)
    return rates


class _Command(TyperCommand):
    """Its option --watch has a value, or none."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        alone = [
            arg == "--watch" and not any(map(_is_duration, args[place + 1 : place + 2]))
            for place, arg in enumerate(args)
        ]
        return super().parse_args(
            ctx, [f"{arg}={_WATCH_EVERY}" if is_alone else arg for arg, is_alone in zip(args, alone, strict=True)]
        )


def _is_duration(text: str) -> bool:
    try:
        Duration(text)
    except ConfigError:
        return False
    return True


info = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)


@info.command("info", cls=_Command)
def show(
    app: Annotated[str | None, typer.Argument(help="Only this app's handlers, stages and streams; its name.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="All columns, and handlers stream by stream.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows of each table.")] = 50,
    over: Annotated[Duration | None, duration("--over", "Measure rates, too, over this time.")] = None,
    watch: Annotated[
        Duration | None,
        duration("--watch", f"Repeat it, with rates, every so often; alone: every {_WATCH_EVERY}.", least="100ms"),
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Show readers, their lag, live workers and dead letters.

    Handlers, stages and other groups are summed up over their streams; those that need an operator come first. Then
    come the streams. --wide shows more columns, and handlers stream by stream.

    A > before a number marks a lower bound, as counting was cut short; ? means unknown. Stuck keys are parked, or back
    off.
    """

    def print_one(snapshot: _Snapshot) -> None:
        if as_json:
            readers = [_row(one, snapshot.rates) for one in snapshot.readers]
            found = msgspec.to_builtins(snapshot.found)
            print_json({"readers": readers, "problems": snapshot.problems, **found}, flush=True)
        else:
            for problem in snapshot.problems:
                print_message(f"{problem}; see: millstream doctor")
            if snapshot.missing:
                print_hidden(snapshot.found)
                print_message(snapshot.missing)
            else:
                print_tables(snapshot.found, snapshot.readers, snapshot.rates, wide=wide, limit=limit)

    with Client(url) as client:
        if watch is not None:
            _watch(client, app, watch, print_one, as_json=as_json)
        snapshot = _take(client, app)
        if over is not None:
            time.sleep(max(0.0, snapshot.at_s + over - time.monotonic()))
            snapshot = _take(client, app, snapshot)
    print_one(snapshot)
    if app is not None and not snapshot.readers and not snapshot.found.hidden_handlers:
        raise typer.Exit(1)  # its name may be misspelt


def _watch(
    client: Client, app: str | None, every: Duration, print_one: Callable[[_Snapshot], None], *, as_json: bool
) -> NoReturn:
    before: _Snapshot | None = None

    def take() -> _Snapshot:
        nonlocal before
        before = _take(client, app, before)
        return before

    show_repeatedly(every, take, print_one, as_json=as_json)


def _row(reader: ReaderReport, rates: RatesByReader | None) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(reader)
    row["largest_lags"] = [{"stream": stream, "lag": lag} for stream, lag in reader.largest_lags]
    if rates is not None:
        rate = rates.get((reader.kind, reader.name))
        row["status"] = status_of(reader, rate)
        row |= {"arriving_per_s": rate and rate.arriving, "done_per_s": rate and rate.done}
    return row
