"""ClusterNodes: which node serves which stream, for a single server and for Redis Cluster."""

import logging
from collections.abc import Iterable
from typing import Any

from millstream.errors import MillstreamError
from millstream.observability import metrics as m
from millstream.observability.metrics import Metrics
from millstream.redis_client.client import Client
from millstream.redis_client.resp import Node, primaries, slot_of
from millstream.router.budget import LEAST_BYTES
from millstream.router.connection import ConnectionEvents
from millstream.router.cursors import CursorTable
from millstream.router.node_reader import NodeReader
from millstream.router.policy import ReaderName, Settings
from millstream.router.reactor import Reactor
from millstream.router.read_request import ReaderCallbacks
from millstream.router.subscriber_buffer import Cursor

logger = logging.getLogger(__name__)

_REFRESH_MS = 1000.0
_SWEEP_EVERY_MS = 20.0
_ASK_RETRY_MS = 50.0
_WARN_EVERY_MS = 60_000.0


class ClusterNodes:
    """One `NodeReader` per primary.

    The recovery from every failure is the same: a stream is read again from its cursor's position.
    Every method is for the reactor's thread.
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
        self.reader: ReaderName = "pool" if settings.choice == "pool" else "tracking"
        self.decided = settings.choice != "auto"
        self._settings = settings
        self._pump = reactor
        self._client = client
        self._shelf = cursors
        self._metrics = metrics
        self._stations: dict[Node | None, NodeReader] = {}
        self._owners = primaries(())
        self._looking = False
        self._to_sweep: list[bytes] = []
        self._sweep_credit = 0.0
        self._spent_was_said = False
        self._calls = ReaderCallbacks(
            done=self._done, want=self.want, moved=self._look, ask_at=self._ask_at, later=reactor.later
        )

    def start(self) -> None:
        """Connect."""
        if self._client.is_cluster:
            self._look()
        else:
            self._station(None)
        self._pump.each_round.append(self._go)
        self._pump.later(_SWEEP_EVERY_MS, self._sweep_some)
        self._pump.later(_REFRESH_MS, self._round)

    def close(self) -> None:
        """Close every connection."""
        for node_reader in self._stations.values():
            node_reader.close()
        self._stations.clear()
        self._client.close()

    @property
    def connections(self) -> int:
        """Connections now, the client's own not counted."""
        return sum(node_reader.connections for node_reader in self._stations.values())

    def want(self, cursor: Cursor) -> None:
        """Queue the cursor to be read."""
        if (node_reader := self._of(cursor.key)) is not None:
            node_reader.lane.want(cursor)

    # Node readers

    def _of(self, key: bytes) -> NodeReader | None:
        if not self._client.is_cluster:
            return self._stations.get(None)
        owner = self._owners[slot_of(key)]
        return None if owner is None else self._stations.get(owner)

    def _station(self, node: Node | None) -> NodeReader:
        node_reader = self._stations.get(node)
        if node_reader is None:
            events = ConnectionEvents(
                up=lambda: self._up(node), down=self._down, denied=self._shelf.end_all, refused=self._refused
            )
            node_reader = self._stations[node] = NodeReader(
                self._pump,
                self._client,
                node,
                self._shelf,
                reader=self.reader,
                settings=self._settings,
                callbacks=self._calls,
                events=events,
                metrics=self._metrics,
            )
        return node_reader

    def _go(self) -> None:
        self._balance()
        for node_reader in self._stations.values():
            node_reader.go()

    def _done(self, cursor: Cursor) -> None:
        if self.reader == "pool" and (node_reader := self._of(cursor.key)) is not None:
            node_reader.arm(cursor)

    def _ask_at(self, node: Node, cursors: list[Cursor]) -> None:
        """Read at a node that is about to get a slot; if it is not connected yet, later and through the slot map."""
        node_reader = self._station(node)
        if node_reader.link.up:
            node_reader.lane.ask_once(cursors)
            return
        for cursor in cursors:
            cursor.asked = cursor.stale = False
        self._pump.later(_ASK_RETRY_MS, lambda: self._want_all(cursors))

    # Connection events

    def _up(self, node: Node | None) -> None:
        """A connection is new, or every key there has changed: read every stream of that node."""
        if not self.decided:
            self.decided = True
            logger.info("router reads by %s", self.reader)
        node_reader = self._stations.get(node)
        if node_reader is not None:
            self._want_all(node_reader.lane.interrupted())
        self._sweep(key for key in self._shelf.streams() if self._of(key) is node_reader)

    def _down(self, _: bool) -> None:
        if self._client.is_cluster:
            self._look()

    def _refused(self, error: MillstreamError) -> None:
        """The server, or a proxy before it, refuses CLIENT TRACKING."""
        if self._settings.choice != "auto" or self.reader == "pool":
            self._shelf.end_all(error)
            return
        logger.warning("CLIENT TRACKING refused: %s; reading through a pool of blocking reads", error)
        self.reader, self.decided = "pool", True
        nodes = list(self._stations)
        for node_reader in self._stations.values():
            node_reader.close()
        self._stations.clear()
        for node in nodes:
            self._station(node)

    # Sweep

    def _sweep(self, keys: Iterable[bytes]) -> None:
        swept = 0
        for key in keys:
            for cursor in self._shelf.at(key):
                self.want(cursor)
                swept += 1
        self._metrics.count(m.ROUTER_RESWEPT, swept)

    def _want_all(self, cursors: list[Cursor]) -> None:
        for cursor in cursors:
            self.want(cursor)

    def _sweep_some(self) -> None:
        """Read a few streams, so that all of them are read within `sweep_ms`."""
        self._pump.later(_SWEEP_EVERY_MS, self._sweep_some)
        self._sweep_credit += len(self._shelf) * _SWEEP_EVERY_MS / self._settings.read.sweep_ms
        count = int(self._sweep_credit)
        if not count:
            return
        self._sweep_credit -= count
        if not self._to_sweep:
            self._to_sweep = self._shelf.streams()
        keys = self._to_sweep[-count:]
        del self._to_sweep[-count:]
        for key in keys:
            for cursor in self._shelf.at(key):
                cursor.anchor, cursor.next_anchor = cursor.next_anchor or cursor.anchor, cursor.last
                if not cursor.asked:
                    self.want(cursor)
        self._metrics.count(m.ROUTER_RESWEPT, len(keys))

    def _round(self) -> None:
        """Once a second: report metrics, and refresh a cluster's slot map."""
        self._pump.later(_REFRESH_MS, self._round)
        self._metrics.set(m.ROUTER_SUBSCRIPTIONS, self._shelf.subscriptions)
        self._metrics.set(m.ROUTER_STREAMS, len(self._shelf))
        self._metrics.set(m.ROUTER_HELD_BYTES, self._balance())
        self._metrics.set(m.ROUTER_AT_BUDGET, int(self._shelf.budget.spent))
        if self._client.is_cluster:
            self._look()

    def _balance(self) -> int:
        """Return the bytes held by the buffers. Warns at the limit, once a minute at most."""
        budget = self._shelf.budget
        held = budget.balance()
        if budget.spent and not self._spent_was_said:
            logger.warning(
                "router is at its budget: %d bytes buffered for slow subscribers, of %d (budget_bytes); "
                "reading ahead only %d bytes or one message for each until a quarter of the budget is free",
                held,
                budget.most_bytes,
                LEAST_BYTES,
            )
            self._spent_was_said = True
            self._pump.later(_WARN_EVERY_MS, self._say_again)
        return held

    def _say_again(self) -> None:
        self._spent_was_said = False

    # Slot map

    def _look(self) -> None:
        """Fetch which node serves which slots."""
        if not self._looking:
            self._looking = True
            self._pump.aside(lambda: self._client.execute("CLUSTER", "SLOTS"), self._looked)

    def _looked(self, reply: Any) -> None:
        self._looking = False
        if isinstance(reply, Exception):
            if not self._stations:
                logger.warning("cluster is unreachable: %s; retrying", reply)
                self._pump.later(_REFRESH_MS, self._look)
            return
        owners = primaries(reply)
        moved = {slot for slot, owner in enumerate(owners) if owner != self._owners[slot]}
        self._owners = owners
        for node in {owner for owner in owners if owner is not None}:
            self._station(node)
        for removed in set(self._stations) - set(owners):
            self._stations.pop(removed).close()
        if moved:
            self._sweep(key for key in self._shelf.streams() if slot_of(key) in moved)
