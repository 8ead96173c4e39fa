"""The site: every page is in its navigation, and no page is named that does not exist. `make docs` checks the links."""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cli]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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
