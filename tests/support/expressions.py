"""Expressions of Prometheus: the metrics and labels that they name, compared with the catalogue."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from millstream.observability.metrics import CATALOGUE
from tests.support.requirements import skip_without

SCRAPED = {"worker", "instance", "job"}
"""Labels that the supervisor and Prometheus add to those of the catalogue."""
ALERTS = {"ALERTS": {"alertname", "alertstate", "handler"}}
"""What Prometheus itself exports about alerts."""


def labels_by_series() -> dict[str, set[str]]:
    """The labels of each series of the catalogue, by its name; a histogram has three."""
    found = {one.name: {*one.labels, *SCRAPED} for one in CATALOGUE if one.kind != "histogram"}
    for one in CATALOGUE:
        if one.kind == "histogram":
            found |= {f"{one.name}{end}": {*one.labels, *SCRAPED} for end in ("_count", "_sum")}
            found[f"{one.name}_bucket"] = {*one.labels, *SCRAPED, "le"}
    return found


def series_of(expression: str) -> list[str]:
    """The names of the series that an expression reads."""
    return re.findall(r"\bmillstream_\w+|\bALERTS\b", expression)


def labels_of(expression: str) -> set[str]:
    """The labels by which an expression groups or selects."""
    grouped = [name.strip() for part in re.findall(r"by \(([\w, ]+)\)", expression) for name in part.split(",")]
    return {*grouped, *re.findall(r"(\w+)(?:=~?|!=|!~)\"", expression)}


def wrong_names(expression: str) -> Iterator[str]:
    """Each series that the catalogue lacks, and each label that the series lack."""
    known = labels_by_series() | ALERTS
    named = series_of(expression)
    if not named:
        yield "reads no metric"
    yield from (f"no metric {name}" for name in named if name not in known)
    has = set[str]().union(*(known.get(name, set()) for name in named))
    yield from (f"no label {label}" for label in sorted(labels_of(expression) - has))


def promtool_accepts(what: str, file: Path) -> None:
    """Check a file of rules, or a configuration, with Prometheus' own program."""
    skip_without(shutil.which("promtool"), "promtool is not installed: apt-get install prometheus")
    done = subprocess.run(["promtool", "check", what, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
