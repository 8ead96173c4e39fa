"""Connections: limits the connections of one process, and how long each client may keep the server waiting.

A client needs no token to open connections and send little or nothing. So a connection that keeps the server waiting is
closed: after a while in any case, and at once where there are too many, the longest wait first. A connection that has
sent its request is never closed to make room ([docs/decisions/0024-connection-limits.md]).
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from millstream.clock import SYSTEM_CLOCK, Clock, Every
from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics, init_series

if TYPE_CHECKING:
    from asyncio import Transport

logger = logging.getLogger(__name__)

_WARN_EVERY_MS = 60_000.0
_SWEEPS = 10

Awaited = Literal["head", "body", "reading"]
"""The input or progress that the server awaits: the head of a request, its body, or that the client reads sent data."""

CutReason = Literal["late", "crowded"]
"""Why a connection is cut: no request in time, or too many connections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on clients.

    * `connections`: the most connections, WebSockets included
    * `request_s`: seconds for the head of a request to arrive, from the start of the connection or the last response;
      and as many again for its body
    * `head_bytes`, `body_bytes`: the largest head and body
    """

    connections: int
    request_s: float = 10.0
    head_bytes: int = 16_384
    body_bytes: int = 65_536


class Connection:
    """One connection, shared by the protocol that reads it and the app that answers it."""

    __slots__ = ("_transport", "awaited", "exempt", "since_ms", "timed_out")

    def __init__(self, transport: "Transport", now_ms: float) -> None:
        self._transport = transport
        self.awaited: Awaited = "head"
        self.since_ms = now_ms
        self.exempt = False
        self.timed_out = False

    @property
    def unread(self) -> bool:
        """Whether data for the client is still unsent, as it has not read on."""
        return self._transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        """Cut it, and discard unsent data."""
        self._transport.abort()

    def close(self) -> None:
        """Close it, once the client has read the sent data."""
        self._transport.close()

    def exempt_reading(self) -> None:
        """Exempt it from the read timeout: the app itself times out a client that follows streams."""
        self.exempt = True


class Connections:
    """All connections of a process. Use it on the event loop; call `sweep` every `sweep_s` seconds."""

    def __init__(self, limits: Limits, *, metrics: Metrics, clock: Clock = SYSTEM_CLOCK) -> None:
        self.limits = limits
        self.sweep_s = limits.request_s / _SWEEPS
        self._metrics = metrics
        for reason in get_args(CutReason):
            init_series(metrics, m.HTTP_DROPPED, reason=reason)
        self._clock = clock
        self._open: set[Connection] = set()
        self._awaited: OrderedDict[Connection, None] = OrderedDict()  # the longest wait first
        self._warning = Every(_WARN_EVERY_MS)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, transport: "Transport") -> Connection:
        """Register a new connection, which may evict another."""
        connection = Connection(transport, self._clock.monotonic_ms())
        self._open.add(connection)
        self._awaited[connection] = None
        self._make_room(connection)
        return connection

    def remove(self, connection: Connection, error: Exception | None) -> None:
        """A connection has ended: by `error`, or None for a regular end."""
        connection.timed_out = isinstance(error, TimeoutError)
        self._remove(connection)

    def await_client(self, connection: Connection, awaited: Awaited = "head") -> None:
        """From now on the server awaits something from the client."""
        if connection in self._open and not (awaited == "reading" and connection.exempt):
            connection.awaited, connection.since_ms = awaited, self._clock.monotonic_ms()
            self._awaited[connection] = None
            self._awaited.move_to_end(connection)

    def await_body(self, connection: Connection) -> None:
        """The head of a request has arrived, and its body is next. The wait so far still counts."""
        connection.awaited = "body"

    def clear_wait(self, connection: Connection) -> None:
        """The server awaits nothing from the client now."""
        self._awaited.pop(connection, None)

    def on_read(self, connection: Connection) -> None:
        """The client has read sent data. If that completed a response, the wait for the next request begins."""
        if connection in self._awaited:
            if connection.awaited == "reading":
                self.clear_wait(connection)
            else:
                self.await_client(connection)

    def is_full(self) -> bool:
        """Whether a request must be refused: there are too many connections, and none could be closed."""
        self._make_room()
        if full := len(self._open) > self.limits.connections:
            self._warn()
        return full

    def sweep(self) -> None:
        """Cut the connections that are late."""
        now_ms, late = self._clock.monotonic_ms(), []
        for connection in self._awaited:
            waited_s = (now_ms - connection.since_ms) / 1000
            if waited_s < self.limits.request_s:
                break  # all others began to wait later
            # The kernel times out a client that reads nothing (TCP_USER_TIMEOUT).
            # A late body gets a 408 before the cut.
            if connection.awaited != "reading" and not connection.unread:
                allowed_s = self.limits.request_s * (1 if connection.awaited == "head" else 3)
                late += [connection] if waited_s >= allowed_s else []
        for connection in late:
            self._cut(connection, "late")

    def close_waiting(self) -> None:
        """Close every connection that the server awaits something from: for a stop."""
        for connection in tuple(self._awaited):
            connection.close()

    def abort_all(self) -> None:
        """Cut every connection."""
        for connection in tuple(self._open):
            connection.abort()

    def _make_room(self, newcomer: Connection | None = None) -> None:
        while len(self._open) > self.limits.connections and self._awaited:
            oldest = next(iter(self._awaited))
            if oldest is newcomer:
                break
            self._cut(oldest, "crowded")
            self._warn()

    def _cut(self, connection: Connection, reason: CutReason) -> None:
        self._remove(connection)
        self._metrics.count(m.HTTP_DROPPED, reason=reason)
        connection.abort()

    def _remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._awaited.pop(connection, None)

    def _warn(self) -> None:
        if self._warning.is_due(self._clock.monotonic_ms()):
            logger.warning(
                "all %d connections are in use; closing those without a request, and refusing new requests where there "
                "is none",
                self.limits.connections,
            )
