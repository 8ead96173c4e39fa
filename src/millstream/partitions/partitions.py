"""The partitions of a base, as Redis has them: made by whoever comes first, and grown without losing a key's order.

A growth seals every partition, each in its own hash slot, and only then begins the new generation: so a producer that
does not know of it can publish to no partition any more, and those that do know that all it has published is up to the
seals. Each step may be repeated by anybody, so a growth that was broken off is ended by whoever meets it. (Compare the
sealed segments of Pravega's streams.)
"""

import logging
from collections.abc import Callable

from millstream.errors import ConfigError
from millstream.handlers.handler import check_partition_count
from millstream.partitions.partition_map import PartitionMap, check_growth
from millstream.redis_client.client import Client, Script
from millstream.redis_client.key_names import StreamKeys, check_base, to_wire

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

    def find(self) -> PartitionMap | None:
        """The layout, or None if nobody has made partitions."""
        text = self._client.execute("HGET", self._key, _FIELD)
        return None if text is None else PartitionMap.unpack(self.base, text)

    def found(self) -> PartitionMap:
        """The layout. Raises ConfigError if nobody has made partitions."""
        layout = self.find()
        if layout is None:
            raise ConfigError(f"{self.base!r} has no partitions on this Redis; its first producer or worker makes them")
        return layout

    def made(self, count: int) -> PartitionMap:
        """The layout; with `count` partitions if there are none yet."""
        known = self.find()
        if known is not None:
            return known
        fresh = PartitionMap(base=self.base, counts=(check_partition_count(count),))
        self._swap(None, fresh)
        return self.found()

    def grow(self, count: int) -> PartitionMap:
        """Have `count` partitions, and return the layout; what was begun by others is ended first.

        Raises ConfigError if there are more than that, or none.
        """
        layout = self.finish(self.found())
        while layout.count != count:
            check_growth(layout, count)
            grown = PartitionMap(base=self.base, counts=layout.counts, seals=layout.seals, growing=count)
            self._swap(layout, grown)
            self._after_step()
            layout = self.finish(self.found())
        return layout

    def finish(self, layout: PartitionMap) -> PartitionMap:
        """End the growth that is under way, if there is one, and return the layout after it."""
        while layout.growing is not None:
            generation = layout.generation + 1
            seals = tuple(self._seal(stream, generation) for stream in layout.streams)
            grown = PartitionMap(
                base=self.base, counts=(*layout.counts, layout.growing), seals=(*layout.seals, seals), growing=None
            )
            if self._swap(layout, grown):
                logger.info("%s has %d partitions now", self.base, grown.count)
            self._after_step()
            layout = self.found()
        return layout

    def newer(self, known: PartitionMap) -> PartitionMap:
        """The layout, after a partition was found sealed for a newer generation than that of `known`."""
        layout = self.finish(self.found())
        if layout.generation <= known.generation:
            raise ConfigError(
                f"a partition of {self.base!r} is sealed for a generation that Redis knows nothing of: it has lost data, "
                f"or its keys were changed by hand; delete {self._key.decode()!r} only with the partitions"
            )
        return layout

    def _seal(self, stream: str, generation: int) -> str:
        seal: bytes = self._client.script(
            CLOSE, (to_wire(stream), to_wire(StreamKeys(stream).partition)), (generation,)
        )
        self._after_step()
        return seal.decode()

    def _swap(self, seen: PartitionMap | None, new: PartitionMap) -> bool:
        before = b"" if seen is None else seen.pack()
        return bool(self._client.script(COMPARE_AND_SET, (self._key,), (_FIELD, before, new.pack())))
