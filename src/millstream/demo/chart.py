"""The demo's chart: delays through the day, and the run's throughput."""

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from millstream.demo.reference import Departure
from millstream.demo.report import Hour, Kill, Sample, hours_of_day
from millstream.errors import ConfigError, install_hint

_INK, _PALE, _ACCENT, _BAD = "#1f2933", "#9aa5b1", "#2f6fab", "#c8553d"


def require_matplotlib() -> None:
    """Raise ConfigError if matplotlib is missing: better now than after the run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"the demo's chart needs matplotlib; {install_hint('demo')}")


def draw_chart(path: Path, departures: Iterable[Departure], samples: Sequence[Sample], kills: Sequence[Kill]) -> None:
    """Save a chart of the delays through the day, and of the run, to `path` (PNG)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    style: dict[Any, Any] = {
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _PALE,
        "axes.labelcolor": _INK,
    }
    with plt.rc_context(style | {"axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
        _draw_hours(left, hours_of_day(departures))
        _draw_run(right, samples, kills)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_hours(axes: Any, hours: Sequence[Hour]) -> None:
    worst = max((hour.mean_delay for hour in hours), default=0.0)
    colours = [_BAD if hour.mean_delay == worst else _ACCENT for hour in hours]
    axes.bar([hour.hour for hour in hours], [hour.mean_delay for hour in hours], color=colours, width=0.75)
    for hour in hours:
        if hour.mean_delay == worst:
            label = f"{hour.mean_delay:.0f} min\n{hour.late_share:.0%} late"
            axes.annotate(label, (hour.hour, worst), (0, 4), textcoords="offset points", ha="center", color=_BAD)
    axes.set_title("Delays pile up through the day", loc="left", fontweight="bold")
    axes.set_xlabel("scheduled hour of departure, New York")
    axes.set_ylabel("mean delay at departure, minutes")
    axes.set_ylim(top=worst * 1.2 or 1)
    axes.set_xticks([hour.hour for hour in hours])


def _draw_run(axes: Any, samples: Sequence[Sample], kills: Sequence[Kill]) -> None:
    times = [sample.at_s for sample in samples]
    done = [sample.done / 1000 for sample in samples]
    axes.plot(times, [sample.published / 1000 for sample in samples], color=_PALE, linewidth=1.5, label="published")
    axes.plot(times, done, color=_ACCENT, linewidth=2.2, label="committed")
    axes.fill_between(times, done, color=_ACCENT, alpha=0.12)
    for number, kill in enumerate(kills):
        axes.axvline(kill.at_s, color=_BAD, linewidth=1, linestyle=":", label=None if number else "kill -9")
    axes.set_title("Published and committed, second by second", loc="left", fontweight="bold")
    axes.set_xlabel("seconds since the first flight was published")
    axes.set_ylabel("flights, thousands")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", edgecolor="white", framealpha=0.9)
