"""Who reads which stream from where: cursors, shared by all subscribers at the same place. Used by the router's thread only.

A stream has one *live* cursor, which follows its end, and late ones, each for subscribers that are elsewhere: they
came with an older id, or could not keep up. A late cursor is read by itself and given up where it reaches the live one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics
from millstream.redis_client.key_names import from_wire
from millstream.router.budget import Batch, Budget, batch_of
from millstream.router.gap_detection import ZERO, Entry, number
from millstream.router.stream_events import Gap, Reason, Start, TooSlow
from millstream.router.subscriber_buffer import Cursor, SubscriberBuffer

NEWEST = b"$"


@dataclass(frozen=True, kw_only=True)
class CursorCallbacks:
    """What a shelf asks for: read this cursor soon; wake the inbox's subscriber."""

    want: Callable[[Cursor], None]
    wake: Callable[[SubscriberBuffer], None]


class CursorTable:
    """All cursors, by stream."""

    def __init__(self, calls: CursorCallbacks, metrics: Metrics, budget: Budget) -> None:
        self.budget = budget
        self._calls = calls
        self._metrics = metrics
        self._live: dict[bytes, Cursor] = {}
        self._late: dict[bytes, list[Cursor]] = {}
        self.subscriptions = 0

    def __len__(self) -> int:
        return len(self._live) + sum(key not in self._live for key in self._late)

    def at(self, key: bytes) -> Sequence[Cursor]:
        """The cursors of a stream."""
        live = self._live.get(key)
        found = (live,) if live is not None else ()
        return (*found, *self._late[key]) if key in self._late else found

    def streams(self) -> list[bytes]:
        """Every stream that somebody follows."""
        return list(self._live) + [key for key in self._late if key not in self._live]

    # Coming and going

    def add(self, inbox: SubscriberBuffer, key: bytes, after: bytes) -> None:
        """Serve `inbox` with what comes after the id `after`."""
        self.subscriptions += 1
        for cursor in self.at(key):
            if cursor.last == after != NEWEST and not (cursor.paused or cursor.lost_at):
                break
        else:
            cursor = Cursor(key, after)
            cursor.anchor = None if after in (NEWEST, ZERO) else after
            self._late.setdefault(key, []).append(cursor)
        cursor.inboxes.append(inbox)
        inbox.cursor = cursor
        self._calls.want(cursor)

    def remove(self, inbox: SubscriberBuffer) -> None:
        """Serve it no more."""
        cursor, inbox.cursor = inbox.cursor, None
        if cursor is None:
            return
        self.subscriptions -= 1
        cursor.inboxes.remove(inbox)
        if not cursor.inboxes:
            self._forget(cursor)

    def end(self, inbox: SubscriberBuffer, ending: bool | Exception = True) -> None:
        """Serve it no more, and say so to its subscriber."""
        inbox.ending = inbox.ending or ending
        self.remove(inbox)
        self._calls.wake(inbox)

    def end_at(self, cursor: Cursor, ending: bool | Exception) -> None:
        """End every subscription at this cursor."""
        for inbox in tuple(cursor.inboxes):
            self.end(inbox, ending)

    def end_all(self, ending: bool | Exception) -> None:
        """End every subscription."""
        for key in self.streams():
            for cursor in self.at(key):
                self.end_at(cursor, ending)

    def resume(self, inbox: SubscriberBuffer) -> None:
        """The subscriber has room again."""
        inbox.paused = False
        if (cursor := inbox.cursor) is not None and cursor.paused:
            cursor.paused = False
            self._calls.want(cursor)

    def settle(self, cursor: Cursor) -> None:
        """The cursor has reached the end of its stream: make it the live one, or join that."""
        live = self._live.get(cursor.key)
        if live is cursor or cursor.paused or not cursor.inboxes:
            return
        if live is None:
            self._drop_late(cursor)
            self._live[cursor.key] = cursor
        elif not (live.lost_at or cursor.lost_at) and number(cursor.last) >= number(live.last):
            for inbox in cursor.inboxes:
                inbox.cursor = live
                inbox.skip = cursor.last if cursor.last != live.last else None
            live.inboxes += cursor.inboxes
            cursor.inboxes = []
            self._drop_late(cursor)

    def _forget(self, cursor: Cursor) -> None:
        if self._live.get(cursor.key) is cursor:
            del self._live[cursor.key]
        else:
            self._drop_late(cursor)

    def _drop_late(self, cursor: Cursor) -> None:
        late = self._late.get(cursor.key, [])
        if cursor in late:
            late.remove(cursor)
            if not late:
                del self._late[cursor.key]

    # Delivery

    def deliver(self, cursor: Cursor, entries: list[Entry]) -> None:
        """Give entries, the next ones of this cursor, to its subscribers."""
        start = cursor.last, cursor.ordinal, cursor.proven
        batch = batch_of(entries, self.budget)
        full = []
        for inbox in cursor.inboxes:
            at = 0
            if inbox.skip is not None:
                limit = number(inbox.skip)
                at = sum(number(entry[0]) <= limit for entry in entries)
                if at == len(entries):
                    continue
                inbox.skip = None
            wanted = batch.part(at, len(entries)) if at else batch
            if inbox.fits(wanted):
                inbox.put(wanted)
            else:
                full.append((inbox, at))
            if inbox.waker is not None:
                self._calls.wake(inbox)
        if cursor.anchor is None:
            cursor.anchor = entries[0][0]
        cursor.last, cursor.proven = entries[-1][0], True
        largest = batch.size if len(entries) == 1 else max(batch.sizes)
        cursor.scale = max(largest.bit_length() - 1, cursor.scale - 1)
        if cursor.ordinal is not None:
            cursor.ordinal += len(entries)
        for inbox, at in full:  # only now: one of them may be resumed at once, and then the cursor is moved back
            self._overflow(cursor, inbox, batch, at, start)
            self._calls.wake(inbox)

    def tell_gap(self, cursor: Cursor, reason: Reason, after: bytes, missed: int | None = None) -> None:
        """Tell the cursor's subscribers that entries are missing after the id `after`."""
        gap = Gap(stream=from_wire(cursor.key), after=after.decode(), reason=reason, missed=missed)
        self._metrics.count(m.ROUTER_GAPS, reason=reason)
        for inbox in cursor.inboxes:
            inbox.skip = None
            inbox.batches.append(gap)
            self._calls.wake(inbox)

    def tell_start(self, cursor: Cursor) -> None:
        """Tell subscribers who asked for it where the cursor, which was to begin at the end, begins."""
        for inbox in cursor.inboxes:
            if inbox.tells_start:
                inbox.batches.append(Start(stream=inbox.stream, after=cursor.last.decode()))
                self._calls.wake(inbox)

    def _overflow(
        self, cursor: Cursor, inbox: SubscriberBuffer, batch: Batch, at: int, start: tuple[bytes, int | None, bool]
    ) -> None:
        """A batch that comes after `start`, an id, its ordinal and whether it was there, does not fit from `at` on."""
        rest = batch.part(at, len(batch))
        if inbox.when_full == "drop-oldest":
            self._metrics.count(m.ROUTER_DROPPED, inbox.put_dropping(rest))
            return
        last, ordinal, proven = start
        end = at + inbox.fitting(rest)
        if end > at:
            inbox.put(batch.part(at, end))
        reached = batch.entries[end - 1][0] if end else last
        if inbox.when_full == "disconnect":
            self.end(inbox, TooSlow(inbox.stream, reached.decode()))
            return
        place = self._own_place(cursor, inbox)
        place.last, place.proven = reached, proven or end > 0
        place.ordinal = None if ordinal is None else ordinal + end
        place.paused = True
        # Said first, looked second: the subscriber takes something out before it looks whether it is paused.
        inbox.paused = True
        if inbox.drained:
            self.resume(inbox)

    def _own_place(self, cursor: Cursor, inbox: SubscriberBuffer) -> Cursor:
        """A late cursor for this inbox alone."""
        if cursor.inboxes == [inbox]:
            self._forget(cursor)
            place = cursor
        else:
            cursor.inboxes.remove(inbox)
            place = Cursor(cursor.key, cursor.last)
            place.careful, place.scale = cursor.careful, cursor.scale
            place.anchor, place.next_anchor = cursor.anchor, cursor.next_anchor
            place.inboxes.append(inbox)
            inbox.cursor = place
        self._late.setdefault(place.key, []).append(place)
        return place
