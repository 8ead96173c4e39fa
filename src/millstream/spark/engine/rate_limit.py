"""RateLimit: a handler's rate on Spark. Tasks and workers reserve their messages in Redis, on one schedule."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from millstream.delivery.commit_store import CommitStore, reservation_size
from millstream.delivery.rate_override import RateOverride
from millstream.spark.engine.attempt_runner import CallRedis

_LOOK_MS = 2_000.0
"""How often a task that waits looks for another rate."""


class RateLimit:
    """Limits one task's messages of each stream to `rate` a second, the one in code; None = no limit.

    The rate that an operator has set on a stream holds in its place.
    `call` runs an operation on Redis until it succeeds; `sleep` waits so many milliseconds. Each reservation is at most
    about a fifth of a second's worth, and at most the expected number of messages: an unused reservation would slow the
    handler down. Retries of a message are free.
    """

    def __init__(
        self,
        rate: float | None,
        commit_store: CommitStore,
        *,
        call: CallRedis,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._rate = rate
        self._commit_store = commit_store
        self._call, self._sleep = call, sleep
        self._overrides: dict[str, RateOverride] = {}
        self._expected: Counter[str] = Counter()
        self._reserved: Counter[str] = Counter()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def is_active(self) -> bool:
        """True if a stream has a rate."""
        return self._rate is not None or bool(self._overrides)

    def follow(self, overrides: Mapping[str, RateOverride | None]) -> None:
        """Follow what operators have set on these streams. A reservation at an earlier rate is dropped."""
        for stream, override in overrides.items():
            if override != self._overrides.get(stream):
                self._reserved.pop(stream, None)
                self._overrides.pop(stream, None)
                if override is not None:
                    self._overrides[stream] = override

    def add_expected(self, messages: Mapping[str, int]) -> None:
        """Add messages, by stream, that the task is about to run."""
        self._expected.update(messages)

    async def acquire(self, stream: str, count: int = 1) -> None:
        """Return once the next `count` messages of a stream may run. Raises RedisError."""
        if not self.is_active:
            return
        async with self._locks[stream]:
            while (rate := self._rate_of(stream)) is not None and self._reserved[stream] < count:
                await self._reserve(stream, rate, count)
            if rate is not None:
                self._reserved[stream] -= count
            self._expected[stream] -= count

    def _rate_of(self, stream: str) -> float | None:
        override = self._overrides.get(stream)
        return self._rate if override is None else override.rate

    async def _reserve(self, stream: str, rate: float, count: int) -> None:
        """Reserve messages and wait for them; nothing is reserved if the rate changes meanwhile."""
        reserved = max(count, min(reservation_size(rate), self._expected[stream]))
        override = self._overrides.get(stream)
        wait_ms = self._call(partial(self._commit_store.reserve_rate, stream, rate, reserved, override))
        if wait_ms is None:
            self._refresh(stream)
            return
        while wait_ms > _LOOK_MS:
            await self._sleep(_LOOK_MS)
            wait_ms -= _LOOK_MS
            if self._refresh(stream) != override:
                return
        await self._sleep(wait_ms)
        self._reserved[stream] += reserved

    def _refresh(self, stream: str) -> RateOverride | None:
        """Follow the rate that an operator has set by now, and return it."""
        override = self._call(partial(self._commit_store.rate_override, stream))
        self.follow({stream: override})
        return override
