"""One subscriber's view of a stream: an iterator, for asyncio and for plain threads."""

import threading
from collections.abc import AsyncIterator
from typing import Any, Never, Protocol, Self

from millstream.clock import SYSTEM_CLOCK
from millstream.router.stream_events import Item
from millstream.router.subscriber_buffer import SubscriberBuffer
from millstream.router.waker import Waker


class SubscriptionHost(Protocol):
    """Whom a subscription tells: there is room again; nobody takes anything out any more."""

    def drained(self, inbox: SubscriberBuffer) -> None:
        """There is room in the inbox again."""

    def left(self, inbox: SubscriberBuffer) -> None:
        """Nobody takes anything out of the inbox any more."""


class Subscription:
    """Messages of one stream in order, each once, and the notices `Gap` and `Dropped` between them.

    `async for item in subscription` or `for item in subscription`; one reader at a time. It ends with `close`, when
    the router is closed (after what is buffered), or by an error: `TooSlow`, or WrongType and AccessDenied of Redis.
    Dropping it is as good as closing it: the router forgets a subscription that nobody has any more.
    """

    __slots__ = ("_desk", "_inbox")

    def __init__(self, inbox: SubscriberBuffer, desk: SubscriptionHost) -> None:
        self._inbox = inbox
        self._desk = desk

    @property
    def stream(self) -> str:
        """The stream's name."""
        return self._inbox.stream

    @property
    def dropped(self) -> int:
        """Messages dropped so far, since this subscriber was too slow for them."""
        return self._inbox.dropped

    @property
    def buffered(self) -> int:
        """Messages that wait to be taken."""
        return self._inbox.held

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more, in good order: it or the router was closed, and all it held is taken.

        False if an error is to come: the next `get` raises that.
        """
        inbox = self._inbox
        return inbox.ending is True and not inbox.batches and inbox.batch is None

    # asyncio

    def __aiter__(self) -> AsyncIterator[Item]:
        return _Turns(self, self._inbox)

    async def __anext__(self) -> Item:
        return await anext(_Turns(self, self._inbox))

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

        None says that the time is over or, if `ended`, that nothing will come any more: loop `while not subscription.ended`.
        Raises what ended the subscription otherwise. Not for the thread of an event loop, unless `timeout_ms` is 0.
        """
        until_ms = None if timeout_ms is None else SYSTEM_CLOCK.monotonic_ms() + timeout_ms
        while True:
            if (item := self._take()) is not None:
                return item
            if self._inbox.over():
                return None
            left_s = -1.0 if until_ms is None else (until_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000
            if until_ms is not None and left_s <= 0:
                return None
            bell = threading.Lock()
            bell.acquire()
            if self._inbox.may_sleep(bell):
                bell.acquire(timeout=left_s)
                self._inbox.waker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Ending

    def close(self) -> None:
        """Unsubscribe. What is buffered is forgotten, and an iteration under way ends."""
        inbox = self._inbox
        if inbox.ending is None:
            inbox.ending = True
            self._desk.left(inbox)
        inbox.batch = None
        inbox.batches.clear()

    def __del__(self) -> None:
        if self._inbox.ending is None:
            self._desk.left(self._inbox)

    # Inside

    def _take(self) -> Item | None:
        item = self._inbox.take()
        if self._inbox.paused:
            self._room()
        return item

    def _room(self) -> None:
        if self._inbox.drained:
            self._desk.drained(self._inbox)


class _Turns:
    """A subscription in `async for`. Waits for items without making anything, for the reasons that `Waker` has.

    It is its own awaitable, and its own way of awaiting: `anext(turns, default)` needs all that a coroutine has.
    """

    __slots__ = ("_bell", "_inbox", "_subscription")

    def __init__(self, subscription: Subscription, inbox: SubscriberBuffer) -> None:
        self._subscription = subscription
        self._inbox = inbox
        self._bell = Waker()

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Self:
        return self

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Waker:
        inbox = self._inbox
        while True:
            if (inbox.batches or inbox.batch) and (item := inbox.take()) is not None:
                if inbox.paused:
                    self._subscription._room()
                raise StopIteration(item)
            if inbox.ending is not None and inbox.over():
                raise StopAsyncIteration
            self._bell.prepare()
            if inbox.may_sleep(self._bell):
                return self._bell.wait()

    def send(self, _: object) -> Waker:
        return self.__next__()

    def throw(self, kind: Any, value: Any = None, _: object = None) -> Never:
        raise kind if value is None else value

    def close(self) -> None:
        """Nothing is held between two waits."""
