"""Delayed messages: published now, added to their stream when they are due (as DelaySeconds of SQS).

They wait in Redis, in the stream's hash slot, until a process moves them: workers and Spark runs do. Moving is one
atomic step by the server's clock, so any number of processes may do it, and each may die at any point.
"""

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from millstream.errors import ConfigError, MillstreamError, RedisError, Unavailable, WrongType
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import StreamKeys, from_wire, to_wire
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.replies import pairs_of
from millstream.redis_client.scripts import Script

logger = logging.getLogger(__name__)

MOVE_DUE = Script("producer/move_due")
CANCEL_DELAYED = Script("producer/cancel_delayed")

_MOST_MESSAGES = 500
_MOST_BYTES = 1_000_000
_READ_AT_ONCE = 1_000
_LAST_MS = 253_402_300_799_999  # the last of the year 9999, which dates go up to
_RAW_HEADS = {0xD9: 2, 0xDA: 3, 0xDB: 5}

_read_items = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def _raise(error: MillstreamError) -> None:
    raise error


class DelayedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A delayed message: the id that its publisher received, when it is due, and its names and values.

    `problem`: why it cannot be read as a message; it has no names and values then. None if it can.
    """

    stream: str
    id: str
    due_ms: int
    pairs: Sequence[bytes]
    problem: str | None = None


class MovedMessages(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `move_due`, in all or on one stream.

    * `moved`: messages added to their streams
    * `next_ms`: milliseconds until the next one is due; 0 if some are due already, None if none waits
    """

    moved: int
    next_ms: int | None


class DelayedMessages:
    """The delayed messages of any streams. Each method raises RedisError, and ConfigError for an impossible stream."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def move_due(self, streams: Sequence[str]) -> MovedMessages:
        """Add the due messages of each of `streams` to it, in due order; at most 500 messages, or about a million
        bytes, each.

        One round trip per Redis node. Safe to repeat when its reply is lost, and to run in any number of processes.
        Raises OutOfMemory at maxmemory, whether a message is due or not: nothing is moved on that server then.
        """
        movements = self.move_each(streams)
        waits = [one.next_ms for one in movements if one.next_ms is not None]
        return MovedMessages(moved=sum(one.moved for one in movements), next_ms=min(waits, default=None))

    def move_each(self, streams: Sequence[str]) -> list[MovedMessages]:
        """Move as `move_due` does; return the result of each stream."""
        names = list(map(StreamKeys, streams))
        replies = self._client.scripts(
            [
                (MOVE_DUE, tuple(map(to_wire, (k.stream, k.due, k.delayed))), (_MOST_MESSAGES, _MOST_BYTES))
                for k in names
            ]
        )
        return [MovedMessages(moved=moved, next_ms=None if next_ms < 0 else next_ms) for moved, next_ms in replies]

    def move_until_stopped(
        self,
        streams: Callable[[], Sequence[str]],
        stopping: threading.Event,
        *,
        every_ms: float = 1_000.0,
        on_moved: Callable[[int], None] = lambda moved: None,
        on_refused: Callable[[MillstreamError], None] = _raise,
    ) -> None:
        """Move messages when they are due, until `stopping`; look for new ones every `every_ms` milliseconds.

        `on_refused` is called with each error that does not end by itself, and may raise it, as it does by default;
        otherwise all streams are tried again. Of several streams, those that the error does not concern were moved.
        """
        wait_ms = 0.0
        while not stopping.wait(wait_ms / 1000):
            wait_ms = every_ms
            try:
                movement = self.move_due(streams())
            except (Unavailable, WrongType) as error:  # WrongType: the reader of that stream reports it
                logger.debug("cannot move delayed messages: %s; trying again", error)
            except (RedisError, ConfigError) as error:
                on_refused(error)
            else:
                on_moved(movement.moved)
                if movement.next_ms is not None:
                    wait_ms = min(wait_ms, movement.next_ms)

    def count(self, stream: str) -> int:
        """Return how many delayed messages `stream` has."""
        waiting: int = self._client.execute("ZCARD", to_wire(StreamKeys(stream).due))
        return waiting

    def find(self, stream: str, *, limit: int = 100, after: tuple[int, str] | None = None) -> list[DelayedMessage]:
        """Return the first `limit` delayed messages of `stream`, in due order. Those moved meanwhile are left out.

        `after`: when a message is due (Unix milliseconds), and its id: those behind it, also if it was moved.
        """
        k = StreamKeys(stream)
        if after is None:
            found = list(pairs_of(self._client.execute("ZRANGE", to_wire(k.due), 0, limit - 1, "WITHSCORES")))
        else:
            found = self._ids_behind(k, after, limit)
        values = call_all(self._client, [("HGET", to_wire(k.delayed), one) for one, _ in found])
        return [
            _read(stream, one, score, packed)
            for (one, score), packed in zip(found, values, strict=True)
            if packed is not None
        ]

    def _ids_behind(self, k: StreamKeys, after: tuple[int, str], limit: int) -> list[tuple[bytes, bytes]]:
        """The ids behind a position, with their scores. Of those that are due at the same time the id decides."""
        due_ms, last = after[0], to_wire(after[1])
        found: list[tuple[bytes, bytes]] = []
        at, is_more = 0, True
        while is_more and len(found) < limit:
            bounds = (due_ms, "+inf", "BYSCORE", "LIMIT", at, _READ_AT_ONCE, "WITHSCORES")
            page = list(pairs_of(self._client.execute("ZRANGE", to_wire(k.due), *bounds)))
            found += [(one, score) for one, score in page if (float(score), one) > (due_ms, last)]
            at, is_more = at + len(page), len(page) == _READ_AT_ONCE
        return found[:limit]

    def count_waiting(self, stream: str, ids: Sequence[str]) -> int:
        """Return how many of these messages are still delayed."""
        key = to_wire(StreamKeys(stream).delayed)
        found = self._client.pipeline([("HGET", key, to_wire(one)) for one in dict.fromkeys(ids)]) if ids else []
        return sum(raise_if_error(packed) is not None for packed in found)

    def cancel(self, stream: str, ids: Sequence[str]) -> int:
        """Cancel messages by the ids that their publishers received; return how many were still delayed.

        Until its window is over, the `dedupe_id` of such a message keeps a second message with it from being added.
        """
        k = StreamKeys(stream)
        cancelled: int = self._client.script(CANCEL_DELAYED, (to_wire(k.due), to_wire(k.delayed)), ids) if ids else 0
        return cancelled


def _read(stream: str, delayed_id: bytes, score: bytes, packed: bytes) -> DelayedMessage:
    name, due_ms = from_wire(delayed_id), min(max(float(score), 0), _LAST_MS)
    try:
        pairs = _items(packed)
    except ValueError as error:
        return DelayedMessage(stream=stream, id=name, due_ms=int(due_ms), pairs=(), problem=str(error))
    return DelayedMessage(stream=stream, id=name, due_ms=int(due_ms), pairs=pairs)


def _items(packed: bytes) -> list[bytes]:
    # Redis packs every value as msgpack text, even if it is no UTF-8: the head is cut off rather than decoded.
    items = [raw[_RAW_HEADS.get(raw[0], 1) :] for raw in map(bytes, _read_items(packed))]
    if len(items) % 2:
        raise ValueError("its fields are not names and values in turn")
    return items
