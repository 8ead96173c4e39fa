"""Waker: the future a task waits on for its subscription, created once."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any, Self

WakeCallback = Callable[[Any], object]


class _Cancelled:
    """Passed to a cancelled task in place of its waker, which another task may wait on by then."""

    def result(self) -> None:
        raise asyncio.CancelledError


_CANCELLED = _Cancelled()


class Waker:
    """A reusable future: a task waits on it any number of times, and continues when it is woken. One task at a time.

    A `Future` is for one use: each wait leaves four objects that live until the next message, and with 100,000 waiting
    tasks, spread over all memory, the garbage collector takes longer to scan them than the router to read. A waker
    stays, in the loop of its first wait, and from the second wait on nothing is allocated. To asyncio it is
    "future-like" (`asyncio.isfuture`): it has what a task needs to wait, and no more.
    """

    __slots__ = ("_asyncio_future_blocking", "_callback", "_context", "_task", "awaited", "loop")

    def __init__(self) -> None:
        self.awaited = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self._asyncio_future_blocking = False
        self._task: object = None
        self._callback: WakeCallback
        self._context: Context

    def prepare(self) -> None:
        """Before the first wait: bind the waker to the running loop, before any other thread can see it."""
        self.loop = asyncio.get_running_loop()

    def wait(self) -> Self:
        """Begin to wait: the task must yield the returned value."""
        self._asyncio_future_blocking = True
        return self

    def wake(self) -> None:
        """Run the waiting task, if there is one. Call it in the thread of its loop, and not within another task."""
        if self.awaited:
            self.awaited = False
            self._context.run(self._callback, self)

    # Called by asyncio tasks

    def get_loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop of the waiting task."""
        return self.loop

    def add_done_callback(self, wake: WakeCallback, *, context: Context) -> None:
        """Call `wake` when the waker is woken."""
        task = getattr(wake, "__self__", wake)
        if task is not self._task:  # the same task passes the same method at every wait
            self._task, self._callback, self._context = task, wake, context
        self.awaited = True

    def cancel(self, msg: object = None) -> bool:
        """Stop waiting: the task continues with CancelledError. False if no task waits."""
        if not self.awaited or self.loop is None:
            return False
        self.awaited = False
        self.loop.call_soon(self._callback, _CANCELLED, context=self._context)
        return True

    def result(self) -> None:
        """The wait has ended by a wake-up; a cancelled wait calls `_Cancelled.result`."""


def wake_all(wakers: list[Waker]) -> None:
    """Run every task that waits on these."""
    for waker in wakers:
        waker.wake()
