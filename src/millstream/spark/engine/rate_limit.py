"""RateLimit: a handler's rate on Spark. Tasks and workers reserve their messages in Redis, on one schedule."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from millstream.delivery.commit_store import CommitStore, reservation_size


class RateLimit:
    """Limits one task's messages of each stream to `rate` a second; None = no limit.

    `call` runs an operation on Redis until it succeeds; `sleep` waits so many milliseconds. Each reservation is at most
    about a fifth of a second's worth, and at most the expected number of messages: an unused reservation would slow the
    handler down. Retries of a message are free.
    """

    def __init__(
        self,
        rate: float | None,
        commit_store: CommitStore,
        *,
        call: Callable[[Callable[[], float]], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._rate = rate
        self._commit_store = commit_store
        self._call, self._sleep = call, sleep
        self._expected: Counter[str] = Counter()
        self._reserved: Counter[str] = Counter()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def add_expected(self, messages: Mapping[str, int]) -> None:
        """Add messages, by stream, that the task is about to run."""
        self._expected.update(messages)

    async def acquire(self, stream: str, count: int = 1) -> None:
        """Return once the next `count` messages of a stream may run. Raises RedisError."""
        if self._rate is None:
            return
        async with self._locks[stream]:
            if self._reserved[stream] < count:
                reserved = max(count, min(reservation_size(self._rate), self._expected[stream]))
                reserve = partial(self._commit_store.reserve_rate, stream, self._rate, reserved)
                wait_ms = self._call(reserve)
                self._reserved[stream] += reserved
                await self._sleep(wait_ms)
            self._reserved[stream] -= count
            self._expected[stream] -= count
