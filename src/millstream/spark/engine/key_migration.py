"""PartitionMigration: key migration on Spark. A migrating key is deferred until its old partition is drained."""

import threading
from collections.abc import Callable, Sequence

from millstream.clock import Backoff
from millstream.handlers.handler import Handler
from millstream.partitions.key_migration import KeyMigration, forward_entry
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys

_WAITS_MS = (50.0, 500.0)


def partition_maps_of(client: Client, handler: Handler) -> list[PartitionMap]:
    """Return the partition map of each of the handler's bases, creating missing ones. Raises RedisError."""
    return [Partitions(client, base).create(handler.partitions or 1) for base in handler.streams]


def _migration_of(client: Client, handler: Handler, partition_map: PartitionMap) -> KeyMigration:
    state_expires = handler.state_ttl_ms is not None
    return KeyMigration(client, partition_map, app=handler.app, handler=handler.name, state_expires=state_expires)


class PartitionMigration:
    """Key migration of the partitions that a task's handler reads. Methods raise RedisError and may be repeated.

    Each task creates its own: a partition receives entries only after the partition map names it.
    """

    def __init__(self, client: Client, handler: Handler) -> None:
        self._client = client
        self._handler = handler
        self._migrations: dict[str, tuple[KeyMigration, int]] = {}
        for partition_map in partition_maps_of(client, handler):
            migration = _migration_of(client, handler, partition_map)
            self._migrations |= {
                partition_map.stream(partition): (migration, partition) for partition in range(partition_map.count)
            }

    def await_keys(self, stream: str, queues: Sequence[bytes]) -> None:
        """Defer those of the key queues `queues` whose keys may still have entries in an older partition."""
        migration, partition = self._migrations[stream]
        migration.await_keys(partition, queues)

    def forward(self, stream: str, key: bytes, entry_id: str, pairs: Sequence[bytes]) -> bool:
        """Forward a redriven entry to its key's current partition; False if that is `stream`."""
        migration, _ = self._migrations[stream]
        keys = HandlerKeys(self._handler.app, self._handler.name, stream)
        return forward_entry(self._client, migration.partition_map.base, keys, key, entry_id.encode(), pairs)


def keep_migrating(
    client: Client, handler: Handler, ended: threading.Event, on_runnable: Callable[[Sequence[str]], None]
) -> None:
    """Import migrating keys until `ended`; pass partitions with runnable keys to `on_runnable`. Raises RedisError."""
    migrations: dict[str, KeyMigration] = {}
    backoff = Backoff(*_WAITS_MS)
    while not ended.wait(backoff.next_ms() / 1000):
        for partition_map in partition_maps_of(client, handler):
            migration = migrations.setdefault(partition_map.base, _migration_of(client, handler, partition_map))
            migration.partition_map = partition_map
            partitions = range(partition_map.count)
            if partition_map.generation > 1 and migration.import_keys(partitions) + migration.drain(partitions):
                on_runnable(partition_map.streams)
                backoff.reset()
