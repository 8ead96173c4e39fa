"""Reading, the same for every way of learning what changed: batches of non-blocking XREADs over one connection.

Two queues, each with one request under way: streams that have changed, and those that are read for another reason
(new, catching up, looked at again), so that a long history never stands in the way of what is happening now. A third
one has streams that may be what ends the connection: they are read while nothing else is under way.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from millstream.errors import AccessDenied, CommandFailed, Unavailable, WrongType
from millstream.redis_client.key_names import from_wire
from millstream.redis_client.resp import Command, Redirection, slot_of
from millstream.router.connection import ReconnectingConnection
from millstream.router.cursors import NEWEST, CursorTable
from millstream.router.gap_detection import (
    MISSING,
    ZERO,
    Entry,
    ReadResult,
    StreamCounters,
    before,
    counters_of,
    detect_gap,
    number,
)
from millstream.router.oversized_streams import LAST, OversizedStreams
from millstream.router.read_request import ReaderCallbacks, Request
from millstream.router.read_size import ReadSize
from millstream.router.subscriber_buffer import Cursor

logger = logging.getLogger(__name__)

_RETRY_MS = 100.0
_MANY, _REST_MS = 32, 10.0
_RECOVER_MS = 10_000.0
_BARRED_MS = 60_000.0
_CHANGED, _OTHERS, _SUSPECTS = range(3)


class StreamReader:
    """Reads cursors over `link`; at most `streams` in a request, whose reply is meant to stay below `reply_bytes`."""

    def __init__(
        self,
        link: ReconnectingConnection,
        shelf: CursorTable,
        calls: ReaderCallbacks,
        *,
        streams: int,
        count: int,
        reply_bytes: int,
        by_slot: bool,
    ) -> None:
        self._link = link
        self._shelf = shelf
        self._calls = calls
        self._streams = streams
        self._by_slot = by_slot
        self._queues: tuple[deque[Cursor], ...] = (deque(), deque(), deque())
        self._under_way: list[Request | None] = [None, None, None]
        self._once: list[Request] = []
        self._first = _CHANGED
        self._interrupted: list[Cursor] = []
        self._sizing = ReadSize(count=count, reply_bytes=reply_bytes, budget=shelf.budget)
        self._suspects = OversizedStreams()
        self._breaks = 0
        self._unchanged = 0
        self._resting = False
        self._warned = False

    def heard(self, keys: Sequence[bytes]) -> None:
        """The server says, over `link`, that these streams have changed."""
        for key in keys:
            for cursor in self._shelf.at(key):
                self.want(cursor, changed=True)

    def want(self, cursor: Cursor, *, changed: bool = False) -> None:
        """Read this soon. `changed`: the server says that there is something."""
        if cursor.paused or not cursor.inboxes:
            return
        if cursor.asked:
            cursor.stale = True
        elif not cursor.queued and self._link.up:  # when it comes up, everything is read
            queue = _CHANGED if changed else _OTHERS
            if self._suspects.active and cursor in self._suspects:
                if self._suspects.rests(cursor):
                    return  # it is wanted again after its rest
                queue = _SUSPECTS
            cursor.queued = True
            self._queues[queue].append(cursor)

    def go(self) -> None:
        """Send what can be sent."""
        if not self._link.up:
            return
        if self._queues[_SUSPECTS] and not any(self._under_way):
            self._ask_next(_SUSPECTS)
        if self._queues[_SUSPECTS] or self._under_way[_SUSPECTS]:
            return
        for queue in (self._first, _OTHERS - self._first):
            if self._sizing.cautious and any(self._under_way):
                return
            resting = self._resting and queue == _CHANGED
            if self._queues[queue] and self._under_way[queue] is None and self._link.up and not resting:
                self._first = _OTHERS - queue  # the other one, next time
                self._ask_next(queue)

    def reset(self, *, hung_up: bool = False) -> None:
        """The link broke: nothing is waited for any more. `hung_up`: the server ended it, maybe for what it was asked."""
        asked = [cursor for one in (*self._under_way, *self._once) if one for cursor in one.cursors]
        for cursor in asked:
            cursor.asked = cursor.stale = False
        waiting = [cursor for queue in self._queues for cursor in queue]
        for cursor in waiting:
            cursor.queued = False
        for queue in self._queues:
            queue.clear()
        self._under_way = [None, None, None]
        self._once.clear()
        self._interrupted = [*asked, *waiting] or self._interrupted
        if hung_up and asked:
            self._suspect([cursor for cursor in asked if cursor.inboxes])

    def interrupted(self) -> list[Cursor]:
        """Who was to be read when the link broke: their turn comes first, or with many breaks it would never come."""
        found, self._interrupted = self._interrupted, []
        return found

    def ask_once(self, cursors: Iterable[Cursor]) -> None:
        """Read cursors whose slot is on its way to this node (Redis Cluster, ASK)."""
        request = self._request([[cursor] for cursor in cursors], queue=None)
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
        commands = self._commands(request)
        if queue == _SUSPECTS and self._suspects.alone(request.cursors[0]):
            self._ask_one_by_one(request, commands, [])
        else:
            self._link.ask(commands, lambda replies: self._answered(request, replies))

    def _ask_one_by_one(self, request: Request, commands: list[Command], replies: list[Any]) -> None:
        """Let no reply add to the size of another."""
        if commands:
            following, *rest = commands
            self._link.ask([following], lambda got: self._ask_one_by_one(request, rest, replies + got))
        else:
            self._answered(request, replies)

    def _next(self, queue: int) -> Iterable[Cursor]:
        """Whose turn it is."""
        waiting = self._queues[queue]
        most, room = self._streams, self._sizing.share_bytes
        if queue == _SUSPECTS:
            most = min(most, *map(self._suspects.group, islice(waiting, most)))
        found: dict[bytes, Cursor] = {}
        again = []
        while waiting and len(found) < most and room > 0:
            cursor = waiting.popleft()
            if cursor.key in found:  # a reply has room for each name once
                again.append(cursor)
                continue
            cursor.queued = False
            if self._suspects.active and self._suspects.bars(cursor):
                self._shelf.end_at(cursor, self._given_up(cursor))
            elif cursor.inboxes and not cursor.paused:
                cursor.asked = True
                found[cursor.key] = cursor
                room -= self._sizing.entry_bytes(cursor)
            elif not cursor.inboxes:
                self._suspects.clear(cursor)
        waiting.extend(again)
        return found.values()

    def _request(self, groups: list[list[Cursor]], *, queue: int | None) -> Request:
        request = Request(groups=groups, careful=[], count=0, queue=queue)
        request.careful = [cursor for cursor in request.cursors if cursor.careful]
        request.count = self._sizing.count(request.cursors, request.careful) + 1  # one more: the last one is read again
        return request

    def _commands(self, request: Request) -> list[Command]:
        commands: list[Command] = []
        for group in request.groups:
            places = [c.last if c.last == NEWEST else before(c.last) for c in group]
            commands.append(("XREAD", "COUNT", request.count, "STREAMS", *[c.key for c in group], *places))
        return commands + [("XINFO", "STREAM", cursor.key) for cursor in request.careful]

    # Answers

    def _answered(self, request: Request, replies: list[Any]) -> None:
        if request.queue is not None:
            self._under_way[request.queue] = None
        else:
            self._once.remove(request)
        counters = replies[len(request.groups) :]
        facts = dict(zip(request.careful, map(counters_of, counters), strict=True))
        for cursor, reply in zip(request.careful, counters, strict=True):
            if isinstance(reply, AccessDenied):
                self._shelf.end_at(cursor, reply)
        self._unchanged = 0
        for group, reply in zip(request.groups, replies, strict=False):
            for cursor in group:
                cursor.asked = False
                if self._suspects.active:
                    self._suspects.answered(cursor)
            if isinstance(reply, Exception):
                self._refused(group, reply)
                continue
            found = reply if isinstance(reply, dict) else dict(reply or ())
            for cursor in group:
                cursor.alone = False
                got = found.get(cursor.key, [])
                if cursor.inboxes and not cursor.paused:
                    self._read(cursor, got, request.count, facts.get(cursor))
                if cursor.stale:
                    cursor.stale = False
                    self.want(cursor, changed=True)
        self._sizing.learn(request.cursors)
        if request.queue == _CHANGED and self._unchanged >= _MANY and 2 * self._unchanged > len(request.cursors):
            self._rest()

    # Whose reading ends connections

    def _suspect(self, cursors: list[Cursor]) -> None:
        self._sizing.broken()
        self._breaks += 1
        breaks = self._breaks
        self._calls.later(_RECOVER_MS, lambda: self._recover(breaks))
        resting, ended, wait_ms = self._suspects.meet(cursors)
        self._calls.later(wait_ms, lambda: self._want_all(self._suspects.rested(resting)))
        for cursor in ended:
            error = self._given_up(cursor)
            logger.warning("the router gives up a stream: %s", error)
            self._shelf.end_at(cursor, error)
        if keys := [cursor.key for cursor in ended]:
            self._calls.later(_BARRED_MS, lambda: self._suspects.unbar(keys))

    def _recover(self, breaks: int) -> None:
        if breaks == self._breaks and self._sizing.recover():
            self._calls.later(_RECOVER_MS, lambda: self._recover(breaks))

    def _given_up(self, cursor: Cursor) -> CommandFailed:
        return CommandFailed(
            f"{from_wire(cursor.key)} cannot be read: Redis closed the connection {LAST} times in a row when it was asked for "
            f"what comes after {cursor.last.decode()}. Most likely an entry is larger than its replies may be: "
            "set client-output-buffer-limit normal (and maxmemory-clients, if used) to four times the largest entry, "
            "or delete that entry; then subscribe again, a minute later"
        )

    # What was found

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

    def _read(self, cursor: Cursor, got: list[Entry], count: int, facts: StreamCounters | None) -> None:
        """Take what was read of one stream, `got`, which should begin with the last entry delivered."""
        if cursor.last == NEWEST:
            self._start_at_end(cursor, facts)
            return
        full = len(got) >= count
        again = bool(got) and got[0][0] == cursor.last
        entries = got[1:] if again else got
        present = again or cursor.last == ZERO
        if facts is not None and cursor.careful:
            if not self._judged(
                cursor, ReadResult(cursor.last, cursor.ordinal, cursor.proven, present, entries, full), facts
            ):
                return
        elif not present or (entries and cursor.last == ZERO and cursor.ordinal is not None):
            cursor.careful = True  # what was read, or that nothing was there yet, may have been trimmed meanwhile
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

    def _judged(self, cursor: Cursor, reading: ReadResult, facts: StreamCounters) -> bool:
        """Deliver what was read with care; False if it has to be read again."""
        verdict = detect_gap(reading, facts)
        if verdict.what == "again":
            self._calls.want(cursor)
            return False
        if verdict.what == "another":
            self._recognise(cursor, facts)
            return False
        if verdict.what == "gone":
            cursor.lost_at = cursor.lost_at or cursor.last
            cursor.last, cursor.ordinal, cursor.proven = ZERO, 0, False
            return True
        if cursor.lost_at and facts is not MISSING:
            self._shelf.tell_gap(cursor, "recreated", cursor.lost_at)
            cursor.lost_at = None
        elif verdict.what != "sound":
            self._shelf.tell_gap(cursor, verdict.what, cursor.last, verdict.missed)
        if verdict.what != "sound" and facts.first is None:  # all of it is gone: say so once
            cursor.last, cursor.proven = facts.top, False
        elif reading.present:
            cursor.proven = cursor.last != ZERO
        known = verdict.ordinal is not None
        cursor.careful = not (known and reading.present and cursor.lost_at is None)
        cursor.ordinal = verdict.ordinal - len(reading.entries) if verdict.ordinal is not None else None
        if reading.entries:
            self._shelf.deliver(cursor, reading.entries)
        return True

    def _recognise(self, cursor: Cursor, facts: StreamCounters) -> None:
        """It is another stream, or Redis lost its end. Old entries tell which."""
        request = self._request([[cursor]], queue=None)
        self._once.append(request)
        cursor.asked = True
        anchor = cursor.anchor or cursor.last
        found: Command = ("XRANGE", cursor.key, anchor, anchor)
        self._link.ask([found], lambda replies: self._recognised(request, cursor, facts, replies[0]))

    def _recognised(self, request: Request, cursor: Cursor, facts: StreamCounters, reply: Any) -> None:
        self._once.remove(request)
        cursor.asked = cursor.stale = False
        if isinstance(reply, AccessDenied):
            self._shelf.end_at(cursor, reply)
            return
        if not isinstance(reply, Exception):
            self._shelf.tell_gap(cursor, "rewound" if reply else "recreated", cursor.last)
            if not reply:
                cursor.last, cursor.ordinal = ZERO, None
            elif number(facts.top) < number(cursor.last):
                cursor.last, cursor.ordinal = facts.top, facts.added
            else:  # it has grown since beyond where we were
                cursor.ordinal = None
            cursor.lost_at, cursor.careful, cursor.proven = None, True, False
        self._calls.want(cursor)

    def _start_at_end(self, cursor: Cursor, facts: StreamCounters | None) -> None:
        if facts is None:
            self._calls.want(cursor)
            return
        cursor.last, cursor.ordinal, cursor.proven = facts.top, facts.added, facts.last == facts.top
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
