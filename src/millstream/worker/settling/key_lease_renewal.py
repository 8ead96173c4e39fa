"""KeyLeaseRenewer: renews the leases of keys with entries in flight."""

import logging
from collections.abc import Iterator, Sequence

from millstream.delivery.keyed_stream import KeyedStream, LeaseRelease, lease_of
from millstream.delivery.last_error import LastError
from millstream.delivery.reliable_stream import Delivery
from millstream.handlers.attempt import DeadLettered, Parked, RetryLater
from millstream.worker.context import WorkerContext
from millstream.worker.settling.lease_release import release_leases
from millstream.worker.settling.stream_calls import Step
from millstream.worker.settling.timed_out_attempts import TimedOutAttempts
from millstream.worker.stream_exclusion import exclude_on_error

logger = logging.getLogger(__name__)


class KeyLeaseRenewer:
    """Renewer of a handler with a key: this worker has leased the key queues of its entries. Used by one thread, except
    `recover`.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._steps = context.steps
        self._in_flight = context.in_flight
        self._loop_metrics = context.loop_metrics
        self._clock = context.clock
        self._policy = context.policy
        self._timed_out = TimedOutAttempts(context)

    def recover(self, stream: KeyedStream) -> None:
        """See Renewer: releases these leases."""
        # Of the stream by its name: a run may go on under a lease of an earlier membership.
        known = [lease for lease in self._in_flight.leases_of_runs() if lease.stream.stream == stream.stream]
        earlier, lost_replies = stream.recover_leases(known, self._policy.batch)
        self._loop_metrics.count_claimed(earlier + lost_replies)

    def release_surplus(self) -> None:
        """See Renewer: releases leases that were acquired when runs were shorter, or before an isolation."""
        release_leases(
            self._in_flight.remove_surplus(),
            self._loop_metrics,
            guard=lambda stream, leases: exclude_on_error(stream),
        )

    def further_steps(self, streams: Sequence[KeyedStream], *, renews: bool) -> Iterator[Step]:
        """See Renewer. There is no progress to record: entries that are not committed stay in their key queues.

        Nor is there anything to claim from stuck workers: the lease of a run is not renewed beyond the time limit,
        however healthy its worker is.
        """
        return iter(())

    def claim_idle(self) -> bool:
        """Claim nothing: the fetcher leases keys with expired leases, too."""
        return False

    def renew(self, stream: KeyedStream) -> None:
        """See Renewer."""
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

    def give_up(self, delivery: Delivery) -> None:
        """See Renewer. The key stays leased while the run goes on: its lease lasts until the process ends, or ends it."""
        lease = lease_of(delivery)
        outcome = self._timed_out.outcome_of(delivery)
        assert outcome is not None
        delivery.has_waited = True  # if Redis fails between two steps and the run ends, its commit clears the counts
        # Until its attempt is recorded the lease is like any other: renewed, and ended with the process in an outage.
        if isinstance(outcome, DeadLettered):
            self._timed_out.write_dead_letter(delivery, self._steps.commit_key(lease, [(delivery, outcome)]))
        elif isinstance(outcome, RetryLater) and not delivery.in_batch:
            lease.stream.record_failures([delivery])
            lease.stream.record_error(delivery, LastError.of(outcome, self._steps.handler.retry).pack())
            lease.stream.end_isolation([delivery])
            self._loop_metrics.count_retried(1)
        elif isinstance(outcome, Parked):
            error = LastError.of(outcome, self._steps.handler.retry).pack()
            reason = f"{outcome.reason}: {outcome.error}"
            # Its lease goes on: an operator may unpark the key before this process ends.
            lease.stream.release_leases([LeaseRelease(lease, "hold", reason, delivery.attempt, error)])
            self._loop_metrics.count_parked(1)
        if isinstance(outcome, (RetryLater, Parked)):  # after the loss of the lease each message of a list runs alone
            self._timed_out.log_failure(delivery, outcome)
        self._in_flight.give_up(lease)
