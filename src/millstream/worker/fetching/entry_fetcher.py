"""Entry fetcher: reads the entries of a handler without a key through the consumer group, as far as there is room."""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping

from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import RedisError, Unavailable
from millstream.groups import Consumer
from millstream.redis_client.call import SentCall
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.fetcher import Fetcher
from millstream.worker.fetching.poll_wait import PollWait
from millstream.worker.fetching.rate_limiter import ReadQuota
from millstream.worker.fetching.read_plan import ReadPlan, ReadScheduler

_MIN_STREAMS, _MAX_STREAMS = 2, 64
_SMALL_READ_BYTES = 2**20
_BLOCKING_COUNT = 4
_FRESH_MS = 100.0
_READS_IN_A_ROW = 8
"""How many reads a fetch makes at most: other steps of the loop follow after each."""
_SAFETY = 2
"""How many times the usual size of a batch must fit into the room for its reply."""


class EntryFetcher(Fetcher[ReliableStream]):
    """Fetches new entries.

    The size of undelivered entries is unknown. So a script reads them and stops when no more bytes fit, and of many
    streams only a few are read in one round trip. The fetcher blocks for new entries only when all streams are empty,
    and then reads few. On Redis Cluster it cannot block on several streams: it polls them. Of a single stream with a
    backlog it sends the next read before it adds the entries of the last one to flight.
    """

    def __init__(self, context: WorkerContext, streams: Mapping[str, ReliableStream]) -> None:
        super().__init__(context, streams)
        self._scheduler = ReadScheduler()
        self._blocking_consumer: Consumer | None = None
        self._mean_bytes: int | None = None
        self._streams_per_trip = _MIN_STREAMS
        self._empty_until_ms = 0.0
        self._poll_wait = PollWait(self._policy.sweep_ms)

    def fetch(self, room: int, stopping: threading.Event) -> None:
        """See Fetcher."""
        if (quota := self._await_quota(stopping)) is not None:
            self._fetch(quota, room, stopping)

    def _fetch(self, quota: ReadQuota, room: int, stopping: threading.Event) -> None:
        plan = self._scheduler.next_plan(quota.counts, min(room, self._affordable()))
        is_whole = True
        can_wait = plan.may_wait and (len(plan.counts) == 1 or not self._client.is_cluster)
        if can_wait and self._clock.monotonic_ms() < self._empty_until_ms:
            count = min(*plan.counts.values(), _BLOCKING_COUNT) if len(plan.counts) == 1 else 1
            plan = ReadPlan(dict.fromkeys(plan.counts, count), may_wait=True)
            found = self._read_blocking(plan, min(self._policy.block_ms, quota.until_ms))
            # A blocking read of several streams returns one entry of each, which shows nothing of the backlog of one.
            if len(plan.counts) == 1:
                self._in_flight.on_fetched(len(plan.used_up(found)), 1)
        else:
            plan, found, is_whole = self._read_now(plan)
            self._in_flight.on_fetched(len(plan.used_up(found)), 1)
            if found:
                self._poll_wait.reset()
            elif plan.may_wait and not can_wait:
                stopping.wait(min(self._poll_wait.next_ms(len(plan.counts)), quota.until_ms) / 1000)
        # The next read of all may bring an entry of each, so it follows at once only if there is room for these.
        self._scheduler.on_read(plan, found, may_repeat=is_whole and self._affordable() >= len(plan.counts))
        self._loop_metrics.on_polled(sum(found.values()))
        if plan.may_wait:
            self._note_empty(plan, found)

    def _affordable(self) -> int:
        """How many entries of the size of those read last there is room for: at least 1, and 1 before the first."""
        return 1 if self._mean_bytes is None else max(1, self._in_flight.free_bytes // self._mean_bytes)

    def _learn_size(self, found: Mapping[str, int], size: int) -> None:
        if found:
            self._mean_bytes = max(1, size // sum(found.values()))

    def _note_empty(self, plan: ReadPlan, found: Mapping[str, int]) -> None:
        """Note until when a blocking read is safe after a read of all streams, as each of thousands may return one."""
        is_known = len(plan.used_up(found)) < len(plan.counts) and self._in_flight.free_bytes > 0
        self._empty_until_ms = self._clock.monotonic_ms() + _FRESH_MS if is_known else 0.0

    def refresh(self) -> None:
        """Do nothing: each read returns new entries also after streams were joined again."""

    # Entries that are there

    def _read_now(self, plan: ReadPlan) -> tuple[ReadPlan, dict[str, int], bool]:
        """Read the entries of these streams, as far as there is room.

        Return the plan with what was asked for, the counts of those that had some, and whether all were read.
        """
        found: dict[str, int] = {}
        names = list(plan.counts)
        if len(names) == 1 and self._may_read_ahead():
            asked, fetched = self._read_ahead(self._streams[names[0]], plan.counts[names[0]])
            found = {names[0]: fetched} if fetched else {}
            return ReadPlan({names[0]: asked}, plan.may_wait), found, True
        at = size = 0
        while at < len(names) and self._in_flight.free_bytes > 0:
            # Each stream with entries returns one at least: no more are read together than have room for that.
            most = self._streams_per_trip if self._mean_bytes is None else self._affordable()
            of_trip = names[at : at + min(self._streams_per_trip, most)]
            counts, trip_bytes = self._read_some({self._streams[name]: plan.counts[name] for name in of_trip})
            found |= counts
            at, size = at + len(of_trip), size + trip_bytes
            self._streams_per_trip = (
                min(2 * self._streams_per_trip, _MAX_STREAMS) if trip_bytes < _SMALL_READ_BYTES else _MIN_STREAMS
            )
        self._learn_size(found, size)
        return plan, found, at == len(names)

    def _read_some(self, most: Mapping[ReliableStream, int]) -> tuple[dict[str, int], int]:
        """Read at most so many entries of these streams in one round trip; return the counts of those that had some,
        and the bytes in total.
        """
        max_bytes = self._in_flight.free_bytes // len(most)
        results = self._client.run_all(
            [one.fetch_call(count=count, max_bytes=max_bytes) for one, count in most.items()]
        )
        found: dict[str, int] = {}
        failed: list[ReliableStream] = []
        size = 0
        for stream, result in zip(most, results, strict=True):
            if isinstance(result, RedisError):
                failed.append(stream)
                continue
            fetched, deliveries = result
            if fetched:
                found[stream.stream] = fetched
                size += self._add_in_flight(stream, fetched, deliveries)
        for stream in failed:  # last: the entries of the other replies are in flight, whatever happens here
            if some := stream.fetch_within(count=most[stream], max_bytes=max_bytes):
                found[stream.stream] = len(some)
                size += self._add_in_flight(stream, len(some), some)
        return found, size

    def _may_read_ahead(self) -> bool:
        """True if entries are so small that the replies to two reads surely fit, and no rate limits them."""
        is_small = self._affordable() >= 2 * _SAFETY * self._policy.batch
        return is_small and not (self._client.is_cluster or self._rate_limiter.is_active)

    def _read_ahead(self, stream: ReliableStream, count: int) -> tuple[int, int]:
        """Read one stream as long as it has a batch more, and there is room for it.

        Redis executes each read while the entries of the one before are added to flight. None is under way at the end.
        Return how many entries were asked for, and how many were fetched.
        """
        asked = found = size = 0
        max_bytes = self._in_flight.free_bytes // 2
        sent: SentCall[tuple[int, Iterator[Delivery]]] | None
        sent = self._client.send(stream.fetch_call(count=count, max_bytes=max_bytes))
        try:
            for number in range(_READS_IN_A_ROW):
                result = sent.result()
                sent, asked = None, asked + count
                if isinstance(result, RedisError):
                    if isinstance(result, Unavailable):
                        raise result
                    counts, read_bytes = self._read_some({stream: count})  # Redis has delivered nothing
                    found, size = found + sum(counts.values()), size + read_bytes
                    break
                fetched, deliveries = result
                has_more = fetched >= count and number + 1 < _READS_IN_A_ROW
                if has_more and stream.readable and self._has_room_for_batch(fetched, max_bytes):
                    count, max_bytes = self._policy.batch, self._in_flight.free_bytes - max_bytes
                    sent = self._client.send(stream.fetch_call(count=count, max_bytes=max_bytes))
                size += self._add_in_flight(stream, fetched, deliveries)
                found += fetched
                if sent is None:
                    break
        except RedisError:
            if sent is not None:
                sent.result()  # pending entries are recovered next: by then Redis must have delivered these
            self._loop_metrics.on_polled(found)
            raise
        if found:
            self._learn_size({stream.stream: found}, size)
        return asked, found

    def _has_room_for_batch(self, fetched: int, max_bytes: int) -> bool:
        """True if there is room for a batch beside `fetched` entries of up to `max_bytes` in total."""
        batch, free_bytes = self._policy.batch, self._in_flight.free_bytes - max_bytes
        return self._in_flight.room - fetched >= batch and free_bytes >= _SAFETY * batch * (self._mean_bytes or 1)

    def _add_in_flight(self, stream: ReliableStream, count: int, fetched: Iterable[Delivery]) -> int:
        """Add entries to flight; return their bytes. `count` includes delivered entries that were committed before."""
        deliveries = list(fetched)
        self._rate_limiter.consume(stream.stream, count)
        self._in_flight.add(deliveries, self._clock.monotonic_ms())
        return sum([one.size for one in deliveries])

    # Entries to come

    def _read_blocking(self, plan: ReadPlan, block_ms: float) -> dict[str, int]:
        """Block until one of these streams has entries; read them, and return the counts of those that had some."""
        names = list(plan.counts)
        if self._blocking_consumer is None or self._blocking_consumer.streams != names:
            self._blocking_consumer = Consumer(
                self._client, group=self._streams[names[0]].group, name=self._context.consumer, streams=names
            )
        found: dict[str, int] = {}
        size = 0
        for batch in self._blocking_consumer.read_new(count=min(plan.counts.values()), block_ms=math.ceil(block_ms)):
            stream = self._streams[batch.stream]
            found[batch.stream] = len(batch)
            size += self._add_in_flight(stream, len(batch), stream.to_deliveries([batch]))
        self._learn_size(found, size)
        return found
