"""Progress of a command that takes long: a bar on stderr, if that is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown_progress(total: int | None, text: Callable[[], str]) -> Iterator[Callable[[int], None]]:
    """Show a bar and `text` within the block; yield the function that says how much of `total` is completed.

    Without a `total` there is no bar, only the text; if stderr is no terminal, there is nothing.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from millstream.cli.progress_bar import ProgressBar

    with ProgressBar(total, text) as bar:
        yield bar.complete
