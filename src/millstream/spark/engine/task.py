"""PartitionTask: one Spark task of the handler engine, run in an executor's Python worker.

Its main loop is `PartitionTask._process_runs`: load where each key continues, run the handler on its messages, commit,
and defer keys that have to wait. If a commit is refused because another execution of the same task was faster, the task
reloads that key and continues from there. A key that backs off for long, or is parked, is deferred
(`millstream.delivery.deferral`), so its batch can finish.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from millstream.delivery.cancellation import Cancellation
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.effects import CANCELED, crash_counts_of
from millstream.handlers.attempt import (
    DeadLettered,
    Done,
    Outcome,
    Parked,
    RetryLater,
    canceled_outcome,
    cancels_rest,
    check_key,
    dead_letter_of,
    is_limited,
)
from millstream.handlers.consecutive import attempt_consecutive, unpack
from millstream.handlers.handler import Handler
from millstream.model import Message
from millstream.observability.failure_log import FailureRecorder
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import is_redriven
from millstream.spark.engine.attempt_runner import AttemptRunner
from millstream.spark.engine.cautious_mode import CautiousMode
from millstream.spark.engine.commit_buffer import CommitBuffer, Settle
from millstream.spark.engine.key_run import DeferReason, KeyRun, check_finished, unpack_fields
from millstream.spark.engine.rate_limit import RateLimit
from millstream.spark.engine.run_committer import RunCommitter
from millstream.spark.engine.run_loader import RunLoader
from millstream.spark.engine.task_breaker import TaskBreaker
from millstream.spark.engine.task_metrics import COUNTERS, METRICS_SCHEMA, TaskMetrics
from millstream.spark.engine.task_permits import TaskPermits
from millstream.spark.key_blocks import read_chunks

MAX_BACKOFF_MS = 1_000.0
"""Total back-off of one key that a batch waits out, in milliseconds; a key that needs longer is deferred."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job that the driver sends to every task: the handler, the URL of Redis, and the run's fencing token."""

    handler: Handler
    url: str = field(repr=False)
    token: int


class PartitionTask:
    """Runs a handler over the sorted blocks of one partition. `retried`: an earlier attempt of the task failed."""

    def __init__(self, job: Job, client: Client, *, retried: bool) -> None:
        self._handler = handler = job.handler
        self._token = job.token
        self._commit_store = CommitStore(
            client,
            app=handler.app,
            handler=handler.name,
            token=job.token,
            into=handler.into,
            into_maxlen=handler.into_maxlen,
            keyed=handler.key is not None,
            state_ttl_ms=handler.state_ttl_ms,
        )
        self._metrics: dict[str, TaskMetrics] = {}
        self._failures = FailureRecorder(handler)
        self._attempts = attempts = AttemptRunner(handler, client)
        self._loader = RunLoader(handler, client, self._commit_store, self._metrics, attempts.call)
        self._cautious = CautiousMode(handler, self._commit_store, attempts.call)
        self._rate_limit = RateLimit(handler.rate, self._commit_store, call=attempts.call, sleep=attempts.sleep)
        self._permits = TaskPermits.of(handler, self._commit_store, attempts.call)
        self._breaker = TaskBreaker(handler.breaker)
        self._runs_consecutive = not (handler.is_async or handler.in_batches or self._permits)
        self._buffer = CommitBuffer()
        self._committer = RunCommitter(
            self._commit_store, self._metrics, self._failures, attempts.call, attempts.call_behind
        )
        if retried:
            self._cautious.begin()

    async def process(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Run every message of `batches` and commit its effects."""
        for chunk in read_chunks(batches):
            if self._breaker.is_open:
                continue  # the driver runs the batch again once the handler is resumed
            runs = self._loader.split_into_runs(chunk)
            self._count_keyless(runs)
            if not self._breaker.is_open:
                await self._process_runs(runs)

    async def process_deferred(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Run deferred keys; `batches` have the columns `stream` and `queue`. Runs the head of each key queue only."""
        for batch in batches:
            if not self._breaker.is_open:
                await self._process_runs(self._loader.runs_of_queues(batch))

    async def _process_runs(self, runs: list[KeyRun]) -> None:
        again = False
        with self._committer.open():
            try:
                while runs:
                    self._load(runs, again=again)
                    await self._run_all([run for run in runs if run not in self._buffer.refused])
                    self._flush()
                    if self._breaker.is_open:
                        return
                    check_finished(run for run in runs if run not in self._buffer.refused)
                    runs, again = self._buffer.pop_refused(), True
            finally:
                self._attempts.disarm()

    def _load(self, runs: Sequence[KeyRun], *, again: bool) -> None:
        """Load where the runs continue, and defer those of keys with deferred messages."""
        if self._loader.load_positions({run.stream for run in runs}, again=again):
            self._cautious.begin()
        self._rate_limit.follow(self._loader.loaded_rates)
        if self._rate_limit.is_active and not again:
            for run in runs:
                self._rate_limit.add_expected({run.stream: len(run.entries)})
        for run in self._loader.load(runs):
            self._buffer.stage_deferral(run)
        self._flush()

    # --- Running ---

    async def _run_all(self, runs: list[KeyRun]) -> None:
        remaining = iter(runs)
        # Isolated messages run one at a time, so that a crash counts against the running message only.
        coroutines = self._handler.concurrency if self._handler.is_async and not self._cautious.is_on else 1
        async with self._attempts.watched(), asyncio.TaskGroup() as group:
            for _ in range(min(coroutines, len(runs))):
                group.create_task(self._run_worker(remaining, group))

    async def _run_worker(self, remaining: Iterator[KeyRun], group: asyncio.TaskGroup) -> None:
        for run in remaining:
            if self._breaker.is_open:
                return
            await self._run_key(run, remaining, group)

    async def _run_key(self, run: KeyRun, remaining: Iterator[KeyRun], group: asyncio.TaskGroup) -> None:
        """Run the handler on the messages of one key, in order."""
        while run.entries and not self._breaker.is_open:
            if not await self._run_next(run, remaining, group):
                return
        self._buffer.stage(run)
        self._flush_if_full()

    async def _run_next(self, run: KeyRun, remaining: Iterator[KeyRun], group: asyncio.TaskGroup) -> bool:
        """Run the next messages of a key; return False if those behind them do not run now."""
        if self._may_run_consecutive(run):
            stopped_by = self._run_consecutive(run)
            if stopped_by is None:
                return self._commit_if_filled(run)
            return await self._settle(run, *stopped_by, remaining, group)
        message, is_meant = self._loader.next_message(run, self._token)
        outcome = await self._run_message(run, message) if is_meant else Done((), run.state)
        run.effects.skipped_count += not is_meant
        return await self._settle(run, message, outcome, remaining, group)

    def _may_run_consecutive(self, run: KeyRun) -> bool:
        """Return whether the next message of a key, and those like it behind it, need nothing but the handler."""
        return (
            self._runs_consecutive
            and run.attempt == 1
            and (run.key is not None or self._handler.key is None)
            and not (run.cancellation or run.next_may_be_for_one)
            and not (self._cautious.is_on or self._rate_limit.is_active)
        )

    def _run_consecutive(self, run: KeyRun) -> tuple[Message, Outcome] | None:
        """Run a plain handler on one message of a key after another, while the outcome is Done; return the first other one.

        Nothing waits in between, so the event loop takes no step for each message.
        """
        stream, key, token = run.stream, run.key, self._token

        def message_of(entry_id: bytes, packed: bytes) -> Message:
            return Message(stream, entry_id.decode(), unpack(packed), key, 1, token)

        entries, room = run.next_entries(), self._buffer.room_for(run)
        with self._attempts.consecutive() as timer:
            done = attempt_consecutive(self._handler, entries, message_of, run.state, timer, room)
        run.add_stretch(done)
        self._buffer.count_bytes(done.size)
        self._breaker.on_processed(done.count)
        return done.stopped_by

    async def _settle(
        self, run: KeyRun, message: Message, outcome: Outcome, remaining: Iterator[KeyRun], group: asyncio.TaskGroup
    ) -> bool:
        """Act on the outcome of the next message of a key; return as `_run_next`."""
        if isinstance(outcome, (RetryLater, Parked)):
            failed = not is_limited(outcome)
            if failed:
                self._on_failed(run, message, outcome)
            else:
                self._metrics[run.stream].limited += 1
            if isinstance(outcome, Parked) or self._must_defer(run, outcome):
                self._defer_later(run, outcome, message.attempt)
                return False
            if not self._commit_now(run):
                return False
            # A new coroutine runs the other keys while this key backs off.
            group.create_task(self._run_worker(remaining, group))
            await self._back_off([run], outcome.delay_ms, failed=failed)
        elif self._admits(run, outcome):
            self._add_outcome(run, message, outcome)
            if self._cautious.is_on:
                self._cautious.on_processed()
                return self._commit_now(run)
            return self._commit_if_filled(run)
        return True

    async def _run_message(self, run: KeyRun, message: Message) -> Outcome:
        if run.cancellation is not None and run.cancellation.covers(run.entries[0].id):
            return canceled_outcome(run.cancellation.canceled_by)
        if run.attempt == 1 and run.entries[0].id > run.admitted_until:
            await self._rate_limit.acquire(run.stream)
            run.admitted_until = run.entries[0].id  # a message that its limit refuses is admitted once
        refusal = check_key(self._handler, message)
        if refusal is not None:
            return refusal
        if self._cautious.is_on:
            return await self._cautious.run(message, lambda: self._attempt(run, message))
        return await self._attempt(run, message)

    async def _attempt(self, run: KeyRun, message: Message) -> Outcome:
        if self._permits is None:
            return await self._attempts.run(message, run.state)
        return await self._attempts.run(message, run.state, partial(self._permits.permitted, run, message))

    async def _back_off(self, runs: Iterable[KeyRun], delay_ms: float, *, failed: bool = True) -> None:
        """Back off before the next attempt on the first message of each run; `failed`: the last one counts."""
        await self._attempts.sleep(delay_ms)
        for run in runs:
            run.waited_ms += delay_ms
            run.attempt += failed

    # --- Outcomes ---

    def _count_keyless(self, runs: Sequence[KeyRun]) -> None:
        """Count the messages without a key for the breaker, before any message is run."""
        if self._handler.key is None:
            return
        keyless: list[DeadLettered] = []
        for run in runs:
            if run.key is None and unpack_fields(run.entries[0].packed)[1] is None:
                refusal = check_key(self._handler, self._loader.next_message(run, self._token)[0])
                keyless += [] if refusal is None else [refusal]
        self._breaker.on_keyless(keyless, of=sum(len(run.entries) for run in runs))

    def _admits(self, run: KeyRun, outcome: Outcome) -> bool:
        """Count an outcome for the breaker; return False if it must not be committed, as the breaker is open."""
        if isinstance(outcome, Done):
            self._breaker.on_processed()
        elif isinstance(outcome, DeadLettered):
            return self._breaker.admits(outcome, redriven=is_redriven(unpack(run.entries[0].packed)))
        return True

    def _add_outcome(self, run: KeyRun, message: Message, outcome: Done | DeadLettered) -> None:
        """Add a processed message's outcome to its run's effects, with what was published: a handler may change its message."""
        effects, entry_id = run.effects, run.next_id
        effects.add_message(entry_id)
        if run.may_be_redriven:
            run.entries[0].add_copy_to(effects)
        if self._cautious.is_on or run.from_queue:  # its key may have waited without a failed attempt
            effects.clear_crash_counts(*crash_counts_of(entry_id))
        if isinstance(outcome, DeadLettered):
            message = run.next_published(message.attempt)
            effects.add_dead_letter(dead_letter_of(self._handler, message, outcome).items())
            if run.key is not None and cancels_rest(self._handler, outcome):
                effects.cancels, run.cancellation = entry_id, Cancellation(entry_id)
            elif outcome.reason == "canceled":
                effects.cancels = effects.cancels or CANCELED
            self._buffer.count_bytes(sum(map(len, message.pairs)))
        else:
            if outcome.outputs:
                effects.add_outputs(outcome.outputs)
            self._buffer.count_bytes(len(outcome.state) + sum(map(len, outcome.outputs)))
            if outcome.timers:
                effects.add_timers(outcome.timers)
                self._buffer.count_bytes(sum(len(own_id) + len(packed) for own_id, _, packed in outcome.timers))
            run.state = outcome.state
        run.covered.append(run.entries.popleft())
        run.attempt = 1

    def _on_failed(self, run: KeyRun, message: Message, outcome: RetryLater | Parked) -> None:
        """Count and record a failed attempt."""
        delay_ms = 0.0
        if isinstance(outcome, RetryLater):
            self._metrics[run.stream].retries += 1
            delay_ms = outcome.delay_ms
        self._failures.attempt_failed(run.stream, run.next_id, run.key, message.attempt, outcome, delay_ms=delay_ms)

    # --- Committing and deferring ---

    def _commit_now(self, run: KeyRun) -> bool:
        """Commit the effects of a run and what else is staged; return False if the run was refused."""
        self._buffer.stage(run)
        self._flush()
        return run not in self._buffer.refused

    def _commit_if_filled(self, run: KeyRun) -> bool:
        """Commit as `_commit_now` if the effects of a run are enough for one commit."""
        return self._commit_now(run) if self._buffer.is_filled_by(run) else True

    def _must_defer(self, run: KeyRun, outcome: RetryLater) -> bool:
        return outcome.waits or run.waited_ms + outcome.delay_ms > MAX_BACKOFF_MS

    def _defer_later(self, run: KeyRun, outcome: RetryLater | Parked, attempt: int) -> None:
        """Defer the remaining entries of a run, whose `attempt` has failed, once its processed ones are committed."""
        run.defer_reason = DeferReason.of(outcome, attempt, self._handler.retry)
        self._buffer.stage_deferral(run)
        if self._cautious.is_on:
            self._flush()
        else:
            self._flush_if_full()

    def _flush_if_full(self) -> None:
        """Commit what is staged if it is enough for one commit, while the task goes on with other keys."""
        if self._buffer.is_full:
            must_wait = self._buffer.has_deferrals or self._cautious.is_on  # a deferral has to know what was refused
            self._flush(self._committer.commit if must_wait else self._committer.begin)
        elif self._committer.has_reply:  # a newer run ends the task at once
            self._buffer.refuse(self._committer.finish())

    def _flush(self, commit: Settle | None = None) -> None:
        """Commit and defer what is staged. `commit`: how; default: wait for the reply."""
        self._buffer.refuse(self._committer.finish())
        self._buffer.flush(commit or self._committer.commit, self._committer.defer)

    def report(self) -> pa.RecordBatch:
        """Return the task's metrics, one row per stream; the first also has those of the whole task."""
        breaker = self._breaker.report()
        rows = [
            {
                "stream": stream,
                "last_id": str(metrics.last_id),
                **{name: getattr(metrics, name) for name in COUNTERS},
                "has_queues": self._loader.may_have_queues(stream),
                "failures": None if at else self._failures.pack(),
                "trip": breaker["trip"],
                "causes": "{}" if at else breaker["causes"],
            }
            for at, (stream, metrics) in enumerate(self._metrics.items())
        ]
        return pa.RecordBatch.from_pylist(rows, schema=METRICS_SCHEMA)
