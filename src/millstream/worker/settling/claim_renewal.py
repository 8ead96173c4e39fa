"""ClaimRenewer: renews claims on entries in flight, claims idle entries of other workers, and checkpoints progress."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from millstream.delivery.effects import Effects
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.handlers.attempt import DeadLettered, RetryLater, timed_out
from millstream.handlers.handler import Handler
from millstream.worker.context import WorkerContext
from millstream.worker.policy import TIME_LIMIT_GRACE_MS, WorkerPolicy
from millstream.worker.running.poison_isolation import isolated_after, loss_retry
from millstream.worker.settling.repeated_warnings import RepeatedWarnings

logger = logging.getLogger(__name__)

_CLAIMED_AT_ONCE = 100
_RUNS_IN_FLIGHT = 3
_CLAIMS_IN_FLIGHT = 10


class ClaimRenewer:
    """Renewer of a handler without a key: this worker has claimed its entries. Used by one thread, except `recover`.

    * `streams`: the streams that this worker has joined; other threads add to it
    * `release`: returns entries to the group, so that other workers get them
    """

    def __init__(
        self,
        context: WorkerContext,
        streams: Mapping[str, ReliableStream],
        *,
        release: Callable[[Sequence[Delivery]], None],
    ) -> None:
        self._context = context
        self._streams = streams
        self._steps = context.steps
        self._in_flight = context.in_flight
        self._loop_metrics = context.loop_metrics
        self._clock = context.clock
        self._policy = context.policy
        self._release = release
        self._warnings = RepeatedWarnings(logger, context)
        self._claim_lock = threading.Lock()
        self._loss_retry = loss_retry(context.handler.retry)
        self._recovered: set[str] = set()
        self._longest_in_flight_ms = _longest_in_flight_ms(context.handler, context.policy)
        self._more_to_claim = False

    def release_surplus(self) -> None:
        """See Renewer: releases what waits for the end of a run in isolation, which may take as long as the handler's time limit."""
        if not self._in_flight.gate.is_set():
            self._release(self._in_flight.remove_unstarted(but_suspects=True))

    def recover(self, stream: ReliableStream) -> None:
        """See Renewer: adds these entries to flight. Skips a paused stream; it is done when the stream resumes."""
        # From the second call on, entries that are pending and not in flight came in a lost reply: no run has begun.
        is_first = stream.stream not in self._recovered
        while not stream.paused and self._claim(stream, idle_ms=0, own=True, count=_CLAIMED_AT_ONCE, delays=is_first):
            pass
        if not stream.paused:
            self._recovered.add(stream.stream)

    def _claim(self, stream: ReliableStream, *, idle_ms: int, own: bool, count: int, delays: bool = True) -> int:
        with self._claim_lock:
            in_flight = self._in_flight.entry_ids(stream.stream)
            claimed = stream.claim_idle(excluding=in_flight, idle_ms=idle_ms, own=own, count=count)
            return self._add_in_flight(claimed, delays=delays)

    def _add_in_flight(self, claimed: Sequence[Delivery], *, delays: bool) -> int:
        """Add claimed entries to flight; `delays`: those that a process may have died of wait first."""
        trusted_count = isolated_after(self._steps.handler.retry)
        by_loss_count: dict[int, list[Delivery]] = defaultdict(list)
        for one in claimed:
            if one.deliveries <= trusted_count:
                by_loss_count[one.deliveries - 1 if delays else 0].append(one)
        for loss_count, trusted in by_loss_count.items():
            delay_ms = self._loss_retry.delay_after(loss_count) if loss_count else 0.0
            self._in_flight.add_later(trusted, delay_ms, self._clock)
        for delivery in claimed:
            if delivery.deliveries > trusted_count:
                self._in_flight.add_suspect(delivery)
                self._context.on_suspect(delivery)
        self._loop_metrics.count_claimed(len(claimed))
        return len(claimed)

    def maintain(self, stream: ReliableStream, *, renews: bool, has_committed: bool) -> bool:
        """See Renewer: claims the entries of workers that seem stuck, too, and records progress as a checkpoint."""
        if renews:
            self.renew(stream)
            if not stream.paused:
                self._claim_stuck(stream)
        return self._checkpoint(stream) if has_committed else True

    def _claim_stuck(self, stream: ReliableStream) -> None:
        with self._claim_lock:
            now_ms = self._clock.monotonic_ms()
            self._add_in_flight(stream.claim_stuck(longest_ms=self._longest_in_flight_ms, now_ms=now_ms), delays=False)

    def _checkpoint(self, stream: ReliableStream) -> bool:
        checkpoint = stream.checkpoint()
        if checkpoint == "too many":
            self._warnings.warn(
                "cannot checkpoint %s: too many entries are pending, so the key offsets in Redis grow until there are "
                "fewer; run fewer workers at once, or use a smaller prefetch",
                stream.stream,
            )
        return checkpoint == "noted"

    def claim_idle(self) -> bool:
        """See Renewer."""
        for stream in list(self._streams.values()):
            room = min(self._in_flight.free_slots(), _CLAIMED_AT_ONCE)
            if room <= 0:
                return self._more_to_claim
            if not stream.paused:
                claimed = self._claim(stream, idle_ms=self._policy.claim_ms, own=False, count=room)
                self._more_to_claim = claimed >= room
                if self._more_to_claim:
                    self._in_flight.on_fetched(claimed, room)
                    return True
        return False

    def renew(self, stream: ReliableStream) -> None:
        """See Renewer."""
        in_flight = {one.id: one for one in self._in_flight.deliveries if one.stream is stream and not one.committing}
        # Entries whose commit runs meanwhile are not pending any more either, and are not lost.
        lost = [
            in_flight[entry_id]
            for entry_id in stream.renew_claims(list(in_flight))
            if not in_flight[entry_id].committing
        ]
        if lost:
            logger.warning(
                "%s: claims on %d messages of %s lost: another worker claimed them, or they were deleted; dropping them",
                self._steps.handler.label,
                len(lost),
                stream.stream,
            )
            stream.report_trimmed([one.id for one in lost])
            self._in_flight.remove(lost)
            self._loop_metrics.count_refused(len(lost))

    def give_up(self, delivery: Delivery) -> None:
        """See Renewer. The process releases its other entries when it ends."""
        stream = delivery.stream
        message = self._steps.decode(delivery)
        if message is not None:
            where = self._context.traceback_of_run(delivery)
            outcome = timed_out(self._steps.handler, message, where=where, alone=not delivery.in_batch)
            if isinstance(outcome, DeadLettered):
                effects: Effects = self._steps.dead_letter(delivery, outcome)
                if not stream.commit([effects]):
                    self._loop_metrics.count_committed([delivery], [outcome.reason], 0.0)
                    self._steps.failures.dead_lettered(effects.dead_letters)
            else:
                assert isinstance(outcome, RetryLater)  # entries without a key are never parked
                self._steps.log_failure(delivery, outcome)
                stream.record_failures([delivery])
                self._loop_metrics.count_retried(1)
                stream.end_isolation([delivery])
                stream.nack([delivery.id])
        self._in_flight.remove([delivery])


def _longest_in_flight_ms(handler: Handler, policy: WorkerPolicy) -> float:
    """Return for how long a healthy worker may have one entry in flight, in milliseconds.

    The sum of all its attempts, each after as long as some other runs take, of the waits in between, and of some claim
    times.
    """
    retry = handler.retry
    waits_ms = sum(map(retry.max_delay_after, range(1, retry.attempts)))
    runs_ms = retry.attempts * _RUNS_IN_FLIGHT * (handler.time_limit_ms + TIME_LIMIT_GRACE_MS)
    return runs_ms + waits_ms + _CLAIMS_IN_FLIGHT * policy.claim_ms
