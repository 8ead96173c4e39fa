"""Deadlines: the time limits of the async attempts of a loop, with one timer for all of them."""

import asyncio
import threading
from typing import Any


class LimitedRun:
    """An attempt under a time limit. `expired`: its task was cancelled, as it took too long."""

    __slots__ = ("due_s", "expired", "task")

    def __init__(self, task: asyncio.Task[Any], due_s: float) -> None:
        self.task = task
        self.due_s = due_s
        self.expired = False


class Deadlines:
    """Cancels the tasks of a loop whose attempts take longer than `limit_s` seconds.

    All have the same limit, so the first that began is the first that is due. A timer of the loop for each attempt
    would cost more than most attempts do.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self.loop = loop
        self.limit_s = limit_s
        self._runs: dict[LimitedRun, None] = {}
        self._has_timer = False

    def begin(self, task: asyncio.Task[Any]) -> LimitedRun:
        """Limit an attempt that the current task makes."""
        run = LimitedRun(task, self.loop.time() + self.limit_s)
        self._runs[run] = None
        if not self._has_timer:
            self._has_timer = True
            self.loop.call_at(run.due_s, self._expire)
        return run

    def end(self, run: LimitedRun) -> None:
        """End the limit of an attempt that has ended. The timer stays, for those that begin meanwhile."""
        self._runs.pop(run, None)

    def _expire(self) -> None:
        now_s = self.loop.time()
        while self._runs:
            run = next(iter(self._runs))
            if run.due_s > now_s:
                self.loop.call_at(run.due_s, self._expire)
                return
            del self._runs[run]
            run.expired = True
            run.task.cancel()
        self._has_timer = False


class _LastOfThread(threading.local):
    deadlines: Deadlines | None = None


_last_of_thread = _LastOfThread()


def deadlines_of(loop: asyncio.AbstractEventLoop, limit_s: float) -> Deadlines:
    """Return those of the running loop with this limit."""
    last = _last_of_thread.deadlines
    if last is None or last.loop is not loop or last.limit_s != limit_s:
        last = _last_of_thread.deadlines = Deadlines(loop, limit_s)
    return last
