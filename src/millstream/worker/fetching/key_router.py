"""Key router and key fetcher: one worker at a time routes new entries to key queues; all workers lease ready keys."""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from millstream.clock import Clock
from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseResult
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import AccessDenied, Unavailable, WrongType
from millstream.redis_client.client import Arg, Client
from millstream.redis_client.key_names import HandlerKeys, from_wire, to_wire
from millstream.worker.fetching.fetcher import Fetcher
from millstream.worker.fetching.rate_limit import Permit
from millstream.worker.policy import WorkerPolicy
from millstream.worker.static_membership import HOLD_NAME
from millstream.worker.stream_exclusion import concerns_one_stream, exclude_on_error

logger = logging.getLogger(__name__)


class WakeUp(Protocol):
    """Receives the names of streams with new entries in key queues."""

    def put(self, name: str, /) -> None:
        """Note that this stream may have keys to lease."""


_ROUTER_MS = 3_000
_ROUTER_MS_EACH = 15.0
_ROUTED_AT_ONCE = 4_000
"""Large: entries routed further ahead make lease slices longer, and a slice costs Redis as much as some messages."""
_IDLE_S = 0.02
_WARN_AFTER_FAILURES = 10
_SWEEP_MS_EACH = 1.0
_POLL_MS_EACH = 20.0
_OTHERS_MS = 50.0
_NEARLY_FULL = 0.8


class LeaseFetcher(Fetcher[KeyedStream]):
    """Leases keys; room is counted in keys.

    `on_suspect` is called with an entry on which `isolated_after` leases expired: it may have crashed its workers.
    """

    def __init__(
        self, *args: Any, with_state: bool, isolated_after: int, on_suspect: Callable[[Delivery], None], **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._with_state = with_state
        self._isolated_after = isolated_after
        self._on_suspect = on_suspect

    def _terms(self, lines: int, count: int, streams: int = 1) -> dict[str, Any]:
        """Return the options of a lease of `lines` keys. One stream alone may give an entry larger than the room."""
        return {
            "lines": lines, "entries": min(count, self._policy.batch), "run": self._hand.run_length,
            "lease_ms": self._policy.claim_ms, "with_state": self._with_state,
            "most_bytes": self._hand.room_bytes // streams, "one_at_least": streams == 1 and self._hand.is_empty,
        }  # fmt: skip

    def _put_in_hand(self, stream: KeyedStream, leased: LeaseResult) -> int:
        new = 0
        trusted: list[KeyLease] = []
        suspects: list[Delivery] = []
        for lease in leased.leases:
            first = lease.waiting[0]
            # Entries that were leased before, and have failed since, were counted then.
            if first.attempt == first.deliveries == 1:
                new += len(lease.entries)
            if first.deliveries <= self._isolated_after:
                trusted.append(lease)
            else:
                suspects.append(lease.waiting.popleft())
        self._allowance.spend(stream.stream, new)
        self._hand.take_leases(trusted, self._clock.monotonic_ms())
        for suspect in suspects:
            self._hand.keep(suspect)
            self._on_suspect(suspect)
        self._report.polled(new)
        self._report.adopted_some(leased.reaped)
        return len(leased.leases)


class KeyFetcher(LeaseFetcher):
    """Leases keys of streams that other workers work on, too; blocks in Redis until a stream may have ready keys."""

    def __init__(self, *args: Any, keys_of: Callable[[str], HandlerKeys], **options: Any) -> None:
        super().__init__(*args, **options)
        self._keys_of = keys_of
        self._due_ms: dict[str, float] = {}
        self._turn = 0

    def take(self, room: int, stopping: threading.Event) -> None:
        """See Fetcher."""
        if (permit := self._ask_all(stopping)) is not None:
            self._take(permit, room, stopping)

    def _take(self, permit: Permit, room: int, stopping: threading.Event) -> None:
        now_ms = self._clock.monotonic_ms()
        due = [name for name in permit.streams if self._due_ms.get(name, 0.0) <= now_ms]
        leased = self._hand.unfit = 0
        self._turn += 1  # each stream gets to be the first that uses the room
        at = self._turn % max(1, len(due))
        for name in (*due[at:], *due[:at]):
            if leased < room and not self._hand.unfit:
                leased += self._take_of(self._streams[name], room - leased, permit.count)
        self._hand.found(leased, room)
        if not (leased or self._hand.unfit):
            self._wait(permit.streams, permit.until_ms, stopping)

    def _take_of(self, stream: KeyedStream, lines: int, count: int) -> int:
        now_ms = self._clock.monotonic_ms()
        leased = stream.take(now_ms=now_ms, **self._terms(lines, count))
        self._hand.unfit = leased.unfit
        if not (leased.leases or leased.unfit):
            # Leases of other workers may expire meanwhile, too. The more streams there are, the less often each is
            # polled.
            sweep_ms = max(self._policy.sweep_ms, _SWEEP_MS_EACH * len(self._streams))
            wait_ms = sweep_ms if leased.wait_ms is None else min(sweep_ms, leased.wait_ms)
            self._due_ms[stream.stream] = now_ms + wait_ms
        return self._put_in_hand(stream, leased)

    def look_again(self) -> None:
        """Forget which streams had no ready keys."""
        self._due_ms.clear()

    def _wait(self, names: Sequence[str], until_ms: float, stopping: threading.Event) -> None:
        """Block until Redis notifies of a ready key in one of these streams, or one may be ready by its due time."""
        self._report.polled(0)
        now_ms = self._clock.monotonic_ms()
        due_ms = min(self._due_ms.get(name, now_ms) for name in names)
        wait_ms = max(1.0, min(self._policy.block_ms, until_ms, due_ms - now_ms))
        if self._client.is_cluster and len(names) > 1:  # one command cannot block on keys of several slots
            stopping.wait(min(wait_ms / 1000, _IDLE_S))
            self._due_ms.clear()
            return
        wake_keys = {to_wire(self._keys_of(name).wake): name for name in names}
        found = self._client.execute("BLPOP", *wake_keys, math.ceil(wait_ms) / 1000)
        if found:
            self._due_ms.pop(wake_keys[found[0]], None)


class KeyRouter:
    """Routes new entries to key queues, of each stream on which this worker is the router. Used by one thread.

    One worker at a time is the router of a stream, so that the others need not read all entries, too. It keeps the role
    by renewing it; after three seconds without renewal, or 15 ms for each stream if those are thousands, another worker
    takes the role. Correctness does not depend on there being one router only.
    """

    _is_shared = True
    """Other workers may route these streams, too, so this worker has to acquire the role."""

    def __init__(
        self, client: Client, clock: Clock, policy: WorkerPolicy, *, token: str,
        keys_of: Callable[[str], HandlerKeys], readable: Callable[[str], bool],
        on_filled: Callable[[float], None] = lambda share: None,
    ) -> None:  # fmt: skip
        self._client = client
        self._clock = clock
        self._policy = policy
        self._token = token
        self._keys_of = keys_of
        self._readable = readable
        self._ask_due_ms = 0.0
        self._asked: set[str] = set()
        self._held_names: set[str] = set()
        self._on_filled = on_filled
        self._filled: dict[str, float] = {}
        self._full: set[str] = set()
        self._fresh: set[str] = set()
        self._all_due_ms = 0.0
        self._look_due_ms = 0.0
        self._failures = 0
        self.streams: dict[str, KeyedStream] = {}
        """Streams to route, each on a connection for routing; other threads add and remove some."""

    def add(self, stream: KeyedStream) -> None:
        """Route this stream; its client is one for routing."""
        self.streams[stream.stream] = stream

    @property
    def held(self) -> Sequence[str]:
        """The streams on which this worker is the router, as far as it knows."""
        return tuple(self._held_names)

    def run(self, stopping: threading.Event) -> None:
        """Route until `stopping`. Raises StaleOwner, and RedisError except Unavailable."""
        while not stopping.is_set():
            try:
                mine = self._mine()
                due = self._due(mine)
                self._route_all(due)
                self._failures = 0
                self._say_full(due)
                not_full = [one for one in mine if one.stream not in self._full]
                if not self._fresh:
                    self._wait(not_full, stopping)
                elif self._clock.monotonic_ms() >= self._look_due_ms and not self._client.is_cluster:
                    self._look(not_full)  # a stream that always has new entries must not hide the others
            except Unavailable as error:
                self._ask_due_ms = 0.0
                self._tell_away(error)
                stopping.wait(self._policy.sweep_ms / 1000)
            except (WrongType, AccessDenied) as error:  # concerns one of the streams it blocked on
                if self._is_shared or not concerns_one_stream(error):
                    raise
                self._all_due_ms = 0.0
        self._let_go()

    def _tell_away(self, error: Unavailable) -> None:
        """Warn once it has lasted. Other parts log that Redis is unavailable, but not that it refuses these reads."""
        self._failures += 1
        level = logging.WARNING if self._failures == _WARN_AFTER_FAILURES else logging.DEBUG
        logger.log(level, "cannot enqueue new entries: %s; retrying", error)

    def _route_all(self, due: Sequence[KeyedStream]) -> None:
        """Route new entries of each stream; then raise the error that kept some from it, perhaps of one server only."""
        self._fresh = set()
        away: Unavailable | None = None
        for stream in due:
            try:
                has_more = self._route(stream)
            except Unavailable as error:
                away = error
                if not self._client.is_cluster:
                    break
            else:
                if has_more:
                    self._fresh.add(stream.stream)
        if away is not None:
            raise away

    def _route(self, stream: KeyedStream) -> bool:
        """Route new entries of a stream; return whether there may be more."""
        before = stream.routed
        count = 0
        with exclude_on_error(stream):
            count = stream.route(count=_ROUTED_AT_ONCE, most_pending=self._policy.look_ahead)
        if stream.leaving:
            self.streams.pop(stream.stream, None)
        # Without new entries a changed position means that Redis lost writes, or that a reply was lost.
        has_more = count > 0 or stream.routed != before
        if has_more:
            self._tell(stream)
        return has_more

    def _tell(self, stream: KeyedStream) -> None:
        """Notify of new entries in key queues. Nothing to do here: Redis has woken the workers that block on it."""

    def _mine(self) -> list[KeyedStream]:
        """Return the streams on which this worker is the router, as of a second ago at most."""
        # Other threads may remove some meanwhile.
        streams = self.streams.copy()
        names: Collection[str] = streams
        if self._is_shared:
            self._ask_for(streams)
            names = [name for name in streams if name in self._held_names]
        return [streams[name] for name in names if self._readable(name)]

    def _ask_for(self, names: Collection[str]) -> None:
        """Acquire or renew the role of router: on new streams at once, on all of them every second."""
        now_ms = self._clock.monotonic_ms()
        held_ms = max(_ROUTER_MS, math.ceil(_ROUTER_MS_EACH * len(names)))
        if now_ms >= self._ask_due_ms:
            self._ask_due_ms = now_ms + held_ms / 3
            self._asked.clear()
        new = [name for name in names if name not in self._asked]
        if not new:
            return
        held = self._client.scripts(
            [(HOLD_NAME, (self._keys_of(name).router,), (self._token, held_ms)) for name in new]
        )
        if not self._asked:
            self._held_names = set()
        self._asked.update(new)
        self._held_names = self._held_names | {name for name, is_held in zip(new, held, strict=True) if is_held}

    def _due(self, mine: Sequence[KeyedStream]) -> Sequence[KeyedStream]:
        """Return the streams with new entries, as far as known; from time to time all, as notifications may be lost."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._all_due_ms:
            return [one for one in mine if one.stream in self._fresh or one.stream in self._full]
        self._all_due_ms = now_ms + max(_ROUTER_MS / 3, _POLL_MS_EACH * len(mine))
        return mine

    def _say_full(self, mine: Sequence[KeyedStream]) -> None:
        """Warn where the key queues are full, which pauses routing, and where they are nearly full."""
        most = self._policy.look_ahead
        for stream in mine:
            name, share = stream.stream, stream.pending / most
            if share < _NEARLY_FULL:
                self._filled.pop(name, None)
                self._full.discard(name)
                continue
            if name not in self._filled:
                logger.warning(
                    "key queues of %s are nearly full: they hold %d entries of at most %d; full queues block all other "
                    "keys. Run `millstream keys` to see which keys fill them, and unblock those, or raise --look-ahead",
                    name, stream.pending, most,
                )  # fmt: skip
            self._filled[name] = share
            if share < 1:
                self._full.discard(name)
            elif name not in self._full:
                self._full.add(name)
                logger.warning(
                    "key queues of %s are full: they hold %d entries; routing is paused until there are fewer",
                    name, stream.pending,
                )  # fmt: skip
        self._on_filled(max(self._filled.values(), default=0.0))

    def _wait(self, mine: Sequence[KeyedStream], stopping: threading.Event) -> None:
        if not mine or (self._client.is_cluster and len(mine) > 1):
            stopping.wait(_IDLE_S if mine else self._policy.sweep_ms / 1000)
            self._fresh = {one.stream for one in mine}
            return
        self._look(mine, "BLOCK", min(self._policy.block_ms, _ROUTER_MS // 3))

    def _look(self, mine: Sequence[KeyedStream], *block: Arg) -> None:
        """Find out which streams have new entries."""
        after = [one.routed for one in mine]
        names = [one.stream for one in mine]
        found = self._client.execute("XREAD", "COUNT", 1, *block, "STREAMS", *names, *after) if mine else ()
        self._fresh |= {from_wire(name) for name, _ in found or ()}
        self._look_due_ms = self._clock.monotonic_ms() + _OTHERS_MS

    def _let_go(self) -> None:
        with contextlib.suppress(Unavailable):
            self._client.scripts(
                [(HOLD_NAME, (self._keys_of(name).router,), (self._token, 0)) for name in self._held_names]
            )
