"""One subscriber's view of a stream: an iterator, for asyncio and for plain threads."""

import asyncio
import threading
from typing import Any, Protocol, Self

from millstream.clock import SYSTEM_CLOCK
from millstream.errors import MillstreamError
from millstream.model import Message
from millstream.router.inbox import Inbox
from millstream.router.notices import Item


class Desk(Protocol):
    """Whom a subscription tells: there is room again; nobody takes anything out any more."""

    def drained(self, inbox: Inbox) -> None:
        """There is room in the inbox again."""

    def left(self, inbox: Inbox) -> None:
        """Nobody takes anything out of the inbox any more."""


class Subscription:
    """Messages of one stream in order, each once, and the notices `Gap` and `Dropped` between them.

    `async for item in subscription` or `for item in subscription`; one reader at a time. It ends with `close`, when
    the router is closed (after what is buffered), or by an error: `TooSlow`, or WrongType and AccessDenied of Redis.
    Dropping it is as good as closing it: the router forgets a subscription that nobody has any more.
    """

    __slots__ = ("_desk", "_inbox")

    def __init__(self, inbox: Inbox, desk: Desk) -> None:
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

    # asyncio

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        while True:
            if (item := self._take()) is not None:
                return item
            if self._ended():
                raise StopAsyncIteration
            future = asyncio.get_running_loop().create_future()
            if self._may_sleep(future):
                try:
                    await future
                finally:
                    self._inbox.waker = None

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

        Raises what ended the subscription. Not for the thread of an event loop, unless `timeout_ms` is 0.
        """
        until_ms = None if timeout_ms is None else SYSTEM_CLOCK.monotonic_ms() + timeout_ms
        while True:
            if (item := self._take()) is not None:
                return item
            if self._ended():
                return None
            left_s = -1.0 if until_ms is None else (until_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000
            if until_ms is not None and left_s <= 0:
                return None
            bell = threading.Lock()
            bell.acquire()
            if self._may_sleep(bell):
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
        inbox = self._inbox
        found: Any = inbox.take()
        if found is None:
            return None
        if inbox.paused and inbox.drained:
            self._desk.drained(inbox)
        if type(found) is not list:
            item: Item = found
            return item
        return Message(inbox.stream, found[0].decode(), found[1])

    def _ended(self) -> bool:
        """Whether nothing will come any more; raises what ended it."""
        ending = self._inbox.ending
        if ending is None or self._inbox.batches:
            return False
        if isinstance(ending, Exception):
            raise ending
        return True

    def _may_sleep(self, waker: Any) -> bool:
        inbox = self._inbox
        if inbox.waker is not None:
            raise MillstreamError(
                f"the subscription of {inbox.stream} is being read by somebody else: subscribe once more"
            )
        inbox.waker = waker
        # Said first, looked second: whoever puts something in looks for the waker after that.
        if inbox.batches or inbox.ending is not None:
            inbox.waker = None
            return False
        return True
