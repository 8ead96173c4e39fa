"""ReadSize: sizes requests by the entries seen, by the replies that connections have survived, and by free room.

No I/O.
"""

from collections.abc import Collection, Iterable

from millstream.router.budget import LEAST_BYTES, Budget
from millstream.router.subscriber_buffer import Cursor

_CAUTIOUS_SCALE = 13
_FEW = 4
_ENDS = 2  # XINFO STREAM has the first and the last entry in it


class ReadSize:
    """Keeps replies near `reply_bytes`, with `count` entries of a stream at most.

    It requests one entry of a stream that was never read, and assumes the largest size lately seen for it. After breaks
    that requests may have caused it requests less, and slowly more again.
    """

    def __init__(self, *, count: int, reply_bytes: int, budget: Budget) -> None:
        self._count = count
        self._reply_bytes = reply_bytes
        self._safe_bytes = reply_bytes
        self._saw_break = False
        self._budget = budget
        self._size_log2 = _CAUTIOUS_SCALE

    @property
    def cautious(self) -> bool:
        """Whether requests may have ended connections lately: then one request at a time."""
        return self._safe_bytes < self._reply_bytes

    @property
    def max_bytes(self) -> int:
        """The target size of the next reply."""
        return min(self._safe_bytes, LEAST_BYTES) if self._budget.spent else self._safe_bytes

    @property
    def share_bytes(self) -> int:
        """The most bytes for one entry of each stream in a request: several entries of few streams beat one of many."""
        return self.max_bytes // _FEW

    def entry_bytes(self, cursor: Cursor) -> int:
        """About the size of an entry of the cursor's stream."""
        return 1 << (cursor.size_log2 or self._size_log2)

    def count(self, cursors: Collection[Cursor], careful: Iterable[Cursor]) -> int:
        """How many entries of each stream to request; the counters of those in `careful` are requested too."""
        total = 0
        for cursor in cursors:
            if not cursor.size_log2:
                return 1
            total += 1 << cursor.size_log2
        room = self.max_bytes - _ENDS * sum(map(self.entry_bytes, careful))
        return max(1, min(self._count, room // total))

    def learn(self, cursors: Iterable[Cursor]) -> None:
        """Update the size estimate from cursors just read."""
        self._size_log2 = max([self._size_log2 - 1, *[cursor.size_log2 for cursor in cursors], 1])

    def on_break(self) -> None:
        """A connection ended with requests in flight: by chance, unless it happens again soon."""
        if self._saw_break:
            self._safe_bytes = min(self._safe_bytes, max(LEAST_BYTES, self._safe_bytes // 4))
        self._saw_break = True

    def recover(self) -> bool:
        """No connection has ended for a while: allow more. Returns whether to call again after as long."""
        self._saw_break = self.cautious
        self._safe_bytes = min(self._reply_bytes, 2 * self._safe_bytes)
        return self._saw_break
