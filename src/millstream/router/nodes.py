"""Which server has which stream, and that every stream is read: a single server's simple case, and a cluster's."""

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

_ROUND_MS = 1000.0
_SWEEP_EVERY_MS = 20.0
_SOON_MS = 50.0
_WORD_EVERY_MS = 60_000.0


class ClusterNodes:
    """All stations.

    Whatever breaks, what keeps everything right is the same: a stream is read again from its cursor's place.
    Everything is for the pump's thread.
    """

    def __init__(
        self,
        pump: Reactor,
        client: Client,
        shelf: CursorTable,
        *,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self.reader: ReaderName = "pool" if settings.choice == "pool" else "tracking"
        self.decided = settings.choice != "auto"
        self._settings = settings
        self._pump = pump
        self._client = client
        self._shelf = shelf
        self._metrics = metrics
        self._stations: dict[Node | None, NodeReader] = {}
        self._owners = primaries(())
        self._looking = False
        self._to_sweep: list[bytes] = []
        self._sweep_credit = 0.0
        self._spent_was_said = False
        self._calls = ReaderCallbacks(
            done=self._done, want=self.want, moved=self._look, ask_at=self._ask_at, later=pump.later
        )

    def start(self) -> None:
        """Connect."""
        if self._client.is_cluster:
            self._look()
        else:
            self._station(None)
        self._pump.each_round.append(self._go)
        self._pump.later(_SWEEP_EVERY_MS, self._sweep_some)
        self._pump.later(_ROUND_MS, self._round)

    def close(self) -> None:
        """Close every connection."""
        for station in self._stations.values():
            station.close()
        self._stations.clear()
        self._client.close()

    @property
    def connections(self) -> int:
        """Connections now, the client's own aside."""
        return sum(station.connections for station in self._stations.values())

    def want(self, cursor: Cursor) -> None:
        """Read this soon."""
        if (station := self._of(cursor.key)) is not None:
            station.lane.want(cursor)

    # Stations

    def _of(self, key: bytes) -> NodeReader | None:
        if not self._client.is_cluster:
            return self._stations.get(None)
        owner = self._owners[slot_of(key)]
        return None if owner is None else self._stations.get(owner)

    def _station(self, node: Node | None) -> NodeReader:
        found = self._stations.get(node)
        if found is None:
            events = ConnectionEvents(
                up=lambda: self._up(node), down=self._down, denied=self._shelf.end_all, refused=self._refused
            )
            found = self._stations[node] = NodeReader(
                self._pump, self._client, node, self._shelf, reader=self.reader, settings=self._settings,
                calls=self._calls, events=events, metrics=self._metrics,
            )  # fmt: skip
        return found

    def _go(self) -> None:
        self._balance()
        for station in self._stations.values():
            station.go()

    def _done(self, cursor: Cursor) -> None:
        if self.reader == "pool" and (station := self._of(cursor.key)) is not None:
            station.arm(cursor)

    def _ask_at(self, node: Node, cursors: list[Cursor]) -> None:
        """Read at a node that is about to get a slot; not connected yet: later, by the usual way."""
        station = self._station(node)
        if station.link.up:
            station.lane.ask_once(cursors)
            return
        for cursor in cursors:
            cursor.asked = cursor.stale = False
        self._pump.later(_SOON_MS, lambda: self._want_all(cursors))

    # Trouble

    def _up(self, node: Node | None) -> None:
        """A connection is new, or everything there has changed: nothing is known of any stream, so read them all."""
        if not self.decided:
            self.decided = True
            logger.info("the router reads by %s", self.reader)
        station = self._stations.get(node)
        if station is not None:
            self._want_all(station.lane.interrupted())
        self._sweep(key for key in self._shelf.streams() if self._of(key) is station)

    def _down(self, _: bool) -> None:
        if self._client.is_cluster:
            self._look()

    def _refused(self, error: MillstreamError) -> None:
        """The server, or what is between, does not track."""
        if self._settings.choice != "auto" or self.reader == "pool":
            self._shelf.end_all(error)
            return
        logger.warning("the router reads through a pool of blocking reads, as tracking is refused: %s", error)
        self.reader, self.decided = "pool", True
        nodes = list(self._stations)
        for station in self._stations.values():
            station.close()
        self._stations.clear()
        for node in nodes:
            self._station(node)

    # Everything once

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
        """Look at a few streams, so that within `sweep_ms` all of them are."""
        self._pump.later(_SWEEP_EVERY_MS, self._sweep_some)
        self._sweep_credit += len(self._shelf) * _SWEEP_EVERY_MS / self._settings.read.sweep_ms
        share = int(self._sweep_credit)
        if not share:
            return
        self._sweep_credit -= share
        if not self._to_sweep:
            self._to_sweep = self._shelf.streams()
        now = self._to_sweep[-share:]
        del self._to_sweep[-share:]
        for key in now:
            for cursor in self._shelf.at(key):
                cursor.anchor, cursor.next_anchor = cursor.next_anchor or cursor.anchor, cursor.last
                if not cursor.asked:
                    self.want(cursor)
        self._metrics.count(m.ROUTER_RESWEPT, len(now))

    def _round(self) -> None:
        """Once a second: figures, and the map of a cluster."""
        self._pump.later(_ROUND_MS, self._round)
        self._metrics.set(m.ROUTER_SUBSCRIPTIONS, self._shelf.subscriptions)
        self._metrics.set(m.ROUTER_STREAMS, len(self._shelf))
        self._metrics.set(m.ROUTER_HELD_BYTES, self._balance())
        self._metrics.set(m.ROUTER_AT_BUDGET, int(self._shelf.budget.spent))
        if self._client.is_cluster:
            self._look()

    def _balance(self) -> int:
        """How many bytes the buffers hold. Says when that is as much as may be, once a minute at most."""
        budget = self._shelf.budget
        held = budget.balance()
        if budget.spent and not self._spent_was_said:
            logger.warning(
                "the router is at its budget: %d bytes wait for slow subscribers, of %d (budget_bytes); until a quarter of "
                "them is taken, it reads ahead %d bytes or one message for each", held, budget.most_bytes, LEAST_BYTES,
            )  # fmt: skip
            self._spent_was_said = True
            self._pump.later(_WORD_EVERY_MS, self._say_again)
        return held

    def _say_again(self) -> None:
        self._spent_was_said = False

    # A cluster's map

    def _look(self) -> None:
        """Ask which node has which slots."""
        if not self._looking:
            self._looking = True
            self._pump.aside(lambda: self._client.execute("CLUSTER", "SLOTS"), self._looked)

    def _looked(self, reply: Any) -> None:
        self._looking = False
        if isinstance(reply, Exception):
            if not self._stations:
                logger.warning("the router waits for the cluster: %s", reply)
                self._pump.later(_ROUND_MS, self._look)
            return
        owners = primaries(reply)
        moved = {slot for slot, owner in enumerate(owners) if owner != self._owners[slot]}
        self._owners = owners
        for node in {owner for owner in owners if owner is not None}:
            self._station(node)
        for gone in set(self._stations) - set(owners):
            self._stations.pop(gone).close()
        if moved:
            self._sweep(key for key in self._shelf.streams() if slot_of(key) in moved)
