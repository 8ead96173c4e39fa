"""Every command that a page, an example or a message quotes exists, with its options."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from millstream.cli.main import COMMANDS, load_command

pytestmark = [pytest.mark.cli]

ROOT = Path(__file__).parents[2]
QUOTING = ("src/**/*.py", "docs/**/*.md", "README.md", "examples/**/*.py", "examples/**/*.md", "CHANGELOG.md")

# After a backtick, a prompt or an indent, and in the words by which messages send users to a command.
_QUOTED = re.compile(r"(?:`|^    |\$ |(?:see|run|see:|run:|see `) )millstream (?!-)([^`\n]*)", re.MULTILINE)
_BESIDE = re.compile(r"  +#.*|'[^']*'")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


@cache
def command(name: str) -> Any:
    return load_command(name)


def known_options(*commands: Any) -> set[str]:
    return {
        "--help",
        *(
            option
            for one in commands
            for parameter in one.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        ),
    }


def wrong_words(quoted: str) -> Iterator[str]:
    """What is wrong with the words after `millstream`."""
    words = _BESIDE.sub("", quoted).split()
    name = re.match(r"[a-z]*", words[0]) if words else None
    if not name or not name[0] or not re.fullmatch(r"[a-z]+[.,;:)]?", words[0]):
        return
    if name[0] not in COMMANDS:
        yield f"no command {name[0]!r}"
        return
    found = command(name[0])
    verbs = getattr(found, "commands", {})
    chosen = [verbs[verb] for verb in re.split(r"[|,.]", words[1]) if verb in verbs] if verbs and words[1:] else []
    if verbs and words[1:] and not chosen and re.fullmatch(r"[a-z][a-z-]+", words[1]):
        yield f"no command '{name[0]} {words[1]}'"
    allowed = known_options(*(chosen or verbs.values() or (found,)))
    yield from (
        f"'{name[0]}' has no {option}" for option in _OPTION.findall(_BESIDE.sub("", quoted)) if option not in allowed
    )


def wrong_quotes(text: str) -> list[str]:
    return [f"{one[0].strip()!r}: {wrong}" for one in _QUOTED.finditer(text) for wrong in wrong_words(one[1])]


@pytest.mark.parametrize("pattern", QUOTING)
def test_every_quoted_command_exists_with_its_options(pattern: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {one}" for path in ROOT.glob(pattern) for one in wrong_quotes(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("see `millstream keys`", "no command 'keys'"),
        ("    millstream key lst", "no command 'key lst'"),
        ("$ millstream dlq list --app shop", "'dlq' has no --app"),
        ("run: millstream done s", "no command 'done'"),
    ],
)
def test_a_quoted_command_that_does_not_exist_is_found(text: str, message: str) -> None:
    (found,) = wrong_quotes(text)
    assert message in found


def test_the_table_of_commands_has_each_command() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    table = page.partition("| command |")[2].partition("\n\n")[0]
    named = {
        name
        for cell in re.findall(r"^\| (\[[^]]*\])", table, re.MULTILINE)
        for name in re.findall(r"`([a-z-]+)`", cell)
    }
    assert named == set(COMMANDS)
