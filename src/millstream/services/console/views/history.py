"""The history on a page: charts of the last 1, 6 or 24 hours, and their figures as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from millstream.admin.figure_history import STEP_MS, WHICH_HANDLERS, FigureHistory
from millstream.admin.figure_points import FigurePoints, Point, points_of
from millstream.errors import AccessDenied, WrongType
from millstream.redis_client.formats import format_age, format_count
from millstream.redis_client.pipelining import server_time_ms
from millstream.services.console.charts import HEIGHT, WIDTH, Chart, Series, chart_of
from millstream.services.console.pages import PageRequest

_HOUR_MS = 3_600_000
_MOST_POINTS = 120
_KEEP_MS = 15_000.0

RANGES_H = (1, 6, 24)
"""The ranges of a history, in hours."""


def _rate(value: float) -> str:
    """A rate; one of less than 1 with two digits that are not zero."""
    return f"{value:.2g}" if value < 1 else format_count(value)


_CHARTS: Sequence[tuple[str, str, Sequence[Series]]] = (
    (
        "rates",
        "Entries a second",
        (
            Series(name="added", value=lambda one: one.added, text=_rate),
            Series(name="committed", value=lambda one: one.done, text=_rate),
        ),
    ),
    ("lag", "Lag", (Series(name="lag", value=lambda one: one.lag, text=format_count),)),
    ("oldest", "Oldest", (Series(name="age", value=lambda one: one.oldest_ms, text=format_age),)),
    (
        "dead",
        "Dead letters",
        (Series(name="dead letters", value=lambda one: one.dead_letters, text=format_count),),
    ),
    (
        "failures",
        "Failures",
        (
            Series(name="new dead letters a minute", value=lambda one: one.dead, text=_rate),
            Series(name="stuck keys", value=lambda one: one.stuck, text=format_count),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class ShownHistory:
    """A history as a page shows it.

    * `ranges`: hours and address of each range; `hours`: the range that is shown
    * `rows`: for each point, or gap (from when until when), the newest first; `columns`: the names of the figures
    * `notes`: sentences about what is missing
    """

    points: FigurePoints
    ranges: Sequence[tuple[int, str]]
    hours: int
    charts: Sequence[Chart]
    columns: Sequence[str]
    rows: Sequence[tuple[int, int | None, Sequence[str]]]
    notes: Sequence[str]
    width: int = WIDTH
    height: int = HEIGHT


def history_of(page: PageRequest, handler: str | None = None) -> ShownHistory:
    """The history of a handler, or the sums over all, in the range that the viewer has chosen. Raises RedisError."""
    hours = next((one for one in RANGES_H if str(one) == page.query.get("hours")), RANGES_H[0])
    points, notes = page.shared.get(
        f"history {hours} {handler or ''}", page.now_ms, lambda: _read(page, hours, handler), keep_ms=_KEEP_MS
    )
    rest = {name: one for name, one in page.query.items() if name not in ("hours", "done", "signature")}
    missing = [f"The history has {WHICH_HANDLERS}."] if points.is_partial else []
    if points.age_ms >= STEP_MS:
        missing.append(
            f"Some of these figures are up to {format_age(points.age_ms)} older than their time: more streams change than the"
            " console reads in a minute, or Redis refuses it key tracking."
        )
    return ShownHistory(
        points=points,
        ranges=[(one, page.url(page.path, **rest, hours=str(one))) for one in RANGES_H],
        hours=hours,
        charts=[chart_of(name, title, points, series) for name, title, series in _CHARTS],
        columns=[one.name for _, _, series in _CHARTS for one in series],
        rows=_rows(points),
        notes=[*notes, *missing],
    )


def _read(page: PageRequest, hours: int, handler: str | None) -> tuple[FigurePoints, Sequence[str]]:
    """The points of the range, which ends now by the clock of Redis, and why there are none."""
    end_ms = server_time_ms(page.client)
    start_ms = end_ms - hours * _HOUR_MS
    points = partial(
        points_of,
        handler=handler,
        start_ms=start_ms,
        end_ms=end_ms,
        bucket_ms=max(STEP_MS, hours * _HOUR_MS // _MOST_POINTS),
    )
    try:
        return points(FigureHistory(page.client).scan(start_ms, handler)), ()
    except AccessDenied:
        return points(()), (
            "Redis refuses to show the history: renew the rights of its user (millstream acl console).",
        )
    except WrongType:
        return points(()), ("Another program has written to the key of the history: delete it.",)


def _rows(points: FigurePoints) -> list[tuple[int, int | None, Sequence[str]]]:
    found: list[tuple[int, int | None, Sequence[str]]] = [
        (one.at_ms, None, _texts(one)) for run in points.runs for one in run
    ]
    return sorted([*found, *((start, end, ()) for start, end in points.gaps)], key=lambda one: one[0], reverse=True)


def _texts(point: Point) -> list[str]:
    values = [(one, one.value(point)) for _, _, series in _CHARTS for one in series]
    return ["-" if value is None else one.text(value) for one, value in values]
