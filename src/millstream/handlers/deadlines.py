"""Deadlines: the time limits of the async attempts of a loop, with one timer for all of them."""

import asyncio
import threading
from typing import Any


class Deadlines:
    """Cancels the tasks of a loop whose attempts take longer than `limit_s` seconds; a task makes one at a time.

    All have the same limit, so the first that began is the first that is due. A timer of the loop for each attempt
    would cost more than most attempts do.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self.loop = loop
        self.limit_s = limit_s
        self._due_s: dict[asyncio.Task[Any], float] = {}
        # Most attempts end before another one begins, as they wait for nothing. This one is not in the mapping yet.
        self._newest: asyncio.Task[Any] | None = None
        self._newest_due_s = 0.0
        self._has_timer = False

    def begin(self, task: asyncio.Task[Any]) -> None:
        """Limit an attempt that the current task makes."""
        if self._newest is not None:
            self._due_s[self._newest] = self._newest_due_s
        self._newest, self._newest_due_s = task, self.loop.time() + self.limit_s
        if not self._has_timer:
            self._has_timer = True
            self.loop.call_at(self._newest_due_s, self._expire)

    def end(self, task: asyncio.Task[Any]) -> bool:
        """End the limit of an attempt that has ended; True if its task was cancelled, as it took too long.

        The timer stays, for those that begin meanwhile.
        """
        if self._newest is task:
            self._newest = None
            return False
        return self._due_s.pop(task, None) is None

    def _expire(self) -> None:
        if self._newest is not None:
            self._due_s[self._newest] = self._newest_due_s
            self._newest = None
        now_s = self.loop.time()
        while self._due_s:
            task = next(iter(self._due_s))
            if (due_s := self._due_s[task]) > now_s:
                self.loop.call_at(due_s, self._expire)
                return
            del self._due_s[task]
            task.cancel()
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
