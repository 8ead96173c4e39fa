"""TrackedClient: a client for figures that are read again and again, at a cost that follows what has changed.

Redis reports the change of a key, but not what happens to a consumer group: XREADGROUP, XACK, XCLAIM and XGROUP
invalidate nothing (Redis documentation, "Client-side caching"; seen on Redis 7.0, 8.2 and Valkey 9.1).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import from_wire
from millstream.redis_client.key_tracking import KeyTracker
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Command, Reply, ReplySize, routing_key
from millstream.redis_client.scripts import Script

GROUPS_MS = 30_000.0
"""How long replies about the groups of a stream are kept, in milliseconds, while no entry waits for any of them."""

_KEPT_MS = 300_000.0
"""How long all others are kept: Redis does not report every change of a key (SWAPDB)."""
_UNUSED_COLLECTIONS = 3

_OF_KEYS = frozenset(("HLEN", "HMGET", "LLEN", "XLEN", "ZCARD", "ZRANGE"))
_STREAM, _GROUPS, _CONSUMERS, _PENDING = "XINFO STREAM", "XINFO GROUPS", "XINFO CONSUMERS", "XPENDING"
_OF_GROUPS = frozenset((_GROUPS, _CONSUMERS, _PENDING))
_SUMMARY_PARTS = 3


class TrackedClient(Client):
    """A `Client` whose `pipeline` sends some read commands again only where their replies may have changed.

    * HLEN, HMGET, LLEN, XLEN, ZCARD, ZRANGE, and `scripts`, which read one key and nothing else: when their key has
      changed, as key tracking reports, and after five minutes
    * XINFO STREAM: likewise, and after `GROUPS_MS`, as it counts groups. The content of entries is not kept
    * XINFO GROUPS, XINFO CONSUMERS, and XPENDING without a range: in each collection; where all groups of a stream have
      read and acknowledged all its entries, as XINFO STREAM and then XINFO GROUPS show, when the stream has changed, and
      after `GROUPS_MS`

    A collection is all that is read from one call of `begin_collection` to the next; in it each of these commands is sent
    once. Where the server or the user does not allow key tracking (see `KeyTracker`), no reply is kept. Not for several
    threads at the same time.
    """

    def __init__(
        self, url: str, *, timeout_ms: int = 15_000, clock: Clock = SYSTEM_CLOCK, scripts: Collection[Script] = ()
    ) -> None:
        super().__init__(url, timeout_ms=timeout_ms, clock=clock)
        self._scripts = frozenset(one.sha for one in scripts)
        self._untracked = Client(url, timeout_ms=timeout_ms, clock=clock)
        self._tracker = KeyTracker(self._untracked)
        self._is_current = False
        self._kept = _KeptReplies(clock)

    def close(self) -> None:
        """Close every connection; the client may be used again."""
        super().close()
        self._tracker.close()
        self._untracked.close()

    def begin_collection(self, *, anew: bool = False) -> None:
        """Replies are as of now from here on; `anew`: those that tell of groups, too. Sends nothing by itself."""
        self._is_current = False
        self._kept.begin_collection(anew=anew)

    def pipeline(self, commands: Sequence[Command], meter: ReplySize | None = None) -> list[Reply]:
        """As `Client.pipeline`, except for the commands whose replies are kept."""
        reads = [_read_of(one, self._scripts) for one in commands] if meter is None else []
        if not any(reads):
            return super().pipeline(commands, meter)
        self._forget_changed()
        replies: list[Reply] = [None if one is None else self._kept.find(one) for one in reads]
        missing = {index: one for index, one in enumerate(reads) if one is not None and replies[index] is None}
        for index, reply in self._read_tracked(missing).items():
            replies[index] = reply
        rest = [index for index, reply in enumerate(replies) if reply is None]
        if rest:
            for index, reply in zip(rest, super().pipeline([commands[index] for index in rest]), strict=True):
                replies[index] = reply
        return replies

    def _forget_changed(self) -> None:
        if not self._is_current:
            try:
                self._kept.forget(self._tracker.changed())
            except RedisError:  # what is sent next without tracking raises the error, or Redis is back
                self._kept.forget(None)
            except BaseException:  # an interruption, as by Ctrl-C: reported changes may be lost with it
                self._kept.forget(None)
                raise
            self._is_current = True

    def _read_tracked(self, missing: Mapping[int, "_Read"]) -> dict[int, Reply]:
        """Send these commands over tracked connections; return the replies that are no errors, by their index."""
        found: dict[int, Reply] = {}
        left = dict(missing)
        try:
            while left and not self._tracker.refused:
                some = {one.key: index for index, one in reversed(left.items())}  # of each key the next command
                for key, reply in self._tracker.read({key: left[index].command for key, index in some.items()}):
                    read = left.pop(some[key])
                    if not isinstance(reply, RedisError):  # sent again without tracking: that error names the key
                        found[some[key]] = self._kept.keep(read, reply)
        except RedisError:
            self._kept.forget(None)
            return {}
        return found


class _Read(msgspec.Struct, frozen=True):
    """A read command whose reply may be kept."""

    kind: str
    key: str
    command: Command


class _KeptReply(msgspec.Struct):
    """A reply: in which collection it was read, until when it is kept, and in which collection it was used last."""

    reply: Reply
    collection: int
    until_ms: float
    last_used: int


class _Key(msgspec.Struct):
    """What is known of a key.

    * `last_id`: of a stream, its last generated id
    * `idle_until_ms`: until when its groups count as idle: no entry waits for any of them
    """

    replies: dict[Command, _KeptReply] = {}
    last_id: bytes | None = None
    idle_until_ms: float = 0.0


class _KeptReplies:
    """The replies that are known, and how long each is valid. No I/O."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._keys: dict[str, _Key] = {}
        self._collection = 0
        self._groups_since = 0

    def begin_collection(self, *, anew: bool) -> None:
        """Begin the next collection, and forget the replies that the last ones have not used."""
        self._collection += 1
        if anew:
            self._groups_since = self._collection
        oldest = self._collection - _UNUSED_COLLECTIONS
        for known in self._keys.values():
            known.replies = {name: one for name, one in known.replies.items() if one.last_used >= oldest}
        self._keys = {key: known for key, known in self._keys.items() if known.replies}

    def forget(self, changed: set[str] | None) -> None:
        """Forget what is known of these keys; of all, for None."""
        if changed is None:
            self._keys.clear()
        for key in changed or ():
            self._keys.pop(key, None)

    def find(self, read: _Read) -> Reply:
        """The reply to a command, if it is valid; else None."""
        known = self._keys.get(read.key)
        kept = None if known is None else known.replies.get(read.command)
        if known is None or kept is None:
            return None
        kept.last_used = self._collection
        is_old = (read.kind == _STREAM or read.kind in _OF_GROUPS) and kept.collection < self._groups_since
        is_valid = kept.collection == self._collection or (not is_old and self._clock.monotonic_ms() < kept.until_ms)
        return kept.reply if is_valid else None

    def keep(self, read: _Read, reply: Reply) -> Reply:
        """Keep a reply of a tracked connection, as other connections have it (RESP2); return it."""
        known = self._keys.setdefault(read.key, _Key())
        now_ms = self._clock.monotonic_ms()
        until_ms = now_ms + _KEPT_MS
        reply = _as_resp2(reply)
        if read.kind == "ZRANGE" and reply and isinstance(reply[0], list):  # WITHSCORES
            reply = [part for member, score in reply for part in (member, repr(score).encode())]
        elif read.kind == _STREAM:
            fields = mapping_of(reply)
            known.last_id, until_ms = fields[b"last-generated-id"], now_ms + GROUPS_MS
            reply = _as_resp2({name: _without_content(name, one) for name, one in fields.items()})
        elif read.kind == _GROUPS:
            known.idle_until_ms = now_ms + GROUPS_MS if _are_idle(map(mapping_of, reply), known.last_id) else 0.0
        if read.kind in _OF_GROUPS:
            until_ms = known.idle_until_ms
        known.replies[read.command] = _KeptReply(reply, self._collection, until_ms, self._collection)
        return reply


def _read_of(command: Command, scripts: Collection[str]) -> _Read | None:
    verb = str(command[0])
    kind = f"{verb} {command[1]!s}" if verb == "XINFO" else verb
    is_kept = (
        kind in _OF_KEYS
        or kind in (_STREAM, _GROUPS, _CONSUMERS)
        or (kind == _PENDING and len(command) == _SUMMARY_PARTS)
        or (kind == "EVALSHA" and command[1] in scripts)
    )
    key = routing_key(command) if is_kept else None
    if key is None:
        return None
    return _Read(kind, from_wire(key) if isinstance(key, bytes) else str(key), tuple(command))


def _are_idle(groups: Iterable[Mapping[bytes, Reply]], last_id: bytes | None) -> bool:
    """Whether all groups have read and acknowledged all entries up to `last_id`."""
    return all(one[b"last-delivered-id"] == last_id and not one[b"pending"] for one in groups)


def _without_content(name: bytes, value: Reply) -> Reply:
    """A field of XINFO STREAM: of an entry its id alone."""
    return [value[0], []] if value and name in (b"first-entry", b"last-entry") else value


def _as_resp2(reply: Reply) -> Reply:
    """A reply of RESP3 with its mappings as RESP2 has them: as flat lists."""
    if isinstance(reply, dict):
        return [part for pair in reply.items() for part in pair]
    if isinstance(reply, list):
        return [_as_resp2(one) for one in reply]
    return reply
