"""Ordering by partition: workers of a handler that reads partitions of all generations, while keys migrate."""

import logging
import threading
from collections.abc import Mapping, Sequence

from millstream.clock import Backoff
from millstream.errors import ConfigError, Unavailable
from millstream.partitions.key_migration import KeyMigration, PartitionStream, forward_entry
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.worker.context import WorkerContext
from millstream.worker.ordering.by_key import ByKey
from millstream.worker.ordering.ordering import BackgroundLoop

logger = logging.getLogger(__name__)

_SOON_MS = 50.0


class ByPartition(ByKey):
    """A ByKey on the partitions of the handler's base streams; joins new partitions as soon as discovery finds them."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        c, handler = context, context.handler
        self._migration_client = Client(c.url, clock=c.clock)
        self._partition_maps: dict[str, PartitionMap] = {}
        self._positions: dict[str, tuple[str, int]] = {}
        self._router_migrations: dict[str, KeyMigration] = {}
        self._key_migrations: dict[str, KeyMigration] = {}
        self._owner = {"app": handler.app, "handler": handler.name}
        self._state_expires = handler.state_ttl_ms is not None

    def discover(self, scan_client: Client) -> Sequence[str]:
        """See Ordering. Newest first: so when the oldest is joined, all partitions created by then are joined."""
        handler = self._context.handler
        found: list[str] = []
        for base in handler.streams:
            self._on_partition_map(Partitions(scan_client, base).create(handler.partitions or 1))
            partition_map = self._partition_maps[base]
            self._positions.update(
                {partition_map.stream(position): (base, position) for position in range(partition_map.count)}
            )
            found += reversed(partition_map.streams)
        return found

    def _on_partition_map(self, partition_map: PartitionMap) -> None:
        known = self._partition_maps.get(partition_map.base)
        if known is not None and partition_map.counts[: known.generation] != known.counts:
            raise ConfigError(
                f"the partitions of {partition_map.base!r} changed: Redis lost their definition; restart the workers"
            )
        self._partition_maps[partition_map.base] = partition_map
        clock = self._context.clock
        for migrations, client in (
            (self._router_migrations, self._routing_client),
            (self._key_migrations, self._migration_client),
        ):
            migrations.setdefault(
                partition_map.base,
                KeyMigration(client, partition_map, state_expires=self._state_expires, clock=clock, **self._owner),
            ).partition_map = partition_map

    def join(self, name: str) -> None:
        """See Ordering. A handler that has started reads a new partition from its beginning, whatever its `start`."""
        base, position = self._positions[name]
        c = self._context
        has_started = c.client.execute(
            "HEXISTS", self._context.keys_of(self._partition_maps[base].stream(0)).meta, "committed_id"
        )
        start = "earliest" if has_started else c.start
        # Steps that may fail come first, before the stream is known. The first worker to join decides where it starts.
        working = self._make_joined(PartitionStream, name, start)
        routed = self._make_routed(PartitionStream, working)
        routed.partition, routed.migration, routed.forward = position, self._router_migrations[base], self._forward
        self._add_stream(working)
        self._router.add(routed)

    def _forward(self, stream: str, key: bytes, entry_id: bytes, pairs: Sequence[bytes]) -> bool:
        """Publish a redriven entry, once, to the partition that now owns its key; False if the key has not moved."""
        base, _ = self._positions[stream]
        return forward_entry(self._routing_client, base, self._context.keys_of(stream), key, entry_id, pairs)

    def background_loops(self) -> Mapping[str, BackgroundLoop]:
        """See Ordering."""
        return {**super().background_loops(), "key-migration": self._run_migration}

    def _run_migration(self, stopping: threading.Event) -> None:
        """Import keys into the partitions that this worker routes. Raises RedisError except Unavailable."""
        backoff = Backoff(_SOON_MS, self._context.policy.sweep_ms)
        while not stopping.wait(backoff.next_ms() / 1000):
            try:
                if self._migrate_once():
                    backoff.reset()
            except Unavailable as error:
                logger.debug("key migration paused, Redis is unavailable: %s; retrying", error)

    def _migrate_once(self) -> int:
        moved = 0
        for base, migration in self._key_migrations.copy().items():
            if migration.partition_map.generation > 1:
                routed = [self._positions[name] for name in self._router.owned]
                own_positions = [position for its_base, position in routed if its_base == base]
                moved += migration.import_keys(own_positions) + migration.drain(own_positions)
        return moved

    def close(self) -> None:
        """See Ordering."""
        super().close()
        self._migration_client.close()
