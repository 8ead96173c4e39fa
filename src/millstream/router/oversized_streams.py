"""Which stream ends the connection whenever it is read: found by reading those under suspicion apart from all others.

Redis closes a connection whose reply is larger than its client-output-buffer-limit, without a word, and after the next
dial the same request would be as large. What was asked and not answered when the server hung up is suspected, and read
again later, in ever smaller groups, while nothing else is under way. Who is answered is cleared. A break for another
reason costs those it has met a few milliseconds; a stream has to end several connections, the last ones by itself alone.
"""

from collections.abc import Iterable

from millstream.router.subscriber_buffer import Cursor

_FIRST_GROUP = 64
_FIRST_WAIT_MS, _SECOND_WAIT_MS, _LAST_WAIT_MS = 20.0, 100.0, 800.0
LAST = 16
"""After so many breaks in a row, the last twelve of which met nobody else, a stream is given up: no chance is like that."""


class OversizedStreams:
    """How many breaks in a row each cursor has met. `active`: whether there are any, or streams that were given up."""

    def __init__(self) -> None:
        self.active = False
        self._breaks: dict[Cursor, int] = {}
        self._resting: set[Cursor] = set()
        self._given_up: set[bytes] = set()
        self._barred: set[bytes] = set()

    def __contains__(self, cursor: Cursor) -> bool:
        return cursor in self._breaks or cursor.key in self._given_up

    def rests(self, cursor: Cursor) -> bool:
        """Whether it is not to be read yet."""
        return cursor in self._resting

    def bars(self, cursor: Cursor) -> bool:
        """Whether its stream was given up a short while ago, and nothing was ever read by this cursor."""
        return cursor.key in self._barred and not cursor.scale

    def group(self, cursor: Cursor) -> int:
        """With how many others, itself included, it may be read."""
        return max(1, _FIRST_GROUP >> 2 * max(0, self._met(cursor) - 1))

    def alone(self, cursor: Cursor) -> bool:
        """Whether it is read by itself."""
        return self.group(cursor) == 1

    def meet(self, cursors: Iterable[Cursor]) -> tuple[list[Cursor], list[Cursor], float]:
        """The server hung up when these were asked for: returns who rests, who is given up, and how many ms to rest."""
        self.active = True
        resting, given_up, wait_ms = [], [], 0.0
        for cursor in cursors:
            breaks = self._met(cursor) + 1
            if breaks >= LAST:
                self.clear(cursor)
                self._given_up.add(cursor.key)
                self._barred.add(cursor.key)
                given_up.append(cursor)
            else:
                self._breaks[cursor] = breaks
                self._resting.add(cursor)
                resting.append(cursor)
                wait_ms = max(wait_ms, _wait_ms(breaks))
        return resting, given_up, wait_ms

    def rested(self, cursors: Iterable[Cursor]) -> list[Cursor]:
        """They may be read now; returns those that somebody still follows."""
        self._resting.difference_update(cursors)
        for cursor in cursors:
            if not cursor.inboxes:
                self.clear(cursor)
        return [cursor for cursor in cursors if cursor.inboxes]

    def clear(self, cursor: Cursor) -> None:
        """Nobody follows it any more."""
        self._breaks.pop(cursor, None)
        self._resting.discard(cursor)

    def answered(self, cursor: Cursor) -> None:
        """It was read; so whatever its stream was given up for is over."""
        self.clear(cursor)
        self._given_up.discard(cursor.key)
        self._barred.discard(cursor.key)
        self.active = bool(self._breaks or self._given_up)

    def unbar(self, keys: Iterable[bytes]) -> None:
        """These streams may be tried once more."""
        self._barred.difference_update(keys)

    def _met(self, cursor: Cursor) -> int:
        """Of a stream that was given up before, one more break is enough."""
        return self._breaks.get(cursor, LAST - 1 if cursor.key in self._given_up else 0)


def _wait_ms(breaks: int) -> float:
    """How long to leave the connection to the others; after a first break, which mostly is chance, hardly at all."""
    return _FIRST_WAIT_MS if breaks == 1 else min(_LAST_WAIT_MS, _SECOND_WAIT_MS * 2 ** (breaks - 2))
