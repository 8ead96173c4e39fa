"""Keeps full garbage collections rare: each stops everything, for longer the more connections are open.

Whenever a quarter more objects have come, Python looks at all it has, which is half a second for 5,000 connections, and
happens all the time while clients come. What is frozen it passes by (Python documentation, `gc.freeze`). Frozen objects
are freed as ever when nothing refers to them, but for those that refer to each other, as the parts of a connection may:
for their sake, once as many connections have ended as are open, everything is looked at after all.
"""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass

_EVERY_S = 0.5
_FEW = 1_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """Connections that are open, and that have ended so far."""

    open: int
    ended: int


class GcFreeze:
    """Decides when to freeze and when to clean up."""

    def __init__(self, traffic: Callable[[], Traffic]) -> None:
        self._traffic = traffic
        self._frozen = 0
        self._cleaned = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        gc.freeze()
        try:
            while True:
                await asyncio.sleep(_EVERY_S)
                self.look()
        finally:
            gc.unfreeze()

    def look(self) -> None:
        """Do what is due."""
        now = self._traffic()
        self._frozen = min(self._frozen, now.open)
        if now.ended - self._cleaned > max(_FEW, now.open):
            self._cleaned = now.ended
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        elif now.open > self._frozen + self._frozen // 50:
            self._frozen = now.open
            gc.freeze()
