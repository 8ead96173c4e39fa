"""StreamReader: reads streams of one node in batches of non-blocking XREADs over one connection.

The reader is the same however the router learns of changes. It has two queues with one request in flight each:
streams that have changed, and streams read for another reason (new, catching up, swept), so that a long history never
delays current messages. A third queue holds streams whose reply may be what ends the connection: the reader reads
them only while no other request is in flight.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from millstream.errors import AccessDenied, CommandFailed, Unavailable, WrongType
from millstream.redis_client.error_translation import not_a_stream
from millstream.redis_client.key_names import from_wire
from millstream.redis_client.resp import Command, Redirection, slot_of
from millstream.router.cursors import NEWEST, CursorTable
from millstream.router.gap_detection import (
    MISSING,
    ZERO,
    Entry,
    ReadResult,
    StreamCounters,
    counters_of,
    detect_gap,
    id_as_numbers,
    id_before,
)
from millstream.router.oversized_streams import MOST_BREAKS, OversizedStreams
from millstream.router.read_request import ReaderCallbacks, Request
from millstream.router.read_size import ReadSize
from millstream.router.reconnecting_connection import ReconnectingConnection
from millstream.router.subscriber_buffer import Cursor

logger = logging.getLogger(__name__)

_RETRY_MS = 100.0
_MANY, _PAUSE_MS = 32, 10.0
_RECOVER_MS = 10_000.0
_UNBAR_AFTER_MS = 60_000.0
_CHANGED, _UNREPORTED, _SUSPECTS = range(3)
_IS_ISOLATED = attrgetter("isolated")


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
        self._connection = connection
        self._cursors = cursors
        self._callbacks = callbacks
        self._max_streams = streams
        self._by_slot = by_slot
        self._queues: tuple[deque[Cursor], ...] = (deque(), deque(), deque())
        self._in_flight: list[Request | None] = [None, None, None]
        self._one_off: list[Request] = []
        self._next_queue = _CHANGED
        self._interrupted: list[Cursor] = []
        self._read_size = ReadSize(count=count, reply_bytes=reply_bytes, budget=cursors.budget)
        self._oversized = OversizedStreams()
        self._breaks = 0
        self._unchanged = 0
        self._paused = False
        self._warned = False

    def on_invalidated(self, keys: Sequence[bytes]) -> None:
        """The server reports over `connection` that these streams have changed."""
        for key in keys:
            for cursor in self._cursors.of(key):
                self.schedule(cursor, changed=True)

    def schedule(self, cursor: Cursor, *, changed: bool = False) -> None:
        """Queue the cursor to be read. `changed`: the server reports a change."""
        if cursor.paused or not cursor.buffers:
            return
        if cursor.in_flight:
            cursor.stale = True
        elif not cursor.queued and self._connection.up:  # once the connection is up, every stream is read
            queue = _CHANGED if changed else _UNREPORTED
            if self._oversized.active and cursor in self._oversized:
                if self._oversized.backs_off(cursor):
                    return  # scheduled again once its back-off is over
                queue = _SUSPECTS
            cursor.queued = True
            self._queues[queue].append(cursor)

    def flush(self) -> None:
        """Send the requests that may be sent now."""
        queues, in_flight = self._queues, self._in_flight
        if not any(queues) or not self._connection.up:
            return
        if queues[_SUSPECTS] and not any(in_flight):
            self._send_next(_SUSPECTS)
        if queues[_SUSPECTS] or in_flight[_SUSPECTS]:
            return
        first = self._next_queue
        for queue in (first, _UNREPORTED - first):
            if not queues[queue] or in_flight[queue] is not None or (self._paused and queue == _CHANGED):
                continue
            if not self._connection.up or (self._read_size.cautious and any(in_flight)):
                return
            self._next_queue = _UNREPORTED - queue  # the other queue goes first next time
            self._send_next(queue)

    def reset(self, *, closed_by_server: bool = False) -> None:
        """The connection broke: forget every queue and request.

        `closed_by_server`: perhaps because of the reply to a request in flight.
        """
        requests = [request for request in (*self._in_flight, *self._one_off) if request]
        in_flight = [cursor for request in requests for cursor in request.cursors]
        suspected = [cursor for request in requests if not request.awaits_control for cursor in request.cursors]
        for cursor in in_flight:
            cursor.in_flight = cursor.stale = False
        queued = [cursor for queue in self._queues for cursor in queue]
        for cursor in queued:
            cursor.queued = False
        for queue in self._queues:
            queue.clear()
        self._in_flight[:] = None, None, None
        self._one_off.clear()
        self._interrupted = [*in_flight, *queued] or self._interrupted
        if closed_by_server and suspected:
            self._on_hang_up([cursor for cursor in suspected if cursor.buffers])

    def pop_interrupted(self) -> list[Cursor]:
        """The cursors queued or in flight when the connection broke.

        They go first, or with many breaks they would starve.
        """
        interrupted, self._interrupted = self._interrupted, []
        return interrupted

    def read_once(self, cursors: Iterable[Cursor]) -> None:
        """Read cursors whose slot is migrating to this node (Redis Cluster, ASK)."""
        request = self._request([[cursor] for cursor in cursors], queue=None)
        self._one_off.append(request)
        commands = [part for command in self._commands(request) for part in (("ASKING",), command)]
        self._connection.request(commands, lambda replies: self._on_replies(request, replies[1::2]))

    # Requests

    def _send_next(self, queue: int) -> None:
        cursors = self._dequeue(queue)
        if not cursors:
            return
        request = self._request(self._groups(cursors), queue=queue)
        self._in_flight[queue] = request
        commands = self._commands(request)
        if queue == _SUSPECTS and self._oversized.isolated(request.cursors[0]):
            self._send_control(request, commands)
        else:
            self._connection.request(commands, lambda replies: self._on_replies(request, replies))

    def _send_control(self, request: Request, commands: list[Command]) -> None:
        """Read the stream from its end first: a break before that empty reply has another cause than a large one."""

        def on_reply(_: list[Any]) -> None:
            request.awaits_control = False
            self._send_one_by_one(request, commands, [])

        request.awaits_control = True
        self._connection.request([("XREAD", "COUNT", 1, "STREAMS", request.cursors[0].key, "$")], on_reply)

    def _send_one_by_one(self, request: Request, commands: list[Command], replies: list[Any]) -> None:
        """Send one command at a time, so that no reply adds to the size of another."""
        if commands:
            command, *rest = commands
            self._connection.request([command], lambda reply: self._send_one_by_one(request, rest, replies + reply))
        else:
            self._on_replies(request, replies)

    def _dequeue(self, queue: int) -> list[Cursor]:
        """Dequeue the cursors of the next request."""
        pending, suspecting = self._queues[queue], self._oversized.active
        most, room = self._max_streams, self._read_size.share_bytes
        if queue == _SUSPECTS:
            most = min(most, *map(self._oversized.group_size, islice(pending, most)))
        chosen: dict[bytes, Cursor] = {}
        requeued = []
        while pending and len(chosen) < most and room > 0:
            cursor = pending.popleft()
            if cursor.key in chosen:  # a reply holds each stream once
                requeued.append(cursor)
                continue
            cursor.queued = False
            if suspecting and self._oversized.is_barred(cursor):
                self._cursors.end_cursor(cursor, self._oversized_error(cursor))
            elif cursor.buffers and not cursor.paused:
                cursor.in_flight = True
                chosen[cursor.key] = cursor
                room -= self._read_size.entry_bytes(cursor)
            elif not cursor.buffers:
                self._oversized.forget(cursor)
        pending.extend(requeued)
        return list(chosen.values())

    def _groups(self, cursors: list[Cursor]) -> list[list[Cursor]]:
        """The cursors of each command: on Redis Cluster a command holds one slot."""
        if not self._by_slot and not any(map(_IS_ISOLATED, cursors)):
            return [cursors]
        groups: dict[Any, list[Cursor]] = {}
        for cursor in cursors:
            group = cursor if cursor.isolated else slot_of(cursor.key) if self._by_slot else None
            groups.setdefault(group, []).append(cursor)
        return list(groups.values())

    def _request(self, groups: list[list[Cursor]], *, queue: int | None) -> Request:
        cursors = groups[0] if len(groups) == 1 else list(chain.from_iterable(groups))
        with_counters = [cursor for cursor in cursors if cursor.needs_counters]
        count = self._read_size.count(cursors, with_counters) + 1  # plus the last delivered one
        return Request(cursors=cursors, groups=groups, with_counters=with_counters, count=count, queue=queue)

    def _commands(self, request: Request) -> list[Command]:
        commands: list[Command] = []
        for group in request.groups:
            ids = [c.last if c.last == NEWEST else id_before(c.last) for c in group]
            commands.append(("XREAD", "COUNT", request.count, "STREAMS", *[c.key for c in group], *ids))
        commands += [("XINFO", "STREAM", cursor.key) for cursor in request.with_counters]
        return commands

    # Replies

    def _on_replies(self, request: Request, replies: list[Any]) -> None:
        if request.queue is not None:
            self._in_flight[request.queue] = None
        else:
            self._one_off.remove(request)
        counters = self._counters(request, replies) if request.with_counters else {}
        self._unchanged = 0
        for group, reply in zip(request.groups, replies, strict=False):
            if isinstance(reply, Exception):
                self._on_answered(group)
                self._on_error(group, reply)
            else:
                self._on_streams(group, reply if isinstance(reply, dict) else dict(reply or ()), request, counters)
        self._read_size.learn(request.cursors)
        if request.queue == _CHANGED and self._unchanged >= _MANY and 2 * self._unchanged > len(request.cursors):
            self._pause()

    def _counters(self, request: Request, replies: list[Any]) -> dict[Cursor, StreamCounters | None]:
        counter_replies = replies[len(request.groups) :]
        for cursor, reply in zip(request.with_counters, counter_replies, strict=True):
            if isinstance(reply, AccessDenied):
                self._cursors.end_cursor(cursor, reply)
        return dict(zip(request.with_counters, map(counters_of, counter_replies), strict=True))

    def _on_answered(self, group: Iterable[Cursor]) -> None:
        step = self._cursors.step
        for cursor in group:
            cursor.in_flight = False
            cursor.read_step = step
        if self._oversized.active:
            for cursor in group:
                self._oversized.on_reply(cursor)

    def _on_streams(
        self,
        group: Iterable[Cursor],
        streams: dict[bytes, list[Entry]],
        request: Request,
        counters: dict[Cursor, StreamCounters | None],
    ) -> None:
        self._on_answered(group)
        for cursor in group:
            cursor.isolated = False
            if cursor.buffers and not cursor.paused:
                found = streams.get(cursor.key, ())
                self._process(cursor, found, request.count, counters.get(cursor))
            if cursor.stale:
                cursor.stale = False
                self.schedule(cursor, changed=True)

    # Streams whose reply ends connections

    def _on_hang_up(self, cursors: list[Cursor]) -> None:
        self._read_size.on_break()
        self._breaks += 1
        breaks = self._breaks
        self._callbacks.call_later(_RECOVER_MS, lambda: self._recover(breaks))
        backing_off, ended, wait_ms = self._oversized.on_break(cursors)
        self._callbacks.call_later(wait_ms, lambda: self._schedule_all(self._oversized.on_backoff_over(backing_off)))
        for cursor in ended:
            error = self._oversized_error(cursor)
            logger.warning("stream given up: %s", error)
            self._cursors.end_cursor(cursor, error)
        if keys := [cursor.key for cursor in ended]:
            self._callbacks.call_later(_UNBAR_AFTER_MS, lambda: self._oversized.unbar(keys))

    def _recover(self, breaks: int) -> None:
        if breaks == self._breaks and self._read_size.recover():
            self._callbacks.call_later(_RECOVER_MS, lambda: self._recover(breaks))

    def _oversized_error(self, cursor: Cursor) -> CommandFailed:
        return CommandFailed(
            f"{from_wire(cursor.key)} cannot be read: Redis closed the connection {MOST_BREAKS} times in a row on a read of "
            f"the entries after {cursor.last.decode()}. Most likely an entry is larger than the output buffer limit: "
            "set client-output-buffer-limit normal (and maxmemory-clients, if used) to four times the largest entry, "
            "or delete that entry; then subscribe again, a minute later"
        )

    # Entries

    def _pause(self) -> None:
        """Pause: most reported streams had not changed, as Redis evicts keys from a full tracking table.

        Reading them makes Redis evict others and report those, so reading on at once would never end.
        """
        self._paused = True
        self._callbacks.call_later(_PAUSE_MS, self._unpause)
        if not self._warned:
            self._warned = True
            logger.warning(
                "Redis evicts streams from its tracking table; "
                "raise tracking-table-max-keys above the number of streams"
            )

    def _unpause(self) -> None:
        self._paused = False

    def _process(self, cursor: Cursor, found: Sequence[Entry], count: int, counters: StreamCounters | None) -> None:
        """Process one stream of a reply: `found` should begin with the last entry delivered."""
        if found and found[0][0] == cursor.last and not cursor.needs_counters:  # the usual case: nothing to check
            if len(found) > 1:
                self._cursors.deliver(cursor, found[1:])
            else:
                self._unchanged += 1
        elif not self._process_unproven(cursor, found, full=len(found) >= count, counters=counters):
            return
        if len(found) >= count:
            self.schedule(cursor)
            return
        self._cursors.promote(cursor)
        if self._callbacks.on_read is not None:
            self._callbacks.on_read(cursor)

    def _process_unproven(
        self, cursor: Cursor, found: Sequence[Entry], *, full: bool, counters: StreamCounters | None
    ) -> bool:
        """Process a read where entries may be missing before `found`; False if the stream must be read again."""
        if cursor.last == NEWEST:
            self._start_at_end(cursor, counters)
            return False
        still_there = bool(found) and found[0][0] == cursor.last
        entries = tuple(found[1:] if still_there else found)
        present = still_there or cursor.last == ZERO
        if counters is not None and cursor.needs_counters:
            return self._check_gap(
                cursor, ReadResult(cursor.last, cursor.ordinal, cursor.proven, present, entries, full), counters
            )
        if not present or (entries and cursor.last == ZERO and cursor.ordinal is not None):
            cursor.needs_counters = True  # entries may have been trimmed meanwhile: read again, with counters
            self.schedule(cursor, changed=True)
            return False
        if entries:
            self._cursors.deliver(cursor, entries)
        else:
            self._unchanged += 1
        return True

    def _check_gap(self, cursor: Cursor, result: ReadResult, counters: StreamCounters) -> bool:
        """Deliver a read that came with counters; False if the stream must be read again."""
        verdict = detect_gap(result, counters)
        if verdict.kind == "retry":
            self._callbacks.schedule(cursor)
            return False
        if verdict.kind == "diverged":
            self._identify(cursor, counters)
            return False
        if verdict.kind == "deleted":
            cursor.deleted_at = cursor.deleted_at or cursor.last
            cursor.last, cursor.ordinal, cursor.proven = ZERO, 0, False
            return True
        if cursor.deleted_at and counters is not MISSING:
            self._cursors.report_gap(cursor, "recreated", cursor.deleted_at)
            cursor.deleted_at = None
        elif verdict.kind != "complete":
            left = counters.first or counters.last_generated
            self._cursors.report_gap(cursor, verdict.kind, cursor.last, verdict.missed, left=left)
        if verdict.kind != "complete" and counters.first is None:  # every entry is gone: report that once
            cursor.last, cursor.proven = counters.last_generated, False
        elif result.present:
            cursor.proven = cursor.last != ZERO
        known = verdict.ordinal is not None
        cursor.needs_counters = not (known and result.present and cursor.deleted_at is None)
        cursor.ordinal = verdict.ordinal - len(result.entries) if verdict.ordinal is not None else None
        if result.entries:
            self._cursors.deliver(cursor, result.entries)
        return True

    def _identify(self, cursor: Cursor, counters: StreamCounters) -> None:
        """The stream was recreated, or Redis lost its end: read an old entry to find out which."""
        request = self._request([[cursor]], queue=None)
        self._one_off.append(request)
        cursor.in_flight = True
        anchor = cursor.anchor or cursor.last
        command: Command = ("XRANGE", cursor.key, anchor, anchor)
        self._connection.request([command], lambda replies: self._on_identified(request, cursor, counters, replies[0]))

    def _on_identified(self, request: Request, cursor: Cursor, counters: StreamCounters, reply: Any) -> None:
        self._one_off.remove(request)
        cursor.in_flight = cursor.stale = False
        if isinstance(reply, AccessDenied):
            self._cursors.end_cursor(cursor, reply)
            return
        if not isinstance(reply, Exception):
            self._cursors.report_gap(cursor, "rewound" if reply else "recreated", cursor.last)
            if not reply:
                cursor.last, cursor.ordinal = ZERO, None
            elif id_as_numbers(counters.last_generated) < id_as_numbers(cursor.last):
                cursor.last, cursor.ordinal = counters.last_generated, counters.entries_added
            else:  # the stream has grown past the position since
                cursor.ordinal = None
            cursor.deleted_at, cursor.needs_counters, cursor.proven = None, True, False
        self._callbacks.schedule(cursor)

    def _start_at_end(self, cursor: Cursor, counters: StreamCounters | None) -> None:
        if counters is None:
            self._callbacks.schedule(cursor)
            return
        cursor.last, cursor.ordinal, cursor.proven = (
            counters.last_generated,
            counters.entries_added,
            counters.last == counters.last_generated,
        )
        cursor.needs_counters = False
        self._cursors.report_start(cursor)
        self._callbacks.schedule(cursor)  # entries added since are read from the id known now

    def _on_error(self, group: Sequence[Cursor], error: Exception) -> None:
        cursors = list(group)
        if isinstance(error, Redirection):
            if error.asking:
                for cursor in cursors:
                    cursor.in_flight = True
                self._callbacks.read_at(error.node, cursors)
                return
            self._callbacks.on_moved()
        if isinstance(error, Unavailable):
            for cursor in cursors:
                cursor.isolated = True  # during a slot migration, keys of one slot may be on two nodes
            self._callbacks.call_later(_RETRY_MS, lambda: self._schedule_all(cursors))
        elif len(cursors) > 1:  # one of them is the cause
            for cursor in cursors:
                cursor.isolated = True
            self._schedule_all(cursors)
        else:
            name = from_wire(cursors[0].key)
            wrong = not_a_stream(name) if isinstance(error, WrongType) else type(error)(f"{name}: {error}")
            self._cursors.end_cursor(cursors[0], wrong)

    def _schedule_all(self, cursors: Iterable[Cursor]) -> None:
        for cursor in cursors:
            self._callbacks.schedule(cursor)
