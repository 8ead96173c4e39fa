"""LoopDelay: measures how late the event loop runs. A late loop receives late what was sent in time."""

import asyncio

_TICK_S = 0.05


class LoopDelay:
    """The total delay of the event loop's wake-ups since `run` began, in seconds.

    The machine may have had no CPU time for this process, or a callback may have blocked the loop.
    """

    def __init__(self) -> None:
        self._total_s = 0.0
        self._due_s: float | None = None

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._due_s = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._total_s, self._due_s = self.total_s(), None

    def total_s(self) -> float:
        """The total delay in seconds, including that of the measurement in progress."""
        overdue_s = 0.0 if self._due_s is None else asyncio.get_running_loop().time() - self._due_s
        return self._total_s + max(0.0, overdue_s)
