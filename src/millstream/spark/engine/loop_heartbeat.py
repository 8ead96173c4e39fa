"""LoopHeartbeat: the heartbeat of the event loop on which a task runs an async handler."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from millstream.spark.engine.watchdog import watchdog

_HEARTBEAT_S = 1.0


class LoopHeartbeat:
    """Lets the watchdog timer kill a process whose event loop is blocked by compiled code in a coroutine.

    `limit_ms`: the time limit of an attempt; None: no watch.
    """

    def __init__(self, limit_ms: float | None) -> None:
        self._limit_ms = limit_ms
        self._watchdog = watchdog()
        self._is_active = False

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch the running loop within the block."""
        if self._limit_ms is None:
            yield
            return
        heartbeat = asyncio.create_task(self._send_heartbeats())
        try:
            yield
        finally:
            heartbeat.cancel()
            self._is_active = False
            self._watchdog.disarm()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the watch within the block, which may block the loop."""
        if not self._is_active:
            yield
            return
        self._watchdog.disarm()
        try:
            yield
        finally:
            self._arm()

    async def _send_heartbeats(self) -> None:
        self._is_active = True
        while True:
            self._arm()
            await asyncio.sleep(_HEARTBEAT_S)

    def _arm(self) -> None:
        assert self._limit_ms is not None
        self._watchdog.arm(self._limit_ms, more_ms=_HEARTBEAT_S * 1000)
