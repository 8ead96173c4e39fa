"""How much a lane asks for at a time: by the sizes of entries seen, by what connections have borne, by the room left. No I/O."""

from collections.abc import Collection, Iterable

from millstream.router.budget import LEAST_BYTES, Budget
from millstream.router.subscriber_buffer import Cursor

_CAUTIOUS_SCALE = 13
_FEW = 4
_ENDS = 2  # XINFO STREAM has the first and the last entry in it


class ReadSize:
    """Keeps replies near `reply_bytes`, with `count` entries of a stream at most.

    Of a stream that was never read it asks one entry, and takes the sizes of the largest entries lately seen for those
    there. After breaks that requests may have caused it asks for less, and slowly for more again.
    """

    def __init__(self, *, count: int, reply_bytes: int, budget: Budget) -> None:
        self._count = count
        self._reply_bytes = reply_bytes
        self._borne_bytes = reply_bytes
        self._broken = False
        self._budget = budget
        self._scale = _CAUTIOUS_SCALE

    @property
    def cautious(self) -> bool:
        """Whether requests may have ended connections lately: one at a time then."""
        return self._borne_bytes < self._reply_bytes

    @property
    def most_bytes(self) -> int:
        """What the next reply should not exceed."""
        return min(self._borne_bytes, LEAST_BYTES) if self._budget.spent else self._borne_bytes

    @property
    def share_bytes(self) -> int:
        """What one entry of each stream in a request may take together: rather several of few streams than one of many."""
        return self.most_bytes // _FEW

    def entry_bytes(self, cursor: Cursor) -> int:
        """About what an entry of the cursor's stream takes."""
        return 1 << (cursor.scale or self._scale)

    def count(self, cursors: Collection[Cursor], careful: Iterable[Cursor]) -> int:
        """How many entries of each to ask for; the counters of those in `careful` are asked for too."""
        if not all(cursor.scale for cursor in cursors):
            return 1
        room = self.most_bytes - _ENDS * sum(map(self.entry_bytes, careful))
        return max(1, min(self._count, room // sum(map(self.entry_bytes, cursors))))

    def learn(self, cursors: Iterable[Cursor]) -> None:
        """These were read."""
        self._scale = max(self._scale - 1, *(cursor.scale for cursor in cursors), 1)

    def broken(self) -> None:
        """A connection has ended while something was asked for: by chance, unless it happens again soon."""
        if self._broken:
            self._borne_bytes = min(self._borne_bytes, max(LEAST_BYTES, self._borne_bytes // 4))
        self._broken = True

    def recover(self) -> bool:
        """No connection has ended for a while; whether to call again after as long."""
        self._broken = self.cautious
        self._borne_bytes = min(self._reply_bytes, 2 * self._borne_bytes)
        return self._broken
