"""Reading, the same for every way of learning what changed: batches of non-blocking XREADs over one connection.

Two queues, each with one request under way: streams that have changed, and those that are read for another reason
(new, catching up, looked at again), so that a long history never stands in the way of what is happening now.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from millstream.errors import AccessDenied, Unavailable, WrongType
from millstream.naming import from_wire
from millstream.router.asking import LaneCalls, Request
from millstream.router.inbox import Cursor
from millstream.router.judging import MISSING, ZERO, Entry, Facts, Reading, before, facts_of, judge
from millstream.router.links import Link
from millstream.router.shelf import NEWEST, Shelf
from millstream.wire import Command, Redirection, slot_of

logger = logging.getLogger(__name__)

_GUESSED_ENTRY_BYTES = 256.0
_RETRY_MS = 100.0
_MANY, _REST_MS = 32, 10.0
_FEW = 4
_PUSH_BYTES = 31.0  # beside the key


class Lane:
    """Reads cursors over `link`; at most `streams` in a request, whose reply is meant to stay below `reply_bytes`."""

    def __init__(
        self, link: Link, shelf: Shelf, calls: LaneCalls, *, streams: int, count: int, reply_bytes: int, by_slot: bool
    ) -> None:
        self._link = link
        self._shelf = shelf
        self._calls = calls
        self._streams = streams
        self._count = count
        self._reply_bytes = reply_bytes
        self._by_slot = by_slot
        self._queues: tuple[deque[Cursor], deque[Cursor]] = (deque(), deque())
        self._under_way: list[Request | None] = [None, None]
        self._once: list[Request] = []
        self._entry_bytes = _GUESSED_ENTRY_BYTES
        self._heard_bytes = 0.0
        self._unchanged = 0
        self._resting = False
        self._warned = False

    def heard(self, keys: Sequence[bytes]) -> None:
        """The server says, over `link`, that these streams have changed."""
        for key in keys:
            self._heard_bytes += len(key) + _PUSH_BYTES
            for cursor in self._shelf.at(key):
                self.want(cursor, changed=True)

    def want(self, cursor: Cursor, *, changed: bool = False) -> None:
        """Read this soon. `changed`: the server says that there is something."""
        if cursor.paused or not cursor.inboxes:
            return
        if cursor.asked:
            cursor.stale = True
        elif not cursor.queued and self._link.up:  # when it comes up, everything is read
            cursor.queued = True
            self._queues[0 if changed else 1].append(cursor)

    def go(self) -> None:
        """Send what can be sent."""
        for queue in (0, 1):
            resting = self._resting and queue == 0
            if self._queues[queue] and self._under_way[queue] is None and self._link.up and not resting:
                self._ask_next(queue)

    def reset(self) -> None:
        """The link broke: nothing is waited for any more."""
        for request in (*self._under_way, *self._once):
            for cursor in (cursor for group in request.groups for cursor in group) if request else ():
                cursor.asked = cursor.stale = False
        for queue in self._queues:
            for cursor in queue:
                cursor.queued = False
            queue.clear()
        self._under_way = [None, None]
        self._once.clear()

    def ask_once(self, cursors: Iterable[Cursor]) -> None:
        """Read cursors whose slot is on its way to this node (Redis Cluster, ASK)."""
        request = self._request([[cursor] for cursor in cursors], queue=-1)
        self._once.append(request)
        commands = [part for command in self._commands(request) for part in (("ASKING",), command)]
        self._link.ask(commands, lambda replies: self._answered(request, replies[1::2]))

    # Asking

    def _ask_next(self, queue: int) -> None:
        groups: dict[Any, list[Cursor]] = {}
        for cursor in self._next(queue):  # into one command goes what is in the same slot, where there are slots
            group = cursor if cursor.alone else slot_of(cursor.key) if self._by_slot else None
            if group in groups:
                groups[group].append(cursor)
            else:
                groups[group] = [cursor]
        if not groups:
            return
        request = self._request(list(groups.values()), queue=queue)
        self._under_way[queue] = request
        self._link.ask(self._commands(request), lambda replies: self._answered(request, replies))

    def _next(self, queue: int) -> Iterable[Cursor]:
        """Whose turn it is. Of large entries, rather of few streams several each than of many one, to be read again."""
        waiting = self._queues[queue]
        most = max(1, min(self._streams, int(self._reply_bytes / self._entry_bytes) // _FEW))
        found: dict[bytes, Cursor] = {}
        again = []
        while waiting and len(found) < most:
            cursor = waiting.popleft()
            if cursor.key in found:  # a reply has room for each name once
                again.append(cursor)
                continue
            cursor.queued = False
            if cursor.inboxes and not cursor.paused:
                cursor.asked = True
                found[cursor.key] = cursor
        waiting.extend(again)
        return found.values()

    def _request(self, groups: list[list[Cursor]], *, queue: int) -> Request:
        cursors = sum(map(len, groups))
        fitting = int(self._reply_bytes / (self._entry_bytes * max(1, cursors)))
        return Request(
            groups=groups,
            careful=[cursor for group in groups for cursor in group if cursor.careful],
            count=max(1, min(self._count, fitting)) + 1,  # one more: the last entry is read again
            began_at=self._read_bytes(),
            queue=queue,
        )

    def _read_bytes(self) -> float:
        """The size of all replies so far."""
        return self._link.received_bytes - self._heard_bytes

    def _commands(self, request: Request) -> list[Command]:
        commands: list[Command] = []
        for group in request.groups:
            places = [c.last if c.last == NEWEST else before(c.last) for c in group]
            commands.append(("XREAD", "COUNT", request.count, "STREAMS", *[c.key for c in group], *places))
        return commands + [("XINFO", "STREAM", cursor.key) for cursor in request.careful]

    # Answers

    def _answered(self, request: Request, replies: list[Any]) -> None:
        if request.queue >= 0:
            self._under_way[request.queue] = None
        else:
            self._once.remove(request)
        counters = replies[len(request.groups) :]
        facts = dict(zip(request.careful, map(facts_of, counters), strict=True))
        for cursor, reply in zip(request.careful, counters, strict=True):
            if isinstance(reply, AccessDenied):
                self._shelf.end_at(cursor, reply)
        entries, self._unchanged = 0, 0
        for group, reply in zip(request.groups, replies, strict=False):
            for cursor in group:
                cursor.asked = False
            if isinstance(reply, Exception):
                self._refused(group, reply)
                continue
            found = reply if isinstance(reply, dict) else dict(reply or ())
            for cursor in group:
                cursor.alone = False
                got = found.get(cursor.key, [])
                entries += len(got)
                if cursor.inboxes and not cursor.paused:
                    self._read(cursor, got, request.count, facts.get(cursor))
                if cursor.stale:
                    cursor.stale = False
                    self.want(cursor, changed=True)
        if request.queue == 0 and self._unchanged >= _MANY and 2 * self._unchanged > sum(map(len, request.groups)):
            self._rest()
        if entries:
            measured = max(1.0, self._read_bytes() - request.began_at) / entries
            self._entry_bytes = max(measured, 0.9 * self._entry_bytes + 0.1 * measured)

    def _rest(self) -> None:
        """Most of what was said to have changed has not, and reading it makes the server forget others: do not race."""
        self._resting = True
        self._calls.later(_REST_MS, self._rested)
        if not self._warned:
            self._warned = True
            logger.warning(
                "Redis forgets which streams are followed: raise its tracking-table-max-keys above their number"
            )

    def _rested(self) -> None:
        self._resting = False

    def _read(self, cursor: Cursor, got: list[Entry], count: int, facts: Facts | None) -> None:
        """Take what was read of one stream, `got`, which should begin with the last entry delivered."""
        if cursor.last == NEWEST:
            self._start_at_end(cursor, facts)
            return
        full = len(got) >= count
        again = bool(got) and got[0][0] == cursor.last
        entries = got[1:] if again else got
        present = again or cursor.last == ZERO
        if facts is not None and cursor.careful:
            if not self._judged(cursor, Reading(cursor.last, cursor.ordinal, present, entries, full), facts):
                return
        elif not present:
            cursor.careful = True
            self.want(cursor, changed=True)
            return
        elif entries:
            self._shelf.deliver(cursor, entries)
        else:
            self._unchanged += 1
        if full:
            self.want(cursor)
            return
        self._shelf.settle(cursor)
        self._calls.done(cursor)

    def _judged(self, cursor: Cursor, reading: Reading, facts: Facts) -> bool:
        """Deliver what was read with care; False if it has to be read again."""
        verdict = judge(reading, facts)
        if verdict.what == "again":
            self._calls.want(cursor)
            return False
        if verdict.what == "lower":
            self._recognise(cursor, facts)
            return False
        if verdict.what == "gone":
            cursor.lost_at = cursor.lost_at or cursor.last
            cursor.last, cursor.ordinal = ZERO, 0
            return True
        if verdict.what != "sound":
            self._shelf.tell_gap(cursor, verdict.what, cursor.last, verdict.missed)
            if facts.first is None:  # all of it is gone: say so once
                cursor.last = facts.top
        elif cursor.lost_at and facts is not MISSING:
            self._shelf.tell_gap(cursor, "recreated", cursor.lost_at)
            cursor.lost_at = None
        known = verdict.ordinal is not None
        cursor.careful = not (known and reading.present and cursor.lost_at is None)
        cursor.ordinal = verdict.ordinal - len(reading.entries) if verdict.ordinal is not None else None
        if reading.entries:
            self._shelf.deliver(cursor, reading.entries)
        return True

    def _recognise(self, cursor: Cursor, facts: Facts) -> None:
        """The stream ends before our place: it is another one, or Redis lost its end. Old entries tell which."""
        request = self._request([[cursor]], queue=-1)
        self._once.append(request)
        cursor.asked = True
        anchor = cursor.anchor or cursor.last
        found: Command = ("XRANGE", cursor.key, anchor, anchor)
        self._link.ask([found], lambda replies: self._recognised(request, cursor, facts, replies[0]))

    def _recognised(self, request: Request, cursor: Cursor, facts: Facts, reply: Any) -> None:
        self._once.remove(request)
        cursor.asked = cursor.stale = False
        if isinstance(reply, AccessDenied):
            self._shelf.end_at(cursor, reply)
            return
        if not isinstance(reply, Exception):
            self._shelf.tell_gap(cursor, "rewound" if reply else "recreated", cursor.last)
            cursor.last, cursor.ordinal = (facts.top, facts.added) if reply else (ZERO, None)
            cursor.lost_at, cursor.careful = None, True
        self._calls.want(cursor)

    def _start_at_end(self, cursor: Cursor, facts: Facts | None) -> None:
        if facts is None:
            self._calls.want(cursor)
            return
        cursor.last, cursor.ordinal = facts.top, facts.added
        cursor.careful = False
        self._shelf.tell_start(cursor)
        self._calls.want(cursor)  # what came between is read from the place that is known now

    def _refused(self, group: Sequence[Cursor], error: Exception) -> None:
        cursors = list(group)
        if isinstance(error, Redirection):
            if error.asking:
                for cursor in cursors:
                    cursor.asked = True
                self._calls.ask_at(error.node, cursors)
                return
            self._calls.moved()
        if isinstance(error, Unavailable):
            for cursor in cursors:
                cursor.alone = True  # while slots move, those of one slot may be in two places
            self._calls.later(_RETRY_MS, lambda: self._want_all(cursors))
        elif len(cursors) > 1:  # one of them is at fault
            for cursor in cursors:
                cursor.alone = True
            self._want_all(cursors)
        else:
            name = from_wire(cursors[0].key)
            wrong = WrongType(f"{name} is not a stream: its key holds another type of value")
            self._shelf.end_at(cursors[0], wrong if isinstance(error, WrongType) else type(error)(f"{name}: {error}"))

    def _want_all(self, cursors: Iterable[Cursor]) -> None:
        for cursor in cursors:
            self._calls.want(cursor)
