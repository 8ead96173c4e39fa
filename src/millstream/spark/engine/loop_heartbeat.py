"""The sign of life of the event loop on which a task runs an async handler."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from millstream.spark.engine.watchdog import hard_limit_ms, watchdog

_BEAT_S = 1.0


class LoopHeartbeat:
    """Has the watchdog end a process whose loop no coroutine gets back, since one keeps it in compiled code.

    `limit_ms`: the time limit of an attempt; None: there is nothing to watch.
    """

    def __init__(self, limit_ms: float | None) -> None:
        self._within_ms = None if limit_ms is None else hard_limit_ms(limit_ms) + _BEAT_S * 1000
        self._watchdog = watchdog()
        self._beats = False

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Watch the running loop for the time of the block."""
        if self._within_ms is None:
            yield
            return
        beat = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beat.cancel()
            self._beats = False
            self._watchdog.rest()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do not watch for the time of the block, which keeps the loop and may do so."""
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
            await asyncio.sleep(_BEAT_S)

    def _expect(self) -> None:
        assert self._within_ms is not None
        self._watchdog.expect(self._within_ms)
