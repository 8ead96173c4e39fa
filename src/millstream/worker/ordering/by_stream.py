"""Ordering by stream: the workers of a handler with order="stream" lease whole streams, and each works on its own."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Literal

from millstream.balancer import Balancer, BalancerPolicy, Lease, StreamAdded, StreamDisowned, Terminated
from millstream.balancer.protocol import announce_all, claim_service, record_stream_error
from millstream.delivery.consumer_removal import remove_consumers
from millstream.delivery.keyed_stream import KeyedStream
from millstream.errors import (
    AccessDenied,
    ConfigError,
    LeaseError,
    MillstreamError,
    PipelineFailed,
    RedisError,
    Unavailable,
    WrongType,
)
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import ServiceKeys, check_stream, to_wire
from millstream.redis_client.pipelining import server_time_us
from millstream.worker.context import WorkerContext
from millstream.worker.ordering.by_key import ByKey
from millstream.worker.ordering.ordering import BackgroundLoop, S, existing_streams
from millstream.worker.settling.repeated_warnings import RepeatedWarnings
from millstream.worker.stream_exclusion import concerns_one_stream

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SETTLE_MS = 2_000.0
_LONGEST_LEASE_MS = 10_000
_LOOKUPS_AT_ONCE = 1_000
_LONGEST_RETRY_MS = 30_000.0
_LONGEST_UNAVAILABLE_MS, _UNAVAILABLE_MS_EACH = 5_000.0, 5.0
_RETRIES_MS = 500.0


def service_of(handler: Handler) -> str:
    """Return the service whose consumers are the handler's workers."""
    return handler.announced or ServiceKeys.of_handler(handler.label).service


@dataclass(slots=True)
class _ExcludedStream:
    """A stream leased to this worker that it cannot work on.

    * `why`: the reported reason; "" if there is none, as its server was unavailable
    * `due_ms`: when to retry, by the worker's clock; `wait_ms`: how long it waits until then
    """

    lease: Lease
    why: str
    wait_ms: float
    due_ms: float


class ByStream(ByKey):
    """A ByKey on the streams that this worker leases, which change while it works.

    The lease on a stream decides which worker is to work on it; the lease on its one key decides what may be committed,
    as for handlers with a key. So a stream can change owner at once: its running entry is finished, or its commit
    refused, under the key lease.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._ready_streams: SimpleQueue[str] = SimpleQueue()
        super().__init__(context, ready_streams=self._ready_streams)  # no other worker works on these streams
        c = context
        self._service = service_of(c.handler)
        self._balancer = Balancer(
            c.url,
            self._service,
            consumer=c.consumer,
            clock=c.clock,
            metrics=c.loop_metrics.metrics,
            policy=BalancerPolicy(lease_ms=max(1_000, min(c.policy.claim_ms, _LONGEST_LEASE_MS))),
            replaces=True,  # the supervisor holds the name, and has one process of that name at a time
        )
        self._is_member = False
        self._former_since_ms: dict[str, float] = {}
        self._invalid_names: set[str] = set()
        self._excluded: dict[str, _ExcludedStream] = {}
        self._stream_errors: SimpleQueue[tuple[str, MillstreamError]] = SimpleQueue()
        self._warnings = RepeatedWarnings(logger, c)

    def _make_stream(
        self, kind: Callable[..., S], client: Client, name: str, start: Literal["earliest", "latest"]
    ) -> S:
        stream = super()._make_stream(kind, client, name, start)
        if self._has_many:
            stream.on_stream_error = lambda error: self._stream_errors.put((name, error))
        return stream

    @property
    def _has_many(self) -> bool:
        return len(self._context.handler.streams) != 1

    def discover(self, scan_client: Client) -> Sequence[str]:
        """See Ordering. Announces new streams; returns none, as leases tell the worker later which are its own."""
        # Each time: Redis may have lost the claim with its other data.
        claim_service(scan_client, self._service, self._context.handler.label)
        if not self._is_member:
            # A stream that is leased later is not taken over from a run on Spark that began after this worker.
            self._max_takeover_epoch = self._join_service(scan_client)
            self._is_member = True
        if self._context.handler.announced is None:
            keys = ServiceKeys(self._service)
            names = [name for name in existing_streams(self._context.handler, scan_client) if self._can_be_leased(name)]
            for at in range(0, len(names), _LOOKUPS_AT_ONCE):
                some = names[at : at + _LOOKUPS_AT_ONCE]
                known = scan_client.execute("HMGET", keys.streams, *map(to_wire, some))
                announce_all(
                    scan_client, self._service, [name for name, one in zip(some, known, strict=True) if one is None]
                )
        return ()

    def _join_service(self, scan_client: Client) -> int:
        """Join the consumers of the service; return the server's time."""
        now_us = server_time_us(scan_client)
        self._balancer.start()  # last, as it can be called only once
        return now_us

    def _can_be_leased(self, name: str) -> bool:
        try:
            check_stream(name)
        except ConfigError as error:
            if name not in self._invalid_names:
                self._invalid_names.add(name)
                logger.warning(
                    "handler %s cannot process stream %r: %s; skipping it", self._context.handler.label, name, error
                )
            return False
        return True

    def background_loops(self) -> Mapping[str, BackgroundLoop]:
        """See Ordering."""
        return {**super().background_loops(), "stream-leases": self._follow_leases}

    def _follow_leases(self, stopping: threading.Event) -> None:
        """Start and stop work on streams as leases begin and end. Raises ConfigError, RedisError except Unavailable."""
        while not stopping.is_set():
            notice = self._balancer.next(_POLL_S)
            match notice:
                case StreamAdded(lease=lease):
                    self._start_stream(lease)
                case StreamDisowned(lease=lease, why=why):
                    self._stop_stream(lease, release=why == "rebalanced")
                case Terminated(error=error) if not stopping.is_set():
                    raise error or PipelineFailed(
                        f"{self._context.handler.label} has lost its stream leases; restart the worker"
                    )
            self._exclude_failed()
            if notice is None:  # changes of leases come first: a retry may wait long for a server that hangs
                self._retry_excluded()
            self._forget_former()
        self._balancer.close()

    def _start_stream(self, lease: Lease) -> None:
        name = lease.stream
        self._former_since_ms.pop(name, None)
        self._excluded.pop(name, None)
        # This worker may lease the stream again before its last run on it has ended.
        join = self._resume_stream if name in self.streams else self.join
        try:
            join(name)
        except Unavailable as error:
            self._postpone(lease, error)
        except (ConfigError, WrongType, AccessDenied) as error:
            self._exclude(lease, error)
        else:
            self._ready_streams.put(name)  # the former owner may have routed entries already

    def _exclude_failed(self) -> None:
        """Exclude the streams on which another thread has met an error."""
        with contextlib.suppress(Empty):
            while True:
                name, error = self._stream_errors.get_nowait()
                lease = self._balancer.lease(name)
                if lease is not None and name not in self._excluded and name not in self._former_since_ms:
                    self._exclude(lease, error)

    def _postpone(self, lease: Lease, error: Unavailable) -> None:
        """Keep the lease, and retry: perhaps only the server of this stream is unavailable, or short of memory."""
        known = self._excluded.get(lease.stream)
        wait_ms, why = float(self._context.policy.sweep_ms), ""
        if known is not None:
            longest_ms = max(_LONGEST_UNAVAILABLE_MS, _UNAVAILABLE_MS_EACH * len(self._excluded), known.wait_ms)
            wait_ms, why = min(2 * known.wait_ms, longest_ms, _LONGEST_RETRY_MS), known.why
        due_ms = self._context.clock.monotonic_ms() + wait_ms
        self._excluded[lease.stream] = _ExcludedStream(lease=lease, why=why, wait_ms=wait_ms, due_ms=due_ms)
        self._warnings.warn("cannot work on stream %r yet: %s; retrying", lease.stream, error)

    def _exclude(self, lease: Lease, error: MillstreamError) -> None:
        """Keep the lease, so that no other worker meets the same error, and retry. Raises errors of all streams."""
        name, known = lease.stream, self._excluded.get(lease.stream)
        if not self._has_many or not (isinstance(error, ConfigError) or concerns_one_stream(error)):
            raise error
        wait_ms = float(self._context.policy.sweep_ms)
        if name in self.streams:
            self.streams[name].leaving = True
            self._router.streams.pop(name, None)
            wait_ms = max(wait_ms, _SETTLE_MS)  # until leases on it that are being fetched are in flight
        if known is not None:
            wait_ms = min(2 * known.wait_ms, _LONGEST_RETRY_MS)
        why = str(error)
        due_ms = self._context.clock.monotonic_ms() + wait_ms
        self._excluded[name] = _ExcludedStream(lease=lease, why=why, wait_ms=wait_ms, due_ms=due_ms)
        if known is None or known.why != why:
            logger.warning(
                "handler %s cannot process stream %r: %s; excluding it and retrying. %s",
                self._context.handler.label,
                name,
                why,
                self._advice(name, error),
            )
            self._report_error(lease, why)

    def _advice(self, name: str, error: MillstreamError) -> str:
        handler = self._context.handler
        alternative = f"run: millstream lease remove {handler.announced or handler.label} {name!r}"
        if handler.pattern is not None:
            alternative = f"exclude it from the pattern and {alternative}"
        if isinstance(error, AccessDenied):
            return (
                f"Give the worker's user the rights that --stream {name!r} adds in millstream acl worker leases, "
                f"or {alternative}"
            )
        return f"Repair the stream, or {alternative}"

    def _report_error(self, lease: Lease, why: str | None) -> None:
        try:
            record_stream_error(self._context.client, self._service, lease, why)
        except RedisError as error:
            logger.debug("cannot report the error of stream %r: %s", lease.stream, error)

    def _retry_excluded(self) -> None:
        """Work on excluded streams again, if that is possible by now; those with the shortest waits first."""
        now_ms = self._context.clock.monotonic_ms()
        due = sorted([one for one in self._excluded.values() if one.due_ms <= now_ms], key=attrgetter("wait_ms"))
        busy = self._busy_streams() if due else set()
        is_back = False
        for one in due:
            name = one.lease.stream
            if name in busy:
                continue
            if self._context.clock.monotonic_ms() - now_ms > _RETRIES_MS:
                break
            self.streams.pop(name, None)
            try:
                self.join(name)
            except Unavailable as error:
                self._postpone(one.lease, error)
            except (ConfigError, WrongType, AccessDenied) as error:
                self._exclude(one.lease, error)
            else:
                is_back = True
                del self._excluded[name]
                self._ready_streams.put(name)
                if one.why:
                    self._report_error(one.lease, None)
                    logger.warning("handler %s processes stream %r again", self._context.handler.label, name)
        if is_back:  # so may be the servers of others, or it is the same one
            for one in self._excluded.values():
                if not one.why:
                    one.due_ms = now_ms

    def _busy_streams(self) -> set[str]:
        """Return the streams of which keys are in flight, or runs go on whose keys were dropped."""
        in_flight = self._context.in_flight
        return {one.stream.stream for one in in_flight.leases.copy()} | {one.stream.stream for one in in_flight.runs}

    def _resume_stream(self, name: str) -> None:
        self.streams[name].leaving = False
        self._router.add(self._make_routed(KeyedStream, self.streams[name]))

    def _stop_stream(self, lease: Lease, *, release: bool) -> None:
        self._excluded.pop(lease.stream, None)
        stream = self.streams.get(lease.stream)
        if stream is not None:
            stream.leaving = True
            self._router.streams.pop(lease.stream, None)
            self._former_since_ms[lease.stream] = self._context.clock.monotonic_ms()
        if release:
            try:
                self._balancer.release(lease)
            except (LeaseError, RedisError) as error:
                logger.debug("cannot release the lease on %s: %s; it expires", lease.stream, error)

    def _forget_former(self) -> None:
        """Forget former streams of which no entry is in flight any more, and leave their groups."""
        if not self._former_since_ms:
            return
        now_ms = self._context.clock.monotonic_ms()
        busy = self._busy_streams()
        self._former_since_ms |= dict.fromkeys(self._former_since_ms.keys() & busy, now_ms)
        # A key of the stream may just have been leased, and not be in flight yet.
        left = [name for name, since_ms in self._former_since_ms.items() if now_ms - since_ms > _SETTLE_MS]
        for name in left:
            del self._former_since_ms[name]
        remove_consumers(self._context.client, [self.streams.pop(name) for name in left if name in self.streams])

    def close(self) -> None:
        """See Ordering."""
        super().close()
        self._balancer.close()
