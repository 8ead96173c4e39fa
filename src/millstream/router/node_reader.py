"""NodeReader: reads the streams of one server: its connection, its stream reader, and its source of changes."""

from typing import Any

from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics
from millstream.redis_client.client import Client
from millstream.redis_client.resp import Node, Push
from millstream.router.blocking_pool import Pool
from millstream.router.connection import ConnectionEvents, ConnectionPolicy, ReconnectingConnection
from millstream.router.cursors import CursorTable
from millstream.router.policy import ReaderName, Settings
from millstream.router.reactor import Reactor
from millstream.router.read_request import ReaderCallbacks
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
        self._pump = reactor
        self._client = client
        self._events = events
        self._metrics = metrics
        self._heard = 0
        self._pool: Pool | None = None
        name = "Redis" if node is None else f"{node[0]}:{node[1]}"
        by_slot = client.is_cluster
        if reader == "pool":
            self._pool = Pool(self._connect, self._changed, settings.pool, greeting=_GREETING, by_slot=by_slot)
        role = b"master" if "+sentinel" in client.url.partition("://")[0] else None
        policy = ConnectionPolicy(
            greeting=_TRACKING_GREETING if reader == "tracking" else _GREETING, timeout_ms=client.timeout_ms, role=role
        )
        own_events = ConnectionEvents(
            up=events.up, down=self._down, push=self._pushed, denied=events.denied, refused=events.refused
        )
        self.link = self._connect(policy, own_events, name)
        self.lane = StreamReader(
            self.link,
            cursors,
            callbacks,
            streams=settings.read.streams,
            count=settings.read.count,
            reply_bytes=settings.read.reply_bytes,
            by_slot=by_slot,
        )

    @property
    def connections(self) -> int:
        """Connections to this server now."""
        return 1 + (self._pool.workers if self._pool else 0)

    def arm(self, cursor: Cursor) -> None:
        """Wait for the next change of a stream just read to its end. With tracking the read has done that."""
        if self._pool is not None:
            self._pool.arm(cursor)

    def go(self) -> None:
        """Send the requests that may be sent now."""
        self.lane.go()
        if self._pool is not None:
            self._pool.go()
        if self._heard:
            self._metrics.count(m.ROUTER_CHANGED, self._heard)
            self._heard = 0

    def close(self) -> None:
        """Close its connections, and forget every queue and request."""
        self.link.close()
        self.lane.reset()
        if self._pool is not None:
            self._pool.close()

    def _connect(self, policy: ConnectionPolicy, events: ConnectionEvents, name: str) -> ReconnectingConnection:
        return ReconnectingConnection(
            self._pump, lambda: self._client.dial(self.node), name, policy=policy, events=events
        )

    def _down(self, hung_up: bool) -> None:
        self.lane.reset(hung_up=hung_up)
        self._events.down(hung_up)

    def _pushed(self, push: Push) -> None:
        """Handle an invalidation: keys have changed, or with None every key has, as after FLUSHALL."""
        if push[0] != b"invalidate":
            return
        keys: list[Any] | None = push[1]
        if keys is None:
            self._events.up()
            return
        self._heard += len(keys)
        self.lane.heard(keys)

    def _changed(self, cursor: Cursor) -> None:
        self._heard += 1
        self.lane.want(cursor, changed=True)
