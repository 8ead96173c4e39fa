"""Workers of a handler without a key."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from millstream.delivery.reliable_stream import NACK_IDLE_MS, Delivery, ReliableStream
from millstream.errors import MillstreamError
from millstream.redis_client.client import Client
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.entry_fetcher import EntryFetcher
from millstream.worker.ordering.ordering import BackgroundLoop, _warn_not_released, existing_streams
from millstream.worker.settling.claim_renewal import ClaimRenewer
from millstream.worker.settling.committer import Committer
from millstream.worker.settling.lease_watchdog import LeaseWatchdog
from millstream.worker.settling.maintenance import Maintenance

_BACK_OFF_STEPS = 100


class Unordered:
    """Ordering of a handler without a key: workers share its entries."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.streams: dict[str, ReliableStream] = {}
        self._renewer = ClaimRenewer(context, self.streams, release=self.release)
        self.maintenance = Maintenance(context, self.streams, self._renewer)
        # Another worker may run an entry whose claim is not renewed; the commit here is then refused.
        self.lease_watchdog: LeaseWatchdog | None = None
        self.committer = Committer(context, release=self.release)
        self.fetcher = EntryFetcher(context, self.streams)

    def discover(self, scan_client: Client) -> Sequence[str]:
        """See Ordering."""
        return existing_streams(self._context.handler, scan_client)

    def join(self, name: str) -> None:
        """See Ordering."""
        c, handler = self._context, self._context.handler
        stream = ReliableStream(
            c.client,
            name,
            app=handler.app,
            handler=handler.name,
            consumer=c.consumer,
            into=handler.into,
            into_maxlen=handler.into_maxlen,
            start=c.start,
            on_trimmed=c.loop_metrics.count_trimmed,
        )
        stream.claim_room_bytes = lambda: c.in_flight.free_bytes
        stream.is_held = c.breaker.is_open
        stream.join()
        stream.remove_idle_consumers()
        stream.refresh()
        self._renewer.recover(stream)
        self.streams[name] = stream

    def background_loops(self) -> Mapping[str, BackgroundLoop]:
        """See Ordering."""
        return {}

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """See Ordering."""
        by_idle: dict[tuple[ReliableStream, int], list[Delivery]] = defaultdict(list)
        for one in deliveries:
            by_idle[one.stream, self._idle_ms_of(one)].append(one)
        for (stream, idle_ms), some in by_idle.items():
            try:
                stream.end_isolation(some)
                lost = stream.nack([one.id for one in some], idle_ms=idle_ms)
            except MillstreamError as error:
                _warn_not_released(self._context.handler, len(some), error)
            else:
                self._context.loop_metrics.count_released(len(some) - len(lost))

    def _idle_ms_of(self, delivery: Delivery) -> int:
        """Return the idle time for a released entry: one that backs off becomes claimable about when its wait ends."""
        wait_ms = delivery.due_ms - self._context.clock.monotonic_ms()
        if wait_ms <= 0:
            return NACK_IDLE_MS
        claim_ms = self._context.policy.claim_ms
        step_ms = math.ceil(claim_ms / _BACK_OFF_STEPS)  # rounded, so that entries share calls
        return claim_ms - math.ceil(wait_ms / step_ms) * step_ms

    def close(self) -> None:
        """See Ordering."""
