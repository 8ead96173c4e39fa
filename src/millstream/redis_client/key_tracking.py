"""KeyTracker: reads keys, and reports which of them have changed since, for callers that poll.

A `Router` learns the same by tracking; a `KeyTracker` does so without a thread: nothing runs between two calls, and
invalidations wait in the socket. They are few, since the server reports the change of a key once, until the key is read
again (Redis documentation, "Client-side caching").
"""

import logging
import select
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from millstream.clock import SYSTEM_CLOCK, Backoff
from millstream.errors import AccessDenied, CommandFailed, RedisError, ScriptMissing, Unavailable
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import from_wire, to_wire
from millstream.redis_client.resp import Command, Node, Push, Reply, RespConnection, slot_of, slot_owners
from millstream.redis_client.scripts import with_texts

logger = logging.getLogger(__name__)

_WINDOW = 500
_UNTRACKED_MS = 20.0
_FIRST_REDIAL_MS, _LONGEST_REDIAL_MS = 1_000.0, 60_000.0
_TRACK: Command = ("CLIENT", "TRACKING", "ON")
"""Where tracking is on this changes nothing, and its reply follows all pending invalidations."""


class KeyTracker:
    """Sends read commands about single keys, over one tracked connection to each primary. Not thread-safe.

    Where invalidations may be missing, nothing is known of any key: at first, over a new connection, after FLUSHALL,
    when slots have moved; and always where the server does not support tracking, or the ACL forbids it
    (`client|tracking`), after a warning. The keys of a primary of a cluster that cannot be reached are not tracked until
    it can be.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._connections: dict[Node | None, _TrackedConnection] = {}
        self._owners: list[Node | None] = []
        self._slots: Reply = None  # the ranges of slots and their primaries, as in the reply that `_owners` is of
        self._untracked: set[str] = set()
        self._refused = False
        self._away: set[Node | None] = set()  # the nodes that could not be reached
        self._redials = Backoff(_FIRST_REDIAL_MS, _LONGEST_REDIAL_MS)
        self._redial_due_ms = 0.0

    def close(self) -> None:
        """Close its connections; it may be used again."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def changed(self) -> set[str] | None:
        """The keys that have changed since they were read, each once; None: nothing is known of any key.

        One round trip to each primary, however many keys there are. Raises RedisError.
        """
        invalidated, self._untracked = self._untracked, set()
        if not self._refused and self._read_invalidations():
            found = invalidated.union(*(connection.pop_invalidated() for connection in self._connections.values()))
            if self._away and self._is_redial_due:
                self._dial(self._away.copy())
            return None if self._refused else found
        if not self._refused:
            self._connect()
        return None

    @property
    def refused(self) -> bool:
        """True if the server refuses tracking: nothing will ever be known."""
        return self._refused

    def wait(self, timeout_ms: float) -> bool:
        """Wait up to `timeout_ms` milliseconds for an invalidation or a broken connection; whether there was one.

        Returns at once where nothing is known, and True after 20 milliseconds where keys could not be tracked, and so
        count as changed: the caller reads these again and again. `changed` returns the keys.
        """
        if not self._connections or any(connection.has_invalidations for connection in self._connections.values()):
            return True
        if self._untracked:
            timeout_ms = min(timeout_ms, _UNTRACKED_MS)
        poller = select.poll()
        for connection in self._connections.values():
            poller.register(connection.fileno(), select.POLLIN)
        return bool(poller.poll(timeout_ms) or self._untracked)

    def read_each(self, command: Sequence[str], keys: Iterable[str]) -> Iterator[tuple[str, Reply]]:
        """Send the read command `command` for each key: see `read`."""
        return self.read({key: (*command, key) for key in keys})

    def read(self, commands: Mapping[str, Command]) -> Iterator[tuple[str, Reply]]:
        """Send a read command about each key; yield key and reply, errors among them, in any order.

        A key that cannot be read over the tracked connections, as during a slot migration, is read through the client,
        and counts as changed. Where that is Unavailable, too, the error is the reply, and the caller has to read the key
        again: it does not count as changed. A script that the server lacks is sent with its text. Raises Unavailable if
        a tracked connection breaks, or the only server is away; then discard all replies.
        """
        elsewhere: dict[Node | None, list[str]] = {}
        for node, batch in self._by_node(commands).items():
            connection = self._connections.get(node)
            if connection is None:
                elsewhere[node] = batch
                continue
            for key, reply in _read_over(connection, {key: commands[key] for key in batch}):
                if isinstance(reply, Unavailable):
                    elsewhere.setdefault(node, []).append(key)
                else:
                    yield key, reply
        for node, batch in elsewhere.items():
            yield from self._read_elsewhere(node, {key: commands[key] for key in batch})

    def _read_elsewhere(self, node: Node | None, commands: Mapping[str, Command]) -> Iterator[tuple[str, Reply]]:
        """Send these commands through the client. `node`: the primary of their keys, as far as known."""
        left = list(commands)
        self._untracked.update(left)  # also those that are not read, if an error is raised
        while left:
            batch, left = left[:_WINDOW], left[_WINDOW:]
            replies: list[Reply]
            try:
                replies = self._client.pipeline([commands[key] for key in batch])
            except Unavailable as error:
                if not self._client.is_cluster:
                    raise
                batch, left = [*batch, *left], []  # of the same server
                replies = [error] * len(batch)
            else:
                if node in self._away:
                    self._redial_due_ms = min(self._redial_due_ms, SYSTEM_CLOCK.monotonic_ms() + _FIRST_REDIAL_MS)
            found = list(zip(batch, replies, strict=True))
            self._untracked.difference_update([key for key, reply in found if isinstance(reply, Unavailable)])
            yield from found

    def _by_node(self, keys: Iterable[str]) -> dict[Node | None, list[str]]:
        if not self._owners:
            return {None: list(keys)}
        found: dict[Node | None, list[str]] = {}
        for key in keys:
            found.setdefault(self._owners[slot_of(to_wire(key))], []).append(key)
        return found

    def _connect(self) -> None:
        self.close()
        nodes: set[Node | None] = {None}
        if self._client.is_cluster:
            reply = self._client.execute_on_any_primary("CLUSTER", "SLOTS")
            self._owners, self._slots = slot_owners(reply), _primaries_of(reply)
            nodes = set(self._owners) - {None}
        self._away &= nodes
        self._dial(nodes if self._is_redial_due or nodes == self._away else nodes - self._away)

    @property
    def _is_redial_due(self) -> bool:
        return SYSTEM_CLOCK.monotonic_ms() >= self._redial_due_ms

    def _dial(self, nodes: AbstractSet[Node | None]) -> None:
        """Open a tracked connection to each of these nodes. Raises RedisError if there is none to any node then."""
        failed: Unavailable | None = None
        for node in nodes:
            try:
                self._connections[node] = _open(self._client, node)
            except Unavailable as error:
                failed = error
                self._away.add(node)
            except (AccessDenied, CommandFailed) as error:
                self._refused = True
                self.close()
                logger.warning("CLIENT TRACKING is unavailable: %s; polling every stream instead", error)
                return
            except RedisError:
                self.close()
                raise
            else:
                self._away.discard(node)
        if failed is None:
            if not self._away:
                self._redials.reset()
            return
        self._redial_due_ms = SYSTEM_CLOCK.monotonic_ms() + self._redials.next_ms()
        if not self._connections:
            raise failed
        logger.info("the keys of %d nodes are not tracked: %s; reconnecting later", len(self._away), failed)

    def _read_invalidations(self) -> bool:
        """Read pending invalidations; False if some may be missing."""
        if not self._connections:
            return False
        command = ("CLUSTER", "SLOTS") if self._owners else _TRACK
        try:
            replies = [reply for connection in self._connections.values() for reply in connection.request([command])]
        except Unavailable as error:
            logger.info("lost a tracked connection: %s; reconnecting", error)
            return False
        if self._owners:
            return all(isinstance(reply, list) and self._has_same_owners(reply) for reply in replies)
        return replies == [b"OK"]

    def _has_same_owners(self, reply: Sequence[Reply]) -> bool:
        """Whether CLUSTER SLOTS shows the owners that are known: to compare those of 16,384 slots takes a millisecond."""
        return _primaries_of(reply) == self._slots or slot_owners(reply) == self._owners


def _primaries_of(reply: Sequence[Reply]) -> Reply:
    """The ranges of slots of a reply to CLUSTER SLOTS, each with its primary, in order."""
    return sorted([first, last, *primary[:2]] for first, last, primary, *_ in reply)


def _open(client: Client, node: Node | None) -> "_TrackedConnection":
    connection = _TrackedConnection(client.dial(node), client.timeout_ms)
    try:
        for reply in list(connection.request([("HELLO", "3"), _TRACK])):
            raise_if_error(reply)
    except RedisError:
        connection.close()
        raise
    return connection


def _read_over(connection: "_TrackedConnection", commands: Mapping[str, Command]) -> Iterator[tuple[str, Reply]]:
    """Yield each key and the reply to its command, that of a script last if the server had to be sent its text."""
    missing: list[str] = []
    for key, reply in zip(commands, connection.request(list(commands.values())), strict=True):
        if isinstance(reply, ScriptMissing):
            missing.append(key)
        else:
            yield key, reply
    if missing:
        again = with_texts([commands[key] for key in missing])
        yield from zip(missing, connection.request(again), strict=True)


class _TrackedConnection:
    """A tracked connection, with one request at a time."""

    def __init__(self, resp: RespConnection, timeout_ms: float) -> None:
        self._resp = resp
        self._timeout_ms = timeout_ms
        self._invalidated: set[str] = set()
        self._in_flight = 0
        self._lost = False
        weakref.finalize(self, resp.close)  # its owner may be dropped without a call of close

    @property
    def has_invalidations(self) -> bool:
        """True if invalidations have arrived already."""
        return self._lost or bool(self._invalidated)

    def fileno(self) -> int:
        return self._resp.fileno()

    def close(self) -> None:
        self._resp.close()

    def pop_invalidated(self) -> set[str]:
        """The keys invalidated since the last call."""
        invalidated, self._invalidated = self._invalidated, set()
        return invalidated

    def request(self, commands: Sequence[Command]) -> Iterator[Reply]:
        """Yield the replies as they arrive, while more commands are sent.

        Raises Unavailable, also where invalidations may be missing.
        """
        if self._in_flight:
            raise Unavailable("replies to the last request were not read")
        if self._lost:
            raise Unavailable("all keys have changed")
        sent = 0
        while sent < len(commands) or self._in_flight:
            if sent < len(commands) and self._in_flight <= _WINDOW:
                batch = commands[sent : sent + _WINDOW]
                sent, self._in_flight = sent + len(batch), self._in_flight + len(batch)
                self._resp.send(batch)
            for reply in self._resp.wait_and_receive(self._timeout_ms):
                if type(reply) is Push:
                    self._on_push(reply)
                else:
                    self._in_flight -= 1
                    yield reply

    def _on_push(self, push: Push) -> None:
        if push[0] != b"invalidate":
            return
        if push[1] is None:
            self._lost = True  # for good: it may follow the last reply, with no other sign of it
            raise Unavailable("all keys have changed")
        self._invalidated.update(map(from_wire, push[1]))
