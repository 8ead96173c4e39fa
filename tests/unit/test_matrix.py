"""`make matrix`: each row runs, whatever became of the others, and the table says so."""

import sys
from pathlib import Path

import pytest

from tests.support.matrix import ROWS, Row, main
from tests.support.pythons import TESTED
from tests.support.servers import NAMES

pytestmark = [pytest.mark.cli]

MAKEFILE = f"""\
try: ; @PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -q -p no:cacheprovider --import-mode=importlib tests $(ARGS)
broken: ; @echo no such version; false
"""
CASES = """\
import pytest

def test_holds(): pass
def test_also(): pass
def test_fails(): assert not {fails}
def test_is_skipped(): pytest.skip("here")
"""
GOOD, BAD, BROKEN = (
    Row(name="good", make=("try",)),
    Row(name="bad", make=("try",)),
    Row(name="none", make=("broken",)),
)
PAGE = """# Versions
<!-- matrix: `make matrix` replaces these rows -->
| row | unit |
|---|---|
| good | 1 | old |
| bad | 1 | kept |
<!-- end of matrix -->
The rest.
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with a Makefile and tests, of which none fails."""
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for area, name in (("unit", "unit"), ("spark", "sink"), ("spark", "demo"), ("faults", "faults")):
        (tmp_path / "tests" / area).mkdir(parents=True, exist_ok=True)
        (tmp_path / f"tests/{area}/test_{name}.py").write_text(CASES.format(fails=False))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/versions.md").write_text(PAGE)
    return tmp_path


def table(clone: Path) -> list[list[str]]:
    lines = (clone / "build/matrix.md").read_text().splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_a_row_counts_its_tests_by_area(clone: Path) -> None:
    assert main([], rows=(GOOD,), root=clone) == 0
    cell = "3, 1 skipped"
    assert [row[:8] for row in table(clone)] == [["good", cell, "", "", cell, cell, cell, "passed"]]
    assert "12 passed, 4 skipped" in (clone / "build/matrix/good.log").read_text()


def test_a_row_that_fails_or_does_not_start_stops_no_other_row_and_sets_the_exit_code(clone: Path) -> None:
    (clone / "tests/faults/test_faults.py").write_text(CASES.format(fails=True))
    assert main([], rows=(BROKEN, BAD, GOOD), root=clone) == 1
    good, bad = "3, 1 skipped", "2, **1 failed**, 1 skipped"
    cells = [good, "", "", good, good, bad, "**failed**"]
    assert [row[:8] for row in table(clone)] == [
        ["none", "", "", "", "", "", "", "**did not start**"],
        ["bad", *cells],
        ["good", *cells],
    ]
    assert "no such version" in (clone / "build/matrix/none.log").read_text()


def test_a_row_does_not_show_the_tests_of_an_earlier_run(clone: Path) -> None:
    main([], rows=(GOOD,), root=clone)
    (clone / "Makefile").write_text("try: ; @true\n")
    assert main([], rows=(GOOD,), root=clone) == 1
    assert table(clone)[0][7] == "**did not start**"


def test_one_row_runs_alone_and_the_table_shows_the_options_of_pytest(clone: Path) -> None:
    assert main(["--only", "good", "-k", "holds or also"], rows=(BROKEN, GOOD), root=clone) == 0
    assert [row[:7] for row in table(clone)] == [["good `-k 'holds or also'`", "2", "", "", "2", "2", "2"]]


def test_the_page_keeps_the_rows_that_did_not_run(clone: Path) -> None:
    main(["--only", "good", "--record"], rows=(BROKEN, GOOD, BAD), root=clone)
    page = (clone / "docs/versions.md").read_text()
    assert page.startswith("# Versions\n<!-- matrix")
    assert page.endswith("<!-- end of matrix -->\nThe rest.\n")
    assert "| good | 3, 1 skipped |" in page
    assert "| bad | 1 | kept |" in page
    assert "old" not in page


def test_every_python_that_the_project_names_has_a_row() -> None:
    assert [row.name for row in ROWS if row.make[0] == "python"] == [f"python-{version}" for version in TESTED]


def test_every_server_that_tests_can_choose_has_a_row() -> None:
    assert {row.make[1] for row in ROWS if row.make[0] == "servers"} == {f"SERVER={name}" for name in NAMES}
