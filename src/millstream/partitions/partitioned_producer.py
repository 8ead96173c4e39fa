"""PartitionedProducer: publishes each message to the partition of its key, and follows a growth of the partitions."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeVar

from millstream.errors import NotReplicated, OutputError, PartitionClosed
from millstream.handlers.encoding import encode_output
from millstream.handlers.handler import check_partition_count
from millstream.observability.metrics import NO_METRICS, Metrics
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitions import Partitions
from millstream.producer.producer import DedupeId, Identified, Publishing, with_ids
from millstream.producer.session import BATCH_ENTRIES, BATCH_SIZE, Batch, PublishOptions
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import StreamKeys, to_wire

Key = str | bytes | int | None
T = TypeVar("T")


class Published(NamedTuple):
    """Where a message was published: the partition, and the id of its entry."""

    stream: str
    id: str


@dataclass(frozen=True, slots=True)
class _Item:
    """A message to publish: its number in the call, the bytes that select its partition, its names and values, its own
    id.
    """

    number: int
    partition_key: bytes
    names: Sequence[bytes]
    values: Sequence[bytes]
    dedupe_id: bytes | None

    @property
    def size(self) -> int:
        return sum(map(len, self.names)) + sum(map(len, self.values))


class PartitionedProducer(Publishing):
    """Publishes messages to the partitions of `base`, each to the partition of its key: in order, and each once.

    (The idea: the partitioner of Kafka's producer.)

    * `key`: the field that orders the messages, or a function that returns the key of a message; must be the handlers'
      key. Messages without a key are spread over all partitions
    * `partitions`: how many to create if there are none yet; None = they must exist
    * `capacity`: most entries that one partition may hold
    * the rest as for `Producer`

    After a growth (`Partitions.grow`), it publishes to the new partitions as soon as Redis reports one as closed: the
    messages of each key stay in order, and a `dedupe_id` that was published before is recognised. Messages of one key
    from one thread keep their order. Raises ConfigError for invalid options.
    """

    def __init__(
        self,
        redis: str | Client,
        base: str,
        *,
        key: str | Callable[[object], Key],
        partitions: int | None = None,
        capacity: int | None = None,
        dedupe_window_ms: int = 3_600_000,
        patience_ms: float = 30_000.0,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        super().__init__(redis, capacity, dedupe_window_ms, patience_ms, metrics)
        self._partitions = Partitions(self._client, base)
        self._base = base
        self._key = key
        self._count = partitions if partitions is None else check_partition_count(partitions)
        self._map: PartitionMap | None = None
        self._round_robin = count()

    def publish(
        self, message: object, *, dedupe_id: DedupeId | None = None, replicas: int = 0, timeout_ms: int = 1_000
    ) -> Published:
        """Publish `message`; return its partition and id. Options and errors as for `Producer.publish`, without
        delays.
        """
        own_ids = None if dedupe_id is None else [dedupe_id]
        return self.publish_many([message], dedupe_ids=own_ids, replicas=replicas, timeout_ms=timeout_ms)[0]

    def publish_many(
        self,
        messages: Iterable[object],
        *,
        dedupe_ids: Sequence[DedupeId] | None = None,
        replicas: int = 0,
        timeout_ms: int = 1_000,
    ) -> list[Published]:
        """Publish `messages`; return the partition and id of each. Options and errors as for `Producer.publish_many`.

        When it raises, some messages may be published: of each key, the first ones.
        """
        options = PublishOptions(replicas=replicas, timeout_ms=timeout_ms)
        messages_with_ids = with_ids(messages, dedupe_ids)
        found: dict[int, Published] = {}
        with self._tracing.publish_span(self._base, len(messages_with_ids)):
            items = list(self._items(messages_with_ids, self._tracing.trace_fields()))
            layout = self._load_map()
            step = self._max_entries * layout.count
            for at in range(0, len(items), step):
                layout = self._publish(layout, items[at : at + step], options, found)
        return [found[number] for number in range(len(messages_with_ids))]

    async def publish_async(
        self, message: object, *, dedupe_id: DedupeId | None = None, replicas: int = 0, timeout_ms: int = 1_000
    ) -> Published:
        """As `publish`, for coroutines; see `Producer.publish_async`."""
        return await self._in_thread(
            lambda: self.publish(message, dedupe_id=dedupe_id, replicas=replicas, timeout_ms=timeout_ms)
        )

    async def publish_many_async(
        self,
        messages: Iterable[object],
        *,
        dedupe_ids: Sequence[DedupeId] | None = None,
        replicas: int = 0,
        timeout_ms: int = 1_000,
    ) -> list[Published]:
        """As `publish_many`, for coroutines; see `Producer.publish_async`."""
        return await self._in_thread(
            lambda: self.publish_many(messages, dedupe_ids=dedupe_ids, replicas=replicas, timeout_ms=timeout_ms)
        )

    # Inside

    def _load_map(self) -> PartitionMap:
        with self._lock:
            if self._map is None:
                load = (
                    self._partitions.require
                    if self._count is None
                    else lambda: self._partitions.create(self._count or 1)
                )
                self._map = self._patiently(load)
            return self._map

    def _load_newer_map(self, known: PartitionMap) -> PartitionMap:
        with self._lock:
            if self._map is None or self._map.generation <= known.generation:
                self._map = self._patiently(lambda: self._partitions.load_newer(known))
            return self._map

    def _patiently(self, call: Callable[[], T]) -> T:
        return self._client.retry_while_unavailable(
            call, what=f"publishing to {self._base}", limit_ms=self._patience_ms
        )

    def _items(self, identified: Iterable[Identified], trace: Sequence[bytes]) -> Iterator[_Item]:
        for number, (message, own_id) in enumerate(identified):
            pairs = [*encode_output(message), *trace]
            own = own_id.encode() if isinstance(own_id, str) else own_id
            by = self._key_of(message, pairs) or own or str(next(self._round_robin)).encode()
            yield _Item(number, by, tuple(pairs[::2]), pairs[1::2], own)

    def _key_of(self, message: object, pairs: Sequence[bytes]) -> bytes:
        """Return the key as a handler finds it in the entry; b"" if there is none."""
        if callable(self._key):
            found = self._key(message)
        else:
            wanted = self._key.encode()
            found = next((pairs[i + 1] for i in range(0, len(pairs), 2) if pairs[i] == wanted), None)
        if isinstance(found, bool) or not isinstance(found, (str, bytes, int, type(None))):
            raise OutputError(f"the key function returned a {type(found).__name__}; return text, bytes, int or None")
        return found if isinstance(found, bytes) else b"" if found is None else str(found).encode()

    def _publish(
        self, layout: PartitionMap, items: Sequence[_Item], options: PublishOptions, found: dict[int, Published]
    ) -> PartitionMap:
        """Publish `items`, add their positions to `found`, and return the partition map that was used last."""
        rest = items
        while rest:
            try:
                self._publish_with(layout, rest, options, found)
            except PartitionClosed:
                layout = self._load_newer_map(layout)
            except NotReplicated as error:
                error.ids = [*(one.id for one in found.values()), *error.ids]
                raise
            # All that were not published are assigned anew: a later message of a key must not overtake a refused one.
            rest = [one for one in rest if one.number not in found]
        return layout

    def _publish_with(
        self, layout: PartitionMap, items: Sequence[_Item], options: PublishOptions, found: dict[int, Published]
    ) -> None:
        by_partition: dict[int, list[_Item]] = defaultdict(list)
        found |= self._published_before(layout, items)
        for one in items:
            if one.number not in found:
                by_partition[layout.partition_of(one.partition_key)].append(one)
        for partition, some in by_partition.items():
            stream = layout.stream(partition)
            for batch, numbers in self._batches(some):
                ids = self._send(self._session(stream), batch, options, layout.generation).decode().split()
                found |= {number: Published(stream, one) for number, one in zip(numbers, ids, strict=True)}

    def _batches(self, items: Sequence[_Item]) -> Iterator[tuple[Batch, list[int]]]:
        batch, numbers = Batch(), list[int]()
        for one in items:
            if batch.entries >= min(self._max_entries, BATCH_ENTRIES) or batch.size + one.size > BATCH_SIZE:
                if numbers:
                    yield batch, numbers
                batch, numbers = Batch(), []
            batch.add(one.names, one.values)
            if one.dedupe_id is not None:
                batch.dedupe_ids.append(one.dedupe_id)
            numbers.append(one.number)
        if numbers:
            yield batch, numbers

    def _published_before(self, layout: PartitionMap, items: Sequence[_Item]) -> Mapping[int, Published]:
        """Return those that were published, under their own ids, to partitions that their keys have left."""
        partitions = [
            (one, layout.stream(partition))
            for one in items
            if one.dedupe_id is not None and layout.generation > 1
            for partition in layout.owners(one.partition_key)[:-1]
        ]
        commands = [("GET", to_wire(StreamKeys(stream).dedupe(one.dedupe_id or b""))) for one, stream in partitions]
        replies = self._patiently(lambda: self._client.pipeline(commands)) if commands else []
        return {
            one.number: Published(stream, raise_if_error(reply).decode())
            for (one, stream), reply in zip(partitions, replies, strict=True)
            if reply is not None
        }
