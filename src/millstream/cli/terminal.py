"""Output of the commands: data on stdout, messages on stderr; rich in a terminal, plain in a pipe.

All output is escaped here, once: a terminal obeys control characters, and any client may have written to Redis.
Passwords are removed from everything on stderr, including logs and tracebacks.

rich and typer are imported only where they are used, to keep the start of commands fast. rich itself obeys NO_COLOR.
"""

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from millstream.errors import ConfigError
from millstream.redis_client.escaping import escape_line, escape_lines
from millstream.redis_client.formats import format_time
from millstream.redis_client.redaction import redact_text


def print_line(line: str, *, flush: bool = False) -> None:
    """Print one line of data; `flush` it if another program waits for it."""
    sys.stdout.write(escape_line(line) + "\n")
    if flush:
        sys.stdout.flush()


def print_text(text: str) -> None:
    """Print data of several lines, such as a traceback."""
    sys.stdout.write(escape_lines(text) + "\n")


def print_json(value: Any, *, flush: bool = False) -> None:
    """Print one line of JSON. It is all ASCII, so no control character reaches a terminal."""
    print_line(json.dumps(value, separators=(",", ":")), flush=flush)


_message_formats: list[Callable[[str], str]] = []


def format_messages_with(function: Callable[[str], str] | None) -> None:
    """Let `function` make one line of each message to the user; None prints it as it is."""
    _message_formats[:] = [] if function is None else [function]


def has_message_format() -> bool:
    """True if a program reads standard error, so that all of it must be in that format."""
    return bool(_message_formats)


def print_message(text: str) -> None:
    """Print a one-line message for the user to stderr."""
    print_message_text(escape_line(text))


def with_time(text: str) -> str:
    """A line of figures with the present time before it, unless messages have a format that adds the time."""
    return text if has_message_format() else f"{format_time(time.time() * 1000)}  {text}"


def print_message_text(text: str) -> None:
    """Print a message of several lines, such as a traceback, to stderr."""
    text = redact_text(text).rstrip("\n")
    sys.stderr.write((_message_formats[0](text) if _message_formats else escape_lines(text)) + "\n")
    sys.stderr.flush()


class OneLineFormatter(logging.Formatter):
    """Formats a log message as one line, whatever it contains, then its traceback; removes passwords from both."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """See logging.Formatter."""
        return escape_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return escape_lines(redact_text(super().format(record)))


def redact_uncaught_exceptions() -> None:
    """Print the tracebacks of uncaught exceptions, in any thread, with `print_message_text`."""

    def at_the_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print_message_text("".join(traceback.format_exception(kind, error, trace)))

    def in_a_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread else "a thread"
            print_message_text(f"in {name}: {''.join(traceback.format_exception(args.exc_value))}")

    sys.excepthook, threading.excepthook = at_the_end, in_a_thread


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user to confirm, unless `yes`. Raises ConfigError without a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to confirm at: add --yes")
    from typer import confirm as ask

    ask(escape_line(question), abort=True, err=True)


class ProblemCell(str):
    """A cell of a table that is red in a terminal."""


class WarningCell(str):
    """A cell of a table that is yellow in a terminal."""


_STYLES: Mapping[type[str], str] = {ProblemCell: "bold red", WarningCell: "yellow"}
_LEAST_CELLS = 8
_GAP = 2


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. A column whose heading begins with `>` is right-aligned.

    Where a terminal is too narrow, columns whose headings begin with `+` move to lines below their row, and those that
    begin with `~` are shortened in the middle; if that is not enough, lines wrap.

    Cells are escaped here. Cells that users copy into commands, such as keys, have been through `visible` already.
    """
    rows = list(rows)
    headings = [column.lstrip(">~+") for column in columns]
    if sys.stdout.isatty():
        _draw(columns, headings, [[(escape_line(cell), _STYLES.get(type(cell), "")) for cell in row] for row in rows])
        return
    lines = [headings, *([escape_line(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    for line in lines:
        cells = [
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ]
        print_line("  ".join(cells).rstrip())


def _draw(columns: Sequence[str], headings: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> None:
    from rich.cells import cell_len
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console()
    needed = [
        max(cell_len(line[i]) for line in (headings, *([text for text, _ in row] for row in rows)))
        for i in range(len(columns))
    ]
    below = [i for i, column in enumerate(columns) if column.startswith("+")] if _total(needed) > console.width else []
    places = [i for i in range(len(columns)) if i not in below]
    widths = _fit([needed[i] for i in places], [columns[i].startswith("~") for i in places], console.width)
    is_utf = console.encoding.startswith("utf")

    def line_of(cells: Sequence[tuple[str, str]]) -> Text:
        line = Text()
        for i, width in zip(places, widths, strict=True):
            text, style = cells[i]
            text = _shorten(text, width, "…" if is_utf else "~")
            blank = " " * (width - cell_len(text))
            before, after = (blank, "") if columns[i].startswith(">") else ("", blank)
            # Text, not markup: data from Redis may contain square brackets.
            line.append(before).append(text, style=style or None).append(after + " " * _GAP)
        line.rstrip()
        return line

    console.print(line_of([(heading, "bold") for heading in headings]), soft_wrap=True)
    console.print(Text(("─" if is_utf else "-") * min(_total(widths), console.width)))
    for row in rows:
        console.print(line_of(row), soft_wrap=True)
        for i in below:
            if row[i][0] not in ("", "-"):
                console.print(
                    Padding(Text(f"{headings[i]}: {row[i][0]}", style=row[i][1]), (0, 0, 0, 2 * _GAP), expand=False)
                )


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _fit(needed: Sequence[int], flexible: Sequence[bool], room: int) -> list[int]:
    """The widths of columns, the flexible ones as narrow as `room` demands; as they are if that is not enough."""
    widths = list(needed)
    while _total(widths) > room:
        widest = max((i for i in range(len(widths)) if flexible[i]), key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= _LEAST_CELLS:
            return list(needed)
        widths[widest] -= 1
    return widths


def _shorten(text: str, width: int, dots: str) -> str:
    """`text`, with dots in its middle if it is wider than `width`: the ends of names tell them apart."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    behind = (width - 1) // 2
    return set_cell_size(text, width - 1 - behind) + dots + set_cell_size(text[::-1], behind)[::-1]


def print_details(pairs: Iterable[tuple[str, str]]) -> None:
    """Print one name and value per line, with the values aligned."""
    listed = [(escape_line(name), escape_line(value)) for name, value in pairs]
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        print_line(f"{name.ljust(width)}  {value}".rstrip())


def truncate_on_screen(text: str, most: int) -> str:
    """`text`, truncated in a terminal; in a pipe it is whole."""
    return truncate(text, most) if sys.stdout.isatty() else text


def truncate(text: str, most: int) -> str:
    """`text`, truncated to `most` characters that end with dots."""
    return text if len(text) <= most else text[: most - 3] + "..."
