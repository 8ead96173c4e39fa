"""NotificationQueue: a queue that one thread fills and others drain, in a thread or in an event loop."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class NotificationQueue(Generic[T]):
    """Keeps items in order until they are read. The producer checks `len` and slows down: no item is dropped.

    After `end`, the remaining items may still be read, and then no call waits any more.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ended = False
        self._changed = threading.Condition()
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def __len__(self) -> int:
        return len(self._items)

    def queued(self) -> list[T]:
        """The queued items."""
        with self._changed:
            return [*self._items]

    def put(self, item: T) -> None:
        """Append an item, and wake the waiters. Ignored after `end`."""
        with self._changed:
            if not self._ended:
                self._items.append(item)
                self._wake()

    def end(self, *last: T) -> bool:
        """Append the last items, and close the queue; False if it was closed before."""
        with self._changed:
            if self._ended:
                return False
            self._items.extend(last)
            self._ended = True
            self._wake()
            return True

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove the queued items that are `unwanted`; return them."""
        with self._changed:
            removed = [item for item in self._items if unwanted(item)]
            self._items = deque(item for item in self._items if not unwanted(item))
            return removed

    def get(self, timeout_s: float | None = None) -> T | None:
        """Wait for the next item, for so many seconds; None on timeout, or at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended, timeout_s)
            return self._items.popleft() if self._items else None

    async def get_async(self) -> T | None:
        """Wait for the next item in the running event loop; None at the end. A cancelled wait loses no item."""
        waiter = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._waiters.add(waiter)
        try:
            while True:
                ended = self._ended  # read first: items put before the end are still returned
                if (item := self.get(0)) is not None or ended:
                    return item
                await waiter[1].wait()
                waiter[1].clear()
        finally:
            with self._changed:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, event in self._waiters:
            with contextlib.suppress(
                RuntimeError
            ):  # the loop was closed, perhaps at this moment: it has no waiter any more
                loop.call_soon_threadsafe(event.set)
