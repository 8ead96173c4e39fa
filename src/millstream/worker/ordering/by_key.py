"""Workers of a handler with a key."""

import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

from millstream.delivery.keyed_stream import KeyedStream, LeaseRelease, lease_of
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import MillstreamError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.worker.context import WorkerContext
from millstream.worker.fetching.key_fetcher import KeyFetcher, LeaseFetcher
from millstream.worker.fetching.key_router import KeyRouter
from millstream.worker.fetching.owned_key_fetcher import OwnedKeyFetcher
from millstream.worker.fetching.owned_key_router import OwnedKeyRouter
from millstream.worker.fetching.rate_limit import RateLimiter
from millstream.worker.fetching.shared_key_fetcher import ReadyHints, SharedKeyFetcher
from millstream.worker.fetching.shared_key_router import SharedKeyRouter
from millstream.worker.ordering.ordering import BackgroundLoop, S, _warn_not_released, existing_streams
from millstream.worker.running.poison_isolation import isolated_after
from millstream.worker.settling.committer import Committer
from millstream.worker.settling.key_committer import KeyCommitter
from millstream.worker.settling.key_lease_renewal import KeyLeaseRenewal

_FEW_STREAMS = 8


class ByKey:
    """Ordering of a handler with a key: workers share its keys, and each key is leased to one worker at a time.

    `ready_streams`: gets the names of streams that may have keys to lease, where this worker alone works on them.
    """

    def __init__(self, context: WorkerContext, *, ready_streams: "SimpleQueue[str] | None" = None) -> None:
        c = context
        self._context = c
        self._max_takeover_epoch: int | None = None
        self.streams: dict[str, KeyedStream] = {}
        self._joined_streams: SimpleQueue[str] = SimpleQueue()
        self._routing_client = Client(c.url, clock=c.clock)
        self._router = self._make_router(ready_streams)
        self.renewal = KeyLeaseRenewal(
            c.steps, c.in_flight, c.loop_metrics, c.clock, c.policy, client=c.client, streams=self.streams,
            on_suspect=c.on_suspect, cancel_run=c.cancel_run, breaker=c.breaker, release=self.release,
        )  # fmt: skip
        self.committer: Committer = KeyCommitter(
            c.steps, c.in_flight, c.client, c.loop_metrics, c.clock, give_up=c.give_up, breaker=c.breaker,
            release=self.release, on_lease_end=(lambda name: None) if ready_streams is None else ready_streams.put,
        )  # fmt: skip
        self.fetcher = self._make_fetcher(ready_streams)

    def _make_router(self, ready_streams: "SimpleQueue[str] | None") -> KeyRouter:
        c = self._context
        options: dict[str, Any] = {
            "token": secrets.token_hex(8),
            "keys_of": self._keys_of,
            "readable": lambda name: name in self.streams and self.streams[name].readable,
        }
        if ready_streams is None and self._shares_many:
            return SharedKeyRouter(
                self._routing_client, c.clock, c.policy, hints=self._make_hints(self._routing_client), **options
            )
        if ready_streams is None:
            return KeyRouter(self._routing_client, c.clock, c.policy, **options)
        return OwnedKeyRouter(self._routing_client, c.clock, c.policy, ready_streams=ready_streams, **options)

    def _make_fetcher(self, ready_streams: "SimpleQueue[str] | None") -> LeaseFetcher:
        c = self._context
        args = c.blocking_client, c.in_flight, c.loop_metrics, c.clock, c.policy
        options: dict[str, Any] = {
            "streams": self.streams,
            "rate_limiter": RateLimiter(c.handler.rate, c.clock),
            "with_state": c.handler.wants_state,
            "isolated_after": isolated_after(c.handler.retry),
            "on_suspect": c.on_suspect,
        }
        if ready_streams is None and self._shares_many:
            return SharedKeyFetcher(
                *args, hints=self._make_hints, keys_of=self._keys_of, ready_streams=self._joined_streams, **options
            )
        if ready_streams is None:
            return KeyFetcher(*args, keys_of=self._keys_of, **options)
        return OwnedKeyFetcher(*args, ready_streams=ready_streams, **options)

    @property
    def _shares_many(self) -> bool:
        handler = self._context.handler
        return handler.pattern is not None or len(handler.streams) > _FEW_STREAMS

    def _make_hints(self, client: Client) -> ReadyHints:
        return ReadyHints(client, self._context.handler.app, self._context.handler.name)

    def _keys_of(self, name: str) -> HandlerKeys:
        return HandlerKeys(self._context.handler.app, self._context.handler.name, name)

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
            client, name, queue_of=lambda entry_id, pairs: queue_of(name, entry_id, pairs), app=handler.app,
            handler=handler.name, consumer=c.consumer, into=handler.into, into_maxlen=handler.into_maxlen,
            start=start, on_trimmed=c.loop_metrics.count_trimmed,
        )  # fmt: skip
        stream.is_held = c.breaker.is_open
        refusal_of = partial(c.steps.refusal_of, name)
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
        self.renewal.recover(stream)
        self.streams[stream.stream] = stream
        self._joined_streams.put(stream.stream)

    def background_loops(self) -> Mapping[str, BackgroundLoop]:
        """See Ordering."""
        return {"router": self._router.run}

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """See Ordering. Skips a key that is being run: the committer releases its lease when the run is settled."""
        in_flight = self._context.in_flight
        releases: dict[KeyedStream, list[LeaseRelease]] = defaultdict(list)
        for lease in dict.fromkeys(map(lease_of, deliveries)):
            if not any(one in in_flight for one in lease.entries):
                in_flight.remove_lease(lease)
                releases[lease.stream].append(LeaseRelease(lease, "return"))
        for stream, some in releases.items():
            count = sum(release.lease.in_flight_count for release in some)
            try:
                stream.end_isolation([one for release in some for one in release.lease.entries])
                lost = stream.release_leases(some)
            except MillstreamError as error:
                _warn_not_released(self._context.handler, count, error)
            else:
                self._context.loop_metrics.count_released(count - sum(lease.in_flight_count for lease in lost))

    def close(self) -> None:
        """See Ordering."""
        self._routing_client.close()
