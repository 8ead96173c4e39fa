"""NodeReader: reads the streams of one server: its connection, its stream reader, and its source of changes."""

from dataclasses import replace
from typing import Any

from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics
from millstream.redis_client.client import Client
from millstream.redis_client.resp import Node, Push
from millstream.router.blocking_pool import BlockingPool
from millstream.router.cursors import CursorTable
from millstream.router.policy import ReaderName, Settings
from millstream.router.reactor import Reactor
from millstream.router.read_request import ReaderCallbacks
from millstream.router.reconnecting_connection import ConnectionEvents, ConnectionPolicy, ReconnectingConnection
from millstream.router.stream_reader import StreamReader
from millstream.router.subscriber_buffer import Cursor

_SET_NAME = ("CLIENT", "SETNAME", "millstream-router")
_TRACKING_GREETING = [("HELLO", "3"), ("CLIENT", "TRACKING", "ON"), _SET_NAME]
_GREETING = [_SET_NAME]
"""The first commands on a connection."""


class NodeReader:
    """Reads the streams of `node` (None: of the only server), by tracking or through a pool.

    Tracking: on a RESP3 connection with CLIENT TRACKING on, each non-blocking XREAD makes the server remember the keys
    it names. The server reports the next change of a key once, until the key is read again: an edge-triggered epoll for
    streams.
    """

    def __init__(
        self,
        reactor: Reactor,
        client: Client,
        node: Node | None,
        cursors: CursorTable,
        *,
        reader: ReaderName,
        settings: Settings,
        callbacks: ReaderCallbacks,
        events: ConnectionEvents,
        metrics: Metrics,
    ) -> None:
        self.node = node
        self._reactor = reactor
        self._client = client
        self._events = events
        self._metrics = metrics
        self._changes = 0
        self._pool: BlockingPool | None = None
        name = "Redis" if node is None else f"{node[0]}:{node[1]}"
        by_slot = client.is_cluster
        if reader == "pool":
            self._pool = BlockingPool(
                self._connect, self._on_changed, settings.pool, greeting=_GREETING, by_slot=by_slot
            )
        role = b"master" if "+sentinel" in client.url.partition("://")[0] else None
        policy = ConnectionPolicy(
            greeting=_TRACKING_GREETING if reader == "tracking" else _GREETING, timeout_ms=client.timeout_ms, role=role
        )
        own_events = ConnectionEvents(
            on_up=events.on_up,
            on_down=self._on_down,
            on_push=self._on_push,
            on_denied=events.on_denied,
            on_refused=events.on_refused,
        )
        self.connection = self._connect(policy, own_events, name)
        self.stream_reader = StreamReader(
            self.connection,
            cursors,
            callbacks if self._pool is not None else replace(callbacks, on_read=None),
            streams=settings.read.streams,
            count=settings.read.count,
            reply_bytes=settings.read.reply_bytes,
            by_slot=by_slot,
        )

    @property
    def connections(self) -> int:
        """Connections to this server now."""
        return 1 + (self._pool.workers if self._pool else 0)

    def watch(self, cursor: Cursor) -> None:
        """Wait for the next change of a stream just read to its end. With tracking the read has done that."""
        if self._pool is not None:
            self._pool.watch(cursor)

    def flush(self) -> None:
        """Send the requests that may be sent now."""
        self.stream_reader.flush()
        if self._pool is not None:
            self._pool.flush()
        if self._changes:
            self._metrics.count(m.ROUTER_CHANGED, self._changes)
            self._changes = 0

    def close(self) -> None:
        """Close its connections, and forget every queue and request."""
        self.connection.close()
        self.stream_reader.reset()
        if self._pool is not None:
            self._pool.close()

    def _connect(self, policy: ConnectionPolicy, events: ConnectionEvents, name: str) -> ReconnectingConnection:
        return ReconnectingConnection(
            self._reactor, lambda: self._client.dial(self.node), name, policy=policy, events=events
        )

    def _on_down(self, closed_by_server: bool) -> None:
        self.stream_reader.reset(closed_by_server=closed_by_server)
        self._events.on_down(closed_by_server)

    def _on_push(self, push: Push) -> None:
        """Handle an invalidation: keys have changed, or with None every key has, as after FLUSHALL."""
        if push[0] != b"invalidate":
            return
        keys: list[Any] | None = push[1]
        if keys is None:
            self._events.on_up()
            return
        self._changes += len(keys)
        self.stream_reader.on_invalidated(keys)

    def _on_changed(self, cursor: Cursor) -> None:
        self._changes += 1
        self.stream_reader.schedule(cursor, changed=True)
