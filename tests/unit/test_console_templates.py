"""The templates of the console: what several have in common is a macro."""

from collections import defaultdict
from importlib import resources

import pytest

pytestmark = [pytest.mark.cli]

MOST_LINES = 5


def test_no_six_lines_stand_in_two_templates() -> None:
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for one in resources.files("millstream.services.console").joinpath("templates").iterdir():
        lines = [line.strip() for line in one.read_text("utf-8").splitlines() if line.strip()]
        for at in range(len(lines) - MOST_LINES):
            found[tuple(lines[at : at + MOST_LINES + 1])].add(one.name)
    assert {lines[0]: names for lines, names in found.items() if len(names) > 1} == {}
