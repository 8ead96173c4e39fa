"""PublishBar: the progress bar of `millstream publish`. A separate module, because importing rich is slow."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from millstream.producer.bulk import Publisher


class _Published(ProgressColumn):
    """Published entries, and entries per second."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__()
        self._publisher = publisher
        self._began = time.monotonic()

    def render(self, task: Task) -> Text:
        """See rich.progress.ProgressColumn."""
        entries = self._publisher.entries
        rate = entries / max(time.monotonic() - self._began, 0.001)
        return Text(f"{entries:,} entries  {rate:,.0f} entries/s")


class PublishBar:
    """Shows the progress of `publisher`; `total` is the size of its input in bytes, or None."""

    def __init__(self, publisher: Publisher, total: int | None) -> None:
        columns = [BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn()] if total else []
        self._progress = Progress(*columns, _Published(publisher), console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def read(self, count: int) -> None:
        """Show that `count` bytes of the input have been read."""
        self._progress.update(self._task, completed=count)
