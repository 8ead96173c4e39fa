"""What the commands print: data on stdout, talk on stderr; rich in a terminal, plain in a pipe.

rich is imported only where something is drawn with it, since the start of a command is felt. It obeys
NO_COLOR itself.
"""

import json
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from millstream.errors import ConfigError
from millstream.escaping import harmless


def say(line: str, *, flush: bool = False) -> None:
    """Print one line of data; `flush` if somebody waits for it."""
    sys.stdout.write(line + "\n")
    if flush:
        sys.stdout.flush()


def say_json(value: Any, *, flush: bool = False) -> None:
    """Print one line of JSON. All of it is ASCII, so that no control character reaches a terminal."""
    say(json.dumps(value, separators=(",", ":")), flush=flush)


def talk(text: str) -> None:
    """Tell the person at the terminal something that is not data."""
    sys.stderr.write(harmless(text) + "\n")
    sys.stderr.flush()


class OneLine(logging.Formatter):
    """A log message is one line, whatever the names in it hold; a traceback comes after it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """See logging.Formatter."""
        return harmless(super().formatMessage(record).replace("\n", "\\n"))


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if `yes`, or if the person says so. Raises ConfigError where nobody can be asked."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Nobody can answer here: add --yes if so")
    typer.confirm(question, abort=True, err=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; a column whose heading begins with `>` is aligned to the right.

    Cells must be printable already (`visible`).
    """
    headings = [column.lstrip(">") for column in columns]
    right = [column.startswith(">") for column in columns]
    if sys.stdout.isatty():
        _draw(headings, right, rows)
        return
    lines = [headings, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    for line in lines:
        cells = [
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, right, strict=True)
        ]
        say("  ".join(cells).rstrip())


def _draw(headings: Sequence[str], right: Sequence[bool], rows: Iterable[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading, at_right in zip(headings, right, strict=True):
        drawn.add_column(heading, justify="right" if at_right else "left", overflow="fold")
    for row in rows:
        # Text, not markup: what stands in Redis may contain square brackets.
        drawn.add_row(*map(Text, row))
    Console().print(drawn)


def details(pairs: Iterable[tuple[str, str]]) -> None:
    """Print names and values, a line each, the values below one another."""
    listed = list(pairs)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        say(f"{name.ljust(width)}  {value}".rstrip())


def clip(text: str, most: int) -> str:
    """`text`, or its first `most` characters with dots after them."""
    return text if len(text) <= most else text[: most - 3] + "..."


def age(duration_ms: float | None) -> str:
    """A duration in milliseconds, in the unit that fits it; "-" for None."""
    if duration_ms is None:
        return "-"
    seconds = duration_ms / 1000
    for unit, length in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= length * 2:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"


def size(count: float) -> str:
    """A number of bytes, in the unit that fits it."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def counted(number: int, thing: str, things: str = "") -> str:
    """`1 entry`, `2 entries`: a number with the word that fits it."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"
