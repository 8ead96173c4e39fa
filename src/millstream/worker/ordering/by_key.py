"""Workers of a handler with a key."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Literal

from millstream.delivery.keyed_stream import KeyedStream, KeyLease, lease_of
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import MillstreamError
from millstream.redis_client.client import Client
from millstream.worker.changed_streams import FEW_STREAMS
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.key_fetcher import KeyFetcher, LeaseFetcher
from millstream.worker.fetching.key_router import KeyRouter
from millstream.worker.fetching.pipelined_key_fetcher import PipelinedKeyFetcher
from millstream.worker.fetching.ready_streams_fetcher import ReadyStreamsFetcher
from millstream.worker.fetching.ready_streams_router import ReadyStreamsRouter
from millstream.worker.fetching.router_role import RouterRole
from millstream.worker.fetching.tracked_key_router import TrackedKeyRouter
from millstream.worker.ordering.ordering import BackgroundLoop, S, _warn_not_released, existing_streams
from millstream.worker.running.losses import loss_retry
from millstream.worker.settling.committer import Committer
from millstream.worker.settling.key_committer import KeyCommitter
from millstream.worker.settling.key_lease_renewal import KeyLeaseRenewer
from millstream.worker.settling.lease_release import release_leases
from millstream.worker.settling.lease_watchdog import LeaseWatchdog
from millstream.worker.settling.maintenance import Maintenance


class ByKey:
    """Ordering of a handler with a key: workers share its keys, and each key is leased to one worker at a time.

    `ready_streams`: gets the names of streams that may have keys to lease, where this worker alone works on them.
    """

    def __init__(self, context: WorkerContext, *, ready_streams: "SimpleQueue[str] | None" = None) -> None:
        self._context = context
        self._max_takeover_epoch: int | None = None
        self.streams: dict[str, KeyedStream] = {}
        self._joined_streams: SimpleQueue[str] = SimpleQueue()
        self._routing_client = Client(context.url, clock=context.clock)
        self._router, self.fetcher = self._make_router_and_fetcher(ready_streams)
        self._renewer = KeyLeaseRenewer(context)
        self.maintenance = Maintenance(context, self.streams, self._renewer)
        self.lease_watchdog: LeaseWatchdog | None = LeaseWatchdog(context)
        on_lease_end = (lambda name: None) if ready_streams is None else ready_streams.put
        self.committer: Committer = KeyCommitter(context, release=self.release, on_lease_end=on_lease_end)

    def _make_router_and_fetcher(self, ready_streams: "SimpleQueue[str] | None") -> tuple[KeyRouter, LeaseFetcher]:
        c, routing, streams = self._context, self._routing_client, self.streams
        if ready_streams is not None:
            return (
                TrackedKeyRouter(c, routing, streams, ready_streams=ready_streams),
                PipelinedKeyFetcher(c, streams, ready_streams=ready_streams),
            )
        role = RouterRole(c, routing)
        if self._shares_many:
            fetcher = ReadyStreamsFetcher(c, streams, ready_streams=self._joined_streams)
            return ReadyStreamsRouter(c, routing, streams, role), fetcher
        return KeyRouter(c, routing, streams, role), KeyFetcher(c, streams)

    @property
    def _shares_many(self) -> bool:
        handler = self._context.handler
        return handler.pattern is not None or len(handler.streams) > FEW_STREAMS

    def _make_joined(self, kind: Callable[..., S], name: str, start: Literal["earliest", "latest"]) -> S:
        stream = self._make_stream(kind, self._context.client, name, start)
        stream.max_takeover_epoch = self._max_takeover_epoch
        stream.join()
        return stream

    def _make_routed(self, kind: Callable[..., S], working: KeyedStream) -> S:
        # The router blocks on its connection while it waits for entries, so nothing else may use that connection.
        stream = self._make_stream(kind, self._routing_client, working.stream, "earliest")
        stream.join_like(working)
        return stream

    def _make_stream(
        self, kind: Callable[..., S], client: Client, name: str, start: Literal["earliest", "latest"]
    ) -> S:
        c, handler, queue_of = self._context, self._context.handler, self._context.steps.queue_of
        stream = kind(
            client,
            name,
            queue_of=lambda entry_id, pairs: queue_of(name, entry_id, pairs),
            app=handler.app,
            handler=handler.name,
            consumer=c.consumer,
            into=handler.into,
            into_maxlen=handler.into_maxlen,
            start=start,
            on_trimmed=c.loop_metrics.count_trimmed,
        )
        stream.let_states_expire(handler.state_ttl_ms)
        stream.is_held = c.breaker.is_open
        stream.loss_retry = loss_retry(handler.retry)
        if handler.in_batches:
            stream.list_size, stream.list_wait_ms = handler.batch_size, handler.batch_wait_ms
        refusal_of = partial(c.steps.refusal_of, name)
        if c.steps.finds_keys_by_field and kind is KeyedStream:
            stream.key_field, stream.on_enqueued_by_field = handler.key_name, c.breaker.on_enqueued
        stream.may_enqueue = lambda entries, queues: c.breaker.may_enqueue(entries, queues, refusal_of)
        return stream

    def discover(self, scan_client: Client) -> Sequence[str]:
        """See Ordering."""
        return existing_streams(self._context.handler, scan_client)

    def join(self, name: str) -> None:
        """See Ordering."""
        working = self._make_joined(KeyedStream, name, self._context.start)
        self._add_stream(working)
        self._router.add(self._make_routed(KeyedStream, working))

    def _add_stream(self, stream: KeyedStream) -> None:
        stream.remove_idle_consumers()
        stream.refresh()
        self._renewer.recover(stream)
        self.streams[stream.stream] = stream
        self._joined_streams.put(stream.stream)

    def background_loops(self) -> Mapping[str, BackgroundLoop]:
        """See Ordering."""
        return {"router": self._router.run}

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """See Ordering. Skips a key that is being run: the committer releases its lease when the run is settled, and that
        of a run that was given up lasts until the process ends.
        """
        in_flight = self._context.in_flight
        dropped: list[KeyLease] = []
        for lease in dict.fromkeys(map(lease_of, deliveries)):
            if lease not in in_flight.given_up and not any(one in in_flight for one in lease.entries):
                in_flight.remove_lease(lease)
                dropped.append(lease)
        release_leases(dropped, self._context.loop_metrics, guard=self._log_not_released)

    @contextlib.contextmanager
    def _log_not_released(self, stream: KeyedStream, leases: Sequence[KeyLease]) -> Iterator[None]:
        try:
            yield
        except MillstreamError as error:
            _warn_not_released(self._context.handler, sum(one.in_flight_count for one in leases), error)

    def close(self) -> None:
        """See Ordering."""
        self.fetcher.close()
        self._routing_client.close()
