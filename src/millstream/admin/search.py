"""Search over all: what has a name, a key or an id, found within a time."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from millstream.admin.inspection import find_handlers, find_stream_names
from millstream.admin.key_places import search_key
from millstream.admin.timed_reads import TimedReads
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, RedisError
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, from_wire, to_wire
from millstream.redis_client.resp import Command

T = TypeVar("T")

_ENTRY_ID = re.compile(rb"\d{1,20}-\d{1,20}")
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
    running = _Search(TimedReads(client, budget_ms, clock=clock), wanted)
    handlers = find_handlers(client) if known is None else known
    running.find_names(handlers)
    if with_entries and (entry_id := _entry_id_of(wanted)) is not None:
        running.find_entries(handlers, str(entry_id))
    if with_keys:
        running.find_keys(handlers)
    return running.end()


class _Search:
    """One search, as long as its reads have time."""

    def __init__(self, reads: TimedReads, wanted: bytes) -> None:
        self._found = Found()
        self._reads = reads
        self._wanted = wanted
        self._name = from_wire(wanted)

    def end(self) -> Found:
        """What was found."""
        self._found.hits.sort(key=lambda one: not one.exact)
        self._found.is_partial |= self._reads.is_partial
        return self._found

    def _add(self, hits: Sequence[Hit], *, is_partial: bool = False) -> None:
        self._found.hits += hits[:MOST_HITS]
        self._found.is_partial |= is_partial or len(hits) > MOST_HITS

    def find_names(self, handlers: Sequence[HandlerKeys]) -> None:
        """Handlers that have it in their names, and streams that begin with it."""
        labels = sorted({one.label for one in handlers if self._name in one.label})
        self._add([Hit(kind="handler", handler=one, exact=one == self._name) for one in labels])
        names, is_partial = self._find_streams(self._name)
        self._add([Hit(kind="stream", stream=one, exact=one == self._name) for one in names], is_partial=is_partial)

    def find_entries(self, handlers: Sequence[HandlerKeys], wanted: str) -> None:
        """Entries with this id, and dead letters."""
        names, is_partial = self._find_streams("")
        self._found.is_partial |= is_partial
        streams = [(one, ("XRANGE", to_wire(one), wanted, wanted)) for one in names]
        hits = [Hit(kind="entry", exact=True, stream=one, id=wanted) for one in self._having(streams)]
        queues = [(one, ("XRANGE", to_wire(one.dead_letters), wanted, wanted)) for one in handlers]
        hits += [
            Hit(kind="dead letter", exact=True, handler=one.label, stream=one.stream, id=wanted)
            for one in self._having(queues)
        ]
        self._add(hits)

    def _find_streams(self, prefix: str) -> tuple[list[str], bool]:
        reads = self._reads
        return find_stream_names(reads.client, prefix, budget_ms=reads.left_ms, clock=reads.clock)

    def _having(self, commands: Sequence[tuple[T, Command]]) -> list[T]:
        """The things about which a command returns something."""
        found = self._reads.replies(commands)
        return [one for one, reply in found if reply and not isinstance(reply, RedisError)]

    def find_keys(self, handlers: Sequence[HandlerKeys]) -> None:
        """Handlers on streams for which this is a key."""
        having, _ = search_key(self._reads, handlers, self._wanted)
        self._add(
            [Hit(kind="key", exact=True, handler=one.label, stream=one.stream, key=self._wanted) for one in having]
        )


def _entry_id_of(text: bytes) -> EntryId | None:
    """The entry id that a text is, with both its parts; None for any other, such as a key of digits that is no id."""
    try:
        return EntryId.parse(text) if _ENTRY_ID.fullmatch(text) else None
    except ConfigError:  # a part is beyond 64 bits
        return None
