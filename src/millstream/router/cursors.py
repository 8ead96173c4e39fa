"""CursorTable: the cursors of a router, each shared by all subscribers at one position.

For the router's thread only, but for the number of streams, which any thread may ask for.

A stream has one *live* cursor, which follows its end, and late ones, each for subscribers at another position: they
subscribed with an older id, or could not keep up. The router reads a late cursor separately, and merges it into the
live one where it reaches that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics
from millstream.redis_client.key_names import from_wire
from millstream.router.budget import Batch, Budget
from millstream.router.gap_detection import ZERO, Entry, id_as_numbers
from millstream.router.stream_events import Gap, Reason, Start, TooSlow
from millstream.router.subscriber_buffer import Cursor, SubscriberBuffer

NEWEST = b"$"


@dataclass(frozen=True, kw_only=True)
class CursorCallbacks:
    """Callbacks of a `CursorTable`: queue a cursor to be read; wake the subscriber of a buffer."""

    schedule: Callable[[Cursor], None]
    wake: Callable[[SubscriberBuffer], None]


class CursorTable:
    """All cursors, by stream. `step`: the number of the current step of the sweep."""

    def __init__(self, callbacks: CursorCallbacks, metrics: Metrics, budget: Budget) -> None:
        self.budget = budget
        self._callbacks = callbacks
        self._metrics = metrics
        self._live: dict[bytes, Cursor] = {}
        self._late: dict[bytes, list[Cursor]] = {}
        self.subscriptions = 0
        self.step = 0

    def __len__(self) -> int:
        return len(self._live) + sum(key not in self._live for key in list(self._late))

    def of(self, key: bytes) -> Sequence[Cursor]:
        """The cursors of a stream."""
        live = self._live.get(key)
        if live is None:
            return tuple(self._late.get(key, ()))
        return (live, *self._late[key]) if key in self._late else (live,)

    def streams(self) -> list[bytes]:
        """Every stream that has a subscriber."""
        return list(self._live) + [key for key in self._late if key not in self._live]

    # Subscribing and unsubscribing

    def add(self, buffer: SubscriberBuffer, key: bytes, after: bytes) -> None:
        """Deliver to `buffer` the entries after the id `after`."""
        self.subscriptions += 1
        for cursor in self.of(key):
            if cursor.last == after != NEWEST and not (cursor.paused or cursor.deleted_at):
                break
        else:
            cursor = Cursor(key, after)
            cursor.anchor = None if after in (NEWEST, ZERO) else after
            self._late.setdefault(key, []).append(cursor)
        if cursor.buffers:
            cursor.buffers.append(buffer)
        else:
            cursor.buffers = [buffer]  # appending would reserve room for three more
        buffer.cursor = cursor
        self._callbacks.schedule(cursor)

    def remove(self, buffer: SubscriberBuffer) -> None:
        """Stop delivering to the buffer."""
        cursor, buffer.cursor = buffer.cursor, None
        if cursor is None:
            return
        self.subscriptions -= 1
        cursor.buffers.remove(buffer)
        if not cursor.buffers:
            self._remove_cursor(cursor)

    def end(self, buffer: SubscriberBuffer, ending: bool | Exception = True) -> None:
        """Stop delivering to the buffer, and end its subscription: True without an error."""
        buffer.ending = buffer.ending or ending
        self.remove(buffer)
        self._callbacks.wake(buffer)

    def end_cursor(self, cursor: Cursor, ending: bool | Exception) -> None:
        """End every subscription at this cursor."""
        for buffer in tuple(cursor.buffers):
            self.end(buffer, ending)

    def end_all(self, ending: bool | Exception) -> None:
        """End every subscription."""
        for key in self.streams():
            for cursor in self.of(key):
                self.end_cursor(cursor, ending)

    def resume(self, buffer: SubscriberBuffer) -> None:
        """The buffer has room again: read on for it."""
        buffer.paused = False
        if (cursor := buffer.cursor) is not None and cursor.paused:
            cursor.paused = False
            self._callbacks.schedule(cursor)

    def promote(self, cursor: Cursor) -> None:
        """The cursor has reached the end of its stream: make it the live one, or merge it into that."""
        live = self._live.get(cursor.key)
        if live is cursor or cursor.paused or not cursor.buffers:
            return
        if live is None:
            self._remove_late(cursor)
            self._live[cursor.key] = cursor
        elif not (live.deleted_at or cursor.deleted_at) and id_as_numbers(cursor.last) >= id_as_numbers(live.last):
            for buffer in cursor.buffers:
                buffer.cursor = live
                buffer.skip = cursor.last if cursor.last != live.last else None
            live.buffers += cursor.buffers
            cursor.buffers = []
            self._remove_late(cursor)

    def _remove_cursor(self, cursor: Cursor) -> None:
        if self._live.get(cursor.key) is cursor:
            del self._live[cursor.key]
        else:
            self._remove_late(cursor)

    def _remove_late(self, cursor: Cursor) -> None:
        late = self._late.get(cursor.key, [])
        if cursor in late:
            late.remove(cursor)
            if not late:
                del self._late[cursor.key]
                if not self._late:  # an emptied dictionary keeps its memory, and is as slow to iterate over
                    self._late = {}

    # Delivery

    def deliver(self, cursor: Cursor, entries: Sequence[Entry]) -> None:
        """Put the next entries of this cursor into the buffers of its subscribers."""
        start = cursor.last, cursor.ordinal, cursor.proven
        batch = Batch(entries, self.budget)
        full = []
        for buffer in cursor.buffers:
            part = batch if buffer.skip is None else _unskipped(buffer, batch)
            if part is None:
                continue
            if buffer.fits(part):
                buffer.put(part)
            else:
                full.append((buffer, len(batch) - len(part)))
            if buffer.waker is not None:
                self._callbacks.wake(buffer)
        if cursor.anchor is None:
            cursor.anchor = entries[0][0]
        cursor.last, cursor.proven = entries[-1][0], True
        largest = batch.size if len(entries) == 1 else max(batch.sizes)
        cursor.size_log2 = max(largest.bit_length() - 1, cursor.size_log2 - 1)
        if cursor.ordinal is not None:
            cursor.ordinal += len(entries)
        for buffer, first in full:  # last: a resume may follow at once and move the cursor back
            self._overflow(cursor, buffer, batch, first, start)
            self._callbacks.wake(buffer)

    def report_gap(
        self, cursor: Cursor, reason: Reason, after: bytes, missed: int | None = None, *, left: bytes = ZERO
    ) -> None:
        """Report to the cursor's subscribers that entries are missing after the id `after`.

        `left`: where they were trimmed, the first id that was not.
        """
        gap = Gap(stream=from_wire(cursor.key), after=after.decode(), reason=reason, missed=missed)
        self._metrics.count(m.ROUTER_GAPS, reason=reason)
        for buffer in cursor.buffers:
            skip, own = buffer.skip, gap
            if skip is not None and reason == "trimmed":  # the buffer has had the entries up to there
                if id_as_numbers(left) <= id_as_numbers(skip):
                    continue
                own = Gap(stream=gap.stream, after=skip.decode(), reason=reason, missed=None)
            buffer.skip = None
            buffer.batches.append(own)
            self._callbacks.wake(buffer)

    def report_start(self, cursor: Cursor) -> None:
        """Report the start id to those subscribers of an END cursor that want it (`report_start`)."""
        for buffer in cursor.buffers:
            if buffer.policy.reports_start:
                buffer.batches.append(Start(stream=buffer.stream, after=cursor.last.decode()))
                self._callbacks.wake(buffer)

    def _overflow(
        self, cursor: Cursor, buffer: SubscriberBuffer, batch: Batch, first: int, start: tuple[bytes, int | None, bool]
    ) -> None:
        """A batch does not fit into a buffer from the index `first` on.

        `start`: where the batch begins: the id before it, the ordinal of that id, and whether its entry was there.
        """
        rest = batch.part(first, len(batch))
        if buffer.policy.when_full == "drop-oldest":
            self._metrics.count(m.ROUTER_DROPPED, buffer.put_dropping(rest))
            return
        last, ordinal, proven = start
        end = first + buffer.fitting(rest)
        if end > first:
            buffer.put(batch.part(first, end))
        reached = batch.entries[end - 1][0] if end else last
        if buffer.policy.when_full == "disconnect":
            self.end(buffer, TooSlow(buffer.stream, reached.decode()))
            return
        own = self._detach(cursor, buffer)
        own.last, own.proven = reached, proven or end > 0
        own.ordinal = None if ordinal is None else ordinal + end
        own.paused = True
        # Set first, checked second: the subscriber reads an item before it checks whether it is paused.
        buffer.paused = True
        if buffer.drained:
            self.resume(buffer)

    def _detach(self, cursor: Cursor, buffer: SubscriberBuffer) -> Cursor:
        """A late cursor for this buffer alone."""
        if cursor.buffers == [buffer]:
            self._remove_cursor(cursor)
            own = cursor
        else:
            cursor.buffers.remove(buffer)
            own = Cursor(cursor.key, cursor.last)
            own.needs_counters, own.size_log2 = cursor.needs_counters, cursor.size_log2
            own.anchor, own.next_anchor = cursor.anchor, cursor.next_anchor
            own.buffers.append(buffer)
            buffer.cursor = own
        self._late.setdefault(own.key, []).append(own)
        return own


def _unskipped(buffer: SubscriberBuffer, batch: Batch) -> Batch | None:
    """The part of the batch after the id that the buffer skips up to."""
    limit = id_as_numbers(buffer.skip or ZERO)
    first = sum(id_as_numbers(entry_id) <= limit for entry_id, _ in batch.entries)
    if first == len(batch):
        return None
    buffer.skip = None
    return batch.part(first, len(batch)) if first else batch
