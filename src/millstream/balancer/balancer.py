"""Balancer: one consumer of a balanced service, which leases whole streams and notifies its program of changes.

`_run` is its loop: a heartbeat to Redis, the changes in the reply, and a wait for the next possible change: an
announcement, a released stream, the expiry of another consumer's leases.

After redis-stream-client-go ("Architecture"): its wire format, its notifications and its calls.
"""

import logging
import secrets
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Literal

from millstream.balancer.lease_metrics import LeaseMetrics
from millstream.balancer.lease_table import Change, LeaseEnded, LeaseTable, UnrenewedLeases
from millstream.balancer.notification_queue import NotificationQueue
from millstream.balancer.notifications import Lease, Notice, StreamAdded, Terminated
from millstream.balancer.policy import BalancerPolicy
from millstream.balancer.protocol import UNASSIGNED, HeartbeatReply, HeartbeatRequest, Service, announce
from millstream.clock import SYSTEM_CLOCK, Backoff, Clock
from millstream.errors import ConfigError, LeaseLost, MillstreamError, NameHeld, Unavailable, text_of
from millstream.observability.metrics import NO_METRICS, Metrics
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import check_identifier, host_name

logger = logging.getLogger(__name__)

_HEARTBEATS = 3
_LEAST_GAP_MS = 10.0
_SERVER_TICK_MS = 100.0  # an idle Redis checks timeouts this often, and ends a blocking read up to this much late
_CHECK_LIMITS_MS = 100.0
_FIRST_BACKOFF_MS, _LAST_BACKOFF_MS = 50.0, 1000.0
_LEAST_TIMEOUT_MS = 100


class Balancer:
    """Takes part in `service` as a consumer, from `start` to `close`; also a context manager.

    * `consumer`: its name, unique among live processes; by default the host's. A process that restarts under the name
      of a dead one joins once the leases of the dead one have expired.
    * `replaces`: the previous process of this name is known to be dead: its streams are reassigned without waiting for
      their leases
    * `metrics`: destination of the metrics; see `millstream.observability.metrics`

    Iterate over it for notifications, in a thread or an event loop, or call `next`. All methods may be called from any
    thread. By the server's clock, at most one consumer has a lease on a stream. Only the lease's token can fence writes
    of a process whose lease has expired, as after a pause (M. Kleppmann, "How to do distributed locking", 2016).
    """

    def __init__(
        self,
        url: str,
        service: str,
        *,
        consumer: str | None = None,
        policy: BalancerPolicy | None = None,
        replaces: bool = False,
        metrics: Metrics = NO_METRICS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._replaces = replaces
        self.policy = policy or BalancerPolicy()
        self.consumer = check_identifier("consumer name", consumer or host_name(100))
        if self.consumer == UNASSIGNED:
            raise ConfigError(
                f"a consumer cannot be called {UNASSIGNED!r}, which is the name for unassigned streams; use another name"
            )
        # A wait and a heartbeat without a reply together end no later than the lease.
        timeout_ms = max(_LEAST_TIMEOUT_MS, self.policy.lease_ms // _HEARTBEATS)
        self._client = Client(url, timeout_ms=timeout_ms, clock=clock)
        self._blocking_client = Client(url, timeout_ms=timeout_ms + self.policy.lease_ms // _HEARTBEATS, clock=clock)
        self._service = Service(self._client, service, consumer=self.consumer, incarnation=secrets.token_hex(8))
        self._metrics = LeaseMetrics(metrics, service)
        self._clock = clock
        # One call to Redis at a time, so that an older reply never overwrites a newer one.
        self._lock = threading.RLock()
        self._table = LeaseTable(lease_ms=self.policy.lease_ms, drain_ms=self.policy.drain_ms)
        self._is_full = False  # more streams to lease, but too many notifications queued
        self._notifications: NotificationQueue[Notice] = NotificationQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # Public methods

    def start(self) -> "Balancer":
        """Join the service.

        Raises NameHeld if another process keeps the name for longer than a lease, and RedisError.
        """
        if self._thread is not None:
            raise ConfigError("this balancer has been started already; create a new one")
        try:
            first = self._join()
        except _Closed:
            raise ConfigError("this balancer is closed; create a new one") from None
        thread = threading.Thread(target=self._run, args=(first,), name=f"balancer-{self.consumer}", daemon=True)
        thread.start()
        self._thread = thread  # now only, as `close` in another thread joins it
        return self

    def __enter__(self) -> "Balancer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, timeout_s: float | None = None) -> Notice | None:
        """Wait up to `timeout_s` seconds for the next notification; None if there is none.

        Terminated is the last one.
        """
        return self._notifications.get(timeout_s)

    def __iter__(self) -> Iterator[Notice]:
        """Notifications, up to Terminated."""
        while (notice := self.next()) is not None:
            yield notice

    async def __aiter__(self) -> AsyncIterator[Notice]:
        """Notifications, up to Terminated, in an event loop."""
        while (notice := await self._notifications.get_async()) is not None:
            yield notice

    def announce(self, stream: str, info: object = None) -> str:
        """See `millstream.balancer.announce`."""
        return announce(self._client, self._service.keys.service, stream, info)

    def claim(self, stream: str) -> Lease:
        """Lease a stream without an owner, even beyond the share. No StreamAdded follows.

        Raises StreamNotFound, AlreadyOwned, LeaseLost, RedisError.
        """
        with self._lock:
            if self._stopping.is_set():
                raise LeaseLost(
                    f"{self.consumer!r} is closed and claims no stream; create a new balancer", stream=stream
                )
            began_ms = self._clock.monotonic_ms()
            try:
                lease = self._service.claim(stream)
            except MillstreamError as error:
                if isinstance(error, Unavailable):
                    self._table.mark_uncertain()  # the claim may have succeeded
                self._metrics.claimed(type(error).__name__, self._clock.monotonic_ms() - began_ms)
                raise
            now_ms = self._clock.monotonic_ms()
            self._metrics.claimed("ok", now_ms - began_ms)
            self._table.add_claimed(lease, now_ms)
            return lease

    def done(self, *streams: str | Lease) -> None:
        """Report streams as complete: the service removes them. Raises LeaseLost if one is not ours, RedisError.

        For a stream that may have been revoked and assigned again meanwhile, pass the lease under which the work was
        done.
        """
        self._end_leases("done", streams)

    def release(self, *streams: str | Lease) -> None:
        """Release streams to other consumers, at once. Raises LeaseLost if one is not ours any more, RedisError."""
        self._end_leases("released", streams)

    def lease(self, stream: str) -> Lease | None:
        """The lease on a stream, while it is valid by the local clock; else None."""
        return None if self._stopping.is_set() else self._table.lease(stream, self._clock.monotonic_ms())

    @property
    def leases(self) -> Sequence[Lease]:
        """All leases that are valid by the local clock."""
        return [] if self._stopping.is_set() else self._table.leases(self._clock.monotonic_ms())

    def expect(self, stream: str, within_ms: float | None) -> None:
        """Set a deadline for progress on a stream: unless it is renewed within so many milliseconds, the lease ends.

        However healthy the process: a stuck stream goes to other consumers, if their shares have room for it, or comes
        back under a new token; the other streams stay. None removes the deadline.
        """
        self._table.expect(stream, within_ms, self._clock.monotonic_ms())

    def close(self, timeout_s: float = 10.0) -> int:
        """Leave the service: release all streams, and end the notifications with Terminated.

        Returns how many streams were released; none of them counts as done. Safe to repeat. If Redis does not answer
        within `timeout_s` seconds, the streams go to other consumers when the leases expire; the log says how many.
        """
        if self._stopping.is_set():
            return 0
        self._stopping.set()
        end_ms, count = self._clock.monotonic_ms() + timeout_s * 1000, len(self._table)
        outcome: list[int | str] = []
        leaving = threading.Thread(target=lambda: outcome.append(self._leave()), name="balancer-leaves", daemon=True)
        leaving.start()
        if self._thread is threading.current_thread():  # it cannot join itself
            return 0
        for thread in (leaving, self._thread):
            if thread is not None:
                thread.join(max(0.0, end_ms - self._clock.monotonic_ms()) / 1000)
        self._terminate(None)
        result = outcome[0] if outcome else f"no answer within {timeout_s:g} s"
        if isinstance(result, int):
            return result
        logger.warning(
            "consumer %s left without releasing %d streams: %s; they are reassigned when its leases expire",
            self.consumer,
            count,
            result,
        )
        return 0

    def _leave(self) -> int | str:
        """Leave the service, after a call in progress; how many streams were released, or the error text."""
        with self._lock:
            try:
                return self._service.leave(self._table.end_reason(self._clock.monotonic_ms()))
            except MillstreamError as error:
                return text_of(error)
            finally:
                self._publish(self._table.end_all("closed", self._clock.monotonic_ms()))
                self._client.close()

    def _end_leases(self, how: Literal["done", "released"], streams: Sequence[str | Lease]) -> None:
        with self._lock:
            ours, lost = self._table.held(streams)
            try:
                refused = self._service.end_leases(how, ours)
            except Unavailable:
                self._table.mark_uncertain()  # the leases may have ended
                raise
            now_ms = self._clock.monotonic_ms()
            for lease in ours:
                self._publish(self._table.end([lease.stream], "refused" if lease.stream in refused else how, now_ms))
        lost += sorted(refused)
        if lost:
            raise LeaseLost(
                f"{', '.join(map(repr, lost))}: this consumer's lease has ended; another may own the stream",
                stream=lost[0],
            )

    # The thread

    def _join(self) -> HeartbeatReply:
        """Send the first heartbeat, and retry while the name may still be that of a process that died a moment ago."""
        end_ms = self._clock.monotonic_ms() + 2 * self.policy.lease_ms
        while True:
            try:
                return self._heartbeat()
            except Unavailable:
                self._table.mark_uncertain()
                raise
            except NameHeld:
                if self._clock.monotonic_ms() >= end_ms:
                    raise
                self._clock.sleep_ms(_FIRST_BACKOFF_MS)

    def _run(self, reply: HeartbeatReply) -> None:
        """Send heartbeats until the balancer is closed."""
        error: Exception | None = None
        try:
            while not self._stopping.is_set():
                if self._table.requests_all:
                    self._stopping.wait(_LEAST_GAP_MS / 1000)
                elif not reply.has_more:
                    self._wait(reply)
                reply = self._heartbeat_with_retry()
        except _Closed:
            pass
        except Exception as fatal:  # noqa: BLE001 - on any error the program must learn that its leases are not renewed
            logger.error(
                "consumer %s of %s stopped: %s; its leases are no longer renewed",
                self.consumer,
                self._service.keys.label,
                text_of(fatal),
            )
            error = fatal
            with self._lock:
                self._publish(self._table.revoke_all("lost contact", self._clock.monotonic_ms()))
        finally:
            self._blocking_client.close()
            self._terminate(error)

    def _terminate(self, error: Exception | None) -> None:
        if self._notifications.end(Terminated(error=error)):
            self._metrics.notified(Terminated.__name__)

    def _heartbeat_with_retry(self) -> HeartbeatReply:
        """Send a heartbeat, and retry with back-off while Redis is unavailable."""
        backoff, since_ms = Backoff(_FIRST_BACKOFF_MS, _LAST_BACKOFF_MS), self._clock.monotonic_ms()
        while not self._stopping.is_set():
            try:
                reply = self._heartbeat()
            except (Unavailable, NameHeld) as error:
                self._table.mark_uncertain()
                if not backoff.has_begun:
                    logger.warning("consumer %s lost contact with Redis: %s; retrying", self.consumer, error)
                with self._lock:
                    now_ms = self._clock.monotonic_ms()
                    if not self._table.is_valid(now_ms):
                        self._publish(self._table.revoke_all("lost contact", now_ms))
                self._stopping.wait(backoff.next_ms() / 1000)
            else:
                if backoff.has_begun:
                    outage_ms = self._clock.monotonic_ms() - since_ms
                    logger.warning(
                        "consumer %s resumes: Redis is available again after %.1f s", self.consumer, outage_ms / 1000
                    )
                return reply
        raise _Closed

    def _heartbeat(self) -> HeartbeatReply:
        """Send one heartbeat, and apply its reply. Raises RedisError, NameHeld."""
        with self._lock:
            if self._stopping.is_set():
                raise _Closed
            if self._table.has_lapsed(self._clock.monotonic_ms()):
                self._rejoin()
            sent_ms = self._clock.monotonic_ms()
            unrenewed = self._table.expired(sent_ms)
            request = self._request(unrenewed)
            reply = self._service.heartbeat(request)
            now_ms = self._clock.monotonic_ms()
            self._is_full = len(reply.added) >= request.max_new and reply.held < reply.share
            self._metrics.heartbeat(reply, now_ms - sent_ms)
            if self._table.is_state_lost(reply):
                logger.warning("Redis lost the state of %s; re-announcing its streams", self._service.keys.label)
                for lease in self._table.recent_leases:
                    self._reannounce(lease)
            self._publish(self._table.apply(reply, unrenewed, sent_ms=sent_ms, now_ms=now_ms))
            self._revoke_excess(reply.excess)
            room = self.policy.max_waiting - len(self._notifications)
            self._publish(self._table.announce_unassigned(reply.unassigned, room, sent_ms=sent_ms))
            return reply

    def _request(self, unrenewed: UnrenewedLeases) -> HeartbeatRequest:
        policy = self.policy
        return HeartbeatRequest(
            lease_ms=policy.lease_ms,
            weight=policy.weight_now(),
            limit=policy.max_streams,
            max_new=max(0, policy.max_waiting - len(self._notifications)),
            recovers=policy.recover == "share",
            releasing=self._table.revoked_count,
            requests_all=self._table.requests_all,
            moves=policy.moves if policy.recover == "share" else 0,
            max_losses=policy.max_losses,
            replaces=self._replaces and self._table.is_new,
            stuck=[held.lease for held in unrenewed.stuck],
            overran=[held.lease for held in unrenewed.overran],
        )

    def _reannounce(self, lease: Lease) -> None:
        try:
            self.announce(lease.stream, lease.info)
        except ConfigError:  # a stream announced by another program may have info that we reject
            self.announce(lease.stream)

    def _rejoin(self) -> None:
        """Rejoin: this consumer's leases have expired by its own clock.

        Redis may still count some as valid: they are ended, so that new leases get new tokens.
        """
        now_ms = self._clock.monotonic_ms()
        how = self._table.end_reason(now_ms)
        self._publish(self._table.lapse(now_ms))
        self._service.leave(how)
        self._service.incarnation = secrets.token_hex(8)
        self._table.rejoin()

    def _revoke_excess(self, count: int) -> None:
        """Release streams whose StreamAdded is still queued, the newest first; revoke others for the rest of `count`."""
        if not count:
            return
        queued = [notice.lease for notice in self._notifications.queued() if isinstance(notice, StreamAdded)]
        unseen = {(lease.stream, lease.token): lease for lease in self._table.not_revoked(queued)[-count:]}
        # The program may have read some notifications meanwhile.
        withdrawn = self._notifications.remove(
            lambda notice: isinstance(notice, StreamAdded) and (notice.stream, notice.lease.token) in unseen
        )
        tokens = {(notice.stream, notice.lease.token) for notice in withdrawn if isinstance(notice, StreamAdded)}
        released = [lease for key, lease in unseen.items() if key in tokens]
        now_ms = self._clock.monotonic_ms()
        # If this release fails, the next heartbeat detects and reports it.
        self._publish(self._table.end([lease.stream for lease in released], "released", now_ms))
        self._service.end_leases("released", released)
        self._publish(self._table.revoke_excess(count - len(released), self._clock.monotonic_ms()))

    def _publish(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, LeaseEnded):
                self._metrics.ended(change.how, change.held_ms)
            else:
                self._metrics.notified(type(change).__name__)
                self._notifications.put(change)

    def _wait(self, reply: HeartbeatReply) -> None:
        """Wait until something may have changed, but not beyond the next heartbeat."""
        now_ms = self._clock.monotonic_ms()
        wait_ms = self._table.valid_until_ms - self.policy.lease_ms * (_HEARTBEATS - 1) / _HEARTBEATS - now_ms
        if reply.next_expiry_ms is not None:
            wait_ms = min(wait_ms, reply.next_expiry_ms)
        if self._is_full or self._table.has_limits:
            wait_ms = min(wait_ms, _CHECK_LIMITS_MS)
        if wait_ms <= _SERVER_TICK_MS:  # a blocking read is not that exact, and would end too late for the lease
            self._stopping.wait(max(wait_ms, _LEAST_GAP_MS) / 1000)
            return
        wait_ms = max(wait_ms - _SERVER_TICK_MS, _LEAST_GAP_MS)
        keys = self._service.keys
        try:
            self._blocking_client.execute(
                "XREAD", "BLOCK", int(wait_ms), "STREAMS", keys.input, keys.events, *reply.newest_ids
            )
        except Unavailable:
            self._table.mark_uncertain()
            self._stopping.wait(_FIRST_BACKOFF_MS / 1000)
        else:
            self._stopping.wait(_LEAST_GAP_MS / 1000)  # collect a burst in one heartbeat


class _Closed(Exception):
    """The balancer was closed meanwhile."""
