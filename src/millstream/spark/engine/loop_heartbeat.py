"""LoopHeartbeat: the heartbeat of the event loop on which a task runs an async handler."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from millstream.spark.engine.watchdog import hard_limit_ms, watchdog

_HEARTBEAT_S = 1.0


class LoopHeartbeat:
    """Lets the watchdog kill a process whose event loop is blocked by compiled code in a coroutine.

    `limit_ms`: the time limit of an attempt; None: no watch.
    """

    def __init__(self, limit_ms: float | None) -> None:
        self._within_ms = None if limit_ms is None else hard_limit_ms(limit_ms) + _HEARTBEAT_S * 1000
        self._watchdog = watchdog()
        self._beats = False

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Watch the running loop within the block."""
        if self._within_ms is None:
            yield
            return
        heartbeat = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            heartbeat.cancel()
            self._beats = False
            self._watchdog.rest()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Pause the watch within the block, which may block the loop."""
        if not self._beats:
            yield
            return
        self._watchdog.rest()
        try:
            yield
        finally:
            self._expect()

    async def _beat(self) -> None:
        self._beats = True
        while True:
            self._expect()
            await asyncio.sleep(_HEARTBEAT_S)

    def _expect(self) -> None:
        assert self._within_ms is not None
        self._watchdog.expect(self._within_ms)
