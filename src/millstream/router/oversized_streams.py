"""OversizedStreams: finds the stream whose reply ends the connection, by reading suspected streams apart.

Redis closes a connection whose reply is larger than its client-output-buffer-limit, without an error reply, and after
the next dial the same request would be as large. The streams of a request in flight when the server closed it are
suspected, and read again later, in ever smaller groups, while no other request is in flight. A reply clears its
streams. A break with another cause delays the streams it met by a few milliseconds; only a stream that ends several
connections in a row, the last ones in a group of its own, is given up. Before each read of a stream alone the reader
reads it from its end, which has an empty reply: a break before that reply does not count.
"""

from collections.abc import Iterable

from millstream.clock import wait_after
from millstream.router.subscriber_buffer import Cursor

_FIRST_GROUP = 64
_FIRST_WAIT_MS, _SECOND_WAIT_MS, _LAST_WAIT_MS = 20.0, 100.0, 800.0
MOST_BREAKS = 16
"""Breaks in a row after which a stream is given up.

The last twelve met no other stream, each after an empty reply for the same stream, which rules out chance.
"""


class OversizedStreams:
    """Counts the breaks in a row of each cursor.

    `active`: whether any cursor is suspected, or any stream was given up.
    """

    def __init__(self) -> None:
        self.active = False
        self._breaks: dict[Cursor, int] = {}
        self._backing_off: set[Cursor] = set()
        self._given_up: set[bytes] = set()
        self._barred: set[bytes] = set()

    def __contains__(self, cursor: Cursor) -> bool:
        return cursor in self._breaks or cursor.key in self._given_up

    def backs_off(self, cursor: Cursor) -> bool:
        """Whether it is in back-off, and must not be read yet."""
        return cursor in self._backing_off

    def is_barred(self, cursor: Cursor) -> bool:
        """Whether its stream was given up a short while ago, and this cursor has never read an entry."""
        return cursor.key in self._barred and not cursor.size_log2

    def group_size(self, cursor: Cursor) -> int:
        """The largest group it may be read in, itself included."""
        return max(1, _FIRST_GROUP >> 2 * max(0, self._breaks_of(cursor) - 1))

    def isolated(self, cursor: Cursor) -> bool:
        """Whether it must be read in a request of its own."""
        return self.group_size(cursor) == 1

    def on_break(self, cursors: Iterable[Cursor]) -> tuple[list[Cursor], list[Cursor], float]:
        """The server closed the connection while these were in flight.

        Returns the cursors to back off, the cursors to give up, and the back-off in milliseconds.
        """
        self.active = True
        backing_off, given_up, wait_ms = [], [], 0.0
        for cursor in cursors:
            breaks = self._breaks_of(cursor) + 1
            if breaks >= MOST_BREAKS:
                self.forget(cursor)
                self._given_up.add(cursor.key)
                self._barred.add(cursor.key)
                given_up.append(cursor)
            else:
                self._breaks[cursor] = breaks
                self._backing_off.add(cursor)
                backing_off.append(cursor)
                wait_ms = max(wait_ms, _backoff_ms(breaks))
        return backing_off, given_up, wait_ms

    def on_backoff_over(self, cursors: Iterable[Cursor]) -> list[Cursor]:
        """The back-off of these is over; returns those that still have subscribers."""
        self._backing_off.difference_update(cursors)
        for cursor in cursors:
            if not cursor.buffers:
                self.forget(cursor)
        return [cursor for cursor in cursors if cursor.buffers]

    def forget(self, cursor: Cursor) -> None:
        """Forget a cursor."""
        self._breaks.pop(cursor, None)
        self._backing_off.discard(cursor)

    def on_reply(self, cursor: Cursor) -> None:
        """It was read: clear its suspicion, and that of its stream."""
        self.forget(cursor)
        self._given_up.discard(cursor.key)
        self._barred.discard(cursor.key)
        self.active = bool(self._breaks or self._given_up)

    def unbar(self, keys: Iterable[bytes]) -> None:
        """Allow these streams to be tried once more."""
        self._barred.difference_update(keys)

    def _breaks_of(self, cursor: Cursor) -> int:
        """The breaks of a cursor so far. A stream that was given up before is given up again after one more."""
        return self._breaks.get(cursor, MOST_BREAKS - 1 if cursor.key in self._given_up else 0)


def _backoff_ms(breaks: int) -> float:
    """How long to wait before the next read; hardly at all after a first break, which mostly is chance."""
    return _FIRST_WAIT_MS if breaks == 1 else wait_after(breaks - 1, _SECOND_WAIT_MS, _LAST_WAIT_MS)
