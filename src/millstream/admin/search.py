"""Search over all: what has a name, a key or an id, found within a time."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from millstream.admin.inspection import find_handlers, find_stream_names
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.dead_letter_queue import DeadLetterQueue
from millstream.delivery.keyed_stream import queue_of_key
from millstream.delivery.state_expiry import live_states
from millstream.errors import AccessDenied, ConfigError, RedisError, WrongType
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, from_wire, to_wire
from millstream.redis_client.pipelining import send_all
from millstream.redis_client.resp import Command, Reply

T = TypeVar("T")

_ENTRY_ID = re.compile(rb"\d{1,20}-\d{1,20}")
_AT_ONCE = 200
MOST_HITS = 100
"""So many hits are returned of each kind."""

Kind = Literal["handler", "stream", "key", "entry", "dead letter"]


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One thing that was found.

    * `exact`: its whole name is what was looked for; else a part of a handler's, or the beginning of a stream's
    * `handler`, `stream`, `key`, `id`: where it is; None for what it does not have
    """

    kind: Kind
    exact: bool
    handler: str | None = None
    stream: str | None = None
    key: bytes | None = None
    id: str | None = None


@dataclass(kw_only=True)
class Found:
    """The hits, those that are exact first; `is_partial`: there may be more."""

    hits: list[Hit] = field(default_factory=list)
    is_partial: bool = False


def search(
    client: Client,
    wanted: bytes,
    *,
    with_entries: bool = True,
    with_keys: bool = True,
    known: Sequence[HandlerKeys] | None = None,
    budget_ms: float = 1_000.0,
    clock: Clock = SYSTEM_CLOCK,
) -> Found:
    """What has this name: handlers, streams, and unless they are left out keys, and entries and dead letters by id.

    It ends about `budget_ms` milliseconds after it has begun; then there may be more. A key is found where it has
    messages that wait, a state or dead letters. `known`: what `find_handlers` has found before. Raises RedisError, and
    ConfigError where nothing is wanted.
    """
    if not wanted:
        raise ConfigError("say what to find: a handler, a key, a stream or an entry id")
    running = _Search(client, wanted, clock, clock.monotonic_ms() + budget_ms)
    handlers = find_handlers(client) if known is None else known
    running.find_names(handlers)
    if with_entries and (entry_id := _entry_id_of(wanted)) is not None:
        running.find_entries(handlers, str(entry_id))
    if with_keys:
        running.find_keys(handlers)
    running.found.hits.sort(key=lambda one: not one.exact)
    return running.found


class _Search:
    """One search, until `end_ms`."""

    def __init__(self, client: Client, wanted: bytes, clock: Clock, end_ms: float) -> None:
        self.found = Found()
        self._client = client
        self._wanted = wanted
        self._name = from_wire(wanted)
        self._clock = clock
        self._end_ms = end_ms

    @property
    def _left_ms(self) -> float:
        return self._end_ms - self._clock.monotonic_ms()

    def _add(self, hits: Sequence[Hit], *, is_partial: bool = False) -> None:
        self.found.hits += hits[:MOST_HITS]
        self.found.is_partial |= is_partial or len(hits) > MOST_HITS

    def find_names(self, handlers: Sequence[HandlerKeys]) -> None:
        """Handlers that have it in their names, and streams that begin with it."""
        labels = sorted({one.label for one in handlers if self._name in one.label})
        self._add([Hit(kind="handler", handler=one, exact=one == self._name) for one in labels])
        names, is_partial = find_stream_names(self._client, self._name, budget_ms=self._left_ms, clock=self._clock)
        self._add([Hit(kind="stream", stream=one, exact=one == self._name) for one in names], is_partial=is_partial)

    def find_entries(self, handlers: Sequence[HandlerKeys], wanted: str) -> None:
        """Entries with this id, and dead letters."""
        names, is_partial = find_stream_names(self._client, budget_ms=self._left_ms, clock=self._clock)
        self.found.is_partial |= is_partial
        streams = [(one, ("XRANGE", to_wire(one), wanted, wanted)) for one in names]
        hits = [Hit(kind="entry", exact=True, stream=one, id=wanted) for one, reply in self._replies(streams) if reply]
        queues = [(one, ("XRANGE", to_wire(one.dead_letters), wanted, wanted)) for one in handlers]
        hits += [
            Hit(kind="dead letter", exact=True, handler=one.label, stream=one.stream, id=wanted)
            for one, reply in self._replies(queues)
            if reply
        ]
        self._add(hits)

    def find_keys(self, handlers: Sequence[HandlerKeys]) -> None:
        """Handlers on streams for which this is a key."""
        name = queue_of_key(self._wanted, b"")
        commands: list[tuple[HandlerKeys, Command]] = []
        for one in handlers:
            commands += [
                (one, ("HGET", to_wire(one.state), self._wanted)),
                (one, ("EXISTS", one.queue(name))),
                (one, ("HEXISTS", to_wire(one.parked), name)),
            ]
        having = dict.fromkeys(one for one, reply in self._replies(commands) if self._is_there(one, reply))
        for one in handlers:
            if one not in having and self._has_letters(one):
                having[one] = None
        self._add(
            [Hit(kind="key", exact=True, handler=one.label, stream=one.stream, key=self._wanted) for one in having]
        )

    def _is_there(self, keys: HandlerKeys, reply: Reply) -> bool:
        """Whether a state has not expired, or something exists."""
        return bool(live_states(self._client, to_wire(keys.state), [reply])[0] if isinstance(reply, bytes) else reply)

    def _has_letters(self, keys: HandlerKeys) -> bool:
        """Whether one of the handler's dead letters has the key, as far as there is time to read them."""
        if self._left_ms <= 0:
            self.found.is_partial = True
            return False
        try:
            for entry in DeadLetterQueue(self._client).newest(keys):
                if entry.letter is not None and entry.letter.key == self._wanted:
                    return True
                if self._left_ms <= 0:
                    self.found.is_partial = True
                    return False
        except RedisError as error:
            if not _is_left_out(error):
                raise
        return False

    def _replies(self, commands: Sequence[tuple[T, Command]]) -> Iterator[tuple[T, Reply]]:
        """The replies to commands about many things, until the time is over; without those that Redis refuses."""
        for at in range(0, len(commands), _AT_ONCE):
            if at and self._left_ms <= 0:
                self.found.is_partial = True
                return
            some = commands[at : at + _AT_ONCE]
            for (one, _), reply in zip(some, send_all(self._client, [one for _, one in some]), strict=True):
                if not isinstance(reply, RedisError):
                    yield one, reply
                elif not _is_left_out(reply):
                    raise reply


def _entry_id_of(text: bytes) -> EntryId | None:
    """The entry id that a text is, with both its parts; None for any other, such as a key of digits that is no id."""
    try:
        return EntryId.parse(text) if _ENTRY_ID.fullmatch(text) else None
    except ConfigError:  # a part is beyond 64 bits
        return None


def _is_left_out(error: RedisError) -> bool:
    """Whether an error concerns one key alone, which is left out: it holds something else, or is not this user's."""
    return isinstance(error, WrongType) or (isinstance(error, AccessDenied) and error.concerns_key)
