"""Charts: the geometry of a chart over time, as attributes of SVG. No I/O, and no style: the stylesheet has the colours."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millstream.admin.figure_points import FigurePoints, Point

WIDTH, HEIGHT = 600, 100
"""The size of the drawing, in its own units: the page stretches it."""

_MARGIN = 4


@dataclass(frozen=True, kw_only=True)
class Series:
    """What one curve of a chart shows: its name, its figure of each point, and how a value is written."""

    name: str
    value: Callable[[Point], float | None]
    text: Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve.

    * `paths`: the attribute `points` of each of its parts, between which the figure is unknown
    * `newest`, `largest`: these values as texts; "-" if unknown
    """

    name: str
    paths: Sequence[str]
    newest: str
    largest: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: its title, its curves, and the left edge and the width of each gap. `name`: its id in the page."""

    name: str
    title: str
    curves: Sequence[Curve]
    gaps: Sequence[tuple[str, str]]


def chart_of(name: str, title: str, found: FigurePoints, series: Sequence[Series]) -> Chart:
    """The chart of these series, all to the same scale."""
    points = [one for run in found.runs for one in run]
    known = [value for each in series for one in points if (value := each.value(one)) is not None]
    top = max(known, default=0.0) or 1.0
    return Chart(
        name=name,
        title=title,
        curves=[_curve(found, each, top) for each in series],
        gaps=[(_number(_x(found, start)), _number(_x(found, end) - _x(found, start))) for start, end in found.gaps],
    )


def _curve(found: FigurePoints, series: Series, top: float) -> Curve:
    values = [value for run in found.runs for one in run if (value := series.value(one)) is not None]
    newest = None if found.newest is None else series.value(found.newest)
    return Curve(
        name=series.name,
        paths=[path for run in found.runs for path in _paths(found, run, series, top)],
        newest="-" if newest is None else series.text(newest),
        largest=series.text(max(values)) if values else "-",
    )


def _paths(found: FigurePoints, run: Sequence[Point], series: Series, top: float) -> Iterator[str]:
    """The parts of a run in which the figure is known. One of a single point has it twice, so that it is drawn."""
    part: list[str] = []
    for one in [*run, None]:
        value = None if one is None else series.value(one)
        if one is not None and value is not None:
            y = HEIGHT - _MARGIN - value / top * (HEIGHT - 2 * _MARGIN)
            part.append(f"{_number(_x(found, one.at_ms))},{_number(y)}")
        elif part:
            yield " ".join(part if len(part) > 1 else part * 2)
            part = []


def _x(found: FigurePoints, at_ms: int) -> float:
    share = (at_ms - found.start_ms) / max(1, found.end_ms - found.start_ms)
    return WIDTH * min(1.0, max(0.0, share))


def _number(value: float) -> str:
    return f"{value:.1f}"
