"""Key lease renewal: renews the leases of keys, and cancels runs whose lease is about to expire."""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence

from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseRelease, lease_of
from millstream.delivery.last_error import LastError
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import HandlerStuck
from millstream.handlers.attempt import DeadLettered, Done, RetryLater, timed_out
from millstream.worker.settling.claim_renewal import ClaimRenewal
from millstream.worker.stream_exclusion import exclude_on_error

logger = logging.getLogger(__name__)

_WATCH_S = 0.1
_MARGIN_SHARE = 0.1
_MIN_MARGIN_MS = 200.0


class KeyLeaseRenewal(ClaimRenewal):
    """A ClaimRenewal for handlers with a key. It claims nothing: the fetcher leases keys with expired leases, too."""

    def recover(self, stream: ReliableStream) -> None:
        """Release the leases that this worker held before a restart, or was given in a reply that was lost."""
        assert isinstance(stream, KeyedStream)
        known = [lease for lease in self._in_flight.leases.copy() if lease.stream is stream]
        earlier, unheard = stream.recover_leases(known, self._policy.batch)
        self._loop_metrics.count_claimed(earlier + unheard)

    def _release_surplus(self) -> None:
        """Release leases that were taken when runs were shorter, or before the isolation: other workers may have time."""
        surplus: dict[KeyedStream, list[KeyLease]] = defaultdict(list)
        for lease in self._in_flight.remove_surplus():
            surplus[lease.stream].append(lease)
        for stream, some in surplus.items():
            with exclude_on_error(stream):
                lost = stream.release_leases([LeaseRelease(lease, "return") for lease in some])
                self._loop_metrics.count_released(
                    sum(one.in_flight_count for one in some) - sum(one.in_flight_count for one in lost)
                )

    def run_watchdog(self, over: threading.Event) -> None:
        """Until `over` is set, cancel each run whose lease is about to expire, also while Redis is unavailable.

        Redis may lease the key to another worker after that. Raises HandlerStuck if a run cannot be cancelled. This
        holds as long as the process is scheduled (M. Kleppmann, "How to do distributed locking": a lease needs a fence
        as well).
        """
        margin_ms = max(_MIN_MARGIN_MS, _MARGIN_SHARE * self._policy.claim_ms)
        cancelled: list[Delivery] = []
        while not over.wait(_WATCH_S):
            if any(not one.finished for one in cancelled):
                raise HandlerStuck(
                    f"{self._steps.handler.label} still runs on message {cancelled[0].id.decode()} of "
                    f"{cancelled[0].stream.stream} though its lease is about to expire; another worker may run it then"
                )
            late_ms = self._clock.monotonic_ms() + margin_ms
            cancelled = self._drop_expiring(
                [
                    lease
                    for lease in self._in_flight.leases.copy()
                    if (lease.expired or lease.expires_ms < late_ms) and not lease.releasing
                ]
            )

    def _drop_expiring(self, leases: Sequence[KeyLease]) -> list[Delivery]:
        """Drop leased keys; return their entries that are still running, whose runs it has tried to cancel."""
        dropped: list[Delivery] = []
        for lease in leases:
            lease.expired = True
            dropped += self._in_flight.remove_lease(lease)
        self._loop_metrics.count_refused(len(dropped))
        running = [one for one in dropped if one.running and not one.finished]
        for delivery in running:
            self._context.cancel_run(delivery)
        for stream, count in Counter(one.stream.stream for one in dropped).items():
            logger.warning(
                "%s: leases on %d messages of %s expire: they were not renewed, as Redis was unavailable or this "
                "process was not scheduled; cancelling their runs", self._steps.handler.label, count, stream,
            )  # fmt: skip
        return running

    # Overridden for keys

    def _claim_idle(self) -> bool:
        return False

    def _claim_stuck(self, stream: ReliableStream) -> None:
        """Nothing to do: the lease of a run is not renewed beyond the time limit, however healthy its worker is."""

    def _checkpoint(self, stream: ReliableStream) -> bool:
        """Nothing to do: entries that are not committed stay in their key queues."""
        return True

    def _renew(self, stream: ReliableStream) -> None:
        assert isinstance(stream, KeyedStream)
        mine = [
            one for one in self._in_flight.leases.copy() if one.stream is stream and not (one.releasing or one.expired)
        ]
        if not mine:
            return
        now_ms = self._clock.monotonic_ms()
        lost: list[Delivery] = []
        for lease in stream.renew_leases(mine, self._policy.claim_ms, now_ms):
            if not lease.releasing:
                lost += self._in_flight.remove_lease(lease)
        if lost:
            self._loop_metrics.count_refused(len(lost))
            logger.warning(
                "%s: leases on %d messages of %s lost: they expired or were ended; dropping them",
                self._steps.handler.label,
                len(lost),
                stream.stream,
            )

    def _give_up_run(self, delivery: Delivery) -> None:
        """Record the failed attempt. The key stays leased while the run goes on, that is, until the process ends."""
        lease = lease_of(delivery)
        message = self._steps.decode(delivery)
        assert message is not None
        lease.releasing = True
        outcome = timed_out(self._steps.handler, message, where=self._context.traceback_of_run(delivery))
        if isinstance(outcome, DeadLettered):
            effects = self._steps.commit_key(lease, [(delivery, outcome)])
            if not lease.stream.commit([effects]):
                self._loop_metrics.count_committed([delivery], [outcome.reason], 0.0)
                self._steps.failures.dead_lettered(effects.dead_letters)
        elif isinstance(outcome, RetryLater):
            self._steps.log_failure(delivery, outcome)
            lease.stream.record_failures([delivery])
            lease.stream.record_error(delivery, LastError.of(outcome, self._steps.handler.retry).pack())
            self._loop_metrics.count_retried(1)
            lease.stream.end_isolation([delivery])
        elif not isinstance(outcome, Done):
            self._steps.log_failure(delivery, outcome)
            reason, error = (
                f"{outcome.reason}: {outcome.error}",
                LastError.of(outcome, self._steps.handler.retry).pack(),
            )
            lease.stream.release_leases([LeaseRelease(lease, "park", reason, delivery.attempt, error)])
        self._in_flight.remove_lease(lease)
