"""LiveReads: what open pages renew themselves with, read once for all of their viewers."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

from millstream.clock import SYSTEM_CLOCK, Clock

LIVE_MS = 5_000.0
"""How often an open page renews its figures, in milliseconds."""

_MOST_KEPT = 200

T = TypeVar("T")


class LiveReads(Generic[T]):
    """Values, each kept for `keep_ms` milliseconds from the end of its read, an error likewise.

    Requests that come meanwhile get the same value, and those that come during the read wait for it: so the number of
    reads depends on the time, not on the number of viewers. At most 200 are kept, the newest. Use it on the event loop.
    """

    def __init__(self, *, keep_ms: float = LIVE_MS, clock: Clock = SYSTEM_CLOCK) -> None:
        self.keep_ms = keep_ms
        self._clock = clock
        self._known: dict[Hashable, _Read[T]] = {}

    async def get(self, name: Hashable, read: Callable[[], Awaitable[T]]) -> tuple[T, float]:
        """The value of `read`, and for how many milliseconds it is kept. Raises what `read` raises."""
        now_ms = self._clock.monotonic_ms()
        self._known = {one: kept for one, kept in self._known.items() if not kept.is_over(now_ms)}
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = _Read(asyncio.ensure_future(read()), self._clock, self.keep_ms)
            known.task.add_done_callback(partial(self._expire, name, known))
            while len(self._known) > _MOST_KEPT:
                del self._known[next(iter(self._known))]
        value = await asyncio.shield(known.task)  # a viewer who goes away ends no read that others wait for
        return value, max(0.0, known.until_ms - self._clock.monotonic_ms())

    def _expire(self, name: Hashable, read: "_Read[T]", task: "asyncio.Future[T]") -> None:
        task.get_loop().call_later(self.keep_ms / 1000, self._drop, name, read)

    def _drop(self, name: Hashable, read: "_Read[T]") -> None:
        """Forget a value that is too old, also if no request comes after it: it has what messages contain."""
        if self._known.get(name) is read:
            del self._known[name]

    def clear(self) -> None:
        """Forget all values."""
        self._known.clear()


class _Read(Generic[T]):
    """One read, and until when its value is kept."""

    def __init__(self, task: "asyncio.Future[T]", clock: Clock, keep_ms: float) -> None:
        self.task = task
        self.until_ms = float("inf")
        self._clock = clock
        self._keep_ms = keep_ms
        task.add_done_callback(self._end)

    def is_over(self, now_ms: float) -> bool:
        """Whether the value is too old."""
        return self.task.cancelled() or now_ms >= self.until_ms

    def _end(self, task: "asyncio.Future[T]") -> None:
        self.until_ms = self._clock.monotonic_ms() + self._keep_ms
        if not task.cancelled():
            task.exception()  # all who waited may be gone: asyncio then logs an error that it believes unseen
