"""Screen: shows output again and again at the same place of a terminal, as `watch` does."""

import io
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from typing import NoReturn, TypeVar

from millstream.admin.time_inputs import Duration
from millstream.cli.terminal import print_line, print_message
from millstream.errors import Unavailable

T = TypeVar("T")

_CLEAR, _HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


class _Terminal(io.StringIO):
    """Collects what is printed, drawn as for the terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Screen:
    """The terminal of standard output. Elsewhere each output follows the one before."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_clear = False

    @contextmanager
    def redrawn(self) -> Iterator[None]:
        """Show what is printed in this block, messages too, instead of what the block before has printed.

        What is too long for the terminal is cut off at its end.
        """
        if not self._is_terminal:
            yield
            sys.stdout.flush()
            return
        shown = _Terminal()
        with redirect_stdout(shown), redirect_stderr(shown):
            yield
        lines = shown.getvalue().splitlines()
        height = shutil.get_terminal_size().lines - 1
        if len(lines) > height:
            lines[height - 1 :] = [f"... {len(lines) - height + 1} more lines"]
        text = "".join(f"{line}{_END_OF_LINE}\n" for line in lines)
        sys.stdout.write(f"{_HOME if self._is_clear else _CLEAR + _HOME}{text}{_END_OF_SCREEN}")
        sys.stdout.flush()
        self._is_clear = True


def show_repeatedly(
    every: Duration, read: Callable[[], T], show: Callable[[T], None], *, as_json: bool, rest: float = 0.0
) -> NoReturn:
    """Read something and show it, again and again, each on the screen in place of the one before.

    While Redis is unavailable, the screen shows the error; at the beginning the error is raised. `rest`: how many times
    as long as a read the wait after it is, at least.
    """
    screen = Screen()
    began_s, failure = time.monotonic(), ""
    found = read()
    took_s = time.monotonic() - began_s
    while True:
        with nullcontext() if as_json else screen.redrawn():
            if not as_json:
                print_line(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, every {every}; Ctrl-C ends it")
                print_line("")
            if failure:
                print_message(failure)
            else:
                show(found)
        time.sleep(max(0.0, began_s + max(every, (1 + rest) * took_s) - time.monotonic()))
        began_s = time.monotonic()
        try:
            found, failure = read(), ""
        except Unavailable as error:
            failure = f"{error}; trying again"
        took_s = time.monotonic() - began_s
