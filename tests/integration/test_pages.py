"""What pages show runs as they print it, and prints what they show."""

from pathlib import Path

import pytest

from tests.support.commandline import reserved_port
from tests.support.pages import Block, not_printed, run_consoles

pytestmark = [pytest.mark.cli]

PAGES = ("README.md", "docs/start/workers.md")


@pytest.mark.parametrize("page", PAGES)
def test_the_consoles_of_a_page_print_what_it_shows(page: str, tmp_path: Path) -> None:
    with reserved_port() as port:
        run_consoles(page, tmp_path, port)


def test_a_line_that_is_not_printed_or_not_often_enough_is_missed() -> None:
    printed = ["noise", "2026-01-01T00:00:00.000Z  totals  1700000000000-0  sum=1.0", "dead  1.9 s"]
    shown = "2026-11-23T09:31:08.370Z  totals  1795426268370-12   sum="
    assert not_printed(["dead    0.3 s", f"{shown}1.0"], printed) == []
    assert not_printed([f"{shown}2.0"], printed) == [f"{shown}2.0"]
    assert not_printed([f"{shown}1.0", f"{shown}1.0"], printed) == [f"{shown}1.0"] * 2


def test_a_console_has_commands_and_outputs() -> None:
    block = Block(language="console", text="$ pip install x\n$ a \\\n    b\nout\n$ c\n...\n")
    assert block.commands == "a \\\n    b\nc"
    assert block.outputs == ["out"]
