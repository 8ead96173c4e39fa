"""What a test may not do: judge by the clock, have a fail-safe of its own, or import another test file."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.syntax import nodes_of

pytestmark = [pytest.mark.cli, pytest.mark.xdist_group("syntax")]  # what is parsed is parsed once

Nodes = tuple[ast.AST, ...]

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "monotonic_ms", "monotonic_ns", "perf_counter", "time"}
GUARDS = {"join", "wait", "communicate", "result", "wait_procs"}
REQUESTS = {"get", "post", "Client"}
"""What httpx ends after five seconds, unless it is told otherwise."""
LONG_S = 2.0
WAITERS = {"waiting.py", "processes_left_behind.py"}
"""The files that implement waiting."""


def verdicts_by_the_clock(nodes: Nodes) -> Iterator[str]:
    """Conditions that hold only as long as little time has passed. That much has passed may be asked for."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for before, operator, after in zip(sides, node.ops, sides[1:], strict=False):
                less, greater = isinstance(operator, ast.Lt | ast.LtE), isinstance(operator, ast.Gt | ast.GtE)
                if (less and reads_a_clock(before)) or (greater and reads_a_clock(after)):
                    yield f"{node.lineno}: asks whether it is still early; wait with `eventually`"


def deadlines_of_ones_own(nodes: Nodes) -> Iterator[str]:
    """Asserted or raised when a deadline has passed, as hand-written loops do."""
    for node in nodes:
        if isinstance(node, ast.If) and any(isinstance(one, ast.Raise) for one in node.body):
            compared = [one for one in ast.walk(node.test) if isinstance(one, ast.Compare)]
            if any(reads_a_clock(side) for one in compared for side in (one.left, *one.comparators)):
                yield f"{node.lineno}: has a deadline of its own; wait with `eventually`"


def fail_safes_of_ones_own(nodes: Nodes) -> Iterator[str]:
    """Waits that a slow machine can outlast."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GUARDS:
            limits = [*node.args[-1:], *(one.value for one in node.keywords if one.arg == "timeout")]
            if any(is_long(limit) for limit in limits):
                yield f"{node.lineno}: .{node.func.attr}() gives up after a number of seconds; use FAIL_SAFE_S"


def requests_of_five_seconds(nodes: Nodes) -> Iterator[str]:
    """Requests without a fail-safe: the library's own is one that a slow machine can outlast."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REQUESTS:
            is_httpx = isinstance(node.func.value, ast.Name) and node.func.value.id == "httpx"
            if is_httpx and not {"timeout", "transport"} & {one.arg for one in node.keywords}:
                yield f"{node.lineno}: httpx gives up after five seconds; use `get` or `http_client` of tests/support"


def imports_of_test_files(nodes: Nodes) -> Iterator[str]:
    """What several test files need is in tests/support."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2].startswith("test_"):
            yield f"{node.lineno}: imports {node.module}; move what both need to tests/support"


def reads_a_clock(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in CLOCKS and not one.args
        for one in ast.walk(node)
    )


def is_long(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value >= LONG_S


RULES: list[tuple[Callable[[Nodes], Iterator[str]], str]] = [
    (verdicts_by_the_clock, "assert time.monotonic() - began < 2"),
    (verdicts_by_the_clock, "while end > time.monotonic(): pass"),
    (deadlines_of_ones_own, "if time.monotonic() > end:\n    raise AssertionError"),
    (fail_safes_of_ones_own, "thread.join(5)"),
    (fail_safes_of_ones_own, "process.communicate(timeout=40)"),
    (requests_of_five_seconds, "httpx.get(url, trust_env=False)"),
    (imports_of_test_files, "from tests.integration.test_worker import working"),
]
SOUND = """
from tests.support.waiting import FAIL_SAFE_S, eventually
assert time.monotonic() - began >= 0.5
thread.join(FAIL_SAFE_S)
over.wait(0.02)
httpx.get(url, timeout=FAIL_SAFE_S)
", ".join(["a"])
eventually(lambda: found, "an entry")
"""


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _ in RULES), ids=lambda rule: rule.__name__)
def test_tests_keep_the_rules(rule: Callable[[Nodes], Iterator[str]]) -> None:
    files = [path for path in TESTS.rglob("*.py") if path.name not in WAITERS]
    assert len(files) > 100
    assert not [f"{path.relative_to(TESTS)}:{line}" for path in files for line in rule(nodes_of(path.read_text()))]


@pytest.mark.parametrize(("broken", "text"), RULES)
def test_a_broken_rule_is_noticed_by_its_check_alone(broken: Callable[[Nodes], Iterator[str]], text: str) -> None:
    rules = dict.fromkeys(rule for rule, _ in RULES)
    assert not [line for rule in rules for line in rule(nodes_of(SOUND))]
    assert [rule for rule in rules if list(rule(nodes_of(SOUND + text)))] == [broken]
