"""Asks about keys, and is told which of them have changed since: for callers that look now and then.

What a `Router` learns by tracking, without its thread: nothing runs between two looks, and what the server says in the
meantime waits in the connection. It is little, since the server tells the change of a key once, until it is asked about
again (Redis documentation, "Client-side caching").
"""

import logging
import select
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

from millstream.errors import AccessDenied, CommandFailed, RedisError, Unavailable
from millstream.redis_client.client import Client, Command, Reply, raise_if_error
from millstream.redis_client.key_names import from_wire, to_wire
from millstream.redis_client.resp import Node, Push, RespConnection, primaries, slot_of

logger = logging.getLogger(__name__)

_WINDOW = 500
_TRACK: Command = ("CLIENT", "TRACKING", "ON")
"""Where it is on this changes nothing, and its answer comes after all that is to be told."""


class KeyTracker:
    """Read commands about single keys, over one connection to each primary that remembers them. Not thread-safe.

    Where that may be broken, nothing is known of any key: at first, over a new connection, after FLUSHALL, when slots have
    moved; and always where the server does not track, or its user may not (`client|tracking`), after a warning.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lines: dict[Node | None, _TrackedConnection] = {}
        self._owners: list[Node | None] = []
        self._unwatched: set[str] = set()
        self._refused = False

    def close(self) -> None:
        """Close its connections; it may be used again."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def changed(self) -> set[str] | None:
        """Which keys have changed since they were asked about, each once; None: nothing is known of any.

        One round trip to each primary, however many keys there are. Raises RedisError.
        """
        told, self._unwatched = self._unwatched, set()
        if not self._refused and self._heard_all():
            return told.union(*(line.take() for line in self._lines.values()))
        if not self._refused:
            self._connect()
        return None

    @property
    def refused(self) -> bool:
        """True if the server does not track for us: nothing will ever be known."""
        return self._refused

    def wait(self, timeout_ms: float) -> bool:
        """Wait until something is said, or a connection breaks, for `timeout_ms` milliseconds; whether so.

        At once where keys count as changed, or nothing is known. `changed` tells what it is.
        """
        if self._unwatched or not self._lines or any(line.has_more for line in self._lines.values()):
            return True
        poller = select.poll()
        for line in self._lines.values():
            poller.register(line.fileno(), select.POLLIN)
        return bool(poller.poll(timeout_ms))

    def ask(self, question: Sequence[str], keys: Iterable[str]) -> Iterator[tuple[str, Reply]]:
        """Ask the read command `question` about each key: see `read`."""
        return self.read({key: (*question, key) for key in keys})

    def read(self, questions: Mapping[str, Command]) -> Iterator[tuple[str, Reply]]:
        """Send a read command about each key; yield key and reply, errors among them, in any order.

        What cannot be asked over its connections, as while slots move, is asked as usual, and counts as changed. Raises
        Unavailable if a connection breaks, and whatever comes of that is to be thrown away.
        """
        others: list[str] = []
        for node, some in self._by_node(questions).items():
            line = self._lines.get(node)
            if line is None:
                others += some
                continue
            for key, reply in zip(some, line.ask([questions[key] for key in some]), strict=True):
                if isinstance(reply, Unavailable):
                    others.append(key)
                else:
                    yield key, reply
        self._unwatched.update(others)
        for at in range(0, len(others), _WINDOW):
            some = others[at : at + _WINDOW]
            yield from zip(some, self._client.pipeline([questions[key] for key in some]), strict=True)

    def _by_node(self, keys: Iterable[str]) -> dict[Node | None, list[str]]:
        if not self._owners:
            return {None: list(keys)}
        found: dict[Node | None, list[str]] = {}
        for key in keys:
            found.setdefault(self._owners[slot_of(to_wire(key))], []).append(key)
        return found

    def _connect(self) -> None:
        self.close()
        self._owners = primaries(self._client.execute("CLUSTER", "SLOTS")) if self._client.is_cluster else []
        try:
            for node in set(self._owners) or {None}:
                line = self._lines[node] = _TrackedConnection(self._client.dial(node), self._client.timeout_ms)
                for reply in list(line.ask([("HELLO", "3"), _TRACK])):
                    raise_if_error(reply)
        except (AccessDenied, CommandFailed) as error:
            self._refused = True
            self.close()
            logger.warning("every look asks about every stream, as Redis does not track them for us: %s", error)
        except RedisError:
            self.close()
            raise

    def _heard_all(self) -> bool:
        """Listen; False if not all of it may have been said."""
        if not self._lines:
            return False
        question = ("CLUSTER", "SLOTS") if self._owners else _TRACK
        try:
            said = [reply for line in self._lines.values() for reply in line.ask([question])]
        except Unavailable as error:
            logger.info("streams are watched over new connections: %s", error)
            return False
        if self._owners:
            return all(isinstance(reply, list) and primaries(reply) == self._owners for reply in said)
        return said == [b"OK"]


class _TrackedConnection:
    """A connection on which questions and answers take turns."""

    def __init__(self, wire: RespConnection, timeout_ms: float) -> None:
        self._wire = wire
        self._timeout_ms = timeout_ms
        self._told: set[str] = set()
        self._owed = 0
        self._lost = False
        weakref.finalize(self, wire.close)  # nobody tells a planner that it is not needed any more

    @property
    def has_more(self) -> bool:
        """True if it has been told of something already."""
        return self._lost or bool(self._told)

    def fileno(self) -> int:
        return self._wire.fileno()

    def close(self) -> None:
        self._wire.close()

    def take(self) -> set[str]:
        """The keys that it was told of since this was called last."""
        told, self._told = self._told, set()
        return told

    def ask(self, commands: Sequence[Command]) -> Iterator[Reply]:
        """Yield the replies as they come, while more is asked. Raises Unavailable, also for keys that went unheard."""
        if self._owed:
            raise Unavailable("answers to the last question were not taken")
        if self._lost:
            raise Unavailable("all keys have changed")
        sent = 0
        while sent < len(commands) or self._owed:
            if sent < len(commands) and self._owed <= _WINDOW:
                some = commands[sent : sent + _WINDOW]
                sent, self._owed = sent + len(some), self._owed + len(some)
                self._wire.send(some)
            for reply in self._received():
                if type(reply) is Push:
                    self._hear(reply)
                else:
                    self._owed -= 1
                    yield reply

    def _hear(self, push: Push) -> None:
        if push[0] != b"invalidate":
            return
        if push[1] is None:
            self._lost = True  # for good, since it may have come behind the last answer, when nothing else is amiss
            raise Unavailable("all keys have changed")
        self._told.update(map(from_wire, push[1]))

    def _received(self) -> list[Reply]:
        """What has come in, after some wait."""
        poller = select.poll()
        poller.register(self._wire.fileno(), select.POLLIN | (select.POLLOUT if self._wire.clogged else 0))
        if not poller.poll(self._timeout_ms):
            raise Unavailable(f"no answer for {self._timeout_ms / 1000:.0f} s")
        if self._wire.clogged:
            self._wire.flush()
        return self._wire.receive()
