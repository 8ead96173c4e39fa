"""GcFreeze: keeps full garbage collections rare, as each stops the process for longer the more connections are open.

Python runs a full collection whenever the number of objects has grown by a quarter. With 5,000 connections it takes
half a second, and it happens all the time while clients connect. The collector skips frozen objects (Python
documentation, `gc.freeze`). Frozen objects are freed as usual once unreferenced, except those in reference cycles, as
the parts of a connection may be: to free these, once as many connections have ended as are open, one full collection
scans everything.
"""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass

_EVERY_S = 0.5
_FEW = 1_000


@dataclass(frozen=True, slots=True)
class ConnectionCounts:
    """The connections that are open, and those that have ended so far."""

    open: int
    ended: int


class GcFreeze:
    """Decides when to freeze and when to collect."""

    def __init__(self, traffic: Callable[[], ConnectionCounts]) -> None:
        self._counts = traffic
        self._frozen = 0
        self._collected = 0

    async def run(self) -> None:
        """Run until cancelled."""
        gc.freeze()
        try:
            while True:
                await asyncio.sleep(_EVERY_S)
                self.update()
        finally:
            gc.unfreeze()

    def update(self) -> None:
        """Freeze or collect if it is due."""
        now = self._counts()
        self._frozen = min(self._frozen, now.open)
        if now.ended - self._collected > max(_FEW, now.open):
            self._collected = now.ended
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        elif now.open > self._frozen + self._frozen // 50:
            self._frozen = now.open
            gc.freeze()
