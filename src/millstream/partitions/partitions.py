"""Partitions: creates the partition map of a base in Redis, and grows it without losing the order of a key.

A growth closes every partition, each in its own hash slot, and only then begins the new generation. So a producer that
does not know of it can publish to no partition any more, and the other producers know that the entries of older
generations end at the closing ids. Each step may be repeated by any process, so the next process to notice an
interrupted growth finishes it. (Compare the sealed segments of Pravega's streams.)
"""

import logging
from collections.abc import Callable

from millstream.errors import ConfigError
from millstream.handlers.handler import check_partition_count
from millstream.partitions.partition_map import PartitionMap, check_growth
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import StreamKeys, check_base, to_wire
from millstream.redis_client.scripts import Script

logger = logging.getLogger(__name__)

CLOSE = Script("partitions/close")
COMPARE_AND_SET = Script("shared/compare_and_set")

_FIELD = "layout"


class Partitions:
    """The partitions of `base`. Every method raises RedisError and may be repeated; ConfigError for an impossible base.

    `after_step` is for tests: it is called after each step of a growth.
    """

    def __init__(self, client: Client, base: str, *, after_step: Callable[[], None] = lambda: None) -> None:
        self.base = check_base(base)
        self._client = client
        self._key = to_wire(StreamKeys(base).partitions)
        self._after_step = after_step

    def load(self) -> PartitionMap | None:
        """Return the partition map, or None if the partitions were never created."""
        text = self._client.execute("HGET", self._key, _FIELD)
        return None if text is None else PartitionMap.unpack(self.base, text)

    def require(self) -> PartitionMap:
        """Return the partition map. Raises ConfigError if the partitions were never created."""
        layout = self.load()
        if layout is None:
            raise ConfigError(
                f"{self.base!r} has no partitions on this Redis: start a producer or worker, the first creates them"
            )
        return layout

    def create(self, count: int) -> PartitionMap:
        """Return the partition map; create `count` partitions if there are none yet."""
        known = self.load()
        if known is not None:
            return known
        fresh = PartitionMap(base=self.base, counts=(check_partition_count(count),))
        self._compare_and_set(None, fresh)
        return self.require()

    def grow(self, count: int) -> PartitionMap:
        """Grow to `count` partitions, and return the map; a growth that is under way is finished first.

        Raises ConfigError if there are more than that, or none.
        """
        layout = self.finish_growth(self.require())
        while layout.count != count:
            check_growth(layout, count)
            grown = PartitionMap(base=self.base, counts=layout.counts, close_ids=layout.close_ids, growing_to=count)
            self._compare_and_set(layout, grown)
            self._after_step()
            layout = self.finish_growth(self.require())
        return layout

    def finish_growth(self, layout: PartitionMap) -> PartitionMap:
        """Finish the growth that is under way, if there is one, and return the map after it."""
        while layout.growing_to is not None:
            generation = layout.generation + 1
            close_ids = tuple(self._close(stream, generation) for stream in layout.streams)
            grown = PartitionMap(
                base=self.base,
                counts=(*layout.counts, layout.growing_to),
                close_ids=(*layout.close_ids, close_ids),
                growing_to=None,
            )
            if self._compare_and_set(layout, grown):
                logger.info("partitions of %s grown: %d in use", self.base, grown.count)
            self._after_step()
            layout = self.require()
        return layout

    def load_newer(self, known: PartitionMap) -> PartitionMap:
        """Return the map after a partition was found closed for a newer generation than that of `known`."""
        layout = self.finish_growth(self.require())
        if layout.generation <= known.generation:
            raise ConfigError(
                f"a partition of {self.base!r} is closed for a generation that the partition map lacks: Redis lost data, "
                f"or its keys were changed by hand; restore {self._key.decode()!r}, or delete it with the partitions"
            )
        return layout

    def _close(self, stream: str, generation: int) -> str:
        close_id: bytes = self._client.script(
            CLOSE, (to_wire(stream), to_wire(StreamKeys(stream).partition)), (generation,)
        )
        self._after_step()
        return close_id.decode()

    def _compare_and_set(self, seen: PartitionMap | None, new: PartitionMap) -> bool:
        before = b"" if seen is None else seen.pack()
        return bool(self._client.script(COMPARE_AND_SET, (self._key,), (_FIELD, before, new.pack())))
