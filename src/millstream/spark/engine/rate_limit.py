"""Keeps a handler's rate on Spark: tasks and workers reserve what they run from the same account in Redis."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from millstream.delivery.commit_store import CommitStore, reservation_size


class RateLimit:
    """When one task may run its next messages; `rate` is in messages a second of each stream, None for no limit. `ask` waits
    for Redis, `sleep` for so many milliseconds.

    It reserves no more than about a fifth of a second's worth, and no more than it was told to `expect`: what a task
    reserved in vain would make the handler slower. An attempt that is repeated costs nothing.
    """

    def __init__(
        self,
        rate: float | None,
        ledger: CommitStore,
        *,
        ask: Callable[[Callable[[], float]], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._rate = rate
        self._ledger = ledger
        self._ask, self._sleep = ask, sleep
        self._expected: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def expect(self, messages: Mapping[str, int]) -> None:
        """Note how many messages of each stream the task has to run."""
        self._expected.update(messages)

    async def wait(self, stream: str, count: int = 1) -> None:
        """Return when the next `count` messages of a stream may be run. Raises RedisError."""
        if self._rate is None:
            return
        async with self._locks[stream]:
            if self._left[stream] < count:
                most = max(count, min(reservation_size(self._rate), self._expected[stream]))
                reserve = partial(self._ledger.reserve, stream, self._rate, most)
                wait_ms = self._ask(reserve)
                self._left[stream] += most
                await self._sleep(wait_ms)
            self._left[stream] -= count
            self._expected[stream] -= count
