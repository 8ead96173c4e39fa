"""Subscription: one subscriber's view of a stream, an iterator for asyncio and for plain threads."""

import threading
from collections.abc import AsyncIterator
from typing import Any, Never, Protocol, Self

from millstream.clock import SYSTEM_CLOCK
from millstream.router.stream_events import Item
from millstream.router.subscriber_buffer import SubscriberBuffer
from millstream.router.waker import Waker


class SubscriptionHost(Protocol):
    """Callbacks of a subscription: its buffer has room again; the subscriber has stopped reading."""

    def on_drained(self, buffer: SubscriberBuffer) -> None:
        """The buffer has room again."""

    def on_left(self, buffer: SubscriberBuffer) -> None:
        """The subscriber has stopped reading the buffer."""


class Subscription:
    """Messages of one stream in order, each once, and the events `Gap`, `Dropped` and `Start` between them.

    `async for item in subscription` or `for item in subscription`; one reader at a time. It ends with `close`, when the
    router is closed (after the buffered messages), or by an error: `TooSlow`, or WrongType and AccessDenied of Redis. A
    subscription without references counts as closed: the router removes it.
    """

    __slots__ = ("_buffer", "_host")

    def __init__(self, buffer: SubscriberBuffer, host: SubscriptionHost) -> None:
        self._buffer = buffer
        self._host = host

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self._buffer.stream

    @property
    def dropped(self) -> int:
        """Messages dropped so far because this subscriber was too slow."""
        return self._buffer.dropped

    @property
    def buffered(self) -> int:
        """Messages in the buffer."""
        return self._buffer.held

    @property
    def ended(self) -> bool:
        """Whether no item will follow, and no error: subscription or router was closed, and the buffer is empty.

        False if an error is next: the next `get` raises it.
        """
        buffer = self._buffer
        return buffer.ending is True and not buffer.batches and buffer.batch is None

    # asyncio

    def __aiter__(self) -> AsyncIterator[Item]:
        return _AsyncItems(self, self._buffer)

    async def __anext__(self) -> Item:
        return await anext(_AsyncItems(self, self._buffer))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # Threads

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        item = self.get()
        if item is None:
            raise StopIteration
        return item

    def get(self, timeout_ms: float | None = None) -> Item | None:
        """The next item, waiting for it up to `timeout_ms` milliseconds (None: without end); None if there is none.

        None means that the time has passed or, if `ended`, that no item will follow: loop `while not
        subscription.ended`. Raises the error that ended the subscription. Not for the thread of an event loop, unless
        `timeout_ms` is 0.
        """
        until_ms = None if timeout_ms is None else SYSTEM_CLOCK.monotonic_ms() + timeout_ms
        while True:
            if (item := self._next_item()) is not None:
                return item
            if self._buffer.has_ended():
                return None
            left_s = -1.0 if until_ms is None else (until_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000
            if until_ms is not None and left_s <= 0:
                return None
            waker = threading.Lock()
            waker.acquire()
            if self._buffer.prepare_wait(waker):
                waker.acquire(timeout=left_s)
                self._buffer.waker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Ending

    def close(self) -> None:
        """Unsubscribe. Discards the buffer, and ends an iteration in progress."""
        buffer = self._buffer
        if buffer.ending is None:
            buffer.ending = True
            self._host.on_left(buffer)
        buffer.batch = None
        buffer.batches.clear()

    def __del__(self) -> None:
        if self._buffer.ending is None:
            self._host.on_left(self._buffer)

    # Inside

    def _next_item(self) -> Item | None:
        item = self._buffer.next_item()
        if self._buffer.paused:
            self._report_drained()
        return item

    def _report_drained(self) -> None:
        if self._buffer.drained:
            self._host.on_drained(self._buffer)


class _AsyncItems:
    """A subscription in `async for`. A wait allocates nothing, for the reasons given at `Waker`.

    It is its own awaitable and its own iterator: `anext(items, default)` needs every method of a coroutine.
    """

    __slots__ = ("_buffer", "_subscription", "_waker")

    def __init__(self, subscription: Subscription, buffer: SubscriberBuffer) -> None:
        self._subscription = subscription
        self._buffer = buffer
        self._waker = Waker()

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Self:
        return self

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Waker:
        buffer = self._buffer
        while True:
            if (buffer.batches or buffer.batch) and (item := buffer.next_item()) is not None:
                if buffer.paused:
                    self._subscription._report_drained()
                raise StopIteration(item)
            if buffer.ending is not None and buffer.has_ended():
                raise StopAsyncIteration
            waker = self._waker
            if waker.loop is None:
                waker.prepare()
            if buffer.prepare_wait(waker):
                return waker.wait()

    def send(self, _: object) -> Waker:
        return self.__next__()

    def throw(self, kind: Any, value: Any = None, _: object = None) -> Never:
        raise kind if value is None else value

    def close(self) -> None:
        """Nothing to release between two waits."""
