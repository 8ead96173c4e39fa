"""The public face: subscriptions to any number of streams, over a handful of connections and one thread."""

import logging
import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self, get_args

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError
from millstream.groups.entries import BEGINNING, Id, wire_id
from millstream.model import EntryId
from millstream.observability.metrics import NOBODY, Metrics
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import to_wire
from millstream.router.asyncio_reactor import AsyncioReactor
from millstream.router.budget import Budget
from millstream.router.cursors import NEWEST, CursorCallbacks, CursorTable
from millstream.router.nodes import ClusterNodes
from millstream.router.policy import PoolPolicy, ReaderName, ReadPolicy, Settings
from millstream.router.reactor import Reactor, ThreadReactor
from millstream.router.stream_events import WhenFull
from millstream.router.subscriber_buffer import Cursor, SubscriberBuffer
from millstream.router.subscription import Subscription

logger = logging.getLogger(__name__)

_READ, _POOL = ReadPolicy(), PoolPolicy()
_FULL = get_args(WhenFull)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterFigures:
    """Where a router stands. `streams` of `subscriptions`; `connections` to Redis; `reader`: how it learns of changes."""

    subscriptions: int
    streams: int
    connections: int
    reader: str


class _Desk:
    """Passes on what subscribers say, from whatever thread. Knows no router, which must not live on for its sake."""

    __slots__ = ("_pump", "_shelf")

    def __init__(self, pump: Reactor, shelf: CursorTable) -> None:
        self._pump = pump
        self._shelf = shelf

    def drained(self, inbox: SubscriberBuffer) -> None:
        """There is room in the inbox again."""
        inbox.paused = False  # at once, so that it is said only once
        self._pump.call(partial(self._shelf.resume, inbox))

    def left(self, inbox: SubscriberBuffer) -> None:
        """Nobody takes anything out of the inbox any more."""
        self._pump.call(partial(self._shelf.end, inbox))


class Router:
    """Follows up to hundreds of thousands of streams in one process, and hands each subscriber its messages.

        async with Router("redis://localhost") as router:
            async for message in router.subscribe("orders:4711", after="1700000000000-0"):
                ...

    Per subscription every message after its id comes exactly once, in the order of the stream, through lost connections,
    restarts and failovers; what cannot come any more is told as a `Gap`. Positions are the subscriber's to keep.

    * `url`: of the deployment, as for `Client`
    * `reader`: "tracking": Redis tells what changed (CLIENT TRACKING); "pool": blocking reads take turns; "auto":
      tracking, or the pool where that is refused. `Router.reader` says which it is, and so does the log
    * `read`, `pool`: how much is read at a time; the pool's measures

    Entered by `async with`, it lives in the running event loop and needs no thread, which is fastest; as any guest of a
    loop, it waits while somebody blocks that. Otherwise (`with`, or by itself) it has a thread of its own. Either way any
    thread and any loop may subscribe. Connections begin with the first subscription.
    Raises ConfigError for a bad URL or reader.
    """

    def __init__(
        self,
        url: str,
        *,
        reader: Literal["auto", "tracking", "pool"] = "auto",
        read: ReadPolicy = _READ,
        pool: PoolPolicy = _POOL,
        timeout_ms: int = 15_000,
        metrics: Metrics = NOBODY,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if reader not in ("auto", "tracking", "pool"):
            raise ConfigError(f'Router(reader={reader!r}): use "auto", "tracking" or "pool"')
        self._client = Client(url, timeout_ms=timeout_ms, clock=clock)
        self._clock = clock
        self._metrics = metrics
        self._settings = Settings(choice=reader, read=read, pool=pool)
        self._build(ThreadReactor(clock, self._crashed))
        self._lock = threading.Lock()
        self._state: Literal["new", "running", "closed"] = "new"
        self._failure: Exception | None = None
        self._pid = os.getpid()

    def _build(self, pump: Reactor) -> None:
        self._pump = pump
        budget = Budget(self._settings.read.budget_bytes)
        self._shelf = CursorTable(CursorCallbacks(want=self._want, wake=pump.wake), self._metrics, budget)
        self._fleet = ClusterNodes(pump, self._client, self._shelf, settings=self._settings, metrics=self._metrics)
        self._desk = _Desk(pump, self._shelf)

    @property
    def reader(self) -> ReaderName | None:
        """How it learns what changed; None until the server was asked."""
        return self._fleet.reader if self._fleet.decided else None

    def figures(self) -> RouterFigures:
        """Where it stands now."""
        return RouterFigures(
            subscriptions=self._shelf.subscriptions,
            streams=len(self._shelf),
            connections=self._fleet.connections,
            reader=self.reader or "undecided",
        )

    def subscribe(
        self,
        stream: str,
        *,
        after: Id = BEGINNING,
        buffer: int = 1000,
        buffer_bytes: int = 1024 * 1024,
        when_full: WhenFull = "wait",
        tell_start: bool = False,
    ) -> Subscription:
        """Follow `stream`, which need not exist yet, from the entry after the id `after` on.

        * `after`: BEGINNING, END (what comes from now on), or the id of the last message that was processed
        * `buffer`: messages that may wait for this subscriber; `buffer_bytes`: how many bytes of them, a last message aside
        * `when_full`: "wait": its stream is not read on for it until half of them are taken, others are not held up;
          "drop-oldest": the oldest are dropped, and a `Dropped` tells how many; "disconnect": it ends with `TooSlow`,
          after what is buffered
        * `tell_start`: with `after=END`, the first item is a `Start` with the id that this was: who is cut off before
          the first message can resume there

        Never waits for Redis. Raises ConfigError for a bad id, buffer or policy, and once the router is closed or has
        failed.
        """
        if min(buffer, buffer_bytes) < 1 or when_full not in _FULL:
            raise ConfigError(
                f"subscribe: buffer and buffer_bytes must be 1 or more, when_full one of {', '.join(_FULL)}"
            )
        place = _place(after)
        if self._failure:
            raise ConfigError(f"the router has failed, make a new one: {self._failure!r}")
        if self._state != "running":
            self._start()
        inbox = SubscriberBuffer(
            stream, self._shelf.budget, limit=buffer, limit_bytes=buffer_bytes, when_full=when_full, tells_start=tell_start
        )  # fmt: skip
        self._pump.call(partial(self._shelf.add, inbox, to_wire(stream), place))
        if self._state == "closed" or self._failure:  # meanwhile: it may have come too late to be ended with the others
            inbox.ending = inbox.ending or self._failure or True
        return Subscription(inbox, self._desk)

    def close(self, *, timeout_ms: float = 5_000) -> bool:
        """End every subscription, each after what it has buffered, and close the connections.

        Returns whether all had ended within `timeout_ms` milliseconds. May be called again, and from any thread.
        """
        with self._lock:
            if self._state == "new":
                self._state = "closed"
                return True
            self._state = "closed"
        self._pump.call(self._end)
        return self._pump.stop(timeout_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        """Let the router live in the running event loop, without a thread of its own."""
        if self._state != "new":
            raise ConfigError("the router runs already, in a thread of its own: enter it before the first subscription")
        self._build(AsyncioReactor(self._clock, self._crashed))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._pid != os.getpid():
            raise ConfigError("the router was made in another process: a fork has none of its thread; make a new one")
        with self._lock:
            if self._state == "closed":
                raise ConfigError("the router is closed: make a new one")
            if self._state == "new":
                self._pump.start()
                self._pump.call(self._fleet.start)
                self._state = "running"

    def _want(self, cursor: Cursor) -> None:
        self._fleet.want(cursor)

    def _end(self) -> None:
        self._shelf.end_all(True)
        self._fleet.close()

    def _crashed(self, error: Exception) -> None:
        """Nobody may wait for what will not come."""
        logger.critical("the router's thread failed: this is a fault of millstream", exc_info=error)
        self._failure = error
        self._shelf.end_all(error)
        self._fleet.close()


def _place(after: Id) -> bytes:
    place = wire_id(after)
    text = place if isinstance(place, bytes) else str(place).encode()
    if text == NEWEST:
        return NEWEST
    return str(EntryId.parse(text)).encode()
