"""When each of many streams is to be looked at next: what is due is found without a look at all others. No I/O."""

import heapq
from collections.abc import Iterable
from math import inf

_OUTDATED = 1_000
_IN_TURN = 50


class DelayQueue:
    """Names and when they are due, by a monotonic clock, in milliseconds. Used by one thread."""

    def __init__(self) -> None:
        self._due_ms: dict[str, float] = {}
        self._order: list[tuple[float, str]] = []

    def put(self, name: str, due_ms: float) -> None:
        """Have `name` be due at `due_ms`, whenever it was before."""
        if self._due_ms.get(name) == due_ms:
            return
        self._due_ms[name] = due_ms
        heapq.heappush(self._order, (due_ms, name))
        if len(self._order) > 2 * len(self._due_ms) + _OUTDATED:
            # What was put again to an earlier time would stay until the later one.
            self._order = [(when_ms, one) for one, when_ms in self._due_ms.items()]
            heapq.heapify(self._order)

    def take(self, now_ms: float, most: int) -> list[str]:
        """Take out up to `most` names that are due, the longest due first."""
        due: list[str] = []
        while len(due) < most and self._next_ms() <= now_ms:
            _, name = heapq.heappop(self._order)
            del self._due_ms[name]
            due.append(name)
        return due

    def wait_ms(self, now_ms: float) -> float:
        """How long nothing is due; infinite if there is nothing at all."""
        return max(0.0, self._next_ms() - now_ms)

    def _next_ms(self) -> float:
        while self._order and self._due_ms.get(self._order[0][1]) != self._order[0][0]:
            heapq.heappop(self._order)  # it was put again since
        return self._order[0][0] if self._order else inf


class RoundRobin:
    """Names in turn, a few at a time: what one is told about many is no more than a hint. Used by one thread."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def next(self, names: Iterable[str]) -> list[str]:
        """Up to 50 of `names`: none comes again before each has come."""
        if not self._left:
            self._left = list(names)
        some = self._left[-_IN_TURN:]
        del self._left[-_IN_TURN:]
        return some
