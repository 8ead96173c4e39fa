"""PartitionTask: one Spark task of the handler engine, run in an executor's Python worker.

The spine is `PartitionTask._process_runs`: load key offsets and states, run the handler on each key's messages, commit.
If a commit is refused because another execution of the same task was faster, the task reloads that key and continues
from there. A key that backs off for long, or is parked, is deferred (`millstream.delivery.deferral`), so its batch can
finish.
"""

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from millstream.delivery.commit_store import ENTRY_PREFIX, KEY_PREFIX, CommitStore, CommittedPosition
from millstream.delivery.deferral import Deferral, defer, deferred_keys, read_queue
from millstream.delivery.effects import ERROR_SUFFIX, FAILED_SUFFIX, Effects
from millstream.delivery.last_error import LastError
from millstream.handlers.attempt import (
    DeadLettered,
    Done,
    Outcome,
    Parked,
    RetryLater,
    attempt,
    attempt_plain,
    check_key,
    dead_letter_of,
    outcome_after_last_attempt,
)
from millstream.handlers.handler import Handler
from millstream.model import ZERO_ID, EntryId, Message, Retry
from millstream.observability.failure_log import FailureRecorder
from millstream.redis_client.client import Client
from millstream.spark.engine.key_run import DeferReason, Entry, KeyRun, _check_finished, _unpack, unpack_fields
from millstream.spark.engine.loop_heartbeat import LoopHeartbeat
from millstream.spark.engine.rate_limit import RateLimit
from millstream.spark.engine.task_breaker import TaskBreaker
from millstream.spark.engine.task_metrics import COUNTERS, METRICS_SCHEMA, TaskMetrics
from millstream.spark.engine.time_limit import AttemptTimeLimit

if TYPE_CHECKING:
    from millstream.spark.engine.key_migration import PartitionMigration

logger = logging.getLogger(__name__)

COMMIT_MESSAGES = 500
COMMIT_BYTES = 1 << 20
ISOLATED_MESSAGES = 4 * COMMIT_MESSAGES
QUEUE_MESSAGES = 5_000
"""Messages that a task for deferred keys loads at most, over all its key queues..."""
MIN_QUEUE_MESSAGES = 10
"""...but at least so many of each."""
MAX_BACKOFF_MS = 1_000.0
"""Total back-off of one key that a batch waits out, in milliseconds; a key that needs longer is deferred."""

_MAX_SLEEP_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the driver sends to every task: the handler, the URL of Redis, and the run's fencing token."""

    handler: Handler
    url: str = field(repr=False)
    token: int


def make_defer_reason(outcome: RetryLater | Parked, attempt: int, retry: Retry) -> DeferReason:
    """Return why a run is deferred after a failed attempt on its first message, under this retry policy."""
    error = LastError.of(outcome, retry).pack()
    if isinstance(outcome, Parked):
        return DeferReason("park", f"{outcome.reason}: {outcome.error}", attempt, error)
    return DeferReason("backoff", round(outcome.delay_ms), attempt, error)


def _partition_migration(client: Client, handler: Handler) -> "PartitionMigration":
    from millstream.spark.engine.key_migration import PartitionMigration

    return PartitionMigration(client, handler)


class PartitionTask:
    """Runs a handler over the sorted rows of one partition. `retried`: an earlier attempt of the task failed."""

    def __init__(self, job: Job, client: Client, *, retried: bool) -> None:
        handler = job.handler
        self._handler = handler
        self._client = client
        self._commit_store = CommitStore(
            client,
            app=handler.app,
            handler=handler.name,
            token=job.token,
            into=handler.into,
            into_maxlen=handler.into_maxlen,
            keyed=handler.key is not None,
        )
        self._token = job.token
        self._label = handler.label.encode()
        # While this is above 0, any message may be the poison pill that killed an earlier attempt: each runs isolated.
        self._isolated_left = ISOLATED_MESSAGES if retried else 0
        self._positions: dict[str, CommittedPosition] = {}
        self._metrics: dict[str, TaskMetrics] = {}
        self._failures = FailureRecorder(handler)
        self._staged: list[KeyRun] = []
        self._to_defer: list[KeyRun] = []
        self._staged_messages = 0
        self._staged_bytes = 0
        self._refused: dict[KeyRun, None] = {}  # a set in the order of refusal: a zombie may have thousands
        self._time_limit = AttemptTimeLimit()
        self._slots = asyncio.Semaphore(handler.concurrency)
        self._isolation_lock = asyncio.Lock()
        self._heartbeat = LoopHeartbeat(handler.time_limit_ms if handler.is_async else None)
        self._rate_limit = RateLimit(
            handler.rate, self._commit_store, call=self._retry_while_unavailable, sleep=self._sleep
        )
        self._breaker = TaskBreaker(handler.breaker)
        self._migration: PartitionMigration | None = None
        if handler.partitions is not None:
            self._migration = self._retry_while_unavailable(lambda: _partition_migration(client, handler))

    # --- Processing ---

    async def process(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Run every message of `batches` and commit its effects."""
        for batch in batches:
            if self._breaker.is_open:
                continue  # the driver runs the batch again once the handler is resumed
            self._rate_limit.add_expected(Counter(batch.column("stream").to_pylist()) if self._handler.rate else {})
            runs = self._split_into_runs(batch)
            self._count_keyless(runs)
            if not self._breaker.is_open:
                await self._process_runs(runs)

    async def process_deferred(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Run deferred keys; `batches` have the columns `stream` and `queue`. Runs the head of each key queue only."""
        for batch in batches:
            if self._breaker.is_open:
                continue
            await self._process_runs([self._run_of_queue(**row) for row in batch.to_pylist()])

    async def _process_runs(self, runs: list[KeyRun]) -> None:
        self._load_positions({run.stream for run in runs})
        try:
            while runs:
                self._load_runs(runs)
                await self._run_all([run for run in runs if run not in self._refused])
                self._flush()
                if self._breaker.is_open:
                    return
                _check_finished(run for run in runs if run not in self._refused)
                runs, self._refused = list(self._refused), {}
                self._load_positions({run.stream for run in runs}, again=True)
        finally:
            self._disarm()

    async def _run_all(self, runs: list[KeyRun]) -> None:
        remaining = iter(runs)
        # Isolated messages run one at a time, so that a crash counts against the running message only.
        coroutines = self._handler.concurrency if self._handler.is_async and not self._isolated_left else 1
        async with self._heartbeat.watched(), asyncio.TaskGroup() as group:
            for _ in range(min(coroutines, len(runs))):
                group.create_task(self._run_worker(remaining, group))

    async def _run_worker(self, remaining: Iterator[KeyRun], group: asyncio.TaskGroup) -> None:
        for run in remaining:
            if self._breaker.is_open:
                return
            await self._run_key(run, remaining, group)

    async def _run_key(self, run: KeyRun, remaining: Iterator[KeyRun], group: asyncio.TaskGroup) -> None:
        """Run the handler on the messages of one key, one by one."""
        while run.entries and not self._breaker.is_open:
            message, is_meant = self._unpack_next(run)
            if is_meant:
                if run.attempt == 1:
                    await self._rate_limit.acquire(run.stream)
                outcome = await self._run_message(run, message)
            else:
                outcome = Done((), run.state)
            if isinstance(outcome, RetryLater):
                self._metrics[run.stream].retries += 1
                self._failures.attempt_failed(
                    run.stream, message.id, run.key, message.attempt, outcome, delay_ms=outcome.delay_ms
                )
                if self._must_defer(run, outcome):
                    self._defer_later(run, make_defer_reason(outcome, message.attempt, self._handler.retry))
                    return
                self._stage_commit(run)
                self._flush()
                if run in self._refused:
                    return
                # A new coroutine runs the other keys while this key backs off.
                group.create_task(self._run_worker(remaining, group))
                await self._back_off([run], outcome)
                continue
            if isinstance(outcome, Parked):
                self._failures.attempt_failed(run.stream, message.id, run.key, message.attempt, outcome)
                self._defer_later(run, make_defer_reason(outcome, message.attempt, self._handler.retry))
                return
            if not self._admits(run, outcome):
                break
            self._add_outcome(run, message, outcome)
            if (
                self._isolated_left > 0
                or run.effects.message_count >= COMMIT_MESSAGES
                or self._staged_bytes >= COMMIT_BYTES
            ):
                self._isolated_left = max(0, self._isolated_left - 1)
                self._stage_commit(run)
                self._flush()
                if run in self._refused:
                    return
        self._stage_commit(run)
        self._flush_if_full()

    def _must_defer(self, run: KeyRun, outcome: RetryLater) -> bool:
        return run.waited_ms + outcome.delay_ms > MAX_BACKOFF_MS

    def _defer_later(self, run: KeyRun, reason: DeferReason) -> None:
        """Defer the remaining entries of a run once its processed ones are committed."""
        run.defer_reason = reason
        self._stage_commit(run)
        self._to_defer.append(run)
        self._staged_messages += 1
        if self._isolated_left > 0:
            self._flush()
        else:
            self._flush_if_full()

    async def _back_off(self, runs: Iterable[KeyRun], outcome: RetryLater) -> None:
        """Back off before the next attempt on the first message of each run."""
        await self._sleep(outcome.delay_ms)
        for run in runs:
            run.waited_ms += outcome.delay_ms
            run.attempt += 1

    async def _sleep(self, duration_ms: float) -> None:
        """Sleep, disarming the time limit that other attempts leave armed when they end meanwhile."""
        until_s = asyncio.get_running_loop().time() + duration_ms / 1000
        while (left_s := until_s - asyncio.get_running_loop().time()) > 0:
            self._disarm()
            await asyncio.sleep(min(left_s, _MAX_SLEEP_S))

    def _disarm(self) -> None:
        if not self._handler.is_async:  # the heartbeat of an async handler's loop goes on
            self._time_limit.disarm()

    def _retry_while_unavailable(self, call: Callable[[], T]) -> T:
        """Call Redis until it answers. The watchdog pauses meanwhile: the call blocks the loop, not a handler."""
        self._disarm()
        with self._heartbeat.paused():
            return self._client.retry_while_unavailable(call, what=self._handler.label)

    # --- Loading ---

    def _unpack_next(self, run: KeyRun) -> tuple[Message, bool]:
        """The next message of a run, and False if it was redriven for another handler of the stream."""
        entry = run.entries[0]
        pairs, meant_for = unpack_fields(entry.packed)
        message = Message(run.stream, str(entry.id), pairs, run.key, run.attempt, self._token)
        if meant_for is None:
            return message, True
        if meant_for == self._label and self._migration is not None and run.key is not None:
            # A dead letter is redriven to its old partition, and its key may have migrated since.
            forward = partial(self._migration.forward, run.stream, run.key, message.id, _unpack(entry.packed))
            return message, not self._retry_while_unavailable(forward)
        return message, meant_for == self._label

    def _split_into_runs(self, batch: pa.RecordBatch) -> list[KeyRun]:
        """Split a sorted batch into runs of one stream and key; each message without a key is a run of its own."""
        runs: list[KeyRun] = []
        last: tuple[str, bytes | None] | None = None
        columns = (batch.column(name).to_pylist() for name in ("stream", "key", "id_ms", "id_seq", "fields"))
        for stream, raw_key, ms, seq, packed in zip(*columns, strict=True):
            key = raw_key or None
            entry = Entry(EntryId(ms, seq), packed)
            if key is not None and (stream, key) == last:
                runs[-1].entries.append(entry)
            else:
                offset_field = KEY_PREFIX + key if key is not None else ENTRY_PREFIX + str(entry.id).encode()
                runs.append(KeyRun(stream, key, offset_field, deque((entry,))))
                last = (stream, key)
            metrics = self._metrics_of(stream, entry.id)
            metrics.messages += 1
            if entry.id > metrics.last_id:
                metrics.last_id = entry.id
        return runs

    def _run_of_queue(self, stream: str, queue: bytes) -> KeyRun:
        self._metrics_of(stream, ZERO_ID)
        return KeyRun(stream, queue[1:] if queue.startswith(KEY_PREFIX) else None, queue, deque(), from_queue=True)

    def _metrics_of(self, stream: str, entry_id: EntryId) -> TaskMetrics:
        metrics = self._metrics.get(stream)
        if metrics is None:
            metrics = self._metrics[stream] = TaskMetrics(entry_id)
        return metrics

    def _load_positions(self, streams: set[str], *, again: bool = False) -> None:
        """Load the committed positions of `streams`; `again` after a refusal, as a batch may have ended meanwhile."""
        missing = sorted(streams if again else streams - self._positions.keys())
        if missing:
            positions = self._retry_while_unavailable(lambda: self._commit_store.begin_run(missing))
            self._positions |= positions
            if any(position.suspects for position in positions.values()):
                self._isolated_left = ISOLATED_MESSAGES

    def _load_runs(self, runs: list[KeyRun]) -> None:
        """Load key offsets and states, drop committed entries, and defer runs of keys with deferred messages."""
        queued = [run for run in runs if run.from_queue]
        for run in queued:
            self._load_queue(run, max(MIN_QUEUE_MESSAGES, QUEUE_MESSAGES // len(queued)))
        self._load_keys([run for run in runs if not run.from_queue])

    def _load_queue(self, run: KeyRun, limit: int) -> None:
        keys = self._commit_store.keys(run.stream)
        read = partial(read_queue, self._client, keys, run.offset_field, limit)
        queue = self._retry_while_unavailable(read)
        deleted = [one for one, pairs in queue.entries if pairs is None]
        if deleted:
            logger.warning(
                "%d deferred messages of stream %s were trimmed or deleted before processing; skipping them: %s",
                len(deleted), run.stream, ", ".join(deleted[:10]),
            )  # fmt: skip
        run.load_queue(queue)

    def _load_keys(self, runs: list[KeyRun]) -> None:
        # Before the states: so the state of a key whose queue has just emptied is loaded after its last commit. In the
        # other order a stale state would go undetected.
        deferred = self._deferred_queues(runs)
        wanted: dict[str, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
        for run in runs:
            offset_fields, keys = wanted[run.stream]
            offset_fields.append(run.offset_field)
            if self._handler.wants_state and run.key is not None:
                keys.append(run.key)
        loaded = self._retry_while_unavailable(lambda: self._commit_store.load(wanted))
        self._drop_committed(runs)
        for run in runs:
            values = loaded[run.stream]
            state = values.get(b"s" + run.key, b"") if run.key is not None else b""
            run.resume(values.get(run.offset_field, b""), state, self._positions[run.stream].committed_id)
        self._defer([run for run in runs if run.entries and (run.stream, run.offset_field) in deferred])

    def _deferred_queues(self, runs: Iterable[KeyRun]) -> set[tuple[str, bytes]]:
        """Stream and key queue of the runs whose key already has deferred messages."""
        queues: dict[str, list[bytes]] = defaultdict(list)
        for run in runs:
            if run.key is not None and (self._migration is not None or self._may_have_queues(run.stream)):
                queues[run.stream].append(run.offset_field)
        deferred: set[tuple[str, bytes]] = set()
        for stream, names in queues.items():
            if self._migration is not None:
                await_keys = partial(self._migration.await_keys, stream, names)
                self._retry_while_unavailable(await_keys)
            read = partial(deferred_keys, self._commit_store, stream, names)
            deferred |= {(stream, name) for name in self._retry_while_unavailable(read)}
        return deferred

    def _may_have_queues(self, stream: str) -> bool:
        return self._positions[stream].has_queues or self._metrics[stream].deferred > 0

    def _drop_committed(self, runs: list[KeyRun]) -> None:
        """Drop entries that workers committed beyond the committed offset before this run took over from them."""
        takeover_ids = {
            stream: position.takeover_offset for stream, position in self._positions.items() if position.takeover_offset
        }
        affected = [
            run
            for run in runs
            if run.stream in takeover_ids and run.entries and run.entries[0].id <= takeover_ids[run.stream]
        ]
        for stream in {run.stream for run in affected}:
            some = [run for run in affected if run.stream == stream]
            ids = [str(entry.id) for run in some for entry in run.entries if entry.id <= takeover_ids[stream]]
            incomplete = partial(self._commit_store.incomplete, stream, ids)
            committed = set(ids) - self._retry_while_unavailable(incomplete)
            for run in some:
                run.entries = deque(entry for entry in run.entries if str(entry.id) not in committed)

    # --- Attempts ---

    async def _run_message(self, run: KeyRun, message: Message) -> Outcome:
        refusal = check_key(self._handler, message)
        if refusal is not None:
            return refusal
        if self._isolated_left > 0:
            async with self._isolation_lock:
                return await self._isolated_attempt(run, message)
        return await self._attempt(run, message)

    async def _isolated_attempt(self, run: KeyRun, message: Message) -> Outcome:
        """Attempt a message in isolation: its crash count goes up first, and stays up if the process dies."""
        count_crash = partial(self._commit_store.count_crash, message.stream, message.id)
        crashes = self._retry_while_unavailable(count_crash)
        if crashes >= max(1, self._handler.retry.attempts - 1):
            message.attempt = crashes + 1
            dead = DeadLettered("crashed", f"the process ended in each of the {crashes + 1} attempts on this message")
            return dead if self._handler.key is None else outcome_after_last_attempt(self._handler, dead)
        outcome = await self._attempt(run, message)
        if isinstance(outcome, RetryLater):  # while it backs off, another message may kill the process
            self._retry_while_unavailable(partial(count_crash, by=-1))
        return outcome

    async def _attempt(self, run: KeyRun, message: Message) -> Outcome:
        if not self._handler.is_async:
            return attempt_plain(self._handler, message, run.state, self._time_limit.guard)
        return await self._run_in_task(attempt(self._handler, message, run.state))

    async def _run_in_task(self, run: Coroutine[Any, Any, T]) -> T:
        async with self._slots:
            outcome = await asyncio.create_task(run)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # a sibling failed: the whole Spark task fails, not this message
        return outcome

    def _count_keyless(self, runs: Sequence[KeyRun]) -> None:
        """Count the messages without a key for the breaker, before any message is run."""
        if self._handler.key is None:
            return
        keyless: list[DeadLettered] = []
        for run in runs:
            if run.key is None and unpack_fields(run.entries[0].packed)[1] is None:
                refusal = check_key(self._handler, self._unpack_next(run)[0])
                keyless += [] if refusal is None else [refusal]
        self._breaker.on_keyless(keyless, of=sum(len(run.entries) for run in runs))

    def _admits(self, run: KeyRun, outcome: Outcome) -> bool:
        """Count an outcome for the breaker; return False if it must not be committed, as the breaker is open."""
        if isinstance(outcome, Done):
            self._breaker.on_processed()
        elif isinstance(outcome, DeadLettered):
            redriven = unpack_fields(run.entries[0].packed)[1] is not None
            return self._breaker.admits(outcome, redriven=redriven)
        return True

    def _add_outcome(self, run: KeyRun, message: Message, outcome: Done | DeadLettered) -> None:
        """Add a processed message's outcome to its run's effects."""
        effects = run.effects
        effects.add_message(message.id)
        if self._isolated_left > 0:
            effects.clear_crash_counts(message.id)
        if run.from_queue and message.attempt > 1:
            effects.clear_crash_counts(message.id + FAILED_SUFFIX, message.id + ERROR_SUFFIX)
        if isinstance(outcome, DeadLettered):
            effects.add_dead_letter(dead_letter_of(self._handler, message, outcome).items())
            self._staged_bytes += sum(map(len, message.pairs))
        else:
            effects.add_outputs(outcome.outputs)
            self._staged_bytes += len(outcome.state) + sum(sum(map(len, items)) for items in outcome.outputs)
            run.state = outcome.state
        run.covered.append(run.entries.popleft())
        run.attempt = 1

    # --- Committing ---

    def _stage_commit(self, run: KeyRun) -> None:
        """Add a run's effects to the commit buffer."""
        if run.effects.message_count:
            if run.key is not None and run.state != run.committed_state:
                run.effects.state = run.state
            self._staged.append(run)
            self._staged_messages += run.effects.message_count

    def _flush_if_full(self) -> None:
        if self._staged_messages >= COMMIT_MESSAGES or self._staged_bytes >= COMMIT_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Commit the buffer, then defer. Repeating is safe: Redis refuses what is committed, the reload drops it."""
        runs, self._staged, self._staged_messages, self._staged_bytes = self._staged, [], 0, 0
        if runs:
            self._commit(runs)
        deferred, self._to_defer = self._to_defer, []
        self._defer([run for run in deferred if run not in self._refused])

    def _commit(self, runs: Sequence[KeyRun]) -> None:
        effects: dict[str, list[Effects]] = defaultdict(list)
        for run in runs:
            effects[run.stream].append(run.effects)
        refused = {id(one) for one in self._retry_while_unavailable(lambda: self._commit_store.commit(effects))}
        for run in runs:
            metrics = self._metrics[run.stream]
            if id(run.effects) in refused:
                metrics.refused += 1
                self._refused |= dict.fromkeys((run, *run.others))
            else:
                metrics.committed += run.effects.message_count
                metrics.dead += len(run.effects.dead_letters)
                self._failures.dead_lettered(run.effects.dead_letters)
                for other in run.others:
                    other.covered = []
                run.on_committed()

    def _defer(self, runs: Iterable[KeyRun]) -> None:
        """Defer the remaining entries of `runs`, whose processed entries are all committed."""
        by_stream: dict[str, list[tuple[KeyRun, Deferral]]] = defaultdict(list)
        for run in runs:
            by_stream[run.stream].append((run, run.deferral()))
        for stream, some in by_stream.items():
            defer_all = partial(defer, self._commit_store, stream, [deferral for _, deferral in some])
            refused = {id(deferral) for deferral in self._retry_while_unavailable(defer_all)}
            metrics = self._metrics[stream]
            for run, deferral in some:
                if id(deferral) in refused:
                    metrics.refused += 1
                    self._refused[run] = None
                else:
                    metrics.deferred += len(deferral.ids)
                    run.entries.clear()

    def report(self) -> pa.RecordBatch:
        """Return the task's metrics, one row per stream; the first has what is of the whole task."""
        breaker = self._breaker.report()
        rows = [
            {
                "stream": stream,
                "last_id": str(metrics.last_id),
                **{name: getattr(metrics, name) for name in COUNTERS},
                "has_queues": stream in self._positions and self._may_have_queues(stream),
                "failures": None if at else self._failures.pack(),
                "trip": breaker["trip"],
                "causes": "{}" if at else breaker["causes"],
            }
            for at, (stream, metrics) in enumerate(self._metrics.items())
        ]
        return pa.RecordBatch.from_pylist(rows, schema=METRICS_SCHEMA)
