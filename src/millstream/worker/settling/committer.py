"""Committer: commits the outcomes of runs, writes dead letters, and schedules retries."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from operator import itemgetter
from typing import TypeVar, cast

import msgspec

from millstream.clock import Every
from millstream.delivery.commit_store import may_repeat
from millstream.delivery.effects import Effects, U, Unit, are_ids, chunk_by_size, last_ids_of
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import OutOfMemory, RedisError
from millstream.handlers.attempt import NO_EFFECTS, DeadLettered, Done, Outcome, RetryLater
from millstream.handlers.dead_letter import Reason, reason_of
from millstream.redis_client.call import SentCall
from millstream.redis_client.key_names import REDRIVE_FIELD, from_wire
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Arg
from millstream.worker.completion_queue import FinishedRun
from millstream.worker.context import WorkerContext
from millstream.worker.due_times import DelayQueue
from millstream.worker.handler_steps import HandlerSteps

logger = logging.getLogger(__name__)

_MEMORY_RETRY_MS = 500.0
_OBSERVED_AT_ONCE = 20
"""How many runs of those that ended together are observed without a metrics backend: a sample costs next to nothing."""
_WARN_EVERY_MS = 5_000.0
LOST = "the message is another worker's now, or was skipped or deleted; this attempt does not count"
"""What the log says of a failed attempt whose claim or lease was lost meanwhile."""
PendingCommit = tuple[Sequence[Delivery], Unit]
T = TypeVar("T")


class _SentCommit(msgspec.Struct, frozen=True):
    """What was committed of one stream in one call; `runs` of it count as settled once Redis has answered."""

    stream: ReliableStream
    commits: Sequence[PendingCommit]
    call_number: str
    sent_ms: float
    runs: int


class Committer:
    """Commits the outcomes of a handler, as many at once as have arrived, and schedules the retries.

    While Redis executes one commit, the next is made from the outcomes that have arrived meanwhile, if they fill one.

    Used by one thread. `release` returns entries to the group that must not be run, or whose dead letter must not be
    written, as the breaker is open.
    """

    def __init__(self, context: WorkerContext, *, release: Callable[[Sequence[Delivery]], None]) -> None:
        self._steps = context.steps
        self._has_own_commit = type(context.steps).commit is not HandlerSteps.commit
        self._in_flight = context.in_flight
        self._client = context.client
        self._loop_metrics = context.loop_metrics
        self._clock = context.clock
        self._give_up = context.give_up
        self._breaker = context.breaker
        self._release = release
        self._retries = DelayQueue[Delivery]()
        self._under_way: tuple[_SentCommit, SentCall[list[Unit]]] | None = None
        self._postponed: list[PendingCommit] = []
        self._postponed_due_ms = 0.0
        self._postponed_since_ms: float | None = None
        self._has_stored = False  # since the last postponement, without the leave to exceed the memory limit
        self._warning = Every(_WARN_EVERY_MS)

    def run(self) -> None:
        """Commit until the completion queue is closed."""
        try:
            self._run()
        finally:  # if that has failed: what Redis has committed by then is not silent
            self._note_executed()

    def _run(self) -> None:
        ended = False
        while not ended:
            if not self._in_flight.completions.has_batch:
                self.finish()
            finished, ended = self._in_flight.completions.collect(self._wait_s())
            if finished:
                self.settle(finished)
                finished = []  # drop the reference while waiting for more
            self._requeue_retries()
            if self._has_postponed and self._clock.monotonic_ms() >= self._postponed_due_ms:
                self._retry_postponed()
            self._note_resumption()
        self.finish()

    def settle(self, finished: Sequence[FinishedRun]) -> None:
        """Commit, retry or dead-letter each of these runs; their last commit may be under way until `finish`."""
        commits: dict[ReliableStream, list[PendingCommit]] = defaultdict(list)
        failed: dict[ReliableStream, list[Delivery]] = defaultdict(list)
        held_back: list[Delivery] = []
        processed = 0
        now_ms = self._clock.monotonic_ms()
        self._observe_run_times(finished)
        settled = _deliveries(finished)
        lost = self._in_flight.not_in_flight(settled)
        for deliveries, outcome in finished:
            delivery = deliveries[0]
            if lost and not lost.isdisjoint(deliveries):
                # The entry was given up, or lost to another worker, while it ran; the rest of its batch is run again.
                rest = _unstarted(one for one in deliveries if one not in lost)
                self._in_flight.buffer_again(rest, now_ms)
                self._log_dropped(delivery, outcome, LOST)
            elif isinstance(outcome, Done):
                processed += len(deliveries)
                commits[delivery.stream].append((deliveries, self._unit_of(deliveries, outcome)))
            elif isinstance(outcome, DeadLettered):
                self._breaker.on_processed(processed)
                processed = 0
                if self._breaker.admits(delivery, outcome):
                    commits[delivery.stream].append((deliveries, self._steps.dead_letter(delivery, outcome)))
                else:
                    held_back += deliveries
            else:
                assert isinstance(outcome, RetryLater)  # entries without a key are never parked
                failed[delivery.stream].append(delivery)
                delivery.running, delivery.state_since_ms = False, now_ms
                delay_ms = self._steps.retry(delivery, outcome)
                self._steps.log_failure(delivery, outcome, delay_ms)
                delivery.due_ms = now_ms + delay_ms
                self._retries.put(delivery, delivery.due_ms)
        self._breaker.on_processed(processed)
        if self._breaker.is_open():
            self._in_flight.remove(held_back)
            held_back += self._in_flight.remove_unstarted()  # among them those that wait for their next attempt
        for stream, deliveries in failed.items():
            self._loop_metrics.count_retried(len(deliveries))
            self._record_failures(stream, deliveries)
        unanswered = self._commit(commits)
        if not commits:
            self.finish()
        if held_back:
            self._release(held_back)
        self._loop_metrics.on_runs_settled(len(settled) - unanswered)

    def _log_dropped(self, delivery: Delivery, outcome: Outcome, why: str) -> None:
        """Log a failed attempt without consequences, unless its run was given up: that has recorded and logged it."""
        if delivery not in self._in_flight.logged:
            self._steps.log_dropped(delivery, outcome, why)

    def _unit_of(self, deliveries: Sequence[Delivery], done: Done) -> Unit:
        delivery = deliveries[0]
        if len(deliveries) > 1:
            return self._steps.commit_batch(deliveries, done)
        if done is NO_EFFECTS and not (
            self._has_own_commit or delivery.may_have_crash_counts or delivery.pairs[0] == REDRIVE_FIELD
        ):
            return delivery.id
        return self._steps.commit(delivery, done)

    def _record_failures(self, stream: ReliableStream, deliveries: Sequence[Delivery]) -> None:
        try:
            self._retry_while_unavailable(lambda: stream.record_failures(deliveries))
        except OutOfMemory as error:
            logger.warning(
                "%s: cannot record %d failed attempts: %s; only this worker counts them",
                self._steps.handler.label,
                len(deliveries),
                error,
            )

    def _wait_s(self) -> float | None:
        now_ms = self._clock.monotonic_ms()
        wait_ms = self._retries.wait_ms(now_ms)
        if self._has_postponed:
            wait_ms = min(wait_ms, max(0.0, self._postponed_due_ms - now_ms))
        return None if wait_ms == inf else wait_ms / 1000

    def _requeue_retries(self) -> None:
        now_ms = self._clock.monotonic_ms()
        due = self._retries.pop_due(now_ms)
        for delivery in due:
            delivery.attempt += 1
        if due:
            self._in_flight.buffer_again(due, now_ms)

    def _commit(self, commits: Mapping[ReliableStream, Sequence[PendingCommit]], *, again: bool = False) -> int:
        """Commit these units; return of how many runs. The last commit is under way then: Redis executes it meanwhile.

        The call of each is made while Redis executes the commit before. `again`: their runs count as settled already.
        """
        count = 0
        for stream, some in commits.items():
            for chunk in chunk_by_size(some, itemgetter(1)):
                deliveries, number = _deliveries(chunk), stream.new_call_number()
                call = stream.commit_call([unit for _, unit in chunk], number)
                before = self._await_commit()
                # Not earlier: claims are renewed until then, and the commit before may take long while Redis is down.
                for one in deliveries:
                    one.committing = True
                commit = _SentCommit(stream, chunk, number, self._clock.monotonic_ms(), 0 if again else len(deliveries))
                try:
                    self._under_way = commit, self._client.send(call)
                finally:
                    if before is not None:
                        self._note(*before)
                count += len(deliveries)
        return count

    def finish(self) -> None:
        """Wait for the commit that is under way, if there is one."""
        if (answered := self._await_commit()) is not None:
            self._note(*answered)

    def _note_executed(self) -> None:
        """Note the commit that is under way if Redis has executed it; do not repeat it. Raises nothing."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        commit, sent = under_way
        try:
            if not isinstance(refused := sent.result(), RedisError):
                self._note(commit, refused, (self._clock.monotonic_ms() - commit.sent_ms) / 1000)
        except Exception as error:  # noqa: BLE001 - an earlier one has ended the work, and must not be hidden
            logger.debug("%s: cannot tell what was committed last: %s", self._steps.handler.label, error)

    def _await_commit(self) -> tuple[_SentCommit, Sequence[Unit], float] | None:
        """Wait for the commit that is under way. Return it, its refused units, and how long it took, in seconds.

        If its reply is lost it is repeated here, before any other commit. Return None if it is postponed.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        commit, sent = under_way
        refused = sent.result()
        try:
            if isinstance(refused, RedisError):
                units = [unit for _, unit in commit.commits]
                refused = self._commit_again(commit.stream, units, commit.call_number, refused)
        except OutOfMemory as error:
            self._postpone(commit, error)
            return None
        return commit, refused, (self._clock.monotonic_ms() - commit.sent_ms) / 1000

    def _commit_again(self, stream: ReliableStream, units: Sequence[U], call_number: str, error: RedisError) -> list[U]:
        """Repeat a commit whose first reply was this error, if that can help; else raise it."""
        if not may_repeat(error):
            raise error
        return self._commit_now(stream, units, call_number)

    def _commit_now(
        self, stream: ReliableStream, units: Sequence[U], call_number: str, *, allow_oom: bool = False
    ) -> list[U]:
        """Commit these units, however long Redis is unavailable; return the refused ones."""
        return self._retry_while_unavailable(lambda: stream.commit(units, allow_oom=allow_oom, call_number=call_number))

    def _note(self, commit: _SentCommit, refused: Sequence[Unit], took_s: float, *, allow_oom: bool = False) -> None:
        """Note that these units are committed, but for those that Redis refused."""
        stream, some = commit.stream, commit.commits
        effects = [one for _, one in some]
        refused_ids = {id(one) for one in refused}
        written = [one for one in some if id(one[1]) not in refused_ids] if refused_ids else some
        self._has_stored |= bool(written) and not allow_oom
        are_plain = are_ids(effects)
        letters = [] if are_plain else _dead_letters(written)
        skipped = 0 if are_plain else sum([one.skipped_count for _, one in written if isinstance(one, Effects)])
        dead = list(map(reason_of, letters))
        self._steps.failures.dead_lettered(letters)
        deliveries = _deliveries(some)
        done = _deliveries(written) if refused_ids else deliveries
        self._loop_metrics.count_committed(done, dead, took_s, skipped=skipped)
        if refused:
            self._loop_metrics.count_refused(len(refused))
            logger.warning(
                "%s: commit refused for %d messages of %s: another worker claimed them, or they were committed before; "
                "discarding their effects (%s, for one)",
                self._steps.handler.label,
                len(refused),
                stream.stream,
                last_ids_of(refused[:1])[0].decode(),
            )
        self._in_flight.remove(deliveries)
        for batch, one in some if refused_ids else ():
            if id(one) in refused_ids:
                for letter in _dead_letters([(batch, one)]):
                    self._log_dropped(batch[0], _outcome_of(letter), LOST)
                if len(batch) > 1:
                    self._rerun_owned(stream, batch)
        self._loop_metrics.on_runs_settled(commit.runs)

    def _rerun_owned(self, stream: ReliableStream, deliveries: Sequence[Delivery]) -> None:
        """Run a refused batch again, without the entries of it that another worker has claimed."""
        try:
            lost = self._retry_while_unavailable(lambda: stream.renew_claims([one.id for one in deliveries]))
        except OutOfMemory:
            return  # the entries stay pending: another worker claims them when they are idle
        owned = _unstarted(one for one in deliveries if one.id not in lost)
        self._in_flight.add(owned, self._clock.monotonic_ms())

    def _retry_while_unavailable(self, operation: Callable[[], T]) -> T:
        """Retry while Redis is unavailable. Raises OutOfMemory at once, for the caller to handle."""

        def attempt() -> T | OutOfMemory:
            try:
                return operation()
            except OutOfMemory as error:
                return error

        what = self._steps.handler.label
        result = self._client.retry_while_unavailable(attempt, what=what, give_up=self._give_up)
        if isinstance(result, OutOfMemory):
            raise result
        return result

    def _postpone(self, commit: _SentCommit, error: OutOfMemory) -> None:
        """Commit plain acknowledgements, which free memory in the end; keep the rest pending, without an attempt."""
        stream = commit.stream
        acknowledgements = [one for one in commit.commits if not _adds_entries(one[1])]
        if acknowledgements:
            began_ms, number = self._clock.monotonic_ms(), stream.new_call_number()
            units = [unit for _, unit in acknowledgements]
            refused = self._commit_now(stream, units, number, allow_oom=True)
            plain = _SentCommit(stream, acknowledgements, number, began_ms, 0)
            self._note(plain, refused, (self._clock.monotonic_ms() - began_ms) / 1000, allow_oom=True)
        postponed = [one for one in commit.commits if _adds_entries(one[1])]
        for one in _deliveries(postponed):
            one.committing = False  # Redis may be out of memory for longer than a claim lasts
        self._postponed += postponed
        self._warn_postponed(len(postponed), stream, error)
        self._loop_metrics.on_runs_settled(commit.runs)

    def _warn_postponed(self, count: int, stream: ReliableStream, error: OutOfMemory) -> None:
        now_ms = self._clock.monotonic_ms()
        self._postponed_due_ms = now_ms + _MEMORY_RETRY_MS
        self._has_stored = False
        self._loop_metrics.on_redis_error(error)
        if count and self._postponed_since_ms is None:
            self._postponed_since_ms = now_ms
        if count and self._warning.is_due(now_ms):
            label = self._steps.handler.label
            logger.warning(
                "%s: commit of %d messages of %s postponed: %s; retrying", label, count, stream.stream, error
            )

    def _note_resumption(self) -> None:
        if self._postponed_since_ms is None or self._has_postponed:
            return
        if self._has_stored:  # else what was postponed is lost: other workers have it
            waited_ms = self._clock.monotonic_ms() - self._postponed_since_ms
            logger.warning(
                "%s resumes: Redis has stored its postponed commits after %.1f s",
                self._steps.handler.label,
                waited_ms / 1000,
            )
        self._postponed_since_ms = None
        self._warning.reset()

    @property
    def _has_postponed(self) -> bool:
        return bool(self._postponed)

    def _retry_postponed(self) -> None:
        postponed: dict[ReliableStream, list[PendingCommit]] = defaultdict(list)
        for one in self._postponed:
            postponed[one[0][0].stream].append(one)
        self._postponed = []
        self._commit(postponed, again=True)
        self.finish()

    def _observe_run_times(self, finished: Sequence[FinishedRun]) -> None:
        observed = finished if self._loop_metrics.has_backend else finished[:_OBSERVED_AT_ONCE]
        self._loop_metrics.observe_run_times([one.attempt_ms for deliveries, _ in observed for one in deliveries])


def _unstarted(deliveries: Iterable[Delivery]) -> list[Delivery]:
    """Return these entries, whose run is over, as if they had not been started."""
    entries = list(deliveries)
    for one in entries:
        one.running = one.finished = one.committing = False
    return entries


def _adds_entries(unit: Unit) -> bool:
    return not isinstance(unit, bytes) and bool(unit.outputs or unit.dead_letters)


def _deliveries(runs: Iterable[tuple[Sequence[Delivery], object]]) -> list[Delivery]:
    return [one for deliveries, _ in runs for one in deliveries]


def _dead_letters(commits: Iterable[PendingCommit]) -> list[Sequence[Arg]]:
    return [letter for _, one in commits if not isinstance(one, bytes) for letter in one.dead_letters]


def _outcome_of(letter: Sequence[Arg]) -> DeadLettered:
    found = {name: from_wire(one) if isinstance(one, bytes) else str(one) for name, one in mapping_of(letter).items()}
    return DeadLettered(cast("Reason", found["reason"]), found["error"], found["traceback"])
