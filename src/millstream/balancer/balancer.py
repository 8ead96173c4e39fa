"""One consumer of a balanced service: it holds leases on whole streams, and its program is told what becomes of them.

The spine is `_live`: a round with Redis, what follows from it, and a wait for the moment at which something can be
different: an announcement, a stream that is given back, the end of somebody's lease.

After redis-stream-client-go ("Architecture"), whose wire form, notifications and calls these are.
"""

import logging
import secrets
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from millstream.balancer.lease_metrics import LeaseMetrics
from millstream.balancer.notification_queue import NotificationQueue
from millstream.balancer.notifications import Lease, Notice, StreamAdded, StreamDisowned, StreamExpired, Terminated, Why
from millstream.balancer.policy import BalancerPolicy
from millstream.balancer.protocol import WAITING, HeartbeatReply, HeartbeatRequest, Service, announce
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, LeaseLost, MillstreamError, NameHeld, Unavailable, text_of
from millstream.observability.metrics import NOBODY, Metrics
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import check_identifier, host_name

logger = logging.getLogger(__name__)

_HEARTBEATS = 3
_LEAST_GAP_MS = 10.0
_SERVER_TICK_MS = 100.0  # an idle Redis looks at the time so often, and ends what blocks so much too late
_LIMITS_LOOKED_AT_MS = 100.0
_FIRST_WAIT_MS, _LAST_WAIT_MS = 50.0, 1000.0
_LEAST_TIMEOUT_MS = 100


@dataclass(slots=True, eq=False)
class _Held:
    """A lease, and what only this process knows of it. Times are of the monotonic clock."""

    lease: Lease
    since_ms: float
    expected_ms: float | None = None
    leaves_ms: float | None = None


class Balancer:
    """Takes part in `service` as a consumer, from `start` to `close`; it is also a context manager.

    * `consumer`: its name, which no other living process may have; by default the host's. A process that is started
      again under the name of one that died gets in when that one's leases have ended.
    * `replaces`: whoever had the name before is known to be dead: its streams need not wait for the end of their leases
    * `metrics`: where figures go; see `millstream.observability.metrics`

    Notifications are taken by iterating, in a thread or an event loop, or one by one with `next`. All methods may be
    called from any thread. A promise is made by the lease: of all consumers at most one holds a stream by the server's
    clock. What a process does after its lease has ended, as after a pause, only the lease's token can tell.
    """

    def __init__(
        self, url: str, service: str, *, consumer: str | None = None, policy: BalancerPolicy | None = None,
        replaces: bool = False, metrics: Metrics = NOBODY, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self._replaces = replaces
        self.policy = policy or BalancerPolicy()
        self.consumer = check_identifier("consumer name", consumer or host_name(100))
        if self.consumer == WAITING:
            raise ConfigError(
                f"a consumer cannot be called {WAITING!r}: so Redis calls those that nobody has; use another name"
            )
        # A wait and a round that are not answered are over when the lease is.
        timeout_ms = max(_LEAST_TIMEOUT_MS, self.policy.lease_ms // _HEARTBEATS)
        self._client = Client(url, timeout_ms=timeout_ms, clock=clock)
        self._waiting = Client(url, timeout_ms=timeout_ms + self.policy.lease_ms // _HEARTBEATS, clock=clock)
        self._service = Service(self._client, service, consumer=self.consumer, incarnation=secrets.token_hex(8))
        self._measures = LeaseMetrics(metrics, service)
        self._clock = clock
        self._turn = threading.RLock()  # one conversation with Redis at a time, so that what is known does not go back
        self._held: dict[str, _Held] = {}
        self._lost: list[Lease] = []  # since Redis was last heard of: it may have forgotten them
        self._until_ms = 0.0
        self._born: str | None = None
        self._wants_all = False  # what Redis knows may be something else than what is known here
        self._unheard = False  # because a call failed, and may have been executed
        self._is_full = False  # there was more to take, but the program has too many notifications waiting
        self._told_free: dict[str, float] = {}
        self._notices: NotificationQueue[Notice] = NotificationQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # What the program calls

    def start(self) -> "Balancer":
        """Join. Raises NameHeld if another process keeps the name for longer than a lease, and RedisError."""
        if self._thread is not None:
            raise ConfigError("a balancer is started once; make another one")
        try:
            first = self._join()
        except _Closed:
            raise ConfigError("a balancer that was closed is not started any more; make another one") from None
        self._thread = threading.Thread(target=self._live, args=(first,), name=f"balancer-{self.consumer}", daemon=True)
        self._thread.start()
        return self

    def __enter__(self) -> "Balancer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, timeout_s: float | None = None) -> Notice | None:
        """Wait so many seconds for the next notification; None if there is none. After Terminated there is none."""
        return self._notices.take(timeout_s)

    def __iter__(self) -> Iterator[Notice]:
        """Notifications, until the one of the end."""
        while (notice := self.next()) is not None:
            yield notice

    async def __aiter__(self) -> AsyncIterator[Notice]:
        """Notifications, until the one of the end, in an event loop."""
        while (notice := await self._notices.take_soon()) is not None:
            yield notice

    def announce(self, stream: str, info: object = None) -> str:
        """See `millstream.balancer.announce`."""
        return announce(self._client, self._service.keys.service, stream, info)

    def claim(self, stream: str) -> Lease:
        """Take a stream that nobody has, beyond the share if need be. No StreamAdded follows.

        Raises StreamNotFound, AlreadyOwned, LeaseLost, RedisError.
        """
        with self._turn:
            if self._stopping.is_set():
                raise LeaseLost(f"{self.consumer!r} is closed, and takes no stream any more", stream=stream)
            began_ms = self._clock.monotonic_ms()
            try:
                lease = self._service.claim(stream)
            except MillstreamError as error:
                if isinstance(error, Unavailable):
                    self._doubt()  # it may be ours
                self._measures.claimed(type(error).__name__, self._clock.monotonic_ms() - began_ms)
                raise
            self._measures.claimed("ok", self._clock.monotonic_ms() - began_ms)
            self._told_free.pop(stream, None)
            known = self._held.get(stream)
            if known is None or known.lease.token != lease.token:
                self._hold(lease)
            return lease

    def done(self, *streams: str | Lease) -> None:
        """Say that streams have no more to come: they are forgotten. Raises LeaseLost if one is not ours, RedisError.

        Of a stream that may have gone and come back meanwhile, give the lease under which the work was done.
        """
        self._hand_in("done", streams)

    def release(self, *streams: str | Lease) -> None:
        """Let others have streams, at once. Raises LeaseLost if one is not ours any more, RedisError."""
        self._hand_in("released", streams)

    def lease(self, stream: str) -> Lease | None:
        """The lease on a stream, as long as this process may believe in it."""
        held = self._held.get(stream)
        return held.lease if held is not None and self._may_believe() else None

    @property
    def leases(self) -> Sequence[Lease]:
        """All leases that this process may believe in."""
        return [held.lease for held in list(self._held.values())] if self._may_believe() else []

    def expect(self, stream: str, within_ms: float | None) -> None:
        """Say that work on a stream gets on within so many milliseconds: if nothing is said until then, its lease ends.

        However healthy the process: a stream that is stuck goes to others, if their shares have room for it, or comes
        back under a new token; its siblings stay. None takes it back.
        """
        held = self._held.get(stream)
        if held is not None:
            held.expected_ms = None if within_ms is None else self._clock.monotonic_ms() + within_ms

    def close(self, timeout_s: float = 10.0) -> int:
        """Leave: take no more, give back every stream, and say Terminated. Return how many streams others may have now.

        Nothing is taken as done that was not. Safe to repeat. If Redis does not answer within `timeout_s` seconds, others get
        the streams when the leases end; the log says how many.
        """
        if self._stopping.is_set():
            return 0
        self._stopping.set()
        end_ms, count = self._clock.monotonic_ms() + timeout_s * 1000, len(self._held)
        outcome: list[int | str] = []
        leaving = threading.Thread(target=lambda: outcome.append(self._leave()), name="balancer-leaves", daemon=True)
        leaving.start()
        if self._thread is threading.current_thread():  # which has to come to its own end first
            return 0
        for thread in (leaving, self._thread):
            if thread is not None:
                thread.join(max(0.0, end_ms - self._clock.monotonic_ms()) / 1000)
        self._terminate(None)
        said = outcome[0] if outcome else f"no answer within {timeout_s:g} s"
        if isinstance(said, int):
            return said
        logger.warning("%s leaves %d streams to others when its leases end (%s)", self.consumer, count, said)
        return 0

    def _leave(self) -> int | str:
        """End with Redis, after whatever is being said to it; how many streams others may have now, or why none."""
        with self._turn:
            try:
                return self._service.retire(self._ended_how())
            except MillstreamError as error:
                return text_of(error)
            finally:
                for held in list(self._held.values()):
                    self._drop(held, "closed")
                self._client.close()

    def _hand_in(self, how: Literal["done", "released"], streams: Sequence[str | Lease]) -> None:
        with self._turn:
            held: dict[str, _Held] = {}
            lost: list[str] = []
            for one in streams:
                name = one if isinstance(one, str) else one.stream
                found = self._held.get(name)
                if found is None or (isinstance(one, Lease) and one.token != found.lease.token):
                    lost.append(name)
                else:
                    held[name] = found
            try:
                refused = self._service.hand_in(how, [one.lease for one in held.values()])
            except Unavailable:
                self._doubt()  # they may be ours no more
                raise
            for name, ours in held.items():
                self._drop(ours, "refused" if name in refused else how)
        lost += sorted(refused)
        if lost:
            raise LeaseLost(
                f"{', '.join(map(repr, lost))}: this consumer's lease has ended, others may have it", stream=lost[0]
            )

    # The thread

    def _join(self) -> HeartbeatReply:
        """The first round. The name may still be that of a process that died a moment ago."""
        end_ms = self._clock.monotonic_ms() + 2 * self.policy.lease_ms
        while True:
            try:
                return self._round()
            except Unavailable:
                self._doubt()
                raise
            except NameHeld:
                if self._clock.monotonic_ms() >= end_ms:
                    raise
                self._clock.sleep_ms(_FIRST_WAIT_MS)

    def _live(self, found: HeartbeatReply) -> None:
        """Round after round until it is closed."""
        error: Exception | None = None
        try:
            while not self._stopping.is_set():
                if self._wants_all:
                    self._stopping.wait(_LEAST_GAP_MS / 1000)
                elif not found.more:
                    self._wait(found)
                found = self._outlasting()
        except _Closed:
            pass
        except Exception as fatal:  # noqa: BLE001 - whatever it is, the program must hear that nothing is renewed
            logger.error("%s of %s has ended: %s", self.consumer, self._service.keys.label, text_of(fatal))
            error = fatal
            with self._turn:
                self._lose_all("lost contact")
        finally:
            self._waiting.close()
            self._terminate(error)

    def _terminate(self, error: Exception | None) -> None:
        if self._notices.end(Terminated(error=error)):
            self._measures.told(Terminated.__name__)

    def _outlasting(self) -> HeartbeatReply:
        """A round, however long Redis is away meanwhile."""
        wait_ms, since_ms = _FIRST_WAIT_MS, self._clock.monotonic_ms()
        while not self._stopping.is_set():
            try:
                found = self._round()
            except (Unavailable, NameHeld) as error:
                self._doubt()
                if wait_ms == _FIRST_WAIT_MS:
                    logger.warning("%s cannot be heard of: %s", self.consumer, error)
                with self._turn:
                    if self._held and self._clock.monotonic_ms() >= self._until_ms:
                        self._lose_all("lost contact")
                self._stopping.wait(wait_ms / 1000)
                wait_ms = min(2 * wait_ms, _LAST_WAIT_MS)
            else:
                if wait_ms > _FIRST_WAIT_MS:
                    away_ms = self._clock.monotonic_ms() - since_ms
                    logger.warning("%s is heard of again after %.1f s", self.consumer, away_ms / 1000)
                return found
        raise _Closed

    def _round(self) -> HeartbeatReply:
        """Ask Redis, and draw the conclusions. Raises RedisError, NameHeld."""
        with self._turn:
            if self._stopping.is_set():
                raise _Closed
            if self._until_ms and self._clock.monotonic_ms() >= self._until_ms:
                self._begin_anew()
            now_ms = self._clock.monotonic_ms()
            held = self._held.values()
            stuck = [one for one in held if _is_past(one.expected_ms, now_ms)]
            overran = [one for one in held if _is_past(one.leaves_ms, now_ms) and not _is_past(one.expected_ms, now_ms)]
            bid = self._bid(stuck, overran)
            found = self._service.round(bid)
            self._is_full = len(found.given) >= bid.take and found.has < found.share
            self._measures.round(found, self._clock.monotonic_ms() - now_ms)
            self._conclude(found, [*stuck, *overran], now_ms)
            return found

    def _bid(self, stuck: Sequence[_Held], overran: Sequence[_Held]) -> HeartbeatRequest:
        policy = self.policy
        return HeartbeatRequest(
            lease_ms=policy.lease_ms,
            weight=policy.weight_now(),
            limit=policy.most_streams,
            take=max(0, policy.most_waiting - len(self._notices)),
            recovers=policy.recover == "share",
            leaving=sum(1 for one in self._held.values() if one.leaves_ms is not None),
            wants_all=self._wants_all,
            moves=policy.moves if policy.recover == "share" else 0,
            most_losses=policy.most_losses,
            replaces=self._replaces and self._born is None,
            stuck=[one.lease for one in stuck],
            overran=[one.lease for one in overran],
        )

    def _conclude(self, found: HeartbeatReply, expired: Sequence[_Held], asked_ms: float) -> None:
        self._find_unknown(found)
        for held in [one for one in expired if self._held.get(one.lease.stream) is one]:
            self._disown(held, "stuck")
        if self._wants_all and not found.is_new:
            tokens = {lease.stream: lease.token for lease in found.all}
            for held in list(self._held.values()):
                if tokens.get(held.lease.stream) != held.lease.token:
                    self._disown(held, "forgotten" if self._unheard else "taken away")
            given = [lease for lease in found.all if lease.stream not in self._held]  # in replies that were lost, too
        else:
            given = [*found.given]
        self._born = found.born
        self._until_ms = asked_ms + self.policy.lease_ms
        self._lost.clear()
        for lease in given:
            if lease.stream in self._held:  # and the same round gave it back
                self._disown(self._held[lease.stream], "taken away")
            self._hold(lease)
            self._put(StreamAdded(lease=lease))
        self._unheard = False
        self._wants_all = found.has != len(self._held)  # somebody has ended a lease from outside
        if found.excess:
            self._give_back(found.excess)
        self._tell_free(found.free, asked_ms)

    def _find_unknown(self, found: HeartbeatReply) -> None:
        """See whether Redis knew this consumer: it may have been thought dead, or Redis has lost its memory."""
        if self._born not in (None, found.born) and (found.is_new or self._wants_all):
            logger.warning("%s has lost its memory: its streams are announced again", self._service.keys.label)
            for lease in (*self._lost, *(held.lease for held in self._held.values())):
                self._announce_again(lease)
            self._lose_all("forgotten")
        elif found.is_new:
            self._lose_all("expired")

    def _announce_again(self, lease: Lease) -> None:
        try:
            self.announce(lease.stream, lease.info)
        except ConfigError:  # others may announce what we would not
            self.announce(lease.stream)

    def _begin_anew(self) -> None:
        """Too late for the leases, whoever has them: those that may still count are ended, so that new ones have new tokens."""
        how = self._ended_how()
        self._lose_all("lost contact" if self._unheard else "expired")
        self._service.retire(how)
        self._service.incarnation = secrets.token_hex(8)
        self._until_ms = 0.0

    def _give_back(self, count: int) -> None:
        """Give back some streams: first those that the program has not heard of."""
        unheard = {id(notice.lease) for notice in self._notices.waiting() if isinstance(notice, StreamAdded)}
        staying = [one.lease for one in self._held.values() if one.leaves_ms is None]
        last = {id(lease) for lease in [lease for lease in staying if id(lease) in unheard][-count:]}
        # The program may have heard of some meanwhile.
        withdrawn = self._notices.withdraw(lambda notice: isinstance(notice, StreamAdded) and id(notice.lease) in last)
        leaving = [self._held[notice.lease.stream] for notice in withdrawn if isinstance(notice, StreamAdded)]
        for held in leaving:  # what cannot be said now is found out, and told again, by the next round
            self._drop(held, "released")
        self._service.hand_in("released", [held.lease for held in leaving])
        others = [one for one in self._held.values() if one.leaves_ms is None and one.expected_ms is None]
        busy = [one for one in self._held.values() if one.leaves_ms is None and one.expected_ms is not None]
        for held in (*reversed(others), *reversed(busy)):
            if len(leaving) >= count:
                break
            leaving.append(held)
            held.leaves_ms = self._clock.monotonic_ms() + self.policy.drain_ms
            self._put(StreamDisowned(lease=held.lease, why="rebalanced", drain_ms=self.policy.drain_ms))

    def _tell_free(self, free: Sequence[str], now_ms: float) -> None:
        """Say which streams are free, and again those that nobody took."""
        again_ms = now_ms - self.policy.lease_ms
        told = {stream: self._told_free.get(stream, float("-inf")) for stream in free}
        for stream in free:
            if told[stream] <= again_ms and len(self._notices) < self.policy.most_waiting:
                told[stream] = now_ms
                self._put(StreamExpired(stream=stream))
        self._told_free = told

    def _may_believe(self) -> bool:
        return self._clock.monotonic_ms() < self._until_ms and not self._stopping.is_set()

    def _ended_how(self) -> Literal["released", "expired", "lapsed"]:
        """What becomes of the leases if this consumer leaves now."""
        if not self._until_ms or self._clock.monotonic_ms() < self._until_ms:
            return "released"
        return "lapsed" if self._unheard else "expired"

    def _doubt(self) -> None:
        """A call has failed, and may have been executed."""
        self._wants_all = self._unheard = True

    def _hold(self, lease: Lease) -> None:
        self._held[lease.stream] = _Held(lease, self._clock.monotonic_ms())

    def _drop(self, held: _Held, how: str) -> None:
        del self._held[held.lease.stream]
        self._measures.ended(how, self._clock.monotonic_ms() - held.since_ms)

    def _disown(self, held: _Held, why: Why) -> None:
        self._drop(held, why)
        self._put(StreamDisowned(lease=held.lease, why=why))

    def _lose_all(self, why: Why) -> None:
        for held in list(self._held.values()):
            self._lost.append(held.lease)
            self._disown(held, why)

    def _put(self, notice: Notice) -> None:
        self._measures.told(type(notice).__name__)
        self._notices.put(notice)

    def _wait(self, found: HeartbeatReply) -> None:
        """Until something may be different, but not beyond the next sign of life."""
        now_ms = self._clock.monotonic_ms()
        wait_ms = self._until_ms - self.policy.lease_ms * (_HEARTBEATS - 1) / _HEARTBEATS - now_ms
        if found.next_ms is not None:
            wait_ms = min(wait_ms, found.next_ms)
        if self._is_full or any(
            one.expected_ms is not None or one.leaves_ms is not None for one in list(self._held.values())
        ):
            wait_ms = min(wait_ms, _LIMITS_LOOKED_AT_MS)
        if wait_ms <= _SERVER_TICK_MS:  # it could not be told so exactly, and that would be too late for a lease
            self._stopping.wait(max(wait_ms, _LEAST_GAP_MS) / 1000)
            return
        wait_ms = max(wait_ms - _SERVER_TICK_MS, _LEAST_GAP_MS)
        keys = self._service.keys
        try:
            self._waiting.execute("XREAD", "BLOCK", int(wait_ms), "STREAMS", keys.input, keys.events, *found.newest)
        except Unavailable:
            self._doubt()
            self._stopping.wait(_FIRST_WAIT_MS / 1000)
        else:
            self._stopping.wait(_LEAST_GAP_MS / 1000)  # what comes in one go is seen in one go


def _is_past(end_ms: float | None, now_ms: float) -> bool:
    return end_ms is not None and end_ms <= now_ms


class _Closed(Exception):
    """It was closed meanwhile."""
