"""The connections of one process: how many there may be, and how long each may let the server wait.

What strangers can do costs a token nothing: they open connections, and send little or nothing. So whoever lets the server
wait is closed, after a while in any case, and at once where there are too many: the one that has waited longest first.
Whoever has sent a request is never closed for others ([docs/decisions/0024-one-guard-of-connections.md]).
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics

if TYPE_CHECKING:
    from asyncio import Transport

logger = logging.getLogger(__name__)

_WARN_EVERY_MS = 60_000.0
_LOOKS = 10

Awaited = Literal["head", "body", "reading"]
"""What a client owes: the head of a request, its body, or to take what is sent to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What clients may take up.

    * `connections`: at most, WebSockets included
    * `request_s`: seconds for the head of a request to arrive, from the connection's beginning or the last answer on; and
      as many again for its body
    * `head_bytes`, `body_bytes`: how large they may be
    """

    connections: int
    request_s: float = 10.0
    head_bytes: int = 16_384
    body_bytes: int = 65_536


class Connection:
    """One connection, for the protocol that reads it and for the app that answers it."""

    __slots__ = ("_transport", "awaited", "kept", "since_ms", "timed_out")

    def __init__(self, transport: "Transport", now_ms: float) -> None:
        self._transport = transport
        self.awaited: Awaited = "head"
        self.since_ms = now_ms
        self.kept = False
        self.timed_out = False

    @property
    def unread(self) -> bool:
        """Whether there is something that the client has not taken yet."""
        return self._transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        """Cut it, whatever the client has not taken yet."""
        self._transport.abort()

    def close(self) -> None:
        """Close it, once the client has taken what was sent."""
        self._transport.close()

    def keep(self) -> None:
        """It is slow with leave, as who follows a stream may be: the app itself sees to it."""
        self.kept = True


class Connections:
    """All connections of a process. Use it on the event loop; have `sweep` called every `sweep_s` seconds."""

    def __init__(self, limits: Limits, *, metrics: Metrics, clock: Clock = SYSTEM_CLOCK) -> None:
        self.limits = limits
        self.sweep_s = limits.request_s / _LOOKS
        self._metrics = metrics
        self._clock = clock
        self._open: set[Connection] = set()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()  # the one that has waited longest is the first
        self._warned_ms: float | None = None

    def __len__(self) -> int:
        return len(self._open)

    def open(self, transport: "Transport") -> Connection:
        """A new connection, which may cost another its place."""
        connection = Connection(transport, self._clock.monotonic_ms())
        self._open.add(connection)
        self._waiting[connection] = None
        self._make_room(connection)
        return connection

    def lost(self, connection: Connection, error: Exception | None) -> None:
        """A connection has ended: by `error`, if it did not end by itself."""
        connection.timed_out = isinstance(error, TimeoutError)
        self._forget(connection)

    def expect(self, connection: Connection, awaited: Awaited = "head") -> None:
        """From now on the client owes something."""
        if connection in self._open and not (awaited == "reading" and connection.kept):
            connection.awaited, connection.since_ms = awaited, self._clock.monotonic_ms()
            self._waiting[connection] = None
            self._waiting.move_to_end(connection)

    def expect_body(self, connection: Connection) -> None:
        """The head of a request is there, and more is to come. The client has waited no less long for that."""
        connection.awaited = "body"

    def arrived(self, connection: Connection) -> None:
        """The client owes nothing now."""
        self._waiting.pop(connection, None)

    def took(self, connection: Connection) -> None:
        """The client has taken of what was sent to it. If that was the end of an answer, its time begins now."""
        if connection in self._waiting:
            if connection.awaited == "reading":
                self.arrived(connection)
            else:
                self.expect(connection)

    def are_full(self) -> bool:
        """Whether there is no place for the one that asks, since all others are at work, too."""
        self._make_room()
        if full := len(self._open) > self.limits.connections:
            self._warn()
        return full

    def sweep(self) -> None:
        """Cut those that are late."""
        now_ms, late = self._clock.monotonic_ms(), []
        for connection in self._waiting:
            waited_s = (now_ms - connection.since_ms) / 1000
            if waited_s < self.limits.request_s:
                break  # all others began later
            # Who takes nothing is the kernel's affair (TCP_USER_TIMEOUT); a late body is answered before it is cut (408).
            if connection.awaited != "reading" and not connection.unread:
                may_s = self.limits.request_s * (1 if connection.awaited == "head" else 3)
                late += [connection] if waited_s >= may_s else []
        for connection in late:
            self._cut(connection, "late")

    def close_waiting(self) -> None:
        """Close those that owe something: for a stop."""
        for connection in tuple(self._waiting):
            connection.close()

    def abort_all(self) -> None:
        """Cut all that there are."""
        for connection in tuple(self._open):
            connection.abort()

    def _make_room(self, newcomer: Connection | None = None) -> None:
        while len(self._open) > self.limits.connections and self._waiting:
            oldest = next(iter(self._waiting))
            if oldest is newcomer:
                break
            self._cut(oldest, "crowded")
            self._warn()

    def _cut(self, connection: Connection, reason: Literal["late", "crowded"]) -> None:
        self._forget(connection)
        self._metrics.count(m.HTTP_CUT, reason=reason)
        connection.abort()

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def _warn(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._warned_ms is None or now_ms - self._warned_ms >= _WARN_EVERY_MS:
            self._warned_ms = now_ms
            logger.warning(
                "all %d connections are taken: those that send no request are closed, new requests refused where all "
                "have sent one",
                self.limits.connections,
            )
