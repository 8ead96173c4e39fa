"""Sweep: which streams are to be read although nothing was reported, so that each is read within `sweep_ms`. No I/O."""

from collections import defaultdict

from millstream.router.cursors import CursorTable
from millstream.router.subscriber_buffer import Cursor

STEP_MS = 20.0
_FEW = 16


class Sweep:
    """Visits each stream once in `sweep_ms`, a few in each step of STEP_MS.

    A stream that was read lately is not read at its visit but put off until `sweep_ms` after that read, and not read
    then if it was read once more: its next visit comes in time. At most twice as many streams as are visited in a step
    are put off to the same step, or _FEW; if more were read at the same time, they are read at their visit.
    """

    def __init__(self, cursors: CursorTable, sweep_ms: float) -> None:
        self._cursors = cursors
        self._steps = max(1.0, sweep_ms / STEP_MS)
        self._credit = 0.0
        self._to_visit: list[bytes] = []
        self._put_off: defaultdict[int, list[bytes]] = defaultdict(list)  # not cursors, which may go before

    def step(self) -> list[Cursor]:
        """The next step: returns the cursors to read now."""
        self._cursors.step += 1
        now = self._cursors.step
        put_off = dict.fromkeys(self._put_off.pop(now, ()))
        due = [
            cursor for key in put_off for cursor in self._cursors.of(key) if now - cursor.read_step >= int(self._steps)
        ]
        visits = len(self._cursors) / self._steps
        self._credit += visits
        count = int(self._credit)
        if count:
            self._credit -= count
            if not self._to_visit:
                self._to_visit = self._cursors.streams()
            for key in self._to_visit[-count:]:
                due += [cursor for cursor in self._cursors.of(key) if not self._visit(cursor, max(_FEW, 2 * visits))]
            del self._to_visit[-count:]
        return [cursor for cursor in due if not cursor.in_flight]

    def _visit(self, cursor: Cursor, most: float) -> bool:
        """Visit a stream; returns whether it is put off, to a step with fewer than `most` others."""
        cursor.anchor, cursor.next_anchor = cursor.next_anchor or cursor.anchor, cursor.last
        at = cursor.read_step + int(self._steps)
        if at <= self._cursors.step or len(self._put_off[at]) >= most:
            return False
        self._put_off[at].append(cursor.key)
        return True
