"""Budget: bytes held by the buffers of all subscriptions, and their limit.

Subscribers of one stream share the entries of a reply, so each reply is counted once, for as long as a buffer holds it.
"""

from collections import deque

from millstream.router.gap_detection import Entry

LEAST_BYTES = 16 * 1024
"""Limit of a buffer, and of a reply, while the budget is spent: smaller steps only cost more."""

_ENTRY_BYTES, _PART_BYTES = 180, 41
"""Memory that Python adds for an entry, and for each of its names and values, beside their own bytes."""


class Budget:
    """Limits read-ahead to `max_bytes`. `spent`: the limit was reached, and less than a quarter of it is free again.

    Any thread may read `spent` and call `release`, even while an object is destroyed; the rest is for the router's
    thread.
    """

    __slots__ = ("_freed", "_held", "max_bytes", "spent")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.spent = False
        self._held = 0
        self._freed: deque[int] = deque()

    def add(self, size: int) -> None:
        """Add bytes that are held from now on."""
        self._held += size
        if self._held >= self.max_bytes and not self.spent:
            self.update()

    def release(self, size: int) -> None:
        """Subtract bytes that are held no more."""
        self._freed.append(size)

    def update(self) -> int:
        """Update `spent`; returns the bytes held."""
        while self._freed:
            self._held -= self._freed.popleft()
        if self._held >= self.max_bytes:
            self.spent = True
        elif self._held < self.max_bytes // 4 * 3:
            self.spent = False
        return self._held


class Batch:
    """Entries read together, with the size of each; counted in the budget until the last reference is dropped."""

    __slots__ = ("_budget", "entries", "size", "sizes")

    def __init__(self, entries: list[Entry], sizes: tuple[int, ...], budget: Budget) -> None:
        self.entries = entries
        self.sizes = sizes
        self.size = size = sizes[0] if len(sizes) == 1 else sum(sizes)
        self._budget = budget
        budget.add(size)

    def __len__(self) -> int:
        return len(self.entries)

    def __del__(self) -> None:
        self._budget.release(self.size)

    def part(self, start: int, end: int) -> "Batch":
        """The entries from index `start` to before `end`."""
        return Batch(self.entries[start:end], self.sizes[start:end], self._budget)


def batch_of(entries: list[Entry], budget: Budget) -> Batch:
    """A batch of one or more entries as Redis returned them."""
    return Batch(entries, tuple([_size_of(entry) for entry in entries]), budget)


def _size_of(entry: Entry) -> int:
    pairs = entry[1]
    return _ENTRY_BYTES + _PART_BYTES * len(pairs) + sum(map(len, pairs))
