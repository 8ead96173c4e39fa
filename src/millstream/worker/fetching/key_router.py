"""How a worker gets the lines of a handler with a key: it routes what is new, as one of them does, and leases what is ready."""

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
    """Told which streams have new lines."""

    def put(self, name: str, /) -> None:
        """There may be lines to take of this stream."""


_ROUTER_MS = 3_000
_ROUTER_MS_EACH = 15.0
_ROUTED_AT_ONCE = 4_000
"""Many: what is routed further ahead of the workers makes their turns longer, and a turn costs Redis as much as some messages."""
_IDLE_S = 0.02
_FAILURES_TOLD = 10
_SWEEP_MS_EACH = 1.0
_LOOK_MS_EACH = 20.0
_OTHERS_MS = 50.0
_CROWDED = 0.8


class LeaseFetcher(Fetcher[KeyedStream]):
    """Leases lines; room is counted in lines.

    `on_suspect` takes an entry on which `isolated_after` leases ran out, so that whoever ran it may have died of it.
    """

    def __init__(
        self, *means: Any, with_state: bool, isolated_after: int, on_suspect: Callable[[Delivery], None], **options: Any
    ) -> None:
        super().__init__(*means, **options)
        self._with_state = with_state
        self._isolated_after = isolated_after
        self._on_suspect = on_suspect

    def _terms(self, lines: int, count: int, streams: int = 1) -> dict[str, Any]:
        """What each of so many streams is asked for. Of one alone an entry is had that is larger than all the room."""
        return {
            "lines": lines, "entries": min(count, self._policy.batch), "run": self._hand.run_length,
            "lease_ms": self._policy.claim_ms, "with_state": self._with_state,
            "most_bytes": self._hand.room_bytes // streams, "one_at_least": streams == 1 and self._hand.is_empty,
        }  # fmt: skip

    def _put_in_hand(self, stream: KeyedStream, taken: LeaseResult) -> int:
        new = 0
        trusted: list[KeyLease] = []
        suspects: list[Delivery] = []
        for lease in taken.leases:
            first = lease.waiting[0]
            # What was given out before, and has failed since, has been counted then.
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
        self._report.adopted_some(taken.reaped)
        return len(taken.leases)


class KeyFetcher(LeaseFetcher):
    """Leases lines of streams that others work on, too; Redis is asked to wake it when there may be some."""

    def __init__(self, *means: Any, keys_of: Callable[[str], HandlerKeys], **options: Any) -> None:
        super().__init__(*means, **options)
        self._keys_of = keys_of
        self._due_ms: dict[str, float] = {}
        self._turn = 0

    def take(self, room: int, stopping: threading.Event) -> None:
        """See Taker."""
        if (allowed := self._ask_all(stopping)) is not None:
            self._take(allowed, room, stopping)

    def _take(self, allowed: Permit, room: int, stopping: threading.Event) -> None:
        now_ms = self._clock.monotonic_ms()
        due = [name for name in allowed.streams if self._due_ms.get(name, 0.0) <= now_ms]
        taken = self._hand.unfit = 0
        self._turn += 1  # with the room that there is, each may be the first
        at = self._turn % max(1, len(due))
        for name in (*due[at:], *due[:at]):
            if taken < room and not self._hand.unfit:
                taken += self._take_of(self._streams[name], room - taken, allowed.count)
        self._hand.found(taken, room)
        if not (taken or self._hand.unfit):
            self._wait(allowed.streams, allowed.until_ms, stopping)

    def _take_of(self, stream: KeyedStream, lines: int, count: int) -> int:
        now_ms = self._clock.monotonic_ms()
        taken = stream.take(now_ms=now_ms, **self._terms(lines, count))
        self._hand.unfit = taken.unfit
        if not (taken.leases or taken.unfit):
            # Leases that others take meanwhile may run out, too; the more streams there are, the less often each is asked.
            sweep_ms = max(self._policy.sweep_ms, _SWEEP_MS_EACH * len(self._streams))
            wait_ms = sweep_ms if taken.wait_ms is None else min(sweep_ms, taken.wait_ms)
            self._due_ms[stream.stream] = now_ms + wait_ms
        return self._put_in_hand(stream, taken)

    def look_again(self) -> None:
        """Forget which streams had nothing: a reply was lost, or they have been joined again."""
        self._due_ms.clear()

    def _wait(self, names: Sequence[str], until_ms: float, stopping: threading.Event) -> None:
        """Until somebody says that a line of one of these streams is ready, or one may be by itself."""
        self._report.polled(0)
        now_ms = self._clock.monotonic_ms()
        due_ms = min(self._due_ms.get(name, now_ms) for name in names)
        wait_ms = max(1.0, min(self._policy.block_ms, until_ms, due_ms - now_ms))
        if self._client.is_cluster and len(names) > 1:  # keys of several slots cannot be waited for at once
            stopping.wait(min(wait_ms / 1000, _IDLE_S))
            self._due_ms.clear()
            return
        places = {to_wire(self._keys_of(name).wake): name for name in names}
        found = self._client.execute("BLPOP", *places, math.ceil(wait_ms) / 1000)
        if found:
            self._due_ms.pop(places[found[0]], None)


class KeyRouter:
    """Routes new entries to their lines, of each stream on which this worker is the router. Used by one thread.

    One worker at a time is, so that the others need not read all entries, too: it keeps the role by using it, and if it is
    gone for three seconds another takes it, or of thousands of streams for as many times 15 ms. Nothing depends on there
    being one only.
    """

    _is_shared = True
    """Others would route these streams, too, so that the role is asked for."""

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
        """Those to route, on a connection of their own; others add to them, and take some away."""

    def add(self, stream: KeyedStream) -> None:
        """Route this stream, which has a connection for that, too."""
        self.streams[stream.stream] = stream

    @property
    def held(self) -> Sequence[str]:
        """The streams on which this worker is the router, as far as it knows."""
        return tuple(self._held_names)

    def run(self, stopping: threading.Event) -> None:
        """Route until `stopping`. Raises RedisError but for Unavailable, StaleOwner."""
        while not stopping.is_set():
            try:
                mine = self._mine()
                due = self._due(mine)
                self._route_all(due)
                self._failures = 0
                self._say_full(due)
                open_ones = [one for one in mine if one.stream not in self._full]
                if not self._fresh:
                    self._wait(open_ones, stopping)
                elif self._clock.monotonic_ms() >= self._look_due_ms and not self._client.is_cluster:
                    self._look(open_ones)  # a stream that always has something hides no other
            except Unavailable as error:
                self._ask_due_ms = 0.0
                self._tell_away(error)
                stopping.wait(self._policy.sweep_ms / 1000)
            except (WrongType, AccessDenied) as error:  # of one of many that were waited for
                if self._is_shared or not concerns_one_stream(error):
                    raise
                self._all_due_ms = 0.0
        self._let_go()

    def _tell_away(self, error: Unavailable) -> None:
        """Say so once it has lasted: a Redis that is away is told of elsewhere, one that refuses what is read is not."""
        self._failures += 1
        level = logging.WARNING if self._failures == _FAILURES_TOLD else logging.DEBUG
        logger.log(level, "nothing new is given to the workers for now: %s", error)

    def _route_all(self, due: Sequence[KeyedStream]) -> None:
        """Route what is new on each; then raise what kept some from it, perhaps only the server of that stream."""
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
        """Route what is new on a stream; return whether there may be more."""
        before = stream.routed
        count = 0
        with exclude_on_error(stream):
            count = stream.route(count=_ROUTED_AT_ONCE, most_pending=self._policy.look_ahead)
        if stream.leaving:
            self.streams.pop(stream.stream, None)
        # Where nothing was new, yet it goes on elsewhere, Redis has gone back, or an answer was lost with what it said.
        has_more = count > 0 or stream.routed != before
        if has_more:
            self._tell(stream)
        return has_more

    def _tell(self, stream: KeyedStream) -> None:
        """Redis has woken who waits for its lines."""

    def _mine(self) -> list[KeyedStream]:
        """The streams on which this worker is the router, as of a second ago at the most."""
        # Others may take some away meanwhile.
        streams = self.streams.copy()
        names: Collection[str] = streams
        if self._is_shared:
            self._ask_for(streams)
            names = [name for name in streams if name in self._held_names]
        return [streams[name] for name in names if self._readable(name)]

    def _ask_for(self, names: Collection[str]) -> None:
        """Take or keep the role on these, on new ones at once, on all every second."""
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
        """Those that have new entries, as far as is known; now and then all: what is known is no more than a hint."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._all_due_ms:
            return [one for one in mine if one.stream in self._fresh or one.stream in self._full]
        self._all_due_ms = now_ms + max(_ROUTER_MS / 3, _LOOK_MS_EACH * len(mine))
        return mine

    def _say_full(self, mine: Sequence[KeyedStream]) -> None:
        """Say where so much waits in the lines of keys that nothing more is routed, and where that is near."""
        most = self._policy.look_ahead
        for stream in mine:
            name, share = stream.stream, stream.pending / most
            if share < _CROWDED:
                self._filled.pop(name, None)
                self._full.discard(name)
                continue
            if name not in self._filled:
                logger.warning(
                    "%d entries of %s wait in the lines of their keys, of at most %d: with so many no key's go on but theirs. "
                    "`millstream keys` shows whose they are: see to these, or give the workers a greater --look-ahead",
                    stream.pending, name, most,
                )  # fmt: skip
            self._filled[name] = share
            if share < 1:
                self._full.discard(name)
            elif name not in self._full:
                self._full.add(name)
                logger.warning(
                    "%d entries of %s wait in the lines of their keys: no more are routed until there are fewer",
                    stream.pending, name,
                )  # fmt: skip
        self._on_filled(max(self._filled.values(), default=0.0))

    def _wait(self, mine: Sequence[KeyedStream], stopping: threading.Event) -> None:
        if not mine or (self._client.is_cluster and len(mine) > 1):
            stopping.wait(_IDLE_S if mine else self._policy.sweep_ms / 1000)
            self._fresh = {one.stream for one in mine}
            return
        self._look(mine, "BLOCK", min(self._policy.block_ms, _ROUTER_MS // 3))

    def _look(self, mine: Sequence[KeyedStream], *block: Arg) -> None:
        """Find out which have new entries."""
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
