"""Timers: when each of many streams is due next, found without a pass over all of them. No I/O."""

import heapq
from collections.abc import Iterable
from math import inf

_OUTDATED = 1_000
_BATCH = 50


class DelayQueue:
    """Names and their due times, by a monotonic clock, in milliseconds. Used by one thread."""

    def __init__(self) -> None:
        self._due_ms: dict[str, float] = {}
        self._order: list[tuple[float, str]] = []

    def put(self, name: str, due_ms: float) -> None:
        """Make `name` due at `due_ms`, in place of an earlier due time."""
        if self._due_ms.get(name) == due_ms:
            return
        self._due_ms[name] = due_ms
        heapq.heappush(self._order, (due_ms, name))
        if len(self._order) > 2 * len(self._due_ms) + _OUTDATED:
            # A name put again with an earlier time leaves its old item behind until the later time.
            self._order = [(when_ms, one) for one, when_ms in self._due_ms.items()]
            heapq.heapify(self._order)

    def take(self, now_ms: float, most: int) -> list[str]:
        """Remove and return up to `most` names that are due, the longest due first."""
        due: list[str] = []
        while len(due) < most and self._next_ms() <= now_ms:
            _, name = heapq.heappop(self._order)
            del self._due_ms[name]
            due.append(name)
        return due

    def wait_ms(self, now_ms: float) -> float:
        """Return the time until the next name is due; infinite if there is none."""
        return max(0.0, self._next_ms() - now_ms)

    def _next_ms(self) -> float:
        while self._order and self._due_ms.get(self._order[0][1]) != self._order[0][0]:
            heapq.heappop(self._order)  # outdated: the name was put again since
        return self._order[0][0] if self._order else inf


class RoundRobin:
    """Names in round robin, a few at a time, for a periodic check of many streams. Used by one thread."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def next(self, names: Iterable[str]) -> list[str]:
        """Return up to 50 of `names`; none comes again before each has come."""
        if not self._left:
            self._left = list(names)
        some = self._left[-_BATCH:]
        del self._left[-_BATCH:]
        return some
