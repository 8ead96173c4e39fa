"""What is different between workers of handlers with a key and without: how entries come, are kept and are committed."""

import logging
import math
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

from millstream.clock import Clock
from millstream.delivery.keyed_stream import KeyedStream, LeaseRelease, lease_of
from millstream.delivery.reliable_stream import HANDED_BACK_MS, Delivery, ReliableStream
from millstream.errors import MillstreamError
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.worker.fetching.entry_fetcher import EntryFetcher
from millstream.worker.fetching.fetcher import Fetcher
from millstream.worker.fetching.key_router import KeyFetcher, KeyRouter, LeaseFetcher
from millstream.worker.fetching.owned_key_fetcher import OwnedKeyFetcher
from millstream.worker.fetching.owned_key_router import OwnedKeyRouter
from millstream.worker.fetching.rate_limit import RateLimiter
from millstream.worker.fetching.shared_key_fetcher import ReadyHints, SharedKeyFetcher
from millstream.worker.fetching.shared_key_router import SharedKeyRouter
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.policy import WorkerPolicy
from millstream.worker.running.poison_isolation import isolated_after
from millstream.worker.settling.claim_renewal import ClaimRenewal
from millstream.worker.settling.committer import Committer
from millstream.worker.settling.key_committer import KeyCommitter
from millstream.worker.settling.key_lease_renewal import KeyLeaseRenewal

logger = logging.getLogger(__name__)

_BACK_OFF_STEPS = 100
_FEW = 8

Round = Callable[[threading.Event], None]
S = TypeVar("S", bound=KeyedStream)


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What a reading loop has, for its parts to share.

    * `client`, `reading`: connections for what is quick, and for what waits
    * `suspect`: takes an entry that its worker may have died of; `break_off` one that must not run any longer
    * `give_up`: says that waiting for Redis has no point any more
    """

    handler: Handler
    pipeline: HandlerSteps
    hand: InFlight
    report: LoopMetrics
    clock: Clock
    policy: WorkerPolicy
    consumer: str
    start: Literal["earliest", "latest"]
    url: str = field(repr=False)
    client: Client
    reading: Client
    suspect: Callable[[Delivery], None]
    break_off: Callable[[Delivery], None]
    give_up: Callable[[], bool]


class Ordering(Protocol):
    """The parts that fit a handler, and what they share."""

    @property
    def taker(self) -> Fetcher[ReliableStream]:
        """Takes what comes."""

    @property
    def keeper(self) -> ClaimRenewal:
        """Keeps what is in hand."""

    @property
    def settler(self) -> Committer:
        """Commits what was run."""

    @property
    def streams(self) -> Mapping[str, ReliableStream]:
        """Those that are joined."""

    def find(self, looking: Client) -> Sequence[str]:
        """The streams that there are now, in the order in which they are to be joined. Raises RedisError."""

    def join(self, name: str) -> None:
        """Join the workers of a stream. Raises ConfigError for a name that cannot be used, RedisError."""

    def rounds(self) -> Mapping[str, Round]:
        """What else has to run in a thread of its own until the loop stops, by name."""

    def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give up entries that were dropped from the hand."""

    def close(self) -> None:
        """Close its own connections."""


class Unordered:
    """For a handler without a key: workers share its entries."""

    def __init__(self, means: WorkerContext) -> None:
        m = means
        self._means = m
        self.streams: dict[str, ReliableStream] = {}
        self.keeper = ClaimRenewal(
            m.pipeline, m.hand, m.report, m.clock, m.policy, client=m.client, streams=self.streams,
            on_suspect=m.suspect,
        )  # fmt: skip
        self.settler = Committer(m.pipeline, m.hand, m.client, m.report, m.clock, give_up=m.give_up)
        self.taker = EntryFetcher(
            m.reading, m.hand, m.report, m.clock, m.policy, streams=self.streams, consumer=m.consumer,
            allowance=RateLimiter(m.handler.rate, m.clock),
        )  # fmt: skip

    def find(self, looking: Client) -> Sequence[str]:
        """See Side."""
        return streams_of(self._means.handler, looking)

    def join(self, name: str) -> None:
        """See Side."""
        m, handler = self._means, self._means.handler
        stream = ReliableStream(
            m.client, name, app=handler.app, handler=handler.name, consumer=m.consumer, into=handler.into,
            into_maxlen=handler.into_maxlen, start=m.start, on_trimmed=m.report.trimmed_some,
        )  # fmt: skip
        stream.room_bytes = lambda: m.hand.room_bytes
        stream.join()
        stream.dismiss_silent()
        stream.look()
        self.keeper.recover(stream)
        self.streams[name] = stream

    def rounds(self) -> Mapping[str, Round]:
        """See Side."""
        return {}

    def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """See Side."""
        by_idle: dict[tuple[ReliableStream, int], list[Delivery]] = defaultdict(list)
        for one in deliveries:
            by_idle[one.stream, self._idle_ms_of(one)].append(one)
        for (stream, idle_ms), some in by_idle.items():
            try:
                stream.end_isolation(some)
                lost = stream.hand_back([one.id for one in some], idle_ms=idle_ms)
            except MillstreamError as error:
                _could_not(len(some), error)
            else:
                self._means.report.handed_back_some(len(some) - len(lost))

    def _idle_ms_of(self, delivery: Delivery) -> int:
        """How long an entry that is handed back is to have been idle: so that its back-off is kept, if not for long."""
        wait_ms = delivery.due_ms - self._means.clock.monotonic_ms()
        if wait_ms <= 0:
            return HANDED_BACK_MS
        claim_ms = self._means.policy.claim_ms
        step_ms = math.ceil(claim_ms / _BACK_OFF_STEPS)  # not a call for each
        return claim_ms - math.ceil(wait_ms / step_ms) * step_ms

    def close(self) -> None:
        """See Side."""


class ByKey:
    """For a handler with a key: workers share the lines of its keys, of which each has one worker at a time.

    `woken`: put in it are the streams that may have lines to take, where no other worker works on them.
    """

    def __init__(self, means: WorkerContext, *, woken: "SimpleQueue[str] | None" = None) -> None:
        m = means
        self._means = m
        self._newest: int | None = None
        self.streams: dict[str, KeyedStream] = {}
        self._joined: SimpleQueue[str] = SimpleQueue()
        self._routing = Client(m.url, clock=m.clock)
        self._router = self._router_of(woken)
        self.keeper = KeyLeaseRenewal(
            m.pipeline, m.hand, m.report, m.clock, m.policy, client=m.client, streams=self.streams,
            on_suspect=m.suspect, break_off=m.break_off,
        )  # fmt: skip
        self.settler: Committer = KeyCommitter(
            m.pipeline, m.hand, m.client, m.report, m.clock, give_up=m.give_up,
            on_turned=(lambda name: None) if woken is None else woken.put,
        )  # fmt: skip
        self.taker = self._taker_of(woken)

    def _router_of(self, woken: "SimpleQueue[str] | None") -> KeyRouter:
        m = self._means
        options: dict[str, Any] = {
            "token": secrets.token_hex(8),
            "keys_of": self._keys_of,
            "readable": lambda name: name in self.streams and self.streams[name].readable,
            "on_filled": m.report.lines_filled,
        }
        if woken is None and self._shares_many:
            return SharedKeyRouter(self._routing, m.clock, m.policy, hints=self._hints(self._routing), **options)
        if woken is None:
            return KeyRouter(self._routing, m.clock, m.policy, **options)
        return OwnedKeyRouter(self._routing, m.clock, m.policy, woken=woken, **options)

    def _taker_of(self, woken: "SimpleQueue[str] | None") -> LeaseFetcher:
        m = self._means
        means = m.reading, m.hand, m.report, m.clock, m.policy
        options: dict[str, Any] = {
            "streams": self.streams,
            "allowance": RateLimiter(m.handler.rate, m.clock),
            "with_state": m.handler.wants_state,
            "isolated_after": isolated_after(m.handler.retry),
            "on_suspect": m.suspect,
        }
        if woken is None and self._shares_many:
            return SharedKeyFetcher(*means, hints=self._hints, keys_of=self._keys_of, woken=self._joined, **options)
        if woken is None:
            return KeyFetcher(*means, keys_of=self._keys_of, **options)
        return OwnedKeyFetcher(*means, woken=woken, **options)

    @property
    def _shares_many(self) -> bool:
        handler = self._means.handler
        return handler.pattern is not None or len(handler.streams) > _FEW

    def _hints(self, client: Client) -> ReadyHints:
        return ReadyHints(client, self._means.handler.app, self._means.handler.name)

    def _keys_of(self, name: str) -> HandlerKeys:
        return HandlerKeys(self._means.handler.app, self._means.handler.name, name)

    def _opened(self, kind: Callable[..., S], name: str, start: Literal["earliest", "latest"]) -> S:
        stream = self._made(kind, self._means.client, name, start)
        stream.newest = self._newest
        stream.join()
        return stream

    def _to_route(self, kind: Callable[..., S], working: KeyedStream) -> S:
        # Whoever routes waits for entries on its connection: nobody else may need an answer there.
        stream = self._made(kind, self._routing, working.stream, "earliest")
        stream.join_as(working)
        return stream

    def _made(self, kind: Callable[..., S], client: Client, name: str, start: Literal["earliest", "latest"]) -> S:
        m, handler, line_of = self._means, self._means.handler, self._means.pipeline.line_of
        return kind(
            client, name, line_of=lambda entry_id, pairs: line_of(name, entry_id, pairs), app=handler.app,
            handler=handler.name, consumer=m.consumer, into=handler.into, into_maxlen=handler.into_maxlen,
            start=start, on_trimmed=m.report.trimmed_some,
        )  # fmt: skip

    def find(self, looking: Client) -> Sequence[str]:
        """See Side."""
        return streams_of(self._means.handler, looking)

    def join(self, name: str) -> None:
        """See Side."""
        working = self._opened(KeyedStream, name, self._means.start)
        self._work_on(working)
        self._router.add(self._to_route(KeyedStream, working))

    def _work_on(self, stream: KeyedStream) -> None:
        stream.dismiss_silent()
        stream.look()
        self.keeper.recover(stream)
        self.streams[stream.stream] = stream
        self._joined.put(stream.stream)

    def rounds(self) -> Mapping[str, Round]:
        """See Side."""
        return {"router": self._router.run}

    def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """See Side. A line that is being run is not given back here: its lease ends when what runs is settled."""
        hand = self._means.hand
        endings: dict[KeyedStream, list[LeaseRelease]] = defaultdict(list)
        for lease in dict.fromkeys(map(lease_of, deliveries)):
            if not any(one in hand for one in lease.entries):
                hand.end_lease(lease)
                endings[lease.stream].append(LeaseRelease(lease, "first"))
        for stream, some in endings.items():
            count = sum(ending.lease.given for ending in some)
            try:
                stream.end_isolation([one for ending in some for one in ending.lease.entries])
                lost = stream.release(some)
            except MillstreamError as error:
                _could_not(count, error)
            else:
                self._means.report.handed_back_some(count - sum(lease.given for lease in lost))

    def close(self) -> None:
        """See Side."""
        self._routing.close()


def streams_of(handler: Handler, looking: Client) -> Sequence[str]:
    """The streams that there are now, of those that the handler reads."""
    return handler.streams or looking.scan_streams(handler.pattern or "*")


def _could_not(count: int, error: MillstreamError) -> None:
    logger.warning("%d messages could not be handed back, others adopt them later: %s", count, error)
