"""The tests on other versions of Spark, Python and servers, one after another, and a table of what came of it.

    python -m tests.support.matrix [--only ROW] [--record] [PYTEST-OPTION ...]     # make matrix

A row is one call of make, which prepares an environment of its own. A row that fails does not stop the others; then the
exit code is 1. Each row's output is in build/matrix/ROW.log, the table in build/matrix.md. With --record the rows that
ran replace theirs in docs/versions.md. What else is given goes to pytest, and the table tells it.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
AREAS = {
    "unit": "unit",
    "integration": "integration",
    "contract": "contract",
    "spark": "Spark",
    "test_demo": "demo",
    "faults": "kills",
}
"""The columns: folders of tests, or one file of them, and what the table calls them."""
_OURS = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL", "ARGS", "AREA", "VERSION", "SERVER")
_FRAME = ("<!-- matrix: `make matrix` replaces these rows -->\n", "<!-- end of matrix -->\n")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A version, and the call of make that tests it."""

    name: str
    make: tuple[str, ...]


ROWS = (
    Row(name="spark-4.0.5", make=("spark", "VERSION=4.0.5")),
    Row(name="spark-4.1.4", make=("spark", "VERSION=4.1.4")),
    Row(name="spark-4.2.1", make=("spark", "VERSION=4.2.1")),
    Row(name="spark-4.3.0", make=("spark", "VERSION=4.3.0")),
    Row(name="python-3.11", make=("python", "VERSION=3.11")),
    Row(name="python-3.12", make=("python", "VERSION=3.12")),
    Row(name="python-3.13", make=("python", "VERSION=3.13")),
    Row(name="redis-8", make=("servers", "SERVER=redis8")),
    Row(name="valkey-8", make=("servers", "SERVER=valkey8")),
    Row(name="valkey-9", make=("servers", "SERVER=valkey9")),
)
"""All rows. A new version is one more line."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a row. `counts` has the outcomes of its tests by area; it is empty where none ran."""

    row: Row
    options: tuple[str, ...]
    code: int
    minutes: float
    counts: dict[str, Counter[str]]

    @property
    def passed(self) -> bool:
        """Whether every test passed, and there were some."""
        return self.code == 0 and bool(self.counts)

    def line(self, day: str) -> str:
        """The row of the table."""
        name = f"{self.row.name} `{shlex.join(self.options)}`" if self.options else self.row.name
        cells = (_cell(self.counts.get(area, Counter())) for area in AREAS)
        verdict = "passed" if self.passed else "**failed**" if self.counts else "**did not start**"
        return f"| {' | '.join((name, *cells, verdict, f'{self.minutes:.0f}', day))} |\n"


def _cell(outcomes: Counter[str]) -> str:
    return ", ".join(
        f"**{count} failed**" if outcome == "failed" else str(count) if outcome == "passed" else f"{count} {outcome}"
        for outcome in ("passed", "failed", "skipped")
        if (count := outcomes[outcome])
    )


def head() -> str:
    """The first two lines of the table."""
    columns = ("row", *AREAS.values(), "result", "minutes", "day")
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"


def run_row(row: Row, options: Sequence[str], root: Path) -> Result:
    """Run one row, its output on the terminal and in its log."""
    folder = root / "build/matrix"
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    # What this program depends on was set up before; the settings of our own call of make are not those of the row.
    command = ["make", "-o", "setup", *row.make, f"ARGS={shlex.join((f'--junitxml={report}', *options))}"]
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    started = time.monotonic()
    with (
        (folder / f"{row.name}.log").open("wb") as log,
        subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as made,
    ):
        assert made.stdout is not None
        while chunk := os.read(made.stdout.fileno(), 65_536):
            log.write(chunk)
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
    minutes = (time.monotonic() - started) / 60
    return Result(row=row, options=tuple(options), code=made.returncode, minutes=minutes, counts=read_report(report))


def read_report(report: Path) -> dict[str, Counter[str]]:
    """Count the outcomes in a JUnit report, by area."""
    counts: dict[str, Counter[str]] = {}
    if not report.exists():
        return counts
    for case in ElementTree.parse(report).iter("testcase"):
        parts = (*case.get("classname", "").split("."), "unit")
        area = "test_demo" if "test_demo" in parts else next(part for part in parts if part in AREAS)
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        counts.setdefault(area, Counter())[outcome] += 1
    return counts


def record(page: Path, results: Sequence[tuple[Row, str]], rows: Sequence[Row]) -> None:
    """Replace the lines of these rows in the table of a page, in the order of `rows`."""
    before, _, rest = page.read_text().partition(_FRAME[0])
    table, _, after = rest.partition(_FRAME[1])
    lines = {line.split()[1]: line for line in table.splitlines(keepends=True)[2:]}
    lines.update({row.name: line for row, line in results})
    kept = "".join(lines[row.name] for row in rows if row.name in lines)
    page.write_text(f"{before}{_FRAME[0]}{head()}{kept}{_FRAME[1]}{after}")


def main(arguments: Sequence[str], *, rows: Sequence[Row] = ROWS, root: Path = ROOT) -> int:
    """Run the rows that were asked for; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="make matrix", epilog="Other options go to pytest.", allow_abbrev=False)
    names = [row.name for row in rows]
    parser.add_argument("--only", action="append", choices=names, metavar="ROW", help=f"repeatable: {', '.join(names)}")
    parser.add_argument("--record", action="store_true", help="put the results into docs/versions.md")
    chosen, options = parser.parse_known_args(arguments)
    lines: list[tuple[Row, str]] = []
    passed = True
    wanted = [row for row in rows if not chosen.only or row.name in chosen.only]
    for number, row in enumerate(wanted, 1):
        print(f"matrix: row {number} of {len(wanted)}: {row.name} (make {' '.join(row.make)})", flush=True)  # noqa: T201 - progress
        result = run_row(row, options, root)
        passed &= result.passed
        lines.append((row, result.line(f"{datetime.now(UTC):%Y-%m-%d}")))
        (root / "build/matrix.md").write_text(
            head() + "".join(line for _, line in lines)
        )  # a later row may be interrupted
        if chosen.record:
            record(root / "docs/versions.md", lines[-1:], rows)
    print(f"\n{head()}{''.join(line for _, line in lines)}", end="")  # noqa: T201 - the result
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
