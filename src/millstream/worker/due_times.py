"""Due times: when each of many streams or messages is due next, found without a pass over all of them. No I/O."""

import heapq
from collections.abc import Hashable, Iterable
from itertools import count
from math import ceil, inf
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_OUTDATED = 1_000
_MOST, _ROUND = 10, 60


class DelayQueue(Generic[T]):
    """Items and their due times, by a monotonic clock, in milliseconds. Used by one thread."""

    def __init__(self) -> None:
        self._due_ms: dict[T, float] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._due_ms)

    def put(self, item: T, due_ms: float) -> None:
        """Make `item` due at `due_ms`, in place of an earlier due time."""
        if self._due_ms.get(item) == due_ms:
            return
        self._due_ms[item] = due_ms
        heapq.heappush(self._heap, (due_ms, next(self._sequence), item))
        if len(self._heap) > 2 * len(self._due_ms) + _OUTDATED:
            # An item put again with an earlier time leaves its old entry behind until the later time.
            self._heap = [(when_ms, next(self._sequence), one) for one, when_ms in self._due_ms.items()]
            heapq.heapify(self._heap)

    def pop_due(self, now_ms: float, most: float = inf) -> list[T]:
        """Remove and return up to `most` items that are due, the longest due first."""
        due: list[T] = []
        while len(due) < most and self._next_ms() <= now_ms:
            _, _, item = heapq.heappop(self._heap)
            del self._due_ms[item]
            due.append(item)
        return due

    def wait_ms(self, now_ms: float) -> float:
        """Return the time until the next item is due; infinite if there is none."""
        return max(0.0, self._next_ms() - now_ms)

    def _next_ms(self) -> float:
        while self._heap and self._due_ms.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)  # outdated: the item was put again since
        return self._heap[0][0] if self._heap else inf


class RoundRobin:
    """Names in round robin, a few at a time, for a periodic check of many streams. Used by one thread."""

    def __init__(self) -> None:
        self._remaining: list[str] = []
        self._count = 1

    def next_names(self, names: Iterable[str]) -> list[str]:
        """Return a sixtieth of `names`, but at most 10; none comes again before each has come."""
        if not self._remaining:
            self._remaining = list(names)
            self._count = min(_MOST, ceil(len(self._remaining) / _ROUND))
        some = self._remaining[-self._count :]
        del self._remaining[-self._count :]
        return some
