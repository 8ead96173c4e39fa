"""The benchmark of the console marks which of its budgets hold."""

from collections.abc import Mapping

import pytest

from benchmarks.console import budgets

pytestmark = [pytest.mark.cli]

WITHIN = {
    "ratio": 0.98,
    "idle_commands_a_second": 10.0,
    "first_overview_ms": 1_000,
    "list_p95_ms": 200,
    "one_viewer_commands_a_second": 400.0,
    "viewers_commands_a_second": 500.0,
    "memory_mb": 200,
}
BEYOND = {
    "ratio": 0.97,
    "idle_commands_a_second": 10.1,
    "first_overview_ms": 1_001,
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
