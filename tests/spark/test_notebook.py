"""The notebook among the examples does what it says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.spark.versions import HAS_FILTERS
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [
    pytest.mark.drivers,
    pytest.mark.spark,
    pytest.mark.skipif(not HAS_FILTERS, reason="one cell pushes a filter down: since Spark 4.1"),
]
PATIENT = "--conf spark.python.authenticate.socketTimeout=120s pyspark-shell"
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_notebook_runs_from_its_first_cell_to_its_last(millstream_url: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "notebook.py"],
        env={**os.environ, "MILLSTREAM_URL": millstream_url, "PYSPARK_SUBMIT_ARGS": PATIENT},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=FAIL_SAFE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    history, live = done.stdout.split("== Physical Plan ==")
    assert sum(counts(history)) == 600, "ten minutes"
    plan = live.partition("count")[0]
    assert ">=" not in plan
    assert sum(counts(live)[-3:]) == 60 + 3 * 20, "a minute of history, and what came since"
    assert "rows," in live


def counts(shown: str) -> list[int]:
    """The second column of the rooms in tables as `show()` prints them."""
    rows = [line.split("|") for line in shown.splitlines() if line.startswith("|")]
    return [int(row[2]) for row in rows if row[1].strip() in ("kitchen", "cellar", "attic")]
