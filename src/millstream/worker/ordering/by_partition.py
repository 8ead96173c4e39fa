"""Workers of a handler that reads partitions: those of all generations, with keys that move from old ones to new ones."""

import logging
import threading
from collections.abc import Mapping, Sequence

from millstream.errors import ConfigError, Unavailable
from millstream.partitions.key_migration import KeyMigration, PartitionStream, send_on
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.worker.ordering.ordering import ByKey, Round, WorkerContext

logger = logging.getLogger(__name__)

_SOON_S = 0.05


class ByPartition(ByKey):
    """A ByKey on the partitions of the handler's bases. New ones are joined as soon as a look shows them."""

    def __init__(self, means: WorkerContext) -> None:
        super().__init__(means)
        m, handler = means, means.handler
        self._moving = Client(m.url, clock=m.clock)
        self._layouts: dict[str, PartitionMap] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._routing_moves: dict[str, KeyMigration] = {}
        self._rounds_moves: dict[str, KeyMigration] = {}
        self._owner = {"app": handler.app, "handler": handler.name}

    def find(self, looking: Client) -> Sequence[str]:
        """See Side. The newest come first: so where the oldest of all is joined, all that there were then are."""
        handler = self._means.handler
        found: list[str] = []
        for base in handler.streams:
            self._take_note(Partitions(looking, base).made(handler.partitions or 1))
            layout = self._layouts[base]
            self._places.update({layout.stream(place): (base, place) for place in range(layout.count)})
            found += reversed(layout.streams)
        return found

    def _take_note(self, layout: PartitionMap) -> None:
        known = self._layouts.get(layout.base)
        if known is not None and layout.counts[: known.generation] != known.counts:
            raise ConfigError(
                f"the partitions of {layout.base!r} are others than they were: Redis has lost them; start the workers anew"
            )
        self._layouts[layout.base] = layout
        clock = self._means.clock
        for moves, client in ((self._routing_moves, self._routing), (self._rounds_moves, self._moving)):
            moves.setdefault(layout.base, KeyMigration(client, layout, clock=clock, **self._owner)).layout = layout

    def join(self, name: str) -> None:
        """See Side. A handler that has begun gets all of a new partition, wherever it is to begin."""
        base, place = self._places[name]
        m = self._means
        has_begun = m.client.execute("HEXISTS", self._keys_of(self._layouts[base].stream(0)).meta, "frontier")
        start = "earliest" if has_begun else m.start
        # What may fail comes before the stream is known. The first to join says where it begins.
        working = self._opened(PartitionStream, name, start)
        routed = self._to_route(PartitionStream, working)
        routed.place, routed.moves, routed.send_on = place, self._routing_moves[base], self._send_on
        self._work_on(working)
        self._router.add(routed)

    def _send_on(self, stream: str, key: bytes, entry_id: bytes, pairs: Sequence[bytes]) -> bool:
        """Publish a redriven entry, once, to the partition that its key is in by now; False if it has not moved."""
        base, _ = self._places[stream]
        return send_on(self._routing, base, self._keys_of(stream), key, entry_id, pairs)

    def rounds(self) -> Mapping[str, Round]:
        """See Side."""
        return {**super().rounds(), "movers": self._move}

    def _move(self, stopping: threading.Event) -> None:
        """Bring in the keys that move to the partitions that this worker routes. Raises RedisError but Unavailable."""
        wait_s, most_s = _SOON_S, self._means.policy.sweep_ms / 1000
        while not stopping.wait(wait_s):
            wait_s = min(2 * wait_s, most_s)
            try:
                if self._move_once():
                    wait_s = _SOON_S
            except Unavailable as error:
                logger.debug("no key moves while Redis is away: %s", error)

    def _move_once(self) -> int:
        moved = 0
        for base, mover in self._rounds_moves.copy().items():
            if mover.layout.generation > 1:
                held = [self._places[name] for name in self._router.held]
                mine = [place for its, place in held if its == base]
                moved += mover.bring_in(mine) + mover.settle(mine)
        return moved

    def close(self) -> None:
        """See Side."""
        super().close()
        self._moving.close()
