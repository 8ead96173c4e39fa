"""How a task waits for its subscription: by a future that is made once."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any, Self

Wake = Callable[[Any], object]


class _Cancelled:
    """Given to a task in place of its bell, which by then another task may wait for."""

    def result(self) -> None:
        raise asyncio.CancelledError


_CANCELLED = _Cancelled()


class Waker:
    """A task waits for it as often as it likes, and goes on at once when it rings. One task at a time.

    A `Future` is for one use: each wait leaves four objects that live until the next message, and with 100,000 tasks
    waiting, spread over all memory, the garbage collector takes longer to look at them than the router to read. A bell
    stays, in the loop of its first wait, and by the second one nothing is made at all. To asyncio it is "future-like"
    (`asyncio.isfuture`): what a task needs to wait for something, and no more.
    """

    __slots__ = ("_asyncio_future_blocking", "_context", "_task", "_wake", "awaited", "loop")

    def __init__(self) -> None:
        self.awaited = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self._asyncio_future_blocking = False
        self._task: object = None
        self._wake: Wake
        self._context: Context

    def prepare(self) -> None:
        """In the task that will wait, before anybody else is told of the bell: who rings must know where."""
        if self.loop is None:
            self.loop = asyncio.get_running_loop()

    def wait(self) -> Self:
        """Begin to wait: the task has to yield what is returned."""
        self._asyncio_future_blocking = True
        return self

    def ring(self) -> None:
        """Run the task that waits, if there is one. In the thread of its loop, and not within another task."""
        if self.awaited:
            self.awaited = False
            self._context.run(self._wake, self)

    # What a task calls

    def get_loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop of the task that waits."""
        return self.loop

    def add_done_callback(self, wake: Wake, *, context: Context) -> None:
        """Call `wake` when it rings."""
        task = getattr(wake, "__self__", wake)
        if task is not self._task:  # otherwise the method it gave for its first wait is as good
            self._task, self._wake, self._context = task, wake, context
        self.awaited = True

    def cancel(self, msg: object = None) -> bool:
        """Wait no more: soon the task goes on with CancelledError. False if none waits."""
        if not self.awaited or self.loop is None:
            return False
        self.awaited = False
        self.loop.call_soon(self._wake, _CANCELLED, context=self._context)
        return True

    def result(self) -> None:
        """The wait has ended since it has rung; whose wait is cancelled asks `_Cancelled`."""


def wake_all(bells: list[Waker]) -> None:
    """Run all who wait for these."""
    for bell in bells:
        bell.ring()
