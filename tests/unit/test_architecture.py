"""The shape of the code: which part imports which, where the third parties are let in, and how big things grow."""

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.syntax import nodes_of, parsed

pytestmark = [pytest.mark.cli, pytest.mark.xdist_group("syntax")]  # what is parsed is parsed once

ROOT = Path(__file__).parents[2]
CHECKED = ("src", "tests", "benchmarks", "examples")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

# One total order: a part imports only those before it. `docs/architecture.md` says what each is.
PARTS = (
    "errors",
    "clock",
    "model",
    "lazy",
    "redis_client",
    "handlers",
    "app",
    "groups",
    "delivery",
    "observability",
    "producer",
    "partitions",
    "balancer",
    "router",
    "admin",
    "worker",
    "services",
    "spark",
    "millstream",
    "pyspark_millstream",
    "pyspark_millstream_state",
    "testing",
    "demo",
    "cli",
    "__main__",
)
LEVELS = {name: level for level, name in enumerate(PARTS)}
MAX_TOP_LEVEL_ENTRIES = 22
# The order inside the engines: the modules that are not named here come first, in any order, and the package's own last.
INNER_ORDER = {
    "worker": ("running", "fetching", "settling", "ordering", "loop", "process"),
    "spark": ("sink", "source", "engine", "run"),
}
SPARK = ("spark", "pyspark_millstream", "pyspark_millstream_state")
HOMES = {
    "redis": ("redis_client",),
    "hiredis": ("redis_client",),
    "pyspark": SPARK,
    "py4j": SPARK,
    "psycopg": ("producer",),
    "prometheus_client": ("observability",),
    "opentelemetry": ("observability",),
    "fastapi": ("services",),
    "starlette": ("services",),
    "h11": ("services",),
    "uvicorn": ("services",),
    "websockets": ("services",),
    "jinja2": ("services",),
    "markupsafe": ("services",),
}
SPARK_PRIVATE = {
    "_jdf",
    "_gateway",
    "_jvm",
    "_jsc",
    "_jsparkSession",
    "_ensure_initialized",
    "_get_j_spark_session_class",
    "launch_gateway",
}
SPARK_VERSIONS = "millstream.spark.versions"
BANNED = {"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal"}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, as seen by the module that imports it."""

    target: str
    line: int
    lazy: bool


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module of `src`, by its dotted name, and what it imports."""

    name: str
    path: Path
    imports: tuple[Import, ...]


def part(name: str) -> str:
    """The part of the code, a key of LEVELS, that a module belongs to: `millstream.spark.x` -> `spark`."""
    root, _, rest = name.partition(".")
    return rest.partition(".")[0] if root == "millstream" and rest else root


def read_modules(src: Path) -> list[Module]:
    """Every module below `src`, with imports resolved to modules where the tree has them."""
    return _modules(src, tuple((path, path.read_text()) for path in sorted(src.rglob("*.py"))))


@functools.cache
def _modules(src: Path, texts: tuple[tuple[Path, str], ...]) -> list[Module]:
    names = {module_name(path, src): path for path, _ in texts}
    return [
        Module(name=module_name(path, src), path=path, imports=tuple(find_imports(parsed(text), names)))
        for path, text in texts
    ]


def module_name(path: Path, src: Path) -> str:
    """The dotted name of the module in the file `path`."""
    return ".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__")


def find_imports(node: ast.AST, known: dict[str, Path], lazy: bool = False) -> Iterator[Import]:
    """Every import below `node`; those in functions or for type checkers only are lazy."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(target=alias.name, line=child.lineno, lazy=lazy)
        elif isinstance(child, ast.ImportFrom):
            base = "." * child.level + (child.module or "")
            for alias in child.names:
                full = f"{base}.{alias.name}"
                yield Import(target=full if full in known else base, line=child.lineno, lazy=lazy)
        else:
            yield from find_imports(child, known, lazy or is_lazy(child))


def is_lazy(node: ast.AST) -> bool:
    """True if what is below `node` does not run when the module is imported."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def each_import(src: Path) -> Iterator[tuple[Module, Import, str]]:
    """Every import of every module, with the place to name in a complaint."""
    for module in read_modules(src):
        for found in module.imports:
            yield module, found, f"{module.path.relative_to(src)}:{found.line}"


def modules_of_no_part(root: Path) -> Iterator[str]:
    for module in read_modules(root / "src"):
        if part(module.name) not in LEVELS:
            yield f"{module.name} is in no part: say in PARTS where it belongs"


def imports_upwards(root: Path) -> Iterator[str]:
    for module, found, where in each_import(root / "src"):
        here, there = part(module.name), part(found.target)
        ours = found.target.partition(".")[0] in ("millstream", "pyspark_millstream", "pyspark_millstream_state")
        if not ours or here == there or here not in LEVELS or there not in LEVELS:
            continue
        if LEVELS[there] > LEVELS[here]:
            yield f"{where} imports {found.target}, which is above it"


def inner_level(name: str) -> int:
    """The place of a module in INNER_ORDER: 0 for the modules that come first."""
    order = INNER_ORDER[part(name)]
    inner = name.split(".")[2:3]
    return order.index(inner[0]) + 1 if inner and inner[0] in order else 0 if inner else len(order) + 1


def inner_imports_upwards(root: Path) -> Iterator[str]:
    for module, found, where in each_import(root / "src"):
        here = part(module.name)
        inside = here in INNER_ORDER and here == part(found.target)
        if inside and inner_level(found.target) > inner_level(module.name):
            yield f"{where} imports {found.target}, which is above it inside {here}/"


def relative_imports(root: Path) -> Iterator[str]:
    for _, found, where in each_import(root / "src"):
        if found.target.startswith("."):
            yield f"{where} imports {found.target}: say the full name"


def import_cycles(root: Path) -> Iterator[str]:
    modules = read_modules(root / "src")
    names = {module.name for module in modules}
    graph = {module.name: {found.target for found in module.imports} & names for module in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "import cycle: " + " <- ".join(error.args[1])


def third_parties_out_of_their_home(root: Path) -> Iterator[str]:
    for module, found, where in each_import(root / "src"):
        package = found.target.partition(".")[0]
        if part(module.name) not in HOMES.get(package, (part(module.name),)):
            yield f"{where} imports {package}: only {' and '.join(HOMES[package])} may"


def spark_needed_by_everyone(root: Path) -> Iterator[str]:
    for module, found, where in each_import(root / "src"):
        if part(found.target) in SPARK and part(module.name) not in SPARK and not found.lazy:
            yield f"{where} imports {found.target} for everyone: import it in the function that needs Spark"


def private_parts_of_spark(root: Path) -> Iterator[str]:
    for module in read_modules(root / "src"):
        if module.name == SPARK_VERSIONS:
            continue
        for node in nodes_of(module.path.read_text()):
            names = {node.attr} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
            for name in sorted(names & SPARK_PRIVATE):
                yield f"{module.name} uses {name}: only {SPARK_VERSIONS} uses private parts of Spark"


def pickles(root: Path) -> Iterator[str]:
    for _, found, where in each_import(root / "src"):
        if found.target.partition(".")[0] in BANNED:
            yield f"{where} imports {found.target}: JSON or msgpack only"


def names_of_the_standard_library(root: Path) -> Iterator[str]:
    for module in read_modules(root / "src"):
        if module.name.rpartition(".")[2] in sys.stdlib_module_names:
            yield f"{module.name} is named like a module of the standard library"


def long_files(root: Path) -> Iterator[str]:
    for path in python_files(root):
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES:
            yield f"{path.relative_to(root)} has {lines} lines: at most {MAX_FILE_LINES}"


def long_functions(root: Path) -> Iterator[str]:
    for path in python_files(root):
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    where = f"{path.relative_to(root)}:{node.lineno}"
                    yield f"{where} {node.name} has {lines} lines: at most {MAX_FUNCTION_LINES}"


def lines_kept_from_the_formatter(root: Path) -> Iterator[str]:
    for path in python_files(root):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.endswith(("# fmt: skip", "# fmt: off")):
                yield f"{path.relative_to(root)}:{number} keeps the formatter from its layout"


def python_files(root: Path) -> Iterator[Path]:
    """Every Python file that the limits hold for."""
    for folder in CHECKED:
        yield from sorted((root / folder).rglob("*.py"))


# Each rule, with a file that breaks it and nothing else.
RULES: list[tuple[Callable[[Path], Iterator[str]], str, str]] = [
    (modules_of_no_part, "millstream/novelty.py", ""),
    (imports_upwards, "millstream/clock.py", "def now():\n    from millstream.redis_client.client import Client"),
    (imports_upwards, "millstream/handlers/attempt.py", "import millstream"),
    (inner_imports_upwards, "millstream/worker/context.py", "from millstream.worker.settling import committer"),
    (inner_imports_upwards, "millstream/worker/running/runner.py", "from millstream.worker.fetching import fetcher"),
    (inner_imports_upwards, "millstream/worker/ordering/by_key.py", "from millstream.worker.loop import ReadingLoop"),
    (inner_imports_upwards, "millstream/spark/sink/writer.py", "from millstream.spark.source import provider"),
    (relative_imports, "millstream/spark/run/plan.py", "from . import source"),
    (import_cycles, "millstream/spark/source/provider.py", "from millstream.spark.source import backlog"),
    (third_parties_out_of_their_home, "millstream/worker/loop.py", "from redis.client import Redis"),
    (third_parties_out_of_their_home, "millstream/cli/run.py", "def run():\n    import pyspark"),
    (spark_needed_by_everyone, "millstream/cli/run.py", "from millstream.spark import source"),
    (private_parts_of_spark, "millstream/spark/plan.py", "def classes(spark):\n    return spark.sparkContext._jvm"),
    (
        private_parts_of_spark,
        "millstream/spark/plan.py",
        "def f():\n    from pyspark.java_gateway import launch_gateway",
    ),
    (pickles, "millstream/delivery/commit_store.py", "import pickle"),
    (names_of_the_standard_library, "millstream/spark/types.py", ""),
    (long_files, "millstream/app.py", "\n" * (MAX_FILE_LINES + 1)),
    (lines_kept_from_the_formatter, "millstream/app.py", "POINTS = (1, 2,\n    3)  # fmt: skip"),
    (long_functions, "millstream/app.py", "async def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
]
CHECKS = dict.fromkeys(rule for rule, _, _ in RULES)


def plant(root: Path, files: dict[str, str]) -> None:
    """Write a small tree that keeps every rule, and then `files` over it."""
    sound = {
        "millstream/__init__.py": "from millstream.app import App",
        "millstream/errors.py": "",
        "millstream/model.py": "from millstream.errors import ConfigError",
        "millstream/redis_client/client.py": "import redis\nfrom millstream import model",
        "millstream/app.py": "from millstream.model import State",
        "millstream/spark/source/provider.py": "import pyspark\nfrom millstream.redis_client import client",
        "millstream/spark/source/backlog.py": "from millstream.spark.source import provider",
        "millstream/spark/run/plan.py": "from millstream.spark.source import provider",
        "millstream/worker/__init__.py": "from millstream.worker.loop import ReadingLoop",
        "millstream/worker/loop.py": "from millstream.worker.running import runner",
        "millstream/cli/run.py": "def run():\n    from millstream.spark import source",
    }
    for name, text in (sound | files).items():
        path = root / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_code_obeys_the_rules_of_its_architecture(check: Callable[[Path], Iterator[str]]) -> None:
    assert list(python_files(ROOT))
    assert not list(check(ROOT))


@pytest.mark.parametrize(("broken", "name", "text"), RULES)
def test_a_broken_rule_is_noticed_by_its_check_alone(
    broken: Callable[[Path], Iterator[str]], name: str, text: str, tmp_path: Path
) -> None:
    plant(tmp_path, {})
    assert not [complaint for check in CHECKS for complaint in check(tmp_path)]
    plant(tmp_path, {name: text})
    assert [check for check in CHECKS if list(check(tmp_path))] == [broken]


def test_every_part_that_the_levels_name_exists() -> None:
    parts = {part(module.name) for module in read_modules(ROOT / "src")}
    assert set(LEVELS) <= parts


@pytest.mark.parametrize("package", INNER_ORDER)
def test_every_part_that_an_inner_order_names_exists(package: str) -> None:
    names = {module.name for module in read_modules(ROOT / "src")}
    assert {f"millstream.{package}.{each}" for each in INNER_ORDER[package]} <= names


def test_the_package_has_few_entries_at_its_top() -> None:
    entries = [
        path.name
        for path in (ROOT / "src/millstream").iterdir()
        if path.name not in ("py.typed", "__pycache__", "__main__.py")  # Python asks for these names
    ]
    assert len(entries) <= MAX_TOP_LEVEL_ENTRIES, entries
