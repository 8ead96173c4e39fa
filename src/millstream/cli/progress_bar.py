"""ProgressBar: progress on a terminal. A separate module, because importing rich is slow."""

from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Figures(ProgressColumn):
    """What a function returns at each drawing."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self._text = text

    def render(self, task: Task) -> Text:
        """See rich.progress.ProgressColumn."""
        return Text(self._text())


class ProgressBar:
    """Shows how much of `total` is completed, if it is known, and `text`, until its end."""

    def __init__(self, total: int | None, text: Callable[[], str]) -> None:
        columns = [BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn()] if total else []
        self._progress = Progress(*columns, _Figures(text), console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def complete(self, count: int) -> None:
        """Show that so much of the total is completed."""
        self._progress.update(self._task, completed=count)
