"""The benchmark of the console marks which of its budgets hold, and fails where one is broken."""

import json
import sys
from collections.abc import Mapping

import pytest

from benchmarks import console
from benchmarks.__main__ import main
from benchmarks.console import budgets

pytestmark = [pytest.mark.cli]

WITHIN = {
    "ratio": 0.98,
    "idle_commands_a_second": 10.0,
    "cold_overview_ms": 1_000,
    "first_paint_ms": 1_000,
    "first_overview_ms": 1_000,
    "stuck_found_ms": 60_000,
    "list_p95_ms": 200,
    "one_viewer_commands_a_second": 400.0,
    "viewers_commands_a_second": 500.0,
    "memory_mb": 200,
}
BEYOND = {
    "ratio": 0.97,
    "idle_commands_a_second": 10.1,
    "cold_overview_ms": 1_001,
    "first_paint_ms": 1_001,
    "first_overview_ms": 1_001,
    "stuck_found_ms": 60_001,
    "list_p95_ms": 201,
    "viewers_commands_a_second": 500.1,
    "memory_mb": 201,
}


def broken(found: Mapping[str, float]) -> set[str]:
    return {name for name, one in budgets(found).items() if not one["holds"]}


def test_figures_at_their_limits_hold_all_budgets() -> None:
    assert budgets(WITHIN).keys() == BEYOND.keys()
    assert broken(WITHIN) == set()


@pytest.mark.parametrize("name", BEYOND)
def test_a_figure_beyond_its_limit_breaks_its_budget_alone(name: str) -> None:
    assert broken({**WITHIN, name: BEYOND[name]}) == {name}


def run_with(figures: Mapping[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m benchmarks console --json`, as if these were measured."""
    monkeypatch.setattr(console, "run", lambda: {"name": "console", "budgets": budgets(figures)})
    monkeypatch.setattr(sys, "argv", ["benchmarks", "console", "--json"])
    main()


def test_the_benchmark_names_each_broken_budget_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_with({**WITHIN, "memory_mb": 201, "ratio": 0.97}, monkeypatch)
    assert ended.value.code == (
        "console: memory_mb was 201, and its budget is at most 200\n"
        "console: ratio was 0.97, and its budget is at least 0.98"
    )
    assert json.loads(capsys.readouterr().out)["name"] == "console"


def test_the_benchmark_ends_well_within_its_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(WITHIN, monkeypatch)
