"""The site: every page is in its navigation, and no page is named that does not exist. `make docs` checks the links."""

import ast
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.pages import blocks_of, consoles_of
from tests.support.syntax import parsed

pytestmark = [pytest.mark.cli]
SYNTAX = pytest.mark.xdist_group("syntax")  # what is parsed is parsed once

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

NOT_RUN: Mapping[str, str] = {
    "docs/start/install.md": "`make wheels` installs the wheel with each extra",
    "docs/start/spark.md": "one command that publishes the orders; test_readme publishes them by itself",
    "docs/operations/systemd.md": "a machine with systemd: the unit is checked by test_page_blocks",
    "docs/operations/compose.md": "containers: their commands are checked by test_deploy",
    "docs/operations/helm.md": "a cluster: the chart is checked by test_helm_chart",
}
"""Pages whose consoles no test runs, with the reason."""
COMPARED: Mapping[str, str] = {
    "docs/spark-connect.md": "test_connect runs the first block in a program, and compares the second with the example",
}
"""Pages whose Python is checked in another way."""
PYTHON_RUNNERS = {"run_python", "program", "write_files", "run_consoles", "run_tests"}
CONSOLE_RUNNERS = {"run_consoles", "service", "consoles_of"}


def test_every_page_is_in_the_navigation_once() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_every_relative_link_of_a_page_has_a_target() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text())]
    assert len(links) > 100
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_every_name_of_the_api_exists() -> None:
    names = re.findall(r"^::: ([\w.]+)$", (DOCS / "reference/api.md").read_text(), re.M)
    assert len(names) > 15
    for name in names:
        module, _, last = name.rpartition(".")
        path = ROOT / "src" / module.replace(".", "/")
        is_module = any((path / f"{last}{ending}").exists() for ending in (".py", "/__init__.py"))
        assert is_module or re.search(rf"^(class|def) {last}\b", path.with_suffix(".py").read_text(), re.M), name


def pages_with(language: str) -> dict[str, int]:
    """How many blocks of a language each page has; of consoles, those with commands to run."""
    pages = ["README.md", *(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))]
    if language == "console":
        return {page: len(consoles_of(page)) for page in pages if consoles_of(page)}
    counts = {page: sum(block.language == language for block in blocks_of(page)) for page in pages}
    return {page: count for page, count in counts.items() if count}


def runs_of_pages(runners: Container[str]) -> Iterator[tuple[str, str, list[int] | None]]:
    """The calls of these functions in tests: the function, the page, and the numbers of blocks, if the call has any."""
    for path in (path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)):
        tree = parsed(path.read_text())
        constants = {
            target.id: statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        for test in (one for one in tree.body if isinstance(one, ast.FunctionDef)):
            for call in (node for node in ast.walk(test) if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Name) and call.func.id in runners:
                    numbers = next((word.value for word in call.keywords if word.arg in ("only", "number")), None)
                    for page in pages_named(call, constants) or pages_named(test, constants):
                        yield call.func.id, page, None if numbers is None else [*_numbers(numbers)]


def pages_named(node: ast.AST, constants: Mapping[str, ast.expr]) -> set[str]:
    """The pages that a piece of a program names, itself or by a constant of its file."""
    names = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
    parts = [node, *(value for name, value in constants.items() if name in names)]
    texts = (leaf.value for part in parts for leaf in ast.walk(part) if isinstance(leaf, ast.Constant))
    return {text for text in texts if isinstance(text, str) and text.endswith(".md")}


def _numbers(value: ast.expr) -> Iterator[int]:
    return (leaf.value for leaf in ast.walk(value) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, int))


def blocks_run(runner: str, page: str, numbers: list[int] | None) -> set[int]:
    """The numbers of the Python blocks that such a call runs."""
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    if runner in ("write_files", "run_consoles", "run_tests"):
        return {number for number, block in enumerate(blocks) if block.file}
    every = range(1) if runner == "program" else range(len(blocks))
    return set(every if numbers is None else numbers)


@SYNTAX
def test_every_python_block_of_every_page_runs_in_a_test() -> None:
    blocks = pages_with("python")
    assert len(blocks) > 20
    run: dict[str, set[int]] = {}
    for runner, page, numbers in runs_of_pages(PYTHON_RUNNERS):
        run.setdefault(page, set()).update(blocks_run(runner, page, numbers))
    missing = {page: sorted(set(range(count)) - run.get(page, set())) for page, count in blocks.items()}
    assert {page: numbers for page, numbers in missing.items() if numbers and page not in COMPARED} == {}


@SYNTAX
def test_every_console_of_every_page_runs_in_a_test() -> None:
    named = {page for _, page, _ in runs_of_pages(CONSOLE_RUNNERS)}
    assert [page for page in pages_with("console") if page not in named and page not in NOT_RUN] == []
    assert not named & NOT_RUN.keys()


def rows_of_the_guarantees() -> list[list[str]]:
    lines = (DOCS / "guarantees.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \d+ \|", line)]
    assert len(rows) > 15
    return rows


def test_each_guarantee_names_code_and_tests_that_exist() -> None:
    tests = {name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    code = [path.as_posix() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.*")]
    for number, *_, held_by, tested_by in rows_of_the_guarantees():
        named = re.findall(r"`([\w/]+(?:\.py|\.lua)?)`", held_by + tested_by)
        files = [name for name in named if "/" in name]
        unknown = [name for name in files if not any(path.endswith(f"/{name}") for path in code)]
        unknown += [name for name in named if name.startswith("test_") and name not in tests]
        assert unknown == [], f"guarantee {number}"
        assert re.search(r"`test_\w+`|`tests/[\w/]+\.py`", tested_by), f"guarantee {number} names no test"


def test_cells_of_the_guarantees_are_short() -> None:
    rows = rows_of_the_guarantees()
    assert [cell for row in rows for cell in row if len(cell) > 300] == []
