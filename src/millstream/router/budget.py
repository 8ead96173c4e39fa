"""Budget: bytes held by the buffers of all subscriptions, and their limit.

Subscribers of one stream share the entries of a reply, so each reply is counted once, for as long as a buffer holds it.
"""

from collections import deque
from collections.abc import Callable, Sequence

from millstream.router.gap_detection import Entry

_MOST_FREED = 500
LEAST_BYTES = 16 * 1024
"""Limit of a buffer, and of a reply, while the budget is spent: smaller steps only cost more."""

_ENTRY_BYTES, _PART_BYTES = 180, 41
"""Memory that Python adds for an entry, and for each of its names and values, beside their own bytes."""


class Budget:
    """Limits read-ahead to `max_bytes`. `spent`: the limit was reached, and less than a quarter of it is free again.

    Any thread may read `spent` and call `release`, even while an object is destroyed; the rest is for the router's
    thread.
    """

    __slots__ = ("_freed", "_held", "max_bytes", "release", "spent")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.spent = False
        self._held = 0
        self._freed: deque[int] = deque()
        self.release: Callable[[int], None] = self._freed.append  # subtracts bytes that are held no more

    def add(self, size: int) -> None:
        """Add bytes that are held from now on."""
        self._held += size
        if len(self._freed) >= _MOST_FREED or (self._held >= self.max_bytes and not self.spent):
            self.update()

    def update(self) -> int:
        """Update `spent`; returns the bytes held."""
        held, next_freed = self._held, self._freed.popleft
        for _ in range(len(self._freed)):
            held -= next_freed()
        self._held = held
        if self._held >= self.max_bytes:
            self.spent = True
        elif self._held < self.max_bytes // 4 * 3:
            self.spent = False
        return self._held


class Batch:
    """Entries read together, with the size of each; counted in the budget until the last reference is dropped.

    `size`: the sum of `sizes`. A batch of one entry, the usual one, has no tuple of sizes in memory.
    """

    __slots__ = ("_budget", "_sizes", "entries", "size")

    def __init__(self, entries: Sequence[Entry], budget: Budget) -> None:
        sizes = [_ENTRY_BYTES + _PART_BYTES * len(pairs) + sum(map(len, pairs)) for _, pairs in entries]
        self.entries = entries
        self._sizes = tuple(sizes) if len(sizes) > 1 else None
        self.size = size = sum(sizes)
        self._budget = budget
        budget.add(size)

    def __len__(self) -> int:
        return len(self.entries)

    def __del__(self) -> None:
        self._budget.release(self.size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each entry."""
        return self._sizes or (self.size,)

    def part(self, start: int, end: int) -> "Batch":
        """The entries from index `start` to before `end`."""
        return Batch(self.entries[start:end], self._budget)
