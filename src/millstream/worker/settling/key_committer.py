"""Key committer: commits the outcomes of leased keys under their leases, and releases leases that are used up."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import cast

import msgspec

from millstream.delivery.effects import Effects, chunk_by_size
from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseRelease, lease_of
from millstream.delivery.last_error import LastError
from millstream.delivery.output_check import check_output
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import AccessDenied, OutOfMemory, RedisError, Unavailable, WrongType
from millstream.handlers.attempt import DeadLettered, Done, Outcome, Parked, RetryLater, is_limited
from millstream.handlers.dead_letter import reason_of
from millstream.redis_client.resp import Arg
from millstream.worker.completion_queue import FinishedRun
from millstream.worker.context import WorkerContext
from millstream.worker.settling.committer import LOST, Committer
from millstream.worker.stream_exclusion import concerns_one_stream, exclude_on_error

logger = logging.getLogger(__name__)

_EXCLUDED = "this worker leaves out the stream; this attempt does not count"

Runs = list[tuple[Delivery, Outcome]]
"""Entries of a key that were run, in order, and their outcomes."""
_Ended = list[tuple[Delivery, Done | DeadLettered]]


class _LeaseOutcome(msgspec.Struct, eq=False):
    """Actions for one lease: effects to commit, and a release other than the requeue at the end of its slice.

    * `runs`: those that the breaker admits
    * `delay_ms`: how long its failed entry waits for the next attempt
    * `halted`: the breaker is open, so the rest of the key is released
    """

    lease: KeyLease
    runs: Runs
    done: Sequence[Delivery] = ()
    effects: Effects | None = None
    release: LeaseRelease | None = None
    delay_ms: float = 0.0
    halted: bool = False

    @property
    def is_over(self) -> bool:
        """True if no further entry of the key is run under this lease, and its end is settled with these runs."""
        return not self.halted and self.lease.last_run is self.runs[-1][0]


class _PipelinedReply(msgspec.Struct, frozen=True):
    """The effects that a commit which was pipelined with others refused, or its error; and the number of the call."""

    call_number: str
    refused: list[Effects] | RedisError
    took_s: float


class KeyCommitter(Committer):
    """A Committer for handlers with a key. A failed message waits in Redis, in its key queue, for its next attempt.

    `on_lease_end` is called with a stream when a lease on one of its keys ended or was lost: it may have more keys to
    lease.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        release: Callable[[Sequence[Delivery]], None],
        on_lease_end: Callable[[str], None],
    ) -> None:
        super().__init__(context, release=release)
        self._on_lease_end = on_lease_end
        self._postponed_runs: dict[KeyLease, Runs] = {}
        self._halted: set[KeyLease] = set()

    def settle(self, finished: Sequence[FinishedRun]) -> None:
        """Commit, retry, park or dead-letter each of these runs."""
        ran = finished
        if self._steps.handler.limit is not None:
            ran = [(deliveries, outcome) for deliveries, outcome in finished if not is_limited(outcome)]
        self._observe_run_times(ran)
        if ran:
            self._in_flight.on_run_time(sum([deliveries[0].attempt_ms for deliveries, _ in ran]) / len(ran))
        runs = _runs_by_lease(finished)
        # Runs kept for want of memory come before later runs of the same key.
        postponed, self._postponed_runs = self._postponed_runs, {}
        leases = dict.fromkeys([*postponed, *runs])
        lost = self._in_flight.not_in_flight([one for some in (*postponed.values(), *runs.values()) for one, _ in some])
        by_stream: dict[KeyedStream, list[_LeaseOutcome]] = defaultdict(list)
        for lease in leases:
            kept, new = postponed.get(lease, []), runs.get(lease, [])
            if lease.expired or (lost and any(delivery in lost for delivery, _ in [*kept, *new])):
                self._drop_lost(lease, [*kept, *new])
            else:
                by_stream[lease.stream].append(self._make_outcome(lease, kept, new))
        sent = self._commit_pipelined(by_stream) if len(by_stream) > 1 else {}
        self._settle_each(by_stream, sent)
        self._release_held_back(leases)
        self._loop_metrics.on_runs_settled(sum([len(deliveries) for deliveries, _ in finished]))

    def _make_outcome(self, lease: KeyLease, postponed: Runs, new: Runs) -> _LeaseOutcome:
        runs = [*postponed, *self._admitted(lease, new)]  # the breaker has counted those that were postponed
        outcome = _LeaseOutcome(lease, runs, halted=lease in self._halted)
        done = cast(_Ended, [run for run in runs if isinstance(run[1], (Done, DeadLettered))])
        lease.releasing = outcome.is_over
        if outcome.is_over:
            self._in_flight.note_returned(lease)
        if done:
            outcome.done = [delivery for delivery, _ in done]
            outcome.effects = self._steps.commit_key(lease, done)
            if outcome.is_over and len(done) == len(runs):
                outcome.effects.unfinished = lease.in_flight_count - len(done)
        if outcome.halted:
            return outcome
        last, result = runs[-1]
        if isinstance(result, RetryLater) and result.limited is not None:
            outcome.release = LeaseRelease(lease, "limit", result.limited)
        elif isinstance(result, RetryLater):
            outcome.delay_ms = self._steps.retry(last, result)
            error = LastError.of(result, self._steps.handler.retry).pack()
            failed = result.failed_attempts(last.attempt)
            outcome.release = LeaseRelease(lease, "backoff", outcome.delay_ms, failed, error)
        elif isinstance(result, Parked):
            error = LastError.of(result, self._steps.handler.retry).pack()
            outcome.release = LeaseRelease(lease, "park", f"{result.reason}: {result.error}", last.attempt, error)
        return outcome

    def _admitted(self, lease: KeyLease, runs: Runs) -> Runs:
        """Return the runs before the first dead letter that must not be written; drop that one and the later ones."""
        if lease not in self._halted and all(isinstance(result, Done) for _, result in runs):  # as nearly always
            self._breaker.on_processed(len(runs))
            return runs
        admitted: Runs = []
        for delivery, result in runs:
            if isinstance(result, DeadLettered) and lease not in self._halted:
                if not self._breaker.admits(delivery, result):
                    self._halted.add(lease)
            elif isinstance(result, Done):
                self._breaker.on_processed(1)
            if lease in self._halted:
                self._in_flight.remove((delivery,))
            else:
                admitted.append((delivery, result))
        return admitted

    def _release_held_back(self, leases: Iterable[KeyLease]) -> None:
        """Release entries that must not run, and keys without an entry to run though their leases are not over.

        A key is without one after a dead letter that must not be written, and if its next entry was removed just before
        it would have started.
        """
        waiting = self._in_flight.remove_unstarted() if self._breaker.is_open() else []
        idle = self._in_flight.idle_leases(leases)
        self._halted.difference_update(idle)
        if waiting := [*waiting, *(lease.entries[0] for lease in idle)]:
            self._release(waiting)

    def _commit_pipelined(
        self, by_stream: Mapping[KeyedStream, Sequence[_LeaseOutcome]]
    ) -> dict[KeyedStream, _PipelinedReply]:
        """Commit as much as fits in one round trip. A commit without a good reply is sent again, stream by stream."""
        effects_of = {stream: _with_effects(outcomes) for stream, outcomes in by_stream.items()}
        numbers = {stream: stream.new_call_number() for stream in _first_round_trip(effects_of)}
        calls = [stream.commit_call(_effects(effects_of[stream]), number) for stream, number in numbers.items()]
        began_ms = self._clock.monotonic_ms()
        results: Sequence[list[Effects] | RedisError]
        try:
            results = list(self._client.run_all(calls))
        except Unavailable as error:
            results = [error] * len(calls)
        took_s = (self._clock.monotonic_ms() - began_ms) / 1000
        return {
            stream: _PipelinedReply(number, result, took_s)
            for (stream, number), result in zip(numbers.items(), results, strict=True)
        }

    def _settle_each(
        self,
        by_stream: Mapping[KeyedStream, Sequence[_LeaseOutcome]],
        sent: Mapping[KeyedStream, _PipelinedReply],
    ) -> None:
        """Settle each stream. After an error only those that are committed, so that it is not silent; then raise it."""
        first: Exception | None = None
        for stream, outcomes in by_stream.items():
            reply = sent.get(stream)
            if first is not None and (reply is None or isinstance(reply.refused, RedisError)):
                continue
            try:
                self._settle_or_exclude(stream, outcomes, reply)
            except Exception as error:  # noqa: BLE001 - raised below
                first = first or error
        if first is not None:
            raise first

    def _settle_or_exclude(
        self, stream: KeyedStream, outcomes: Sequence[_LeaseOutcome], sent: _PipelinedReply | None
    ) -> None:
        try:
            self._settle_stream(stream, outcomes, sent)
        except (WrongType, AccessDenied) as error:
            if stream.on_stream_error is None or not concerns_one_stream(error):
                raise
            # An output stream that cannot be written concerns all streams.
            self._retry_while_unavailable(lambda: check_output(self._client, self._steps.handler))
            with exclude_on_error(stream):
                raise
            self._drop_excluded(stream, outcomes)

    def _drop_excluded(self, stream: KeyedStream, outcomes: Sequence[_LeaseOutcome]) -> None:
        """Drop keys of a stream that this worker leaves: their leases expire, or end when it works on the stream again.

        Nothing of them is committed any more, as that would have to come after what was not committed.
        """
        dropped: list[Delivery] = []
        for one in outcomes:
            if not one.lease.expired:
                left = [run for run in one.runs if run[0] in self._in_flight]  # others are committed
                dropped += self._drop(one.lease, left, _EXCLUDED)
        if dropped:
            logger.warning(
                "%s: %d messages of %s are not committed: this worker leaves out the stream; discarding their effects "
                "(first: %s)",
                self._steps.handler.label,
                len(dropped),
                stream.stream,
                dropped[0].id.decode(),
            )

    def _settle_stream(
        self, stream: KeyedStream, outcomes: Sequence[_LeaseOutcome], sent: _PipelinedReply | None
    ) -> None:
        kept = [one for some in _chunks(_with_effects(outcomes)) for one in self._commit_or_keep(stream, some, sent)]
        outcomes = [one for one in outcomes if one not in kept and not one.lease.expired]
        releases = [one.release for one in outcomes if one.release is not None]
        if releases:
            self._loop_metrics.count_retried(sum(release.mode == "backoff" for release in releases))
            self._loop_metrics.count_limited(sum(release.mode == "limit" for release in releases))
            self._loop_metrics.count_parked(sum(release.mode == "park" for release in releases))
            runs_of = {one.lease: one.runs for one in outcomes}
            for lease in self._retry_while_unavailable(lambda: stream.release_leases(releases)):
                self._drop_lost(lease, runs_of[lease][-1:])
            for one in outcomes:
                if one.release is not None and one.release.mode != "limit" and not one.lease.expired:
                    delivery, result = one.runs[-1]
                    assert isinstance(result, (RetryLater, Parked))
                    self._steps.log_failure(delivery, result, one.delay_ms)
        over = [one for one in outcomes if one.is_over]
        for one in over:
            self._in_flight.remove_lease(one.lease)
            one.lease.clear()
        if over:
            self._on_lease_end(stream.stream)

    def _commit_or_keep(
        self, stream: KeyedStream, outcomes: Sequence[_LeaseOutcome], sent: _PipelinedReply | None
    ) -> list[_LeaseOutcome]:
        """Commit the effects; return the outcomes that Redis has no memory for: they are kept, with their leases."""
        try:
            self._commit_outcomes(stream, outcomes, sent)
        except OutOfMemory as error:
            # Plain acknowledgements free memory in the end.
            plain = [one for one in outcomes if one.effects and one.effects.is_ack_only]
            self._commit_outcomes(stream, plain, None, allow_oom=True)
            kept = [one for one in outcomes if one not in plain]
            self._postponed_runs |= {one.lease: one.runs for one in kept}
            for one in kept:
                one.lease.releasing = False  # the lease has to be renewed meanwhile
            self._warn_postponed(sum(len(one.runs) for one in kept), stream, error)
            return kept
        return []

    def _commit_outcomes(
        self,
        stream: KeyedStream,
        outcomes: Sequence[_LeaseOutcome],
        sent: _PipelinedReply | None,
        *,
        allow_oom: bool = False,
    ) -> None:
        if not outcomes:
            return
        by_effects = {id(one.effects): one for one in outcomes}
        effects = _effects(outcomes)
        began_ms = self._clock.monotonic_ms()
        if sent is None:
            refused = self._commit_now(stream, effects, stream.new_call_number(), allow_oom=allow_oom)
        elif isinstance(sent.refused, RedisError):
            refused = self._commit_again(stream, effects, sent.call_number, sent.refused)
        else:
            refused = sent.refused
        took_s = (self._clock.monotonic_ms() - began_ms) / 1000 + (sent.took_s if sent else 0.0)
        for one in refused:
            outcome = by_effects.pop(id(one))
            self._drop_lost(outcome.lease, outcome.runs)
        done: list[Delivery] = []
        letters: list[Sequence[Arg]] = []
        skipped = 0
        for outcome in by_effects.values():
            assert outcome.effects is not None
            outcome.lease.in_flight_count -= len(outcome.done)
            if outcome.effects.state is not None:
                outcome.lease.committed_state = outcome.effects.state
            done += outcome.done
            letters += outcome.effects.dead_letters
            skipped += outcome.effects.skipped_count
        avoided = 0
        if self._loop_metrics.has_backend:
            avoided = sum(one.count_unblocked() for one in _effects(list(by_effects.values())))
        self._has_stored |= bool(done) and not allow_oom
        self._steps.failures.dead_lettered(letters)
        self._in_flight.remove(done)
        dead = list(map(reason_of, letters))
        self._loop_metrics.count_committed(done, dead, took_s, skipped=skipped, head_of_line_avoided=avoided)

    def _drop(self, lease: KeyLease, runs: Runs, why: str) -> list[Delivery]:
        """Drop a key under whose lease nothing is committed any more; return its entries that were in flight.

        `runs` have no consequences, and those that failed are logged; `why` says what happens instead.
        """
        lease.expired = True
        self._halted.discard(lease)
        self._postponed_runs.pop(lease, None)
        for delivery, result in runs:
            self._log_dropped(delivery, result, why)
        return self._in_flight.remove_lease(lease)

    def _drop_lost(self, lease: KeyLease, runs: Runs) -> None:
        """Drop a key that another worker has leased since, or whose lease an operator has ended by changing the key."""
        self._on_lease_end(lease.stream.stream)
        lost = self._drop(lease, runs, LOST)
        if lost:
            self._loop_metrics.count_refused(len(lost))
            logger.warning(
                "%s: commit refused for %d messages of %s: this worker lost the lease of their key; "
                "discarding their effects (first: %s)",
                self._steps.handler.label,
                len(lost),
                lease.stream.stream,
                lost[0].id.decode(),
            )

    @property
    def _has_postponed(self) -> bool:
        return bool(self._postponed_runs)

    def _retry_postponed(self) -> None:
        self.settle(())


def _runs_by_lease(finished: Sequence[FinishedRun]) -> dict[KeyLease, Runs]:
    """Return the runs of each lease, in order."""
    found: dict[KeyLease, Runs] = defaultdict(list)
    last: object = found
    runs: Runs = []
    for deliveries, outcome in finished:
        first = deliveries[0]
        if first.lease is not last:  # most follow another one of their key
            last = lease = lease_of(first)
            runs = found[lease]
        if len(deliveries) == 1:
            runs.append((first, outcome))
        else:
            runs += _runs_of(deliveries, outcome)
    return found


def _runs_of(deliveries: Sequence[Delivery], outcome: Outcome) -> Runs:
    """Return the run of each message of a list: the last one has the outputs."""
    assert isinstance(outcome, Done)
    *others, last = deliveries
    return [*((one, Done((), outcome.state)) for one in others), (last, outcome)]


def _with_effects(outcomes: Sequence[_LeaseOutcome]) -> list[_LeaseOutcome]:
    return [one for one in outcomes if one.effects is not None]


def _chunks(outcomes: Sequence[_LeaseOutcome]) -> Iterator[Sequence[_LeaseOutcome]]:
    return chunk_by_size(outcomes, attrgetter("effects"))


def _first_round_trip(by_stream: Mapping[KeyedStream, Sequence[_LeaseOutcome]]) -> Iterator[KeyedStream]:
    """Yield the first streams whose outcomes fit in one chunk, all together."""
    room = len(next(_chunks([one for outcomes in by_stream.values() for one in outcomes]), ()))
    for stream, outcomes in by_stream.items():
        room -= len(outcomes)
        if outcomes and room >= 0:
            yield stream


def _effects(outcomes: Sequence[_LeaseOutcome]) -> list[Effects]:
    return [one.effects for one in outcomes if one.effects is not None]
