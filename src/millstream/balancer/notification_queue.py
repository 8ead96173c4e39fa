"""A queue that one thread fills and others empty, waiting in a thread or in an event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class NotificationQueue(Generic[T]):
    """Holds what was put until it is taken, in order. Its filler looks at `len` and slows down: nothing is dropped.

    After `end`, what is left may be taken, and then nobody waits any more.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ended = False
        self._changed = threading.Condition()
        self._sleepers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def __len__(self) -> int:
        return len(self._items)

    def waiting(self) -> list[T]:
        """What nobody has taken yet."""
        with self._changed:
            return [*self._items]

    def put(self, item: T) -> None:
        """Add an item, and wake whoever waits. After the end nothing is added."""
        with self._changed:
            if not self._ended:
                self._items.append(item)
                self._wake()

    def end(self, *last: T) -> bool:
        """Put the last items of all, and say that there are no more; False if it had ended before."""
        with self._changed:
            if self._ended:
                return False
            self._items.extend(last)
            self._ended = True
            self._wake()
            return True

    def withdraw(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take back what is unwanted and nobody has taken yet; return it."""
        with self._changed:
            withdrawn = [item for item in self._items if unwanted(item)]
            self._items = deque(item for item in self._items if not unwanted(item))
            return withdrawn

    def take(self, timeout_s: float | None = None) -> T | None:
        """Wait for the next item, for so many seconds; None if none has come, or none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended, timeout_s)
            return self._items.popleft() if self._items else None

    async def take_soon(self) -> T | None:
        """Wait for the next item in the running event loop; None if none will come. To be cancelled costs no item."""
        sleeper = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._sleepers.add(sleeper)
        try:
            while True:
                ended = self._ended  # looked at first: what was put before it is still taken
                if (item := self.take(0)) is not None or ended:
                    return item
                await sleeper[1].wait()
                sleeper[1].clear()
        finally:
            with self._changed:
                self._sleepers.discard(sleeper)

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, event in self._sleepers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)
