"""One connection of the router that is kept up: dialled aside, greeted, given up when it is silent, dialled again."""

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
_WORD_EVERY_MS = 5000.0
_TICK_MS = 250.0
_CHUNKS = 8  # in one go; others want their turn too

Then = Callable[[list[Any]], None]


@dataclass(frozen=True, kw_only=True)
class ConnectionEvents:
    """Whom a link tells. All are called in the pump's thread.

    * `up`: it can be asked now; nothing of before is in flight
    * `down`: it broke; what was asked and not answered will not be. It is told whether the other side has ended it
    * `push`: a word of the server that nobody asked for
    * `denied`: the server does not let us in; `refused`: it refuses the greeting. It is tried again all the same
    """

    up: Callable[[], None]
    down: Callable[[bool], None]
    push: Callable[[Push], None] = lambda push: None
    denied: Callable[[MillstreamError], None] = lambda error: None
    refused: Callable[[MillstreamError], None] = lambda error: None


@dataclass(frozen=True, kw_only=True)
class ConnectionPolicy:
    """How a link is kept. `greeting`: sent first, and none of it may be refused. `idle_ms`: after so long a silence the
    server is asked `alive`. `timeout_ms`: after so long without an answer it is given up. `role`: what ROLE must say."""

    greeting: Sequence[Command]
    idle_ms: float = 1000.0
    timeout_ms: float = 15_000.0
    role: bytes | None = None


class ReconnectingConnection:
    """A connection by `dial`, which may block and is called aside. Replies come in the order of the questions."""

    def __init__(
        self,
        pump: Reactor,
        dial: Callable[[], RespConnection],
        name: str,
        *,
        policy: ConnectionPolicy,
        events: ConnectionEvents,
    ) -> None:
        self.up = False
        self.name = name
        self._pump = pump
        self._dial = dial
        self._policy = policy
        self._events = events
        self._wire: RespConnection | None = None
        self._closed = False
        self._asked: deque[tuple[int, Then]] = deque()
        self._replies: list[Any] = []
        self._heard_ms = self._away_since_ms = self._up_since_ms = pump.clock.monotonic_ms()
        self._wait_ms = 0.0
        self._said_ms: float | None = None
        self._said = False
        self._redial()
        self._tick()

    def ask(self, commands: Sequence[Command], then: Then) -> None:
        """Send commands; `then` gets their replies, errors among them. Never, if the link breaks before."""
        if self._wire is None:
            return
        if not self._asked:
            self._heard_ms = self._pump.clock.monotonic_ms()
        self._asked.append((len(commands), then))
        self._guarded(lambda wire: wire.send(commands))

    def close(self) -> None:
        """End it for good."""
        self._closed = True
        self._hang_up()

    # What the pump calls

    def fileno(self) -> int:
        """The descriptor of the connection that is open now."""
        return self._wire.fileno() if self._wire else -1

    def ready(self) -> None:
        """Read what has come in, send what waits."""
        if self._wire is not None and self._wire.clogged:
            self._guarded(lambda wire: wire.flush())
        for _ in range(_CHUNKS):
            if self._hear() < CHUNK_BYTES:
                return

    # Inside

    def _hear(self) -> int:
        """Take in some of what has come, and pass it on; returns how many bytes were read."""
        wire = self._wire
        if wire is None:
            return 0
        try:
            size = wire.take_in()
        except Unavailable as error:
            self._broken(error, hung_up=True)
            return 0
        if size:
            self._heard_ms = self._pump.clock.monotonic_ms()
        for reply in wire.replies():
            if type(reply) is Push:
                self._events.push(reply)
            else:
                self._answer(reply)
            if self._wire is not wire:  # whoever was told had trouble
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
            logger.warning("the router goes on at %s after %.1f s", self.name, away_s)
        self._said = False
        self.up = True
        self._events.up()

    def _guarded(self, action: Callable[[RespConnection], None]) -> None:
        wire = self._wire
        if wire is None:
            return
        clogged = wire.clogged
        try:
            action(wire)
        except Unavailable as error:
            self._broken(error, hung_up=True)
            return
        if wire.clogged != clogged:
            self._pump.watch(self, writing=wire.clogged)

    def _broken(self, error: MillstreamError, *, hung_up: bool = False) -> None:
        was_up = self.up
        if was_up:
            self._away_since_ms = self._pump.clock.monotonic_ms()
            if self._away_since_ms - self._up_since_ms >= self._wait_ms:  # it was worth the dialling
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
        """Wait with back-off, and say so, every five seconds at most."""
        if self._closed:
            return
        now_ms = self._pump.clock.monotonic_ms()
        if self._said_ms is None or now_ms - self._said_ms >= _WORD_EVERY_MS:
            self._said_ms, self._said = now_ms, True
            away_s = (now_ms - self._away_since_ms) / 1000
            logger.warning("the router waits for %s (%.0f s so far): %s", self.name, away_s, error)
        self._pump.later(self._wait_ms, self._redial)
        self._wait_ms = min(max(self._wait_ms * 2, _FIRST_WAIT_MS), _LAST_WAIT_MS)

    def _tick(self) -> None:
        """A connection may die without a word: ask when it is silent, and give it up when it does not answer."""
        if self._closed:
            return
        self._pump.later(_TICK_MS, self._tick)
        silent_ms = self._pump.clock.monotonic_ms() - self._heard_ms
        if self._wire is None:
            return
        if self._asked:
            if silent_ms > self._policy.timeout_ms:
                self._broken(Unavailable(f"no answer for {silent_ms / 1000:.0f} s"))
        elif self.up and silent_ms > self._policy.idle_ms:
            self.ask([("ROLE",) if self._policy.role else ("PING",)], self._answered)

    def _answered(self, replies: list[Any]) -> None:
        reply, role = replies[0], self._policy.role
        if role and isinstance(reply, list) and reply[0] != role:
            self._broken(Unavailable("it is the primary no more"))
