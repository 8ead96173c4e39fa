"""ClaimRenewer: renews claims on entries in flight, and checkpoints progress."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from millstream.clock import Every
from millstream.delivery.commit_store import Checkpoint
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import RedisError
from millstream.handlers.attempt import DeadLettered, RetryLater
from millstream.worker.context import WorkerContext
from millstream.worker.due_times import RoundRobin
from millstream.worker.settling.idle_claims import IdleClaimer
from millstream.worker.settling.repeated_warnings import RepeatedWarnings
from millstream.worker.settling.stream_calls import Step, ask_all, query_by
from millstream.worker.settling.timed_out_attempts import TimedOutAttempts

logger = logging.getLogger(__name__)

_SWEEP_MS = 1_000.0


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
        self._steps = context.steps
        self._in_flight = context.in_flight
        self._loop_metrics = context.loop_metrics
        self._release = release
        self._warnings = RepeatedWarnings(logger, context)
        self._idle_claimer = IdleClaimer(context, streams)
        self._timed_out = TimedOutAttempts(context)
        self._recorded: dict[str, int] = {}
        """The `commit_count` of each stream, as of its last checkpoint."""
        self._round_robin, self._sweep = RoundRobin(), Every(_SWEEP_MS)

    def release_surplus(self) -> None:
        """See Renewer: releases what waits for the end of a run in isolation, which may take as long as the handler's time limit."""
        if not self._in_flight.gate.is_set():
            self._release(self._in_flight.remove_unstarted(but_suspects=True))

    def recover(self, stream: ReliableStream) -> None:
        """See Renewer: adds these entries to flight. Skips a paused stream; it is done when the stream resumes."""
        self._idle_claimer.recover(stream)

    def further_steps(self, streams: Sequence[ReliableStream], *, renews: bool) -> Iterator[Step]:
        """See Renewer: claims the entries of workers that seem stuck, and records progress as checkpoints."""
        by_name = {one.stream: one for one in streams}
        if renews:
            yield from self._idle_claimer.claim_stuck(by_name)
        yield from self._checkpoints(by_name)

    def _checkpoints(self, streams: Mapping[str, ReliableStream]) -> Iterator[Step]:
        """Yield a checkpoint of each stream that has none since this worker has committed there, or joined it.

        And of a few others in any case: a worker that has committed there may have ended before its checkpoint.
        """
        is_due = self._sweep.is_due(self._context.clock.monotonic_ms())
        some: set[str] = set(self._round_robin.next_names(streams)) if is_due else set()
        due = {
            name: one for name, one in streams.items() if name in some or self._recorded.get(name) != one.commit_count
        }
        counts = {name: one.commit_count for name, one in due.items()}  # what is committed from now on needs another
        calls = {name: one.checkpoint_call() for name, one in due.items()}
        for name, checkpoint in ask_all(calls, query_by(self._context.client)):
            yield due[name], partial(self._record, due[name], counts[name], checkpoint)

    def _record(self, stream: ReliableStream, count: int, checkpoint: Callable[[], Checkpoint | RedisError]) -> None:
        outcome = checkpoint()
        if outcome == "noted":
            self._recorded[stream.stream] = count
            if self._context.policy.trim:
                stream.trim()  # it may have acknowledged entries
        elif outcome == "too many":
            self._warnings.warn(
                "cannot checkpoint %s: too many entries are pending, so the key offsets in Redis grow until there are "
                "fewer; run fewer workers at once, or use a smaller prefetch",
                stream.stream,
            )

    def claim_idle(self) -> bool:
        """See Renewer."""
        return self._idle_claimer.claim_idle()

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
        stream, outcome = delivery.stream, self._timed_out.outcome_of(delivery)
        delivery.has_waited = True  # if Redis fails between two steps and the run ends, its commit clears the counts
        if isinstance(outcome, DeadLettered):
            self._timed_out.write_dead_letter(delivery, self._steps.dead_letter(delivery, outcome))
        elif outcome is not None:
            assert isinstance(outcome, RetryLater)  # entries without a key are never parked
            stream.record_failures([delivery])
            stream.end_isolation([delivery])
            stream.nack([delivery.id])
            self._loop_metrics.count_retried(1)
            self._timed_out.log_failure(delivery, outcome)
        self._in_flight.remove([delivery])
