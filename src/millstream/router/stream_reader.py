"""StreamReader: reads streams of one node in batches of non-blocking XREADs over one connection.

The reader is the same however the router learns of changes. It has two queues with one request in flight each:
streams that have changed, and streams read for another reason (new, catching up, swept), so that a long history never
delays current messages. A third queue holds streams whose reply may be what ends the connection: the reader reads
them only while no other request is in flight.
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
_MANY, _PAUSE_MS = 32, 10.0
_RECOVER_MS = 10_000.0
_UNBAR_AFTER_MS = 60_000.0
_CHANGED, _UNREPORTED, _SUSPECTS = range(3)


class StreamReader:
    """Reads cursors over `connection`; at most `streams` in a request, with a reply of about `reply_bytes` at most."""

    def __init__(
        self,
        connection: ReconnectingConnection,
        cursors: CursorTable,
        callbacks: ReaderCallbacks,
        *,
        streams: int,
        count: int,
        reply_bytes: int,
        by_slot: bool,
    ) -> None:
        self._link = connection
        self._shelf = cursors
        self._calls = callbacks
        self._streams = streams
        self._by_slot = by_slot
        self._queues: tuple[deque[Cursor], ...] = (deque(), deque(), deque())
        self._under_way: list[Request | None] = [None, None, None]
        self._once: list[Request] = []
        self._first = _CHANGED
        self._interrupted: list[Cursor] = []
        self._sizing = ReadSize(count=count, reply_bytes=reply_bytes, budget=cursors.budget)
        self._suspects = OversizedStreams()
        self._breaks = 0
        self._unchanged = 0
        self._resting = False
        self._warned = False

    def heard(self, keys: Sequence[bytes]) -> None:
        """The server reports over `connection` that these streams have changed."""
        for key in keys:
            for cursor in self._shelf.at(key):
                self.want(cursor, changed=True)

    def want(self, cursor: Cursor, *, changed: bool = False) -> None:
        """Queue the cursor to be read. `changed`: the server reports a change."""
        if cursor.paused or not cursor.inboxes:
            return
        if cursor.asked:
            cursor.stale = True
        elif not cursor.queued and self._link.up:  # once the connection is up, every stream is read
            queue = _CHANGED if changed else _UNREPORTED
            if self._suspects.active and cursor in self._suspects:
                if self._suspects.rests(cursor):
                    return  # scheduled again once its back-off is over
                queue = _SUSPECTS
            cursor.queued = True
            self._queues[queue].append(cursor)

    def go(self) -> None:
        """Send the requests that may be sent now."""
        if not self._link.up:
            return
        if self._queues[_SUSPECTS] and not any(self._under_way):
            self._ask_next(_SUSPECTS)
        if self._queues[_SUSPECTS] or self._under_way[_SUSPECTS]:
            return
        for queue in (self._first, _UNREPORTED - self._first):
            if self._sizing.cautious and any(self._under_way):
                return
            held_back = self._resting and queue == _CHANGED
            if self._queues[queue] and self._under_way[queue] is None and self._link.up and not held_back:
                self._first = _UNREPORTED - queue  # the other queue goes first next time
                self._ask_next(queue)

    def reset(self, *, hung_up: bool = False) -> None:
        """The connection broke: forget every queue and request.

        `hung_up`: the server closed the connection, perhaps because of the reply to what is in flight.
        """
        in_flight = [cursor for request in (*self._under_way, *self._once) if request for cursor in request.cursors]
        for cursor in in_flight:
            cursor.asked = cursor.stale = False
        queued = [cursor for queue in self._queues for cursor in queue]
        for cursor in queued:
            cursor.queued = False
        for queue in self._queues:
            queue.clear()
        self._under_way = [None, None, None]
        self._once.clear()
        self._interrupted = [*in_flight, *queued] or self._interrupted
        if hung_up and in_flight:
            self._suspect([cursor for cursor in in_flight if cursor.inboxes])

    def interrupted(self) -> list[Cursor]:
        """The cursors queued or in flight when the connection broke.

        They go first, or with many breaks they would starve.
        """
        interrupted, self._interrupted = self._interrupted, []
        return interrupted

    def ask_once(self, cursors: Iterable[Cursor]) -> None:
        """Read cursors whose slot is migrating to this node (Redis Cluster, ASK)."""
        request = self._request([[cursor] for cursor in cursors], queue=None)
        self._once.append(request)
        commands = [part for command in self._commands(request) for part in (("ASKING",), command)]
        self._link.ask(commands, lambda replies: self._answered(request, replies[1::2]))

    # Requests

    def _ask_next(self, queue: int) -> None:
        groups: dict[Any, list[Cursor]] = {}
        for cursor in self._next(queue):  # on Redis Cluster a command holds one slot
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
        """Send one command at a time, so that no reply adds to the size of another."""
        if commands:
            command, *rest = commands
            self._link.ask([command], lambda reply: self._ask_one_by_one(request, rest, replies + reply))
        else:
            self._answered(request, replies)

    def _next(self, queue: int) -> Iterable[Cursor]:
        """Dequeue the cursors of the next request."""
        pending = self._queues[queue]
        most, room = self._streams, self._sizing.share_bytes
        if queue == _SUSPECTS:
            most = min(most, *map(self._suspects.group, islice(pending, most)))
        chosen: dict[bytes, Cursor] = {}
        requeued = []
        while pending and len(chosen) < most and room > 0:
            cursor = pending.popleft()
            if cursor.key in chosen:  # a reply holds each stream once
                requeued.append(cursor)
                continue
            cursor.queued = False
            if self._suspects.active and self._suspects.bars(cursor):
                self._shelf.end_at(cursor, self._given_up(cursor))
            elif cursor.inboxes and not cursor.paused:
                cursor.asked = True
                chosen[cursor.key] = cursor
                room -= self._sizing.entry_bytes(cursor)
            elif not cursor.inboxes:
                self._suspects.clear(cursor)
        pending.extend(requeued)
        return chosen.values()

    def _request(self, groups: list[list[Cursor]], *, queue: int | None) -> Request:
        request = Request(groups=groups, careful=[], count=0, queue=queue)
        request.careful = [cursor for cursor in request.cursors if cursor.careful]
        request.count = self._sizing.count(request.cursors, request.careful) + 1  # plus the last delivered one
        return request

    def _commands(self, request: Request) -> list[Command]:
        commands: list[Command] = []
        for group in request.groups:
            ids = [c.last if c.last == NEWEST else before(c.last) for c in group]
            commands.append(("XREAD", "COUNT", request.count, "STREAMS", *[c.key for c in group], *ids))
        return commands + [("XINFO", "STREAM", cursor.key) for cursor in request.careful]

    # Replies

    def _answered(self, request: Request, replies: list[Any]) -> None:
        if request.queue is not None:
            self._under_way[request.queue] = None
        else:
            self._once.remove(request)
        counter_replies = replies[len(request.groups) :]
        counters = dict(zip(request.careful, map(counters_of, counter_replies), strict=True))
        for cursor, reply in zip(request.careful, counter_replies, strict=True):
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
            streams = reply if isinstance(reply, dict) else dict(reply or ())
            for cursor in group:
                cursor.alone = False
                entries = streams.get(cursor.key, [])
                if cursor.inboxes and not cursor.paused:
                    self._read(cursor, entries, request.count, counters.get(cursor))
                if cursor.stale:
                    cursor.stale = False
                    self.want(cursor, changed=True)
        self._sizing.learn(request.cursors)
        if request.queue == _CHANGED and self._unchanged >= _MANY and 2 * self._unchanged > len(request.cursors):
            self._rest()

    # Streams whose reply ends connections

    def _suspect(self, cursors: list[Cursor]) -> None:
        self._sizing.broken()
        self._breaks += 1
        breaks = self._breaks
        self._calls.later(_RECOVER_MS, lambda: self._recover(breaks))
        backing_off, ended, wait_ms = self._suspects.meet(cursors)
        self._calls.later(wait_ms, lambda: self._want_all(self._suspects.rested(backing_off)))
        for cursor in ended:
            error = self._given_up(cursor)
            logger.warning("stream given up: %s", error)
            self._shelf.end_at(cursor, error)
        if keys := [cursor.key for cursor in ended]:
            self._calls.later(_UNBAR_AFTER_MS, lambda: self._suspects.unbar(keys))

    def _recover(self, breaks: int) -> None:
        if breaks == self._breaks and self._sizing.recover():
            self._calls.later(_RECOVER_MS, lambda: self._recover(breaks))

    def _given_up(self, cursor: Cursor) -> CommandFailed:
        return CommandFailed(
            f"{from_wire(cursor.key)} cannot be read: Redis closed the connection {LAST} times in a row on a read of "
            f"the entries after {cursor.last.decode()}. Most likely an entry is larger than the output buffer limit: "
            "set client-output-buffer-limit normal (and maxmemory-clients, if used) to four times the largest entry, "
            "or delete that entry; then subscribe again, a minute later"
        )

    # Entries

    def _rest(self) -> None:
        """Pause: most reported streams had not changed, as Redis evicts keys from a full tracking table.

        Reading them makes Redis evict others and report those, so reading on at once would never end.
        """
        self._resting = True
        self._calls.later(_PAUSE_MS, self._rested)
        if not self._warned:
            self._warned = True
            logger.warning(
                "Redis evicts streams from its tracking table; "
                "raise tracking-table-max-keys above the number of streams"
            )

    def _rested(self) -> None:
        self._resting = False

    def _read(self, cursor: Cursor, found: list[Entry], count: int, counters: StreamCounters | None) -> None:
        """Process one stream of a reply: `found` should begin with the last entry delivered."""
        if cursor.last == NEWEST:
            self._start_at_end(cursor, counters)
            return
        full = len(found) >= count
        still_there = bool(found) and found[0][0] == cursor.last
        entries = found[1:] if still_there else found
        present = still_there or cursor.last == ZERO
        if counters is not None and cursor.careful:
            if not self._judged(
                cursor, ReadResult(cursor.last, cursor.ordinal, cursor.proven, present, entries, full), counters
            ):
                return
        elif not present or (entries and cursor.last == ZERO and cursor.ordinal is not None):
            cursor.careful = True  # entries may have been trimmed meanwhile: read again, with counters
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

    def _judged(self, cursor: Cursor, result: ReadResult, counters: StreamCounters) -> bool:
        """Deliver a read that came with counters; False if the stream must be read again."""
        verdict = detect_gap(result, counters)
        if verdict.what == "retry":
            self._calls.want(cursor)
            return False
        if verdict.what == "diverged":
            self._recognise(cursor, counters)
            return False
        if verdict.what == "deleted":
            cursor.lost_at = cursor.lost_at or cursor.last
            cursor.last, cursor.ordinal, cursor.proven = ZERO, 0, False
            return True
        if cursor.lost_at and counters is not MISSING:
            self._shelf.tell_gap(cursor, "recreated", cursor.lost_at)
            cursor.lost_at = None
        elif verdict.what != "complete":
            self._shelf.tell_gap(cursor, verdict.what, cursor.last, verdict.missed)
        if verdict.what != "complete" and counters.first is None:  # every entry is gone: report that once
            cursor.last, cursor.proven = counters.top, False
        elif result.present:
            cursor.proven = cursor.last != ZERO
        known = verdict.ordinal is not None
        cursor.careful = not (known and result.present and cursor.lost_at is None)
        cursor.ordinal = verdict.ordinal - len(result.entries) if verdict.ordinal is not None else None
        if result.entries:
            self._shelf.deliver(cursor, result.entries)
        return True

    def _recognise(self, cursor: Cursor, counters: StreamCounters) -> None:
        """The stream was recreated, or Redis lost its end: read an old entry to find out which."""
        request = self._request([[cursor]], queue=None)
        self._once.append(request)
        cursor.asked = True
        anchor = cursor.anchor or cursor.last
        command: Command = ("XRANGE", cursor.key, anchor, anchor)
        self._link.ask([command], lambda replies: self._recognised(request, cursor, counters, replies[0]))

    def _recognised(self, request: Request, cursor: Cursor, counters: StreamCounters, reply: Any) -> None:
        self._once.remove(request)
        cursor.asked = cursor.stale = False
        if isinstance(reply, AccessDenied):
            self._shelf.end_at(cursor, reply)
            return
        if not isinstance(reply, Exception):
            self._shelf.tell_gap(cursor, "rewound" if reply else "recreated", cursor.last)
            if not reply:
                cursor.last, cursor.ordinal = ZERO, None
            elif number(counters.top) < number(cursor.last):
                cursor.last, cursor.ordinal = counters.top, counters.added
            else:  # the stream has grown past the position since
                cursor.ordinal = None
            cursor.lost_at, cursor.careful, cursor.proven = None, True, False
        self._calls.want(cursor)

    def _start_at_end(self, cursor: Cursor, counters: StreamCounters | None) -> None:
        if counters is None:
            self._calls.want(cursor)
            return
        cursor.last, cursor.ordinal, cursor.proven = counters.top, counters.added, counters.last == counters.top
        cursor.careful = False
        self._shelf.tell_start(cursor)
        self._calls.want(cursor)  # entries added since are read from the id known now

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
                cursor.alone = True  # during a slot migration, keys of one slot may be on two nodes
            self._calls.later(_RETRY_MS, lambda: self._want_all(cursors))
        elif len(cursors) > 1:  # one of them is the cause
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
