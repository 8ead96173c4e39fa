"""One language: names in the code use the field's terms (`docs/glossary.md`), and pages name modules that exist."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.prose import prose_of, words_of_code, words_of_script
from tests.support.syntax import nodes_of, parsed

pytestmark = [pytest.mark.cli, pytest.mark.xdist_group("syntax")]  # what is parsed is parsed once

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PAGES = ("docs/glossary.md", "docs/architecture.md")

# Words of an earlier vocabulary, as whole parts of a name: `put_in_hand`, `LineTaker`. The glossary has the terms.
_RETIRED = """
    adopt adopted aside bell born bury desk door doors doubt fleet frontier given guest hand handed hands hear heard
    house hurry judging keeper keeping lane leaver leavers ledger line lines look looked marks moving nudge outbox
    pieces postbox pulse pump restless seal sealed seals settler shelf station stray strays strike strikes struck
    surroundings taken taker taking tell tend told turn turns unheard
    """
RETIRED = frozenset(_RETIRED.split())
_TEXT = {"line", "lines", "look"}
"""Words of RETIRED that names of attributes, parameters and tests may have: a line of text; look-ahead."""

# Names that hold such a word and stay, with the reason.
ALLOWED: Mapping[str, str] = {
    "AclRule.line": "a line of an ACL file",
    "OneLineFormatter": "a line of text",
    "_given_up": "to give up",
    "escape_line": "a line of text",
    "escape_lines": "lines of text",
    "get_usage_pieces": "a method of click",
    "given_up": "to give up",
    "print_line": "a line of text",
}

# Names in backticks that nothing in the code is called, with the reason. Each part of a dotted name counts for itself.
NAMES_OF_OTHERS: Mapping[str, str] = {
    "attrs": "a package on PyPI",
    "basicConfig": "logging",
    "dictConfig": "logging",
    "isfuture": "asyncio",
    "millstream_redis_up": "a metric, with the prefix that all have",
    "psycopg": "a package on PyPI",
    "paramstyle": "psycopg",
    "readlink": "POSIX",
    "sentinelProcessHelloMessage": "a function of Redis",
    "_idms": "a field of an entry, misspelt as in the text beside it",
    "_index": "a field of an entry, misspelt as in the text beside it",
    "_time": "a field of an entry, misspelt as in the text beside it",
    "_timestmp": "a field of an entry, misspelt as in the text beside it",
    "_uid": "a field of an entry, misspelt as in the text beside it",
    "REGISTRY": "prometheus_client",
}

TESTS = ROOT / "tests"
IN_TESTS = (RETIRED - _TEXT - {"given"}) | {
    "nobody",
    "somebody",
    "everybody",
    "anybody",
    "who",
    "whom",
    "whoever",
}
"""Words that names in tests do without; a line of text, or how something looks, may be what is tested."""

# These stand in for a component that has a name. In the tests "who" does, too; in the code it stands for people.
PRONOUNS = re.compile(r"\b(?:some|no|any|every)body\b", re.IGNORECASE)
PRONOUNS_IN_TESTS = re.compile(rf"{PRONOUNS.pattern}|\bwho(?:m|ever)?\b", re.IGNORECASE)


def parts(name: str) -> list[str]:
    """The words of a name in snake_case or CamelCase, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def names_in(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """Classes, public functions and public methods below `tree`, as `Class.method`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name
            yield from names_in(child, f"{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield prefix + child.name


def inner_names(nodes: tuple[ast.AST, ...]) -> Iterator[str]:
    """Private functions and methods, attributes and parameters among `nodes`."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.arg):
            yield node.arg


def names_in_script(text: str) -> Iterator[str]:
    """The names, and the strings without spaces, in the code of a Lua script."""
    yield from re.findall(r"[A-Za-z_]\w*", re.sub(r"--.*|'[^']* [^']*'", "", text))


def retired_names(src: Path) -> Iterator[str]:
    """Each name below `src` that holds a retired word, with the word."""
    for path in sorted(src.rglob("*.lua")):
        for name in sorted(set(names_in_script(path.read_text()))):
            yield from (f"{path.name}: {name!r} has {word!r}" for word in parts(name) if word in RETIRED - _TEXT)
    for path in sorted(src.rglob("*.py")):
        module = ".".join(path.relative_to(src).with_suffix("").parts)
        for part in module.split("."):
            yield from (f"{module}: module {part!r} has {word!r}" for word in parts(part) if word in RETIRED)
        for name in names_in(parsed(path.read_text())):
            last = name.rpartition(".")[2]
            if not {name, last} & ALLOWED.keys():
                yield from (f"{module}: {name!r} has {word!r}" for word in parts(last) if word in RETIRED)
        for name in sorted(set(inner_names(nodes_of(path.read_text()))) - ALLOWED.keys()):
            yield from (f"{module}: {name!r} has {word!r}" for word in parts(name) if word in RETIRED - _TEXT)


def prose_pronouns(src: Path) -> int:
    """How often "somebody" and "nobody" stand in the text of modules and scripts; names in capitals do not count."""
    texts = [path.read_text() for kind in ("*.py", "*.lua") for path in src.rglob(kind)]
    return sum(not word.isupper() for text in texts for word in PRONOUNS.findall(text))


def unclear_names(tests: Path) -> Iterator[str]:
    """Each function or class below `tests`, public or a test, with a word that names no component or is retired."""
    for path in sorted(tests.rglob("*.py")):
        for name in names_in(parsed(path.read_text())):
            words = parts(name.replace("taken_over", ""))
            yield from (f"{path.name}: {name!r} has {word!r}" for word in words if word in IN_TESTS)


def names_that_nothing_has(src: Path) -> Iterator[str]:
    """Each name in backticks in a docstring or comment below `src` that is no name, string or file in the code there."""
    modules = {path: path.read_text() for path in sorted(src.rglob("*.py"))}
    scripts = {path: path.read_text() for path in sorted(src.rglob("*.lua"))}
    known = {path.stem for path in src.rglob("*")} | NAMES_OF_OTHERS.keys()
    known.update(word for text in modules.values() for word in words_of_code(text))
    known.update(word for text in scripts.values() for word in words_of_script(text))
    prose = {path: " ".join(prose_of(text)) for path, text in modules.items()}
    prose.update({path: " ".join(re.findall(r"--.*", text)) for path, text in scripts.items()})
    for path, text in prose.items():
        for name in re.findall(r"`([a-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`", text):
            yield from (f"{path.name}: `{name}`" for word in name.split(".") if word not in known)


def fields_that_a_class_lacks(src: Path) -> Iterator[str]:
    """Each name that the list in a docstring of a class describes, and that the class does not have."""
    for path in sorted(src.rglob("*.py")):
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.ClassDef) and (text := ast.get_docstring(node)):
                has = {name for child in ast.walk(node) for name in own_names(child)}
                described = re.findall(r"^\* ((?:`[^`]*`(?:, | and )?)+)", text, re.MULTILINE)
                for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", " ".join(described)):
                    if name not in has:
                        yield f"{path.name}: {node.name} has no {name}"


def own_names(node: ast.AST) -> list[str]:
    """The names that a node of a class defines or uses: methods, attributes, parameters and fields."""
    found = [getattr(node, each, None) for each in ("name", "attr", "arg")]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    found += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in found if isinstance(name, str)]


def missing_modules(page: str, root: Path) -> Iterator[str]:
    """Every module, script, folder or page that the text of a page names and the tree lacks."""
    package = root / "src" / "millstream"
    places = (package, package / "redis_client", package / "redis_client/lua", root, root / "docs")
    neighbours = list(package.rglob("*/"))
    for name in sorted(set(re.findall(r"`([\w/]+(?:\.py|\.lua|/))`", page))):
        where = places if "/" in name.rstrip("/") else (*places, *neighbours)
        if not any((place / name).exists() for place in where):
            yield f"{name} is named, and does not exist"
    for name in sorted(set(re.findall(r"\| `([a-z]+/[a-z_]+)`|` `([a-z]+/[a-z_]+)`", page))):
        script = "".join(name)
        if not (package / "redis_client/lua" / f"{script}.lua").exists():
            yield f"the script {script} is named, and does not exist"
    for link in sorted(set(re.findall(r"\]\(([\w./-]+)", page))):
        if not (root / "docs" / link).exists():
            yield f"{link} is linked, and does not exist"


def test_names_hold_no_word_of_an_earlier_vocabulary() -> None:
    assert list(retired_names(SRC)) == []


def test_prose_names_the_component_instead_of_a_pronoun() -> None:
    assert prose_pronouns(SRC) == 0


def test_prose_in_the_code_names_only_what_exists() -> None:
    assert list(names_that_nothing_has(SRC)) == []


def test_lists_in_docstrings_describe_fields_that_exist() -> None:
    assert list(fields_that_a_class_lacks(SRC)) == []


def test_a_described_field_that_does_not_exist_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("class X:\n    '''Of:\n\n    * `here`, `gone`: numbers\n    '''\n\n    here: int\n")
    assert list(fields_that_a_class_lacks(tmp_path)) == ["x.py: X has no gone"]


def test_a_name_of_the_past_in_prose_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def fetch():\n    '''As `fetch`, or `take`.'''\n    # until `x.hold_on()` ends\n")
    (tmp_path / "y.lua").write_text("-- `seal`: of `shut`\nlocal seal = 1")
    assert list(names_that_nothing_has(tmp_path)) == ["x.py: `take`", "x.py: `x.hold_on`", "y.lua: `shut`"]


def test_prose_in_tests_names_the_component_instead_of_a_pronoun() -> None:
    prose = {path: "\n".join(prose_of(path.read_text())) for path in TESTS.rglob("*.py") if path != Path(__file__)}
    prose |= {path: path.read_text() for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix}
    assert [f"{path.name}: {word}" for path, text in prose.items() for word in PRONOUNS_IN_TESTS.findall(text)] == []


def test_names_in_tests_hold_no_retired_word_and_name_the_component() -> None:
    assert list(unclear_names(TESTS)) == []


@pytest.mark.parametrize("text", ["def test_nobody_hears_it(): ...", "class X:\n def whoever(self): ..."])
def test_an_unclear_name_of_a_test_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "test_x.py").write_text(text)
    assert list(unclear_names(tmp_path))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_modules_that_exist(page: str) -> None:
    assert list(missing_modules((ROOT / page).read_text(), ROOT)) == []


def test_every_script_is_in_the_map_of_architecture() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    scripts = (SRC / "millstream/redis_client/lua").glob("*/*.lua")
    names = [f"{path.parent.name}/{path.stem}" for path in scripts if path.parent.name != "include"]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_part_of_the_code_is_in_architecture() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    entries = (SRC / "millstream").iterdir()
    tops = {path.name if path.suffix else f"{path.name}/" for path in entries if path.name[0] not in "._"}
    assert [name for name in sorted(tops) if f"`{name}`" not in page and name != "py.typed"] == []


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("millstream/worker/taker.py", "", "module 'taker'"),
        ("millstream/worker/x.py", "class LineTaker: ...", "'LineTaker' has 'line'"),
        ("millstream/worker/x.py", "class X:\n def put_in_hand(self): ...", "'X.put_in_hand' has 'hand'"),
        ("millstream/worker/x.py", "def _take_heard(): ...", "'_take_heard' has 'heard'"),
        ("millstream/worker/x.py", "def f(taken_ids): ...", "'taken_ids' has 'taken'"),
        ("millstream/worker/x.py", "class X:\n moving: int", "'moving' has 'moving'"),
        ("millstream/worker/x.py", "class X:\n def f(self):\n  self._bell = 1", "'_bell' has 'bell'"),
        ("millstream/lua/x.lua", "-- the seal\nlocal seal_id = 1", "'seal_id' has 'seal'"),
    ],
)
def test_a_retired_word_is_found(tmp_path: Path, path: str, text: str, complaint: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert any(complaint in found for found in retired_names(tmp_path))


def test_words_within_a_word_are_not_found(tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text("class Handler:\n def outline(self): ...\ndef _handle(look_ahead): ...")
    (tmp_path / "x.lua").write_text("-- taken\nreturn 'was taken by ' .. handler")
    assert list(retired_names(tmp_path)) == []


def test_a_module_that_does_not_exist_is_found() -> None:
    page = "`worker/gone.py`, `worker/loop.py`, `lua/commit/commit.lua`, `worker/` and [x](gone.md)\n| `keys/gone` |"
    assert [one.split()[0] for one in missing_modules(page, ROOT)] == ["worker/gone.py", "the", "gone.md"]
