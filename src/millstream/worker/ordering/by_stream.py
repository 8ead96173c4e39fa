"""Workers of a handler with order="stream": each has leases on whole streams, and works on those only."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

from millstream.balancer import Balancer, BalancerPolicy, Lease, StreamAdded, StreamDisowned, Terminated
from millstream.balancer.protocol import announce_all, claim_service, note_trouble
from millstream.delivery.keyed_stream import KeyedStream
from millstream.delivery.reliable_stream import leave_all
from millstream.errors import (
    AccessDenied,
    CommandFailed,
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
from millstream.worker.ordering.ordering import ByKey, Round, S, WorkerContext, streams_of
from millstream.worker.stream_exclusion import concerns_one_stream

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_TAKEN_MS = 2_000.0
_LONGEST_LEASE_MS = 10_000
_ASKED_AT_ONCE = 1_000
_LONGEST_WAIT_MS = 30_000.0


def service_of(handler: Handler) -> str:
    """The service whose consumers are the handler's workers."""
    return handler.announced or ServiceKeys.of_handler(handler.label).service


@dataclass(slots=True)
class _LeftOut:
    """A stream that is this worker's, and cannot be worked on; when that is tried again, by the worker's clock."""

    lease: Lease
    why: str
    wait_ms: float
    due_ms: float


class ByStream(ByKey):
    """A ByKey on the streams that this worker has leases on, which come and go while it works.

    The lease on a stream says who is to work on it; what may be committed, the lease on its one line says, as for keys. So
    a stream can change hands at once: what still runs on it is finished, or refused, under the line's lease.
    """

    def __init__(self, means: WorkerContext) -> None:
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
        self._unusable: set[str] = set()
        self._left_out: dict[str, _LeftOut] = {}
        self._troubles: SimpleQueue[tuple[str, MillstreamError]] = SimpleQueue()

    def _made(self, kind: Callable[..., S], client: Client, name: str, start: Literal["earliest", "latest"]) -> S:
        stream = super()._made(kind, client, name, start)
        if self._has_many:
            stream.leave_out = lambda error: self._troubles.put((name, error))
        return stream

    @property
    def _has_many(self) -> bool:
        return len(self._means.handler.streams) != 1

    def find(self, looking: Client) -> Sequence[str]:
        """See Side. Streams that nobody has announced are announced; which are its own, the worker is told later."""
        # Each time: Redis may have lost it with the rest of its memory.
        claim_service(looking, self._service, self._means.handler.label)
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
        """Join the consumers of the service; return the server's time."""
        seconds, microseconds = looking.execute("TIME")
        self._check_output(looking)
        self._balancer.start()  # last: it can be done once only
        return int(seconds) * 1_000_000 + int(microseconds)

    def _check_output(self, looking: Client) -> None:
        """Raises AccessDenied if the user may not write to where all of its streams' outputs go."""
        if self._means.handler.into is not None:
            with contextlib.suppress(CommandFailed, WrongType):  # it cannot be, and is refused, but for its id
                looking.execute("XADD", self._means.handler.into, "0-0", "f", "v")

    def _can_be_leased(self, name: str) -> bool:
        try:
            check_stream(name)
        except ConfigError as error:
            if name not in self._unusable:
                self._unusable.add(name)
                logger.warning("%s leaves the stream %r out: %s", self._means.handler.label, name, error)
            return False
        return True

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
            self._hear_of_troubles()
            self._try_again()
            self._forget_left()
        self._balancer.close()

    def _begin(self, lease: Lease, stopping: threading.Event) -> None:
        name, client = lease.stream, self._means.client
        self._leaving.pop(name, None)
        self._left_out.pop(name, None)
        # It may be back before what ran on it has ended.
        join = self._rejoin if name in self.streams else self.join
        try:
            client.patiently(lambda: join(name), what=self._means.handler.label, give_up=stopping.is_set)
            self._woken.put(name)  # its entries may have been routed by somebody else
        except (ConfigError, WrongType, AccessDenied) as error:
            self._leave_out(lease, error)
        except Unavailable:
            if not stopping.is_set():
                raise

    def _hear_of_troubles(self) -> None:
        """Leave out what turned out, in some other thread, to be something else than it was."""
        with contextlib.suppress(Empty):
            while True:
                name, error = self._troubles.get_nowait()
                lease = self._balancer.lease(name)
                if lease is not None and name not in self._left_out and name not in self._leaving:
                    self._leave_out(lease, error)

    def _leave_out(self, lease: Lease, error: MillstreamError) -> None:
        """Keep the lease, so that nobody else stumbles over the stream, and try it again. Raises what concerns others, too."""
        name, known = lease.stream, self._left_out.get(lease.stream)
        if not self._has_many or not (isinstance(error, ConfigError) or concerns_one_stream(error)):
            raise error
        wait_ms = float(self._means.policy.sweep_ms)
        if name in self.streams:
            self.streams[name].leaving = True
            self._router.streams.pop(name, None)
            wait_ms = max(wait_ms, _TAKEN_MS)  # until nothing of it is on its way to the hand any more
        if known is not None:
            wait_ms = min(2 * known.wait_ms, _LONGEST_WAIT_MS)
        why = str(error)
        due_ms = self._means.clock.monotonic_ms() + wait_ms
        self._left_out[name] = _LeftOut(lease=lease, why=why, wait_ms=wait_ms, due_ms=due_ms)
        if known is None or known.why != why:
            logger.warning(
                "%s leaves the stream %r out for now, and tries it again: %s. %s",
                self._means.handler.label, name, why, self._advice(name, error),
            )  # fmt: skip
            self._tell_people(lease, why)

    def _advice(self, name: str, error: MillstreamError) -> str:
        handler = self._means.handler
        rest = f"run: millstream done {handler.announced or handler.label} {name!r}"
        if handler.pattern is not None:
            rest = f"keep it out of the pattern and {rest}"
        if isinstance(error, AccessDenied):
            return f"Give the worker's user the rights that --stream {name!r} adds in millstream acl worker leases, or {rest}"
        return f"Mend it, or {rest}"

    def _tell_people(self, lease: Lease, why: str | None) -> None:
        try:
            note_trouble(self._means.client, self._service, lease, why)
        except RedisError as error:
            logger.debug("it is not noted what is wrong with %r: %s", lease.stream, error)

    def _try_again(self) -> None:
        """Work on streams again that were left out, if that is possible by now."""
        now_ms = self._means.clock.monotonic_ms()
        due = [name for name, one in self._left_out.items() if one.due_ms <= now_ms]
        busy = {lease.stream.stream for lease in self._means.hand.leases.copy()} if due else set()
        for name in due:
            if name in busy:  # it ends with its lease, at the latest
                continue
            lease = self._left_out[name].lease
            self.streams.pop(name, None)
            try:
                self.join(name)
            except Unavailable:
                return
            except (ConfigError, WrongType, AccessDenied) as error:
                self._leave_out(lease, error)
            else:
                del self._left_out[name]
                self._woken.put(name)
                self._tell_people(lease, None)
                logger.warning("%s works on the stream %r again", self._means.handler.label, name)

    def _rejoin(self, name: str) -> None:
        self.streams[name].leaving = False
        self._router.add(self._to_route(KeyedStream, self.streams[name]))

    def _end(self, lease: Lease, *, hand_in: bool) -> None:
        self._left_out.pop(lease.stream, None)
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
        left = [name for name, since_ms in self._leaving.items() if now_ms - since_ms > _TAKEN_MS]
        for name in left:
            del self._leaving[name]
        leave_all(self._means.client, [self.streams.pop(name) for name in left if name in self.streams])

    def close(self) -> None:
        """See Side."""
        super().close()
        self._balancer.close()
