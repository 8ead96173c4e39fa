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
        self._heap: list[tuple[float, str]] = []

    def put(self, name: str, due_ms: float) -> None:
        """Make `name` due at `due_ms`, in place of an earlier due time."""
        if self._due_ms.get(name) == due_ms:
            return
        self._due_ms[name] = due_ms
        heapq.heappush(self._heap, (due_ms, name))
        if len(self._heap) > 2 * len(self._due_ms) + _OUTDATED:
            # A name put again with an earlier time leaves its old item behind until the later time.
            self._heap = [(when_ms, one) for one, when_ms in self._due_ms.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now_ms: float, most: int) -> list[str]:
        """Remove and return up to `most` names that are due, the longest due first."""
        due: list[str] = []
        while len(due) < most and self._next_ms() <= now_ms:
            _, name = heapq.heappop(self._heap)
            del self._due_ms[name]
            due.append(name)
        return due

    def wait_ms(self, now_ms: float) -> float:
        """Return the time until the next name is due; infinite if there is none."""
        return max(0.0, self._next_ms() - now_ms)

    def _next_ms(self) -> float:
        while self._heap and self._due_ms.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)  # outdated: the name was put again since
        return self._heap[0][0] if self._heap else inf


class RoundRobin:
    """Names in round robin, a few at a time, for a periodic check of many streams. Used by one thread."""

    def __init__(self) -> None:
        self._remaining: list[str] = []

    def next_names(self, names: Iterable[str]) -> list[str]:
        """Return up to 50 of `names`; none comes again before each has come."""
        if not self._remaining:
            self._remaining = list(names)
        some = self._remaining[-_BATCH:]
        del self._remaining[-_BATCH:]
        return some
