"""Progress of the run, read from Redis, so that it does not depend on processes that die meanwhile."""

from collections import deque
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from millstream.demo.audit import KEYS
from millstream.demo.report import Sample
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.formats import entry_rate, pluralize

_WINDOW_S = 5.0
_LINE_EVERY_S = 3.0
_ESTIMATE_AFTER = 3
"""So many batches tell how fast the run is: the first ones are small, and begin while Spark compiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """Progress in Redis: entries published, done and dead; `caught_up`: the committed offset is the last entry."""

    published: int
    done: int
    dead: int
    caught_up: bool


def read_progress(client: Client) -> RunProgress:
    """Read the pipeline's progress from Redis. Raises RedisError."""
    replies = client.pipeline(
        [
            ("XLEN", KEYS.stream),
            ("XREVRANGE", KEYS.stream, "+", "-", "COUNT", 1),
            ("HMGET", KEYS.meta, "committed", "dead", "committed_id"),
        ]
    )
    published, last, (done, dead, committed_id) = (raise_if_error(reply) for reply in replies)
    caught_up = bool(last) and last[0][0] == committed_id
    return RunProgress(published=published, done=int(done or 0), dead=int(dead or 0), caught_up=caught_up)


class ProgressView:
    """Shows progress towards `total` entries: bars in a terminal, otherwise a line every three seconds."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._recent: deque[Sample] = deque()
        self._line_at_s = 0.0
        self._bars = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[details]}", markup=False),
            console=console,
        )
        self._published = self._bars.add_task("published", total=total, details="")
        self._done = self._bars.add_task("committed", total=total, details="")
        live = console.is_terminal
        self._live = Live(self._bars, console=console, refresh_per_second=5, transient=True) if live else None

    def __enter__(self) -> "ProgressView":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, sample: Sample, progress: RunProgress, batches: int) -> None:
        """Show the current progress."""
        self._recent.append(sample)
        while sample.at_s - self._recent[0].at_s > _WINDOW_S:
            self._recent.popleft()
        details = self._describe(progress, batches)
        if self._live:
            self._bars.update(self._published, completed=progress.published)
            self._bars.update(self._done, completed=progress.done, details=details)
        elif sample.at_s - self._line_at_s >= _LINE_EVERY_S:
            self._line_at_s = sample.at_s
            share = f"{sample.at_s:6.1f} s  {progress.done:,} of {self._total:,} done  "
            self._console.print(share + details, markup=False, highlight=False, soft_wrap=True)

    def _describe(self, progress: RunProgress, batches: int) -> str:
        first, last = self._recent[0], self._recent[-1]
        rate = (last.done - first.done) / (last.at_s - first.at_s) if last.at_s > first.at_s else 0.0
        left = (
            f"  {(self._total - progress.done) / rate:,.0f} s left" if rate > 0 and batches >= _ESTIMATE_AFTER else ""
        )
        return (
            f"{entry_rate(rate)}  lag {progress.published - progress.done:,}  {pluralize(batches, 'batch', 'batches')}  "
            f"{pluralize(progress.dead, 'dead letter')}{left}"
        )
