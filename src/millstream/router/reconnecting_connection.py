"""ReconnectingConnection: a connection of the router that redials itself.

It dials in a helper thread, sends the greeting, and replaces a connection that is silent or broken.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.clock import Backoff, Every
from millstream.errors import AccessDenied, CommandFailed, ConfigError, MillstreamError, Unavailable
from millstream.redis_client.resp import CHUNK_BYTES, Command, Push, RespConnection
from millstream.router.reactor import Reactor

logger = logging.getLogger(__name__)

_WAITS_MS = (50.0, 1_000.0)
_WARN_EVERY_MS = 5000.0
_TICK_MS = 250.0
_MOST_CHUNKS = 8  # per call, so that other connections get their turn

ReplyCallback = Callable[[list[Any]], None]


@dataclass(frozen=True, kw_only=True)
class ConnectionEvents:
    """Callbacks of a connection, all called in the reactor's thread.

    * `on_up`: it accepts requests now; no earlier request is in flight
    * `on_down`: it broke, and requests in flight will get no reply; its argument: whether the server closed it
    * `on_push`: the server sent an unsolicited message
    * `on_denied`: the server denies access; `on_refused`: it refuses the greeting. The connection redials all the same
    """

    on_up: Callable[[], None]
    on_down: Callable[[bool], None]
    on_push: Callable[[Push], None] = lambda push: None
    on_denied: Callable[[MillstreamError], None] = lambda error: None
    on_refused: Callable[[MillstreamError], None] = lambda error: None


@dataclass(frozen=True, kw_only=True)
class ConnectionPolicy:
    """How a connection is opened and checked.

    * `greeting`: commands sent first, of which the server may refuse none
    * `idle_ms`: milliseconds of silence until a PING (or ROLE)
    * `timeout_ms`: milliseconds without a reply until the connection is closed and redialled
    * `role`: the reply that ROLE must give; None: any
    """

    greeting: Sequence[Command]
    idle_ms: float = 1000.0
    timeout_ms: float = 15_000.0
    role: bytes | None = None


class ReconnectingConnection:
    """A connection opened by `dial`, which may block and runs in a helper thread.

    Replies come in the order of requests.
    """

    def __init__(
        self,
        reactor: Reactor,
        dial: Callable[[], RespConnection],
        name: str,
        *,
        policy: ConnectionPolicy,
        events: ConnectionEvents,
    ) -> None:
        self.up = False
        self.name = name
        self._reactor = reactor
        self._dial = dial
        self._policy = policy
        self._events = events
        self._resp: RespConnection | None = None
        self._closed = False
        self._in_flight: deque[tuple[int, ReplyCallback]] = deque()
        self._replies: list[Any] = []
        self._last_reply_ms = self._down_since_ms = self._up_since_ms = reactor.clock.monotonic_ms()
        self._backoff = Backoff(*_WAITS_MS, at_once=True)
        self._warning = Every(_WARN_EVERY_MS)
        self._warned = False
        self._redial()
        self._check_alive()

    def request(self, commands: Sequence[Command], on_reply: ReplyCallback) -> None:
        """Send commands; `on_reply` gets their replies, errors among them.

        It is not called if the connection breaks before.
        """
        resp = self._resp
        if resp is None:
            return
        if not self._in_flight:
            self._last_reply_ms = self._reactor.clock.monotonic_ms()
        self._in_flight.append((len(commands), on_reply))
        self._or_reconnect(resp, resp.send, commands)

    def close(self) -> None:
        """Close it for good."""
        self._closed = True
        self._disconnect()

    # Called by the reactor

    def fileno(self) -> int:
        """The descriptor of the open connection; -1 if there is none."""
        return self._resp.fileno() if self._resp else -1

    def on_ready(self) -> None:
        """Read the replies that have arrived, and send what is unsent."""
        resp = self._resp
        if resp is not None and resp.has_unsent:
            self._or_reconnect(resp, resp.flush)
        for _ in range(_MOST_CHUNKS):
            if self._read_chunk() < CHUNK_BYTES:
                return

    # Inside

    def _read_chunk(self) -> int:
        """Read one chunk, and dispatch its replies; returns how many bytes were read."""
        resp = self._resp
        if resp is None:
            return 0
        try:
            size = resp.fill()
        except Unavailable as error:
            self._on_broken(error, closed_by_server=True)
            return 0
        if size:
            self._last_reply_ms = self._reactor.clock.monotonic_ms()
        for reply in resp.replies():
            if type(reply) is Push:
                self._events.on_push(reply)
            else:
                self._dispatch(reply)
            if self._resp is not resp:  # a callback has closed it
                return 0
        return size

    def _dispatch(self, reply: Any) -> None:
        self._replies.append(reply)
        if self._in_flight and len(self._replies) >= self._in_flight[0][0]:
            collected, self._replies = self._replies, []
            self._in_flight.popleft()[1](collected)

    def _redial(self) -> None:
        if not self._closed:
            self._reactor.run_in_helper(self._dial, self._on_dialled)

    def _on_dialled(self, result: Any) -> None:
        if isinstance(result, Exception):
            if isinstance(result, (ConfigError, AccessDenied)):
                self._events.on_denied(result)
            self._redial_later(result)
            return
        if self._closed:
            result.close()
            return
        self._resp = result
        self._reactor.watch(self)
        self.request(self._policy.greeting, self._on_greeted)

    def _on_greeted(self, replies: list[Any]) -> None:
        for reply in replies:
            if isinstance(reply, MillstreamError):
                if isinstance(reply, (CommandFailed, AccessDenied)):
                    self._events.on_refused(reply)
                self._on_broken(reply)
                return
        self._up_since_ms = self._reactor.clock.monotonic_ms()
        if self._warned:
            outage_s = (self._up_since_ms - self._down_since_ms) / 1000
            logger.warning("reconnected to %s after %.1f s", self.name, outage_s)
        self._warned = False
        self.up = True
        self._events.on_up()

    def _or_reconnect(self, resp: RespConnection, action: Callable[..., None], *arguments: object) -> None:
        clogged = resp.has_unsent
        try:
            action(*arguments)
        except Unavailable as error:
            self._on_broken(error, closed_by_server=True)
            return
        if resp.has_unsent != clogged:
            self._reactor.watch(self, writing=resp.has_unsent)

    def _on_broken(self, error: MillstreamError, *, closed_by_server: bool = False) -> None:
        was_up = self.up
        if was_up:
            self._down_since_ms = self._reactor.clock.monotonic_ms()
            if self._down_since_ms - self._up_since_ms >= self._backoff.upcoming_ms:  # it was stable
                self._backoff.reset()
        self._disconnect()
        if was_up:
            self._events.on_down(closed_by_server)
        self._redial_later(error)

    def _disconnect(self) -> None:
        self.up = False
        self._in_flight.clear()
        self._replies.clear()
        if self._resp is not None:
            self._reactor.unwatch(self)
            self._resp.close()
            self._resp = None

    def _redial_later(self, error: Exception) -> None:
        """Redial after a back-off, and log that every five seconds at most."""
        if self._closed:
            return
        now_ms = self._reactor.clock.monotonic_ms()
        if self._warning.is_due(now_ms):
            self._warned = True
            outage_s = (now_ms - self._down_since_ms) / 1000
            logger.warning("%s unreachable for %.0f s: %s; redialling", self.name, outage_s, error)
        self._reactor.call_later(self._backoff.next_ms(), self._redial)

    def _check_alive(self) -> None:
        """Detect a dead connection: send a PING when it is silent, and redial when no reply comes."""
        if self._closed:
            return
        self._reactor.call_later(_TICK_MS, self._check_alive)
        silent_ms = self._reactor.clock.monotonic_ms() - self._last_reply_ms
        if self._resp is None:
            return
        if self._in_flight:
            if silent_ms > self._policy.timeout_ms:
                self._on_broken(Unavailable(f"no reply for {silent_ms / 1000:.0f} s"))
        elif self.up and silent_ms > self._policy.idle_ms:
            self.request([("ROLE",) if self._policy.role else ("PING",)], self._on_ping_reply)

    def _on_ping_reply(self, replies: list[Any]) -> None:
        reply, role = replies[0], self._policy.role
        if role and isinstance(reply, list) and reply[0] != role:
            self._on_broken(Unavailable("it is no longer the primary"))
