"""How late an event loop runs: what it hears late, others may have said in time."""

import asyncio

_TICK_S = 0.05


class LoopDelay:
    """How much later than it asked for the event loop has woken up, in all, since `run` began.

    The processor may have had no time for this process, or something in it held the loop up.
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
            self._total_s, self._due_s = self.so_far_s(), None

    def so_far_s(self) -> float:
        """Seconds in all, with those by which the next measurement is overdue by now."""
        overdue_s = 0.0 if self._due_s is None else asyncio.get_running_loop().time() - self._due_s
        return self._total_s + max(0.0, overdue_s)
