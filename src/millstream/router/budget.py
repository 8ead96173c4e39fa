"""What the buffers of all subscriptions hold, in bytes, and how much that may be.

Subscribers of one stream share the entries of a reply, so each reply is counted once, for as long as anybody has it.
"""

from collections import deque

from millstream.router.gap_detection import Entry

LEAST_BYTES = 16 * 1024
"""What a buffer may hold, and a reply should not exceed, while there is no more room: smaller steps only cost more."""

_ENTRY_BYTES, _PART_BYTES = 180, 41
"""What Python takes for an entry, and for each of its names and values, beside their own bytes."""


class Budget:
    """At most `most_bytes` are read ahead. `spent`: so much is held, and from then on until a quarter of it is free again.

    `spent` may be read in any thread, and `free` called there, even while an object is destroyed; the rest is for the
    router's thread.
    """

    __slots__ = ("_freed", "_held", "most_bytes", "spent")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.spent = False
        self._held = 0
        self._freed: deque[int] = deque()

    def take(self, size: int) -> None:
        """So many bytes are held from now on."""
        self._held += size
        if self._held >= self.most_bytes and not self.spent:
            self.balance()

    def free(self, size: int) -> None:
        """So many bytes are held no more."""
        self._freed.append(size)

    def balance(self) -> int:
        """Look whether the budget is spent; returns how many bytes are held."""
        while self._freed:
            self._held -= self._freed.popleft()
        if self._held >= self.most_bytes:
            self.spent = True
        elif self._held < self.most_bytes // 4 * 3:
            self.spent = False
        return self._held


class Batch:
    """Entries that were read together, with the size of each; counted in the budget until nobody has them any more."""

    __slots__ = ("_budget", "entries", "size", "sizes")

    def __init__(self, entries: list[Entry], sizes: tuple[int, ...], budget: Budget) -> None:
        self.entries = entries
        self.sizes = sizes
        self.size = size = sizes[0] if len(sizes) == 1 else sum(sizes)
        self._budget = budget
        budget.take(size)

    def __len__(self) -> int:
        return len(self.entries)

    def __del__(self) -> None:
        self._budget.free(self.size)

    def part(self, start: int, end: int) -> "Batch":
        """The entries from place `start` to before `end`."""
        return Batch(self.entries[start:end], self.sizes[start:end], self._budget)


def batch_of(entries: list[Entry], budget: Budget) -> Batch:
    """Entries as they came from Redis, of which there is one or more."""
    return Batch(entries, tuple([_size_of(entry) for entry in entries]), budget)


def _size_of(entry: Entry) -> int:
    pairs = entry[1]
    return _ENTRY_BYTES + _PART_BYTES * len(pairs) + sum(map(len, pairs))
