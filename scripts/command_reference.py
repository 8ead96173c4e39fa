"""Writes docs/reference/options.md: every command with its arguments and options, as the program itself has them.

    python scripts/command_reference.py

`tests/unit/test_command_reference.py` compares the page with the program.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typer.main import get_command

from millstream.cli.main import COMMANDS, load_command, main

PAGE = Path(__file__).parents[1] / "docs/reference/options.md"

_INTRODUCTION = """# Options of all commands

Written by `python scripts/command_reference.py` from the program itself; a test refuses a page that differs from it.
[Commands](../commands.md) says what each command promises. `millstream COMMAND --help` prints the same as here.

**Each option can come from four places**; the first that has it counts: the command line, the environment variable, the TOML file, the default.
The file is that of `--config`, else `millstream.toml` in the current folder; [more on it](../commands.md#settings).
An option marked "repeatable" takes several values: several times on the command line, with spaces in between in a variable, as a list in the file.
`-` in a table: there is none.
"""


def commands_of(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command at or below `command` that can be run, with its words: ("key", "list")."""
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
    for name, one in (below or {}).items():
        yield from commands_of(one, (*words, name))


def all_commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of the program, in the order of its help."""
    for name in COMMANDS:
        yield from commands_of(load_command(name), (name,))


def variables(option: Any) -> list[str]:
    """The environment variables of an option; the first that is set counts."""
    return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())


def toml_name(option: Any) -> str:
    """An option's name in the section of its command, if a file may have it."""
    longest = next((one for one in option.opts if one.startswith("--")), "")
    if option.envvar is None or longest in ("--config", "--debug"):
        return ""
    return longest.removeprefix("--").replace("-", "_")


def page() -> str:
    """The whole page."""
    program = get_command(main)
    parts = [_INTRODUCTION, "## millstream\n", _usage(("[OPTIONS] COMMAND",), []), _options(program)]
    for words, command in all_commands():
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        parts += [f"## millstream {' '.join(words)}\n", _escape(_summary(command)) + "\n", _usage(words, arguments)]
        parts += [_arguments(arguments), _section(words), _options(command)]
    return "\n".join(part for part in parts if part)


def _summary(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


def _usage(words: tuple[str, ...], arguments: list[Any]) -> str:
    shown = (" ".join(one.get_usage_pieces(None)) for one in arguments)
    return f"    {' '.join(('millstream', *words, *shown))}\n"


def _section(words: tuple[str, ...]) -> str:
    return f"In the TOML file: the section `[{'.'.join(words)}]`.\n"


def _arguments(arguments: list[Any]) -> str:
    explained = [one for one in arguments if one.help]
    if not explained:
        return ""
    rows = [(f"`{' '.join(one.get_usage_pieces(None))}`", _escape(one.help)) for one in explained]
    return _table(("argument", "meaning"), rows)


def _options(command: Any) -> str:
    rows = [
        (
            f"`{_names(one)}`",
            _escape(one.help or ""),
            f"`{default}`" if (default := _default(one)) else "-",
            ", ".join(f"`{variable}`" for variable in variables(one)) or "-",
            f"`{name}`" if (name := toml_name(one)) else "-",
        )
        for one in command.params
        if one.param_type_name == "option" and not one.hidden
    ]
    return _table(("option", "meaning", "default", "environment", "in the file"), rows)


def _names(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar}"
    return ", ".join(sorted((*option.opts, *option.secondary_opts), key=lambda one: one.startswith("--no-"))) + value


def _default(option: Any) -> str:
    if option.is_flag and not option.secondary_opts:
        return "off" if option.default in (False, None) else "on"
    if option.is_flag:
        return str(option.opts[0] if option.default else option.secondary_opts[0])
    found = option.default
    if found is None or found == "":
        return ""
    return f"{found:,}" if type(found) is int and found >= 10_000 else str(getattr(found, "value", found))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    assert not any("|" in one for row in rows for one in row), "a cell of a table cannot have a |"
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escape(text: str) -> str:
    """Prose of a help text as Markdown: names of options as code, patterns and braces as they are."""
    text = re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", " ".join(text.split()))
    return re.sub(r"([*<\[{])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE} is written\n")
