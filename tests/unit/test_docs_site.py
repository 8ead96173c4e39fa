"""The site: every page is in its navigation, and no page is named that does not exist. `make docs` checks the links."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.pages import blocks_of, consoles_of

pytestmark = [pytest.mark.cli]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

NOT_RUN: Mapping[str, str] = {
    "docs/start/install.md": "`make wheels` installs the wheel with each extra",
    "docs/operations/production.md": "containers: their commands are checked by test_deploy",
}
"""Pages whose consoles no test runs, with the reason."""


def test_every_page_is_in_the_navigation_once() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_every_relative_link_of_a_page_has_a_target() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
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


def calls_with_a_page() -> Iterator[tuple[str, list[int] | None]]:
    """The pages that tests name, each with the numbers of the blocks that the same call names; None: all of them."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        names = {
            target.id: statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            numbers = next((word.value for word in call.keywords if word.arg in ("only", "number")), None)
            values = [names.get(one.id, one) if isinstance(one, ast.Name) else one for one in call.args]
            for value in values:
                for leaf in ast.walk(value):
                    if isinstance(leaf, ast.Constant) and str(leaf.value).endswith(".md"):
                        yield str(leaf.value), None if numbers is None else [*_numbers(numbers)]


def _numbers(value: ast.expr) -> Iterator[int]:
    return (leaf.value for leaf in ast.walk(value) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, int))


def test_every_python_block_of_every_page_runs_in_a_test() -> None:
    run: dict[str, set[int]] = {}
    blocks = pages_with("python")
    for page, numbers in calls_with_a_page():
        if page in blocks:
            run.setdefault(page, set()).update(range(blocks[page]) if numbers is None else numbers)
    missing = {page: sorted(set(range(count)) - run.get(page, set())) for page, count in blocks.items()}
    assert len(blocks) > 20
    assert {page: numbers for page, numbers in missing.items() if numbers} == {}


def test_every_console_of_every_page_runs_in_a_test() -> None:
    named = {page for page, _ in calls_with_a_page()}
    assert [page for page in pages_with("console") if page not in named and page not in NOT_RUN] == []
