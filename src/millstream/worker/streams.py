"""Workers of a handler with order="stream": each has leases on whole streams, and works on those only."""

import logging
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from millstream.balancer import Balancer, BalancerPolicy, Lease, StreamAdded, StreamDisowned, Terminated
from millstream.balancer.service import announce_all
from millstream.client import Client
from millstream.errors import (
    ConfigError,
    LeaseError,
    MillstreamError,
    PipelineFailed,
    RedisError,
    Unavailable,
    WrongType,
)
from millstream.handlers import Handler
from millstream.keyed import KeyedStream
from millstream.naming import PREFIX, ServiceKeys, check_stream, from_wire, to_wire
from millstream.worker.sides import LineSide, Means, Round, streams_of

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_TAKEN_MS = 2_000.0
_LONGEST_LEASE_MS = 10_000
_ASKED_AT_ONCE = 1_000


def service_of(handler: Handler) -> str:
    """The service whose consumers are the handler's workers."""
    return handler.announced or f"{PREFIX}:{handler.label}"


class StreamSide(LineSide):
    """A LineSide on the streams that this worker has leases on, which come and go while it works.

    The lease on a stream says who is to work on it; what may be committed, the lease on its one line says, as for keys. So
    a stream can change hands at once: what still runs on it is finished, or refused, under the line's lease.
    """

    def __init__(self, means: Means) -> None:
        self._woken: SimpleQueue[str] = SimpleQueue()
        super().__init__(means, woken=self._woken)  # nobody else works on these streams
        m = means
        self._service = service_of(m.handler)
        self._balancer = Balancer(
            m.url, self._service, consumer=m.consumer, clock=m.clock, metrics=m.report.metrics,
            policy=BalancerPolicy(lease_ms=max(1_000, min(m.policy.claim_ms, _LONGEST_LEASE_MS))),
            replaces=True,  # the supervisor holds the name, and has one process of that name at a time
        )  # fmt: skip
        self._is_member = False
        self._leaving: dict[str, float] = {}
        self._left_out: set[str] = set()

    def find(self, looking: Client) -> Sequence[str]:
        """See Side. Streams that nobody has announced are announced; which are its own, the worker is told later."""
        if not self._is_member:
            # A lease that moves here later takes nothing over from a run on Spark that began after this worker.
            self._newest = self._begin_all(looking)
            self._is_member = True
        if self._means.handler.announced is None:
            keys = ServiceKeys(self._service)
            names = [name for name in streams_of(self._means.handler, looking) if self._can_be_leased(name)]
            for at in range(0, len(names), _ASKED_AT_ONCE):
                some = names[at : at + _ASKED_AT_ONCE]
                known = looking.execute("HMGET", keys.streams, *map(to_wire, some))
                announce_all(
                    looking, self._service, [name for name, one in zip(some, known, strict=True) if one is None]
                )
        return ()

    def _begin_all(self, looking: Client) -> int:
        """Join the consumers of the service; return the server's time. Raises ConfigError if they run another handler."""
        label, meta = self._means.handler.label, ServiceKeys(self._service).meta
        looking.execute("HSETNX", meta, "handler", label)
        known = from_wire(looking.execute("HGET", meta, "handler"))
        if known != label:
            raise ConfigError(
                f"the streams of service {self._service!r} are shared by the workers of {known}: give {label} a service of "
                f"its own, or, if {known} is no more, HDEL {meta} handler"
            )
        seconds, microseconds = looking.execute("TIME")
        self._balancer.start()  # last: it can be done once only
        return int(seconds) * 1_000_000 + int(microseconds)

    def _can_be_leased(self, name: str) -> bool:
        try:
            check_stream(name)
        except ConfigError as error:
            self._leave_out(name, error)
            return False
        return True

    def _leave_out(self, name: str, error: MillstreamError) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            logger.warning("%s leaves a stream out: %s", self._means.handler.label, error)

    def rounds(self) -> Mapping[str, Round]:
        """See Side."""
        return {**super().rounds(), "leases": self._follow}

    def _follow(self, stopping: threading.Event) -> None:
        """Begin and end work on streams as leases come and go. Raises RedisError but for Unavailable, ConfigError."""
        while not stopping.is_set():
            match self._balancer.next(_LOOK_S):
                case StreamAdded(lease=lease):
                    self._begin(lease, stopping)
                case StreamDisowned(lease=lease, why=why):
                    self._end(lease, hand_in=why == "rebalanced")
                case Terminated(error=error) if not stopping.is_set():
                    raise error or PipelineFailed(f"{self._means.handler.label} has lost its leases for good")
            self._forget_left()
        self._balancer.close()

    def _begin(self, lease: Lease, stopping: threading.Event) -> None:
        name, client = lease.stream, self._means.client
        self._leaving.pop(name, None)
        # It may be back before what ran on it has ended.
        join = self._rejoin if name in self.streams else self.join
        try:
            client.patiently(lambda: join(name), what=self._means.handler.label, give_up=stopping.is_set)
            self._woken.put(name)  # its entries may have been routed by somebody else
        except (ConfigError, WrongType) as error:  # it concerns this stream only, whoever has announced it
            self._leave_out(name, error)
        except Unavailable:
            if not stopping.is_set():
                raise

    def _rejoin(self, name: str) -> None:
        self.streams[name].leaving = False
        self._router.streams[name] = self._to_route(KeyedStream, self.streams[name])

    def _end(self, lease: Lease, *, hand_in: bool) -> None:
        stream = self.streams.get(lease.stream)
        if stream is not None:
            stream.leaving = True
            self._router.streams.pop(lease.stream, None)
            self._leaving[lease.stream] = self._means.clock.monotonic_ms()
        if hand_in:
            try:
                self._balancer.release(lease)
            except (LeaseError, RedisError) as error:
                logger.debug("the lease on %s is not given back: %s", lease.stream, error)

    def _forget_left(self) -> None:
        """Forget streams on which nothing of this worker's runs or waits any more."""
        if not self._leaving:
            return
        now_ms = self._means.clock.monotonic_ms()
        busy = {lease.stream.stream for lease in self._means.hand.leases.copy()}
        self._leaving |= dict.fromkeys(self._leaving.keys() & busy, now_ms)
        # Something may just have been taken, and not be in hand yet.
        for name in [name for name, since_ms in self._leaving.items() if now_ms - since_ms > _TAKEN_MS]:
            del self._leaving[name]
            self.streams.pop(name, None)

    def close(self) -> None:
        """See Side."""
        super().close()
        self._balancer.close()
