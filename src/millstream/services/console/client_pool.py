"""ClientPool: Redis clients of a console, one for each request that is being answered."""

import asyncio
import contextvars
import queue
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from millstream.admin.lag import COUNT_ENTRIES
from millstream.redis_client.client import Client
from millstream.redis_client.tracked_client import TrackedClient

_MOST_CLIENTS = 8
_TIMEOUT_MS = 10_000

T = TypeVar("T")


class ClientPool:
    """At most eight clients of one Redis, and a TrackedClient, opened when they are first needed. For any thread.

    `close` closes those that are not in use.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._free: queue.LifoQueue[Client | None] = queue.LifoQueue()
        for _ in range(_MOST_CLIENTS):
            self._free.put(None)
        self._tracked: queue.LifoQueue[TrackedClient | None] = queue.LifoQueue()
        self._tracked.put(None)
        # Threads of its own: those that wait for a slow Redis keep no other part of the application waiting.
        self._threads = ThreadPoolExecutor(_MOST_CLIENTS, "millstream-console")
        # A console that is mounted in another application gets no call at the shutdown, so the collector closes them.
        self.close = weakref.finalize(self, _close, self._free, self._tracked)

    async def in_thread(self, read: Callable[[], T]) -> T:
        """The result of `read`, which may use `client`, in one of eight threads; waits while all are in use."""
        run = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._threads, run, read)

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A client for the block; waits while all are in use. Raises ConfigError for an invalid URL."""
        found = self._free.get()
        try:
            found = found or Client(self._url, timeout_ms=_TIMEOUT_MS)
            yield found
        finally:
            self._free.put(found)

    @contextmanager
    def tracked_client(self) -> Iterator[TrackedClient]:
        """The one client that keeps replies, for the block; waits while it is in use. Raises ConfigError likewise."""
        found = self._tracked.get()
        try:
            found = found or TrackedClient(self._url, timeout_ms=_TIMEOUT_MS, scripts=(COUNT_ENTRIES,))
            yield found
        finally:
            self._tracked.put(found)


def _close(*unused: "queue.LifoQueue[Client | None] | queue.LifoQueue[TrackedClient | None]") -> None:
    """Close the clients that are not in use."""
    for clients in unused:
        with suppress(queue.Empty):
            while True:
                if found := clients.get_nowait():
                    found.close()
