"""Leases key queues for a worker of a handler with a key."""

import contextlib
import math
import threading
from collections.abc import Mapping, Sequence
from queue import Empty
from typing import Any, Protocol

from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseResult
from millstream.delivery.reliable_stream import Delivery
from millstream.redis_client.key_names import to_wire
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.fetcher import Fetcher
from millstream.worker.fetching.poll_wait import PollWait
from millstream.worker.fetching.rate_limiter import ReadQuota
from millstream.worker.running.losses import isolated_after


class WakeUp(Protocol):
    """Receives the names of streams with new entries in key queues."""

    def put(self, name: str, /) -> None:
        """Note that this stream may have keys to lease."""


_SWEEP_MS_EACH = 1.0


class LeaseFetcher(Fetcher[KeyedStream]):
    """Leases keys; room is counted in keys. An entry on which too many leases expired may have crashed its workers."""

    def __init__(self, context: WorkerContext, streams: Mapping[str, KeyedStream]) -> None:
        super().__init__(context, streams)
        self._isolated_after = isolated_after(context.handler.retry)
        self._uncounted = 0  # entries that were counted as read, and are read again

    def _lease_options(self, queues: int, count: int, streams: int = 1) -> dict[str, Any]:
        """Return the options of a lease of `queues` keys. On one stream alone it may exceed the room by one entry."""
        return {
            "queues": queues,
            "entries": min(count, self._policy.batch),
            "run": self._slice_length,
            "lease_ms": self._policy.claim_ms,
            "with_state": self._context.handler.wants_state,
            "max_bytes": self._in_flight.free_bytes // streams,
            "one_at_least": streams == 1 and self._in_flight.is_empty,
        }

    @property
    def _slice_length(self) -> int:
        # The rate counts what is leased. Entries behind one that its limit refuses would be leased, and counted, again.
        is_alone = self._context.handler.limit is not None and self._rate_limiter.is_active
        return 1 if is_alone else self._in_flight.slice_length

    def _add_in_flight(self, stream: KeyedStream, leased: LeaseResult) -> int:
        new = 0
        trusted: list[KeyLease] = []
        suspects: list[Delivery] = []
        for lease in stream.move_to_their_keys(leased.leases):
            first = lease.queued[0]
            # Entries that were leased before, and have failed or waited since, were counted then.
            if not first.may_have_crash_counts:
                new += len(lease.entries)
            if first.deliveries <= self._isolated_after or self._context.steps.canceled(first):
                trusted.append(lease)
            else:
                suspects.append(lease.queued.popleft())
        self._rate_limiter.consume(stream.stream, new)
        self._take_returned()
        self._in_flight.add_leases(trusted, self._clock.monotonic_ms())
        for suspect in suspects:
            self._in_flight.add_suspect(suspect)
            self._context.on_suspect(suspect)
        read = max(0, new - self._uncounted)
        self._uncounted -= new - read
        self._loop_metrics.on_polled(read)
        self._loop_metrics.count_claimed(leased.expired_count)
        return len(leased.leases)

    def _take_returned(self) -> None:
        """Give back what the rate counts for entries that went back to their key queues: their next lease counts them."""
        with contextlib.suppress(Empty):
            while True:
                name, count = self._in_flight.returned.get_nowait()
                self._rate_limiter.give_back(name, count)
                self._uncounted += count


class KeyFetcher(LeaseFetcher):
    """Leases keys of streams that other workers work on, too; blocks in Redis until a stream may have ready keys.

    On Redis Cluster it cannot block on several streams: it polls their wake-up lists.
    """

    def __init__(self, context: WorkerContext, streams: Mapping[str, KeyedStream]) -> None:
        super().__init__(context, streams)
        self._due_ms: dict[str, float] = {}
        self._round = 0
        self._poll_wait = PollWait(self._policy.sweep_ms)

    def fetch(self, room: int, stopping: threading.Event) -> None:
        """See Fetcher."""
        if (quota := self._await_quota(stopping)) is not None:
            self._fetch(quota, room, stopping)

    def _fetch(self, quota: ReadQuota, room: int, stopping: threading.Event) -> None:
        now_ms = self._clock.monotonic_ms()
        due = [name for name in quota.counts if self._due_ms.get(name, 0.0) <= now_ms]
        leased = self._in_flight.oversized_bytes = 0
        self._round += 1  # each stream gets to be the first that uses the room
        at = self._round % max(1, len(due))
        for name in (*due[at:], *due[:at]):
            if leased < room and not self._in_flight.oversized_bytes:
                leased += self._lease_from(self._streams[name], room - leased, quota.counts[name])
        self._in_flight.on_fetched(leased, room)
        if leased:
            self._poll_wait.reset()
        elif not self._in_flight.oversized_bytes:
            self._block(list(quota.counts), quota.until_ms, stopping)

    def _lease_from(self, stream: KeyedStream, queues: int, count: int) -> int:
        now_ms = self._clock.monotonic_ms()
        leased = stream.lease_keys(now_ms=now_ms, **self._lease_options(queues, count))
        self._in_flight.oversized_bytes = leased.unfit_bytes
        if not (leased.leases or leased.unfit_bytes):
            # Leases of other workers may expire meanwhile, too. The more streams there are, the less often each is
            # polled.
            sweep_ms = max(self._policy.sweep_ms, _SWEEP_MS_EACH * len(self._streams))
            wait_ms = sweep_ms if leased.wait_ms is None else min(sweep_ms, leased.wait_ms)
            self._due_ms[stream.stream] = now_ms + wait_ms
        return self._add_in_flight(stream, leased)

    def refresh(self) -> None:
        """Forget which streams had no ready keys."""
        self._due_ms.clear()

    def _block(self, names: Sequence[str], until_ms: float, stopping: threading.Event) -> None:
        """Block until Redis notifies of a ready key in one of these streams, or one may be ready by its due time."""
        self._loop_metrics.on_polled(0)
        now_ms = self._clock.monotonic_ms()
        due_ms = min(self._due_ms.get(name, now_ms) for name in names)
        wait_ms = max(1.0, min(self._policy.block_ms, until_ms, due_ms - now_ms))
        wake_keys = {to_wire(self._context.keys_of(name).notify): name for name in names}
        if self._client.is_cluster and len(names) > 1:  # one command cannot block on keys of several slots
            stopping.wait(min(wait_ms, self._poll_wait.next_ms(len(names))) / 1000)
            replies = self._client.pipeline([("EXISTS", key) for key in wake_keys])
            for name, reply in zip(wake_keys.values(), replies, strict=True):
                if reply:  # also an error: leasing will report it
                    self._due_ms.pop(name, None)
            return
        found = self._client.execute("BLPOP", *wake_keys, math.ceil(wait_ms) / 1000)
        if found:
            self._due_ms.pop(wake_keys[found[0]], None)
