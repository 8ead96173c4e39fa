"""The page of all options is what the program has, and pages name the commands that ask."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from millstream.cli.main import main
from scripts.command_reference import PAGE, all_commands, page, toml_name, variables

pytestmark = [pytest.mark.cli]

ROOT = Path(__file__).parents[2]


def sections() -> dict[str, str]:
    """The text of each section of the page, by its heading."""
    heading, *parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)
    assert heading.startswith("# Options")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def options_of(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "option"]


def test_the_page_of_options_is_that_of_the_program() -> None:
    assert PAGE.read_text() == page(), "run: python scripts/command_reference.py"


def test_every_option_of_every_command_is_on_the_page_with_its_other_sources() -> None:
    found = sections()
    known = {"millstream": get_command(main)} | {f"millstream {' '.join(words)}": one for words, one in all_commands()}
    assert found.keys() == known.keys()
    assert len(known) > 40
    for heading, command in known.items():
        rows = [line for line in found[heading].splitlines() if line.startswith("| `-")]
        assert len(rows) == len(options_of(command)), heading
        for option, row in zip(options_of(command), rows, strict=True):
            name, _, _, environment, in_file = (cell.strip().replace("`", "") for cell in row.split("|")[1:-1])
            assert {one.strip(",") for one in name.split(" ") if one.startswith("-")} == {
                *option.opts,
                *option.secondary_opts,
            }
            assert environment == (", ".join(variables(option)) or "-"), (heading, name)
            assert in_file == (toml_name(option) or "-"), (heading, name)


def test_the_help_of_every_option_shows_the_value_that_the_page_shows() -> None:
    found = sections()
    for words, command in all_commands():
        context = command.make_context(" ".join(words), [], resilient_parsing=True)
        rows = re.findall(r"^\| `(-[^`]+)`", found[f"millstream {' '.join(words)}"], re.M)
        records = [option.get_help_record(context) for option in options_of(command)]
        assert [value_of(record[0]) for record in records] == [value_of(row) for row in rows], words


def test_an_option_that_is_a_time_is_a_duration_without_a_unit_in_its_name() -> None:
    named = [(words, option.opts[0]) for words, command in all_commands() for option in options_of(command)]
    assert [(words, name) for words, name in named if re.search(r"-(s|ms|seconds|minutes|hours|days)$", name)] == []


def value_of(names: str) -> str:
    """What stands behind the names of an option: `-y, --yes` has nothing, `--limit N` has N."""
    return " ".join(word for word in re.split(r"[ /]+", names) if not word.startswith("-"))


def test_the_page_of_commands_names_those_that_ask_and_no_others() -> None:
    text = (ROOT / "docs/commands.md").read_text()
    named = set(
        re.findall(r"`([a-z -]+)`", text.partition("**Which commands ask.**")[2].partition(" Where there is no")[0])
    )
    asking = {" ".join(words) for words, one in all_commands() if any("--yes" in option.opts for option in one.params)}
    conditional = {"key unpark": "key unpark --all", "group claim": "group claim --min-idle"}
    assert named == {conditional.get(one, one) for one in asking}
