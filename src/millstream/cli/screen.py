"""Screen: shows output again and again at the same place of a terminal, as `watch` does."""

import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

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
