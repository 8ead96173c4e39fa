"""ClusterNodes: which node serves which stream, for a single server and for Redis Cluster."""

import logging
from collections.abc import Iterable
from typing import Any

from millstream.clock import Every
from millstream.errors import MillstreamError
from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics
from millstream.redis_client.client import Client
from millstream.redis_client.resp import Node, slot_of, slot_owners
from millstream.router.budget import LEAST_BYTES
from millstream.router.cursors import CursorTable
from millstream.router.node_reader import NodeReader
from millstream.router.policy import ReaderName, Settings
from millstream.router.reactor import Reactor
from millstream.router.read_request import ReaderCallbacks
from millstream.router.reconnecting_connection import ConnectionEvents
from millstream.router.subscriber_buffer import Cursor
from millstream.router.sweep import STEP_MS, Sweep

logger = logging.getLogger(__name__)

_REFRESH_MS = 1000.0
_ASK_RETRY_MS = 50.0
_WARN_EVERY_MS = 60_000.0


class ClusterNodes:
    """One `NodeReader` per primary.

    The recovery from every failure is the same: a stream is read again from its cursor's position.
    Every method is for the reactor's thread, but for `connections`, which any thread may ask for.
    """

    def __init__(
        self,
        reactor: Reactor,
        client: Client,
        cursors: CursorTable,
        *,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self.reader: ReaderName = "pool" if settings.reader == "pool" else "tracking"
        self.decided = settings.reader != "auto"
        self._settings = settings
        self._reactor = reactor
        self._client = client
        self._cursors = cursors
        self._metrics = metrics
        self._readers: dict[Node | None, NodeReader] = {}
        self._owners = slot_owners(())
        self._refreshing = False
        self._sweep = Sweep(cursors, settings.read.sweep_ms)
        self._spent_warning = Every(_WARN_EVERY_MS)
        self._callbacks = ReaderCallbacks(
            on_read=self._on_read,
            schedule=self.schedule,
            on_moved=self._refresh_slots,
            read_at=self._read_at,
            call_later=reactor.call_later,
        )

    def start(self) -> None:
        """Connect."""
        if self._client.is_cluster:
            self._refresh_slots()
        else:
            self._reader_at(None)
        self._reactor.after_round.append(self._flush)
        self._reactor.call_later(STEP_MS, self._sweep_some)
        self._reactor.call_later(_REFRESH_MS, self._each_second)

    def close(self) -> None:
        """Close every connection."""
        for node_reader in self._readers.values():
            node_reader.close()
        self._readers.clear()
        self._client.close()

    @property
    def connections(self) -> int:
        """Connections now, the client's own not counted."""
        return sum(node_reader.connections for node_reader in list(self._readers.values()))

    def schedule(self, cursor: Cursor) -> None:
        """Queue the cursor to be read."""
        if (node_reader := self._reader_of(cursor.key)) is not None:
            node_reader.stream_reader.schedule(cursor)

    # Node readers

    def _reader_of(self, key: bytes) -> NodeReader | None:
        if not self._client.is_cluster:
            return self._readers.get(None)
        owner = self._owners[slot_of(key)]
        return None if owner is None else self._readers.get(owner)

    def _reader_at(self, node: Node | None) -> NodeReader:
        node_reader = self._readers.get(node)
        if node_reader is None:
            events = ConnectionEvents(
                on_up=lambda: self._on_up(node),
                on_down=self._on_down,
                on_denied=self._cursors.end_all,
                on_refused=self._on_refused,
            )
            node_reader = self._readers[node] = NodeReader(
                self._reactor,
                self._client,
                node,
                self._cursors,
                reader=self.reader,
                settings=self._settings,
                callbacks=self._callbacks,
                events=events,
                metrics=self._metrics,
            )
        return node_reader

    def _flush(self) -> None:
        if self._cursors.budget.spent:
            self._update_budget()
        for node_reader in self._readers.values():
            node_reader.flush()

    def _on_read(self, cursor: Cursor) -> None:
        if (node_reader := self._reader_of(cursor.key)) is not None:
            node_reader.watch(cursor)

    def _read_at(self, node: Node, cursors: list[Cursor]) -> None:
        """Read at a node that is about to get a slot; if it is not connected yet, later and through the slot map."""
        node_reader = self._reader_at(node)
        if node_reader.connection.up:
            node_reader.stream_reader.read_once(cursors)
            return
        for cursor in cursors:
            cursor.in_flight = cursor.stale = False
        self._reactor.call_later(_ASK_RETRY_MS, lambda: self._schedule_all(cursors))

    # Connection events

    def _on_up(self, node: Node | None) -> None:
        """A connection is new, or every key there has changed: read every stream of that node."""
        if not self.decided:
            self.decided = True
            logger.info("router reads by %s", self.reader)
        node_reader = self._readers.get(node)
        if node_reader is not None:
            self._schedule_all(node_reader.stream_reader.pop_interrupted())
        self._read_all(key for key in self._cursors.streams() if self._reader_of(key) is node_reader)

    def _on_down(self, _: bool) -> None:
        if self._client.is_cluster:
            self._refresh_slots()

    def _on_refused(self, error: MillstreamError) -> None:
        """The server, or a proxy before it, refuses CLIENT TRACKING."""
        if self._settings.reader != "auto" or self.reader == "pool":
            self._cursors.end_all(error)
            return
        logger.warning("CLIENT TRACKING refused: %s; reading through a pool of blocking reads", error)
        self.reader, self.decided = "pool", True
        nodes = list(self._readers)
        for node_reader in self._readers.values():
            node_reader.close()
        self._readers.clear()
        for node in nodes:
            self._reader_at(node)

    # Sweep

    def _read_all(self, keys: Iterable[bytes]) -> None:
        swept = 0
        for key in keys:
            for cursor in self._cursors.of(key):
                self.schedule(cursor)
                swept += 1
        self._metrics.count(m.ROUTER_POLLED, swept)

    def _schedule_all(self, cursors: list[Cursor]) -> None:
        for cursor in cursors:
            self.schedule(cursor)

    def _sweep_some(self) -> None:
        """Read a few streams, so that all of them are read within `sweep_ms`."""
        self._reactor.call_later(STEP_MS, self._sweep_some)
        if due := self._sweep.step():
            self._schedule_all(due)
            self._metrics.count(m.ROUTER_POLLED, len(due))

    def _each_second(self) -> None:
        """Once a second: report metrics, and refresh a cluster's slot map."""
        self._reactor.call_later(_REFRESH_MS, self._each_second)
        self._metrics.set(m.ROUTER_SUBSCRIPTIONS, self._cursors.subscriptions)
        self._metrics.set(m.ROUTER_STREAMS, len(self._cursors))
        self._metrics.set(m.ROUTER_BUFFERED_BYTES, self._update_budget())
        self._metrics.set(m.ROUTER_AT_BUDGET, int(self._cursors.budget.spent))
        if self._client.is_cluster:
            self._refresh_slots()

    def _update_budget(self) -> int:
        """Return the bytes held by the buffers. Warns at the limit, once a minute at most."""
        budget = self._cursors.budget
        held = budget.update()
        if budget.spent and self._spent_warning.is_due(self._reactor.clock.monotonic_ms()):
            logger.warning(
                "router is at its budget: %d bytes buffered for slow subscribers, of %d (budget_bytes); "
                "reading ahead only %d bytes or one message for each until a quarter of the budget is free",
                held,
                budget.max_bytes,
                LEAST_BYTES,
            )
        return held

    # Slot map

    def _refresh_slots(self) -> None:
        """Fetch which node serves which slots."""
        if not self._refreshing:
            self._refreshing = True
            self._reactor.run_in_helper(lambda: self._client.execute("CLUSTER", "SLOTS"), self._on_slots)

    def _on_slots(self, reply: Any) -> None:
        self._refreshing = False
        if isinstance(reply, Exception):
            if not self._readers:
                logger.warning("cluster is unreachable: %s; retrying", reply)
                self._reactor.call_later(_REFRESH_MS, self._refresh_slots)
            return
        owners = slot_owners(reply)
        moved = {slot for slot, owner in enumerate(owners) if owner != self._owners[slot]}
        self._owners = owners
        for node in {owner for owner in owners if owner is not None}:
            self._reader_at(node)
        for removed in set(self._readers) - set(owners):
            self._readers.pop(removed).close()
        if moved:
            self._read_all(key for key in self._cursors.streams() if slot_of(key) in moved)
