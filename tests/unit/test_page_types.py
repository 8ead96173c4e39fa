"""The Python of the pages is typed: mypy accepts each complete program, as strictly as our own code."""

import ast
import builtins
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks_of
from tests.support.requirements import skip_without

pytestmark = [pytest.mark.cli]

PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
UNTYPED = {"docs/django.md": "Django has no annotations; test_django_page runs the project"}
GENERIC = {"dict", "list", "set", "frozenset", "tuple", "type"}


def missing_names(tree: ast.AST) -> set[str]:
    """The names that a block uses and neither binds nor imports: an excerpt has some, a complete program none."""
    used: set[str] = set()
    bound = set(dir(builtins)) | {"__name__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            bound.add(node.name or "")
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.MatchAs | ast.MatchStar):
            bound.add(node.name or "")
    return used - bound


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """What the functions and variables of a block are annotated with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield node.returns
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation


def bare_generics(tree: ast.AST) -> set[str]:
    """The generic types that stand in annotations without their parameters, which mypy refuses."""
    wholes = [part for annotation in annotations(tree) for part in ast.walk(annotation)]
    subscripted = {id(part.value) for part in wholes if isinstance(part, ast.Subscript)}
    names = [part for part in wholes if isinstance(part, ast.Name) and id(part) not in subscripted]
    return {part.id for part in names} & GENERIC


def write_programs(folder: Path) -> list[Path]:
    """Write the complete programs of the pages below `folder`, those of each page as a package of its own."""
    written = []
    for page in [one for one in PAGES if one not in UNTYPED]:
        package = re.sub(r"\W", "_", page)
        blocks = [block for block in blocks_of(page) if block.language == "python"]
        modules = {Path(block.file).stem for block in blocks if block.file}
        for number, block in enumerate(blocks):
            if not missing_names(ast.parse(block.text)):
                text = block.text
                for module in modules:
                    text = re.sub(rf"^from {module} import", f"from {package}.{module} import", text, flags=re.M)
                path = folder / package / (block.file or f"block_{number}.py")
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
                written.append(path)
    return written


def test_mypy_accepts_every_complete_program_of_the_pages(tmp_path: Path) -> None:
    skip_without(find_spec("mypy"), "mypy is not installed: make setup")
    programs = write_programs(tmp_path)
    assert len(programs) > 30
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *programs],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_annotation_of_a_page_lacks_the_parameters_of_its_type() -> None:
    programs = [(page, block.text) for page in PAGES for block in blocks_of(page) if block.language == "python"]
    bare = [f"{page}: {name}" for page, text in programs for name in sorted(bare_generics(ast.parse(text)))]
    assert bare == []
