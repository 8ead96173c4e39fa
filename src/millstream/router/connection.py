"""ReconnectingConnection: a connection of the router that redials itself.

It dials in a helper thread, sends the greeting, and replaces a connection that is silent or broken.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.errors import AccessDenied, CommandFailed, ConfigError, MillstreamError, Unavailable
from millstream.redis_client.resp import CHUNK_BYTES, Command, Push, RespConnection
from millstream.router.reactor import Reactor

logger = logging.getLogger(__name__)

_FIRST_WAIT_MS, _LAST_WAIT_MS = 50.0, 1000.0
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

    up: Callable[[], None]
    down: Callable[[bool], None]
    push: Callable[[Push], None] = lambda push: None
    denied: Callable[[MillstreamError], None] = lambda error: None
    refused: Callable[[MillstreamError], None] = lambda error: None


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
        self._pump = reactor
        self._dial = dial
        self._policy = policy
        self._events = events
        self._wire: RespConnection | None = None
        self._closed = False
        self._asked: deque[tuple[int, ReplyCallback]] = deque()
        self._replies: list[Any] = []
        self._heard_ms = self._away_since_ms = self._up_since_ms = reactor.clock.monotonic_ms()
        self._wait_ms = 0.0
        self._said_ms: float | None = None
        self._said = False
        self._redial()
        self._tick()

    def ask(self, commands: Sequence[Command], on_reply: ReplyCallback) -> None:
        """Send commands; `on_reply` gets their replies, errors among them.

        It is not called if the connection breaks before.
        """
        if self._wire is None:
            return
        if not self._asked:
            self._heard_ms = self._pump.clock.monotonic_ms()
        self._asked.append((len(commands), on_reply))
        self._guarded(lambda resp: resp.send(commands))

    def close(self) -> None:
        """Close it for good."""
        self._closed = True
        self._hang_up()

    # Called by the reactor

    def fileno(self) -> int:
        """The descriptor of the open connection; -1 if there is none."""
        return self._wire.fileno() if self._wire else -1

    def ready(self) -> None:
        """Read the replies that have arrived, and send what is unsent."""
        if self._wire is not None and self._wire.clogged:
            self._guarded(lambda resp: resp.flush())
        for _ in range(_MOST_CHUNKS):
            if self._hear() < CHUNK_BYTES:
                return

    # Inside

    def _hear(self) -> int:
        """Read one chunk, and dispatch its replies; returns how many bytes were read."""
        resp = self._wire
        if resp is None:
            return 0
        try:
            size = resp.take_in()
        except Unavailable as error:
            self._broken(error, hung_up=True)
            return 0
        if size:
            self._heard_ms = self._pump.clock.monotonic_ms()
        for reply in resp.replies():
            if type(reply) is Push:
                self._events.push(reply)
            else:
                self._answer(reply)
            if self._wire is not resp:  # a callback has closed it
                return 0
        return size

    def _answer(self, reply: Any) -> None:
        self._replies.append(reply)
        if self._asked and len(self._replies) >= self._asked[0][0]:
            collected, self._replies = self._replies, []
            self._asked.popleft()[1](collected)

    def _redial(self) -> None:
        if not self._closed:
            self._pump.aside(self._dial, self._dialled)

    def _dialled(self, result: Any) -> None:
        if isinstance(result, Exception):
            if isinstance(result, (ConfigError, AccessDenied)):
                self._events.denied(result)
            self._endure(result)
            return
        if self._closed:
            result.close()
            return
        self._wire = result
        self._pump.watch(self)
        self.ask(self._policy.greeting, self._greeted)

    def _greeted(self, replies: list[Any]) -> None:
        for reply in replies:
            if isinstance(reply, MillstreamError):
                if isinstance(reply, (CommandFailed, AccessDenied)):
                    self._events.refused(reply)
                self._broken(reply)
                return
        self._up_since_ms = self._pump.clock.monotonic_ms()
        if self._said:
            away_s = (self._up_since_ms - self._away_since_ms) / 1000
            logger.warning("reconnected to %s after %.1f s", self.name, away_s)
        self._said = False
        self.up = True
        self._events.up()

    def _guarded(self, action: Callable[[RespConnection], None]) -> None:
        resp = self._wire
        if resp is None:
            return
        clogged = resp.clogged
        try:
            action(resp)
        except Unavailable as error:
            self._broken(error, hung_up=True)
            return
        if resp.clogged != clogged:
            self._pump.watch(self, writing=resp.clogged)

    def _broken(self, error: MillstreamError, *, hung_up: bool = False) -> None:
        was_up = self.up
        if was_up:
            self._away_since_ms = self._pump.clock.monotonic_ms()
            if self._away_since_ms - self._up_since_ms >= self._wait_ms:  # it was stable: no back-off
                self._wait_ms = 0.0
        self._hang_up()
        if was_up:
            self._events.down(hung_up)
        self._endure(error)

    def _hang_up(self) -> None:
        self.up = False
        self._asked.clear()
        self._replies.clear()
        if self._wire is not None:
            self._pump.unwatch(self)
            self._wire.close()
            self._wire = None

    def _endure(self, error: Exception) -> None:
        """Redial after a back-off, and log that every five seconds at most."""
        if self._closed:
            return
        now_ms = self._pump.clock.monotonic_ms()
        if self._said_ms is None or now_ms - self._said_ms >= _WARN_EVERY_MS:
            self._said_ms, self._said = now_ms, True
            away_s = (now_ms - self._away_since_ms) / 1000
            logger.warning("%s unreachable for %.0f s: %s; redialling", self.name, away_s, error)
        self._pump.later(self._wait_ms, self._redial)
        self._wait_ms = min(max(self._wait_ms * 2, _FIRST_WAIT_MS), _LAST_WAIT_MS)

    def _tick(self) -> None:
        """Detect a dead connection: send a PING when it is silent, and redial when no reply comes."""
        if self._closed:
            return
        self._pump.later(_TICK_MS, self._tick)
        silent_ms = self._pump.clock.monotonic_ms() - self._heard_ms
        if self._wire is None:
            return
        if self._asked:
            if silent_ms > self._policy.timeout_ms:
                self._broken(Unavailable(f"no reply for {silent_ms / 1000:.0f} s"))
        elif self.up and silent_ms > self._policy.idle_ms:
            self.ask([("ROLE",) if self._policy.role else ("PING",)], self._answered)

    def _answered(self, replies: list[Any]) -> None:
        reply, role = replies[0], self._policy.role
        if role and isinstance(reply, list) and reply[0] != role:
            self._broken(Unavailable("it is no longer the primary"))
