"""Router: subscriptions to any number of streams, over a handful of connections and one thread."""

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
from millstream.observability import metrics as m
from millstream.observability.metrics import NO_METRICS, Metrics, init_series
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import to_wire
from millstream.router.asyncio_reactor import AsyncioReactor
from millstream.router.budget import Budget
from millstream.router.cursors import NEWEST, CursorCallbacks, CursorTable
from millstream.router.nodes import ClusterNodes
from millstream.router.policy import PoolPolicy, ReaderName, ReadPolicy, Settings
from millstream.router.reactor import Reactor, ThreadReactor
from millstream.router.stream_events import Reason, WhenFull
from millstream.router.subscriber_buffer import Cursor, SubscriberBuffer
from millstream.router.subscription import Subscription

logger = logging.getLogger(__name__)

_READ, _POOL = ReadPolicy(), PoolPolicy()
_WHEN_FULL = get_args(WhenFull)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterFigures:
    """A snapshot of a router.

    * `subscriptions`, `streams`: how many there are
    * `connections`: connections to Redis
    * `reader`: how the router learns of changes: "tracking", "pool" or "undecided"
    """

    subscriptions: int
    streams: int
    connections: int
    reader: str


class _ReactorHost:
    """Forwards calls of subscribers, from any thread, to the reactor.

    Holds no reference to the router, so it cannot keep it alive.
    """

    __slots__ = ("_cursors", "_reactor")

    def __init__(self, reactor: Reactor, cursors: CursorTable) -> None:
        self._reactor = reactor
        self._cursors = cursors

    def on_drained(self, buffer: SubscriberBuffer) -> None:
        """The buffer has room again."""
        buffer.paused = False  # at once, so that the buffer is reported only once
        self._reactor.call(partial(self._cursors.resume, buffer))

    def on_left(self, buffer: SubscriberBuffer) -> None:
        """The subscriber has stopped reading the buffer."""
        self._reactor.call(partial(self._cursors.end, buffer))


class Router:
    """Follows up to hundreds of thousands of streams in one process, and delivers each subscriber its messages.

        async with Router("redis://localhost") as router:
            async for message in router.subscribe("orders:4711", after="1700000000000-0"):
                ...

    Per subscription every message after its id comes exactly once, in stream order, through lost connections, restarts
    and failovers. Messages that cannot be delivered any more are reported as a `Gap`. The router stores no positions:
    each subscriber keeps its own.

    * `url`: of the deployment, as for `Client`
    * `reader`: how the router finds changes. "tracking": Redis reports them (CLIENT TRACKING); "pool": blocking
      reads in turn; "auto": tracking, or the pool where the server refuses it. `Router.reader` and the log say which
    * `read`, `pool`: how much is read at a time; the size of the pool
    * `timeout_ms`: milliseconds without a reply after which a connection is closed and dialled again

    Entered by `async with`, the router runs in the running event loop and needs no thread, which is fastest; a task
    that blocks the loop then blocks the router too. Otherwise (`with`, or neither) it has a thread of its own. Either
    way any thread and any loop may subscribe. The first subscription opens the connections.

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
        metrics: Metrics = NO_METRICS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if reader not in ("auto", "tracking", "pool"):
            raise ConfigError(f'Router(reader={reader!r}): use "auto", "tracking" or "pool"')
        self._client = Client(url, timeout_ms=timeout_ms, clock=clock)
        self._clock = clock
        self._metrics = metrics
        init_series(metrics, m.ROUTER_CHANGED, m.ROUTER_POLLED, m.ROUTER_DROPPED)
        for reason in get_args(Reason):
            init_series(metrics, m.ROUTER_GAPS, reason=reason)
        self._settings = Settings(reader=reader, read=read, pool=pool)
        self._build(ThreadReactor(clock, self._on_crash))
        self._lock = threading.Lock()
        self._state: Literal["new", "running", "closed"] = "new"
        self._failure: Exception | None = None
        self._pid = os.getpid()

    def _build(self, reactor: Reactor) -> None:
        self._reactor = reactor
        budget = Budget(self._settings.read.budget_bytes)
        self._cursors = CursorTable(CursorCallbacks(schedule=self._schedule, wake=reactor.wake), self._metrics, budget)
        self._nodes = ClusterNodes(reactor, self._client, self._cursors, settings=self._settings, metrics=self._metrics)
        self._host = _ReactorHost(reactor, self._cursors)

    @property
    def reader(self) -> ReaderName | None:
        """How the router learns of changes; None until the server has replied."""
        return self._nodes.reader if self._nodes.decided else None

    def figures(self) -> RouterFigures:
        """A snapshot of the router. Any thread may call it."""
        return RouterFigures(
            subscriptions=self._cursors.subscriptions,
            streams=len(self._cursors),
            connections=self._nodes.connections,
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
        report_start: bool = False,
    ) -> Subscription:
        """Follow `stream`, which need not exist yet, from the entry after the id `after` on.

        * `after`: BEGINNING, END (entries added from now on), or the id of the last message that was processed
        * `buffer`: the most messages buffered for this subscriber; `buffer_bytes`: the most bytes of them, the last
          message not counted
        * `when_full`: "wait": the router pauses this subscription until half of its buffer is free, and reads on for
          the others; "drop-oldest": the oldest messages are dropped, and a `Dropped` says how many; "disconnect": the
          subscription ends with `TooSlow`, after the buffered messages
        * `report_start`: with `after=END`, the first item is a `Start` with the id that END stood for, so that a
          subscriber disconnected before its first message can resume there

        Never waits for Redis. Raises ConfigError for a bad id, buffer or policy, and once the router is closed or has
        failed.
        """
        if min(buffer, buffer_bytes) < 1 or when_full not in _WHEN_FULL:
            raise ConfigError(
                f"subscribe: buffer and buffer_bytes must be 1 or more, when_full one of {', '.join(_WHEN_FULL)}"
            )
        start_id = _start_id(after)
        if self._failure:
            raise ConfigError(f"the router has failed; create a new one: {self._failure!r}")
        if self._state != "running":
            self._start()
        subscriber_buffer = SubscriberBuffer(
            stream,
            self._cursors.budget,
            limit=buffer,
            limit_bytes=buffer_bytes,
            when_full=when_full,
            reports_start=report_start,
        )
        self._reactor.call(partial(self._cursors.add, subscriber_buffer, to_wire(stream), start_id))
        if self._state == "closed" or self._failure:  # closed meanwhile: end_all may have missed this one
            subscriber_buffer.ending = subscriber_buffer.ending or self._failure or True
        return Subscription(subscriber_buffer, self._host)

    def close(self, *, timeout_ms: float = 5_000) -> bool:
        """End every subscription, each after its buffered messages, and close the connections.

        Returns whether that took no longer than `timeout_ms` milliseconds. May be called again, and from any thread.
        """
        with self._lock:
            if self._state == "new":
                self._state = "closed"
                return True
            self._state = "closed"
        self._reactor.call(self._shut_down)
        return self._reactor.stop(timeout_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        """Run the router in the running event loop, without a thread of its own."""
        if self._state != "new":
            raise ConfigError("the router already runs in a thread of its own; enter it before the first subscription")
        self._build(AsyncioReactor(self._clock, self._on_crash))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._pid != os.getpid():
            raise ConfigError(
                "the router was created in another process, and its thread does not survive a fork; create a new one"
            )
        with self._lock:
            if self._state == "closed":
                raise ConfigError("the router is closed; create a new one")
            if self._state == "new":
                self._reactor.start()
                self._reactor.call(self._nodes.start)
                self._state = "running"

    def _schedule(self, cursor: Cursor) -> None:
        self._nodes.schedule(cursor)

    def _shut_down(self) -> None:
        self._cursors.end_all(True)
        self._nodes.close()

    def _on_crash(self, error: Exception) -> None:
        """End every subscription with the error, so that no subscriber waits for ever."""
        logger.critical(
            "router failed on an unexpected error (a bug in millstream); ending every subscription", exc_info=error
        )
        self._failure = error
        self._cursors.end_all(error)
        self._nodes.close()


def _start_id(after: Id) -> bytes:
    start_id = wire_id(after)
    text = start_id if isinstance(start_id, bytes) else str(start_id).encode()
    if text == NEWEST:
        return NEWEST
    return str(EntryId.parse(text)).encode()
