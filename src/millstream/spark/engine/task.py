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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from millstream.delivery.commit_store import (
    ENTRY_MARK,
    FAILED,
    IN_LINE,
    KEY_MARK,
    CommitStore,
    CommittedPosition,
    Effects,
)
from millstream.delivery.deferral import Deferral, DeferredKey, How, defer, deferred_keys, read_queue
from millstream.errors import Unfinished
from millstream.handlers.attempt import (
    DeadLettered,
    Done,
    Outcome,
    Parked,
    RetryLater,
    attempt,
    attempt_plain,
    given_up,
    letter,
    refuse_unkeyed,
)
from millstream.handlers.handler import Handler
from millstream.model import ZERO_ID, EntryId, Message
from millstream.redis_client.client import Arg, Client
from millstream.redis_client.key_names import REDRIVE_FIELD
from millstream.spark.engine.loop_heartbeat import LoopHeartbeat
from millstream.spark.engine.rate_limit import RateLimit
from millstream.spark.engine.task_metrics import COUNTED, TALLY_SCHEMA, TaskMetrics
from millstream.spark.engine.time_limit import AttemptTimeLimit

if TYPE_CHECKING:
    from millstream.spark.engine.key_migration import PartitionMigration

logger = logging.getLogger(__name__)

COMMIT_MESSAGES = 500
COMMIT_BYTES = 1 << 20
CAUTIOUS_MESSAGES = 4 * COMMIT_MESSAGES
LINE_MESSAGES = 5_000
"""Messages that a task for deferred keys loads at most, over all its key queues..."""
LEAST_OF_LINE = 10
"""...but at least so many of each."""
MOST_WAIT_MS = 1_000.0
"""Total back-off of one key that a batch waits out, in milliseconds; a key that needs longer is deferred."""

_MAX_SLEEP_S = 1.0

T = TypeVar("T")

_unpack = msgspec.msgpack.Decoder(list[bytes]).decode
_pack = msgspec.msgpack.Encoder().encode
_DELETED = _pack([REDRIVE_FIELD, b""])  # a deleted entry: meant for no handler, so it is skipped


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the driver sends to every task: the handler, the URL of Redis, and the run's fencing token."""

    handler: Handler
    url: str = field(repr=False)
    token: int


@dataclass(slots=True)
class Entry:
    """One row: an entry id and its fields, still packed as msgpack."""

    id: EntryId
    packed: bytes


class DeferReason(NamedTuple):
    """Why the rest of a run is deferred; the default: its key already has deferred messages. See `Deferral`."""

    how: How = "join"
    detail: Arg = ""
    failed: int | None = None


@dataclass(slots=True, eq=False)
class KeyRun:
    """The messages of one key of one stream, in order; or a single message without a key.

    * `offset_field`: the field of its key offset
    * `entries`: not processed yet; `covered`: processed, in `effects`, not committed yet
    * `others`: runs that a batch commits with the `effects` of this one
    * `from_queue`: the messages were deferred before, and run from the key queue
    * `waited_ms`: back-off that its batch has waited out for it so far
    * `defer_reason`: why its remaining entries are to be deferred
    """

    stream: str
    key: bytes | None
    mark: bytes
    entries: deque[Entry]
    covered: list[Entry] = field(default_factory=list)
    unit: Effects = field(default_factory=lambda: Effects(b"", b""))
    state: bytes = b""
    committed_state: bytes = b""
    attempt: int = 1
    others: list["KeyRun"] = field(default_factory=list)
    in_line: bool = False
    waited_ms: float = 0.0
    leaving: DeferReason = field(default_factory=DeferReason)

    def resume(self, key_offset: bytes, state: bytes, committed_id: EntryId | None) -> None:
        """Start, or restart, after the last committed entry."""
        self.entries.extendleft(reversed(self.covered))
        # The key offset of a batch that died may lie below the committed offset by now.
        last_done = max(EntryId.parse(key_offset) if key_offset else ZERO_ID, committed_id or ZERO_ID)
        while self.entries and self.entries[0].id <= last_done:
            self.entries.popleft()
            self.attempt = 1
        self._begin(state, key_offset)

    def take_line(self, queue: DeferredKey) -> None:
        """Start, or restart, with the entries of its key queue."""
        self.entries = deque(
            Entry(EntryId.parse(one), _DELETED if pairs is None else _pack(pairs)) for one, pairs in queue.entries
        )
        self.attempt = queue.failed + 1
        self._begin(queue.state, b"")

    def _begin(self, state: bytes, key_offset: bytes) -> None:
        self.state = self.committed_state = state
        self.leaving = DeferReason()
        self._begin_unit(key_offset)

    def aside(self) -> Deferral:
        """The deferral of its remaining entries; valid once its effects are committed."""
        ids = [str(entry.id) for entry in self.entries]
        how, detail, failed = self.leaving
        return Deferral(
            line=self.mark, expected=self.unit.expected, how=how, detail=detail, failed=failed,
            ids=ids[:1] if self.in_line else ids,
        )  # fmt: skip

    def accepted(self) -> None:
        """Continue after a successful commit of its effects."""
        self.committed_state = self.state
        self._begin_unit(self.unit.last_id.encode())

    def _begin_unit(self, key_offset: bytes) -> None:
        self.covered = []
        self.others = []
        self.unit = Effects(self.mark, IN_LINE if self.in_line else key_offset, self.key or b"")


def _check_finished(runs: Iterable[KeyRun]) -> None:
    """Raise Unfinished if messages are left, so Spark repeats the task: the committed offset must not pass them."""
    for run in runs:
        if run.entries or run.covered:
            raise Unfinished(
                f"messages of stream {run.stream!r} from {(run.covered or run.entries)[0].id} on are unfinished: the "
                "handler cancelled tasks that are not its own; let it cancel only tasks that it created"
            )


def _partition_migration(client: Client, handler: Handler) -> "PartitionMigration":
    from millstream.spark.engine.key_migration import PartitionMigration

    return PartitionMigration(client, handler)


def open_fields(packed: bytes) -> tuple[list[bytes], bytes | None]:
    """Unpack an entry's fields; return them and, if it was redriven, the handler that it was redriven for."""
    pairs = _unpack(packed)
    if pairs and pairs[0] == REDRIVE_FIELD:
        return pairs[2:], pairs[1]
    return pairs, None


class PartitionTask:
    """Runs a handler over the sorted rows of one partition. `retried`: an earlier attempt of the task failed."""

    def __init__(self, job: Job, client: Client, *, retried: bool) -> None:
        handler = job.handler
        self._handler = handler
        self._client = client
        self._ledger = CommitStore(
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
        self._cautious_left = CAUTIOUS_MESSAGES if retried else 0
        self._standings: dict[str, CommittedPosition] = {}
        self._tallies: dict[str, TaskMetrics] = {}
        self._outbox: list[KeyRun] = []
        self._leavers: list[KeyRun] = []
        self._outbox_messages = 0
        self._outbox_bytes = 0
        self._refused: list[KeyRun] = []
        self._alarm = AttemptTimeLimit()
        self._slots = asyncio.Semaphore(handler.concurrency)
        self._alone = asyncio.Lock()
        self._pulse = LoopHeartbeat(handler.time_limit_ms if handler.is_async else None)
        self._pace = RateLimit(handler.rate, self._ledger, call=self._patiently, sleep=self._sleep)
        self._moves: PartitionMigration | None = None
        if handler.partitions is not None:
            self._moves = self._patiently(lambda: _partition_migration(client, handler))

    # --- Processing ---

    async def process(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Run every message of `batches` and commit its effects."""
        for batch in batches:
            self._pace.expect(Counter(batch.column("stream").to_pylist()) if self._handler.rate else {})
            await self._work_off(self._runs_of(batch))

    async def catch_up(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Run deferred keys; `batches` have the columns `stream` and `line`. Runs the head of each key queue only."""
        for batch in batches:
            await self._work_off([self._run_of_line(**row) for row in batch.to_pylist()])

    async def _work_off(self, runs: list[KeyRun]) -> None:
        self._begin_streams({run.stream for run in runs})
        try:
            while runs:
                self._load(runs)
                await self._drive_all([run for run in runs if run not in self._refused])
                self._flush()
                _check_finished(run for run in runs if run not in self._refused)
                runs, self._refused = self._refused, []
                self._begin_streams({run.stream for run in runs}, again=True)
        finally:
            self._rest()

    async def _drive_all(self, runs: list[KeyRun]) -> None:
        remaining = iter(runs)
        # Isolated messages run one at a time, so that a crash counts against the running message only.
        coroutines = self._handler.concurrency if self._handler.is_async and not self._cautious_left else 1
        async with self._pulse.beating(), asyncio.TaskGroup() as group:
            for _ in range(min(coroutines, len(runs))):
                group.create_task(self._work(remaining, group))

    async def _work(self, remaining: Iterator[KeyRun], group: asyncio.TaskGroup) -> None:
        for run in remaining:
            await self._drive(run, remaining, group)

    async def _drive(self, run: KeyRun, remaining: Iterator[KeyRun], group: asyncio.TaskGroup) -> None:
        """Run the handler on the messages of one key, one by one."""
        while run.entries:
            message, is_meant = self._opened(run)
            if is_meant:
                if run.attempt == 1:
                    await self._pace.wait(run.stream)
                outcome = await self._outcome(run, message)
            else:
                outcome = Done((), run.state)
            if isinstance(outcome, RetryLater):
                self._tallies[run.stream].retries += 1
                if self._has_to_leave(run, outcome):
                    self._leave(run, DeferReason("later", round(outcome.delay_ms), message.attempt))
                    return
                self._post(run)
                self._flush()
                if run in self._refused:
                    return
                # A new coroutine runs the other keys while this key backs off.
                group.create_task(self._work(remaining, group))
                await self._wait([run], outcome)
                continue
            if isinstance(outcome, Parked):
                self._leave(run, DeferReason("park", f"{outcome.reason}: {outcome.error}", message.attempt))
                return
            self._settle(run, message, outcome)
            if self._cautious_left > 0 or run.unit.messages >= COMMIT_MESSAGES or self._outbox_bytes >= COMMIT_BYTES:
                self._cautious_left = max(0, self._cautious_left - 1)
                self._post(run)
                self._flush()
                if run in self._refused:
                    return
        self._post(run)
        self._flush_if_full()

    def _has_to_leave(self, run: KeyRun, outcome: RetryLater) -> bool:
        return run.waited_ms + outcome.delay_ms > MOST_WAIT_MS

    def _leave(self, run: KeyRun, reason: DeferReason) -> None:
        """Defer the remaining entries of a run once its processed ones are committed."""
        run.leaving = reason
        self._post(run)
        self._leavers.append(run)
        self._outbox_messages += 1
        if self._cautious_left > 0:
            self._flush()
        else:
            self._flush_if_full()

    async def _wait(self, runs: Iterable[KeyRun], outcome: RetryLater) -> None:
        """Back off before the next attempt on the first message of each run."""
        await self._sleep(outcome.delay_ms)
        for run in runs:
            run.waited_ms += outcome.delay_ms
            run.attempt += 1

    async def _sleep(self, duration_ms: float) -> None:
        """Sleep, disarming the time limit that other attempts leave armed when they end meanwhile."""
        until_s = asyncio.get_running_loop().time() + duration_ms / 1000
        while (left_s := until_s - asyncio.get_running_loop().time()) > 0:
            self._rest()
            await asyncio.sleep(min(left_s, _MAX_SLEEP_S))

    def _rest(self) -> None:
        if not self._handler.is_async:  # the heartbeat of an async handler's loop goes on
            self._alarm.rest()

    def _patiently(self, call: Callable[[], T]) -> T:
        """Call Redis until it answers. The watchdog pauses meanwhile: the call blocks the loop, not a handler."""
        self._rest()
        with self._pulse.held():
            return self._client.patiently(call, what=self._handler.label)

    # --- Loading ---

    def _opened(self, run: KeyRun) -> tuple[Message, bool]:
        """The next message of a run, and False if it was redriven for another handler of the stream."""
        entry = run.entries[0]
        pairs, meant_for = open_fields(entry.packed)
        message = Message(run.stream, str(entry.id), pairs, run.key, run.attempt, self._token)
        if meant_for is None:
            return message, True
        if meant_for == self._label and self._moves is not None and run.key is not None:
            # A dead letter is redriven to its old partition, and its key may have migrated since.
            forward = partial(self._moves.send_on, run.stream, run.key, message.id, _unpack(entry.packed))
            return message, not self._patiently(forward)
        return message, meant_for == self._label

    def _runs_of(self, batch: pa.RecordBatch) -> list[KeyRun]:
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
                offset_field = KEY_MARK + key if key is not None else ENTRY_MARK + str(entry.id).encode()
                runs.append(KeyRun(stream, key, offset_field, deque((entry,))))
                last = (stream, key)
            metrics = self._tally(stream, entry.id)
            metrics.messages += 1
            if entry.id > metrics.last_id:
                metrics.last_id = entry.id
        return runs

    def _run_of_line(self, stream: str, line: bytes) -> KeyRun:
        self._tally(stream, ZERO_ID)
        return KeyRun(stream, line[1:] if line.startswith(KEY_MARK) else None, line, deque(), in_line=True)

    def _tally(self, stream: str, entry_id: EntryId) -> TaskMetrics:
        metrics = self._tallies.get(stream)
        if metrics is None:
            metrics = self._tallies[stream] = TaskMetrics(entry_id)
        return metrics

    def _begin_streams(self, streams: set[str], *, again: bool = False) -> None:
        """Load the committed positions of `streams`; `again` after a refusal, as a batch may have ended meanwhile."""
        missing = sorted(streams if again else streams - self._standings.keys())
        if missing:
            positions = self._patiently(lambda: self._ledger.begin(missing))
            self._standings |= positions
            if any(position.struck for position in positions.values()):
                self._cautious_left = CAUTIOUS_MESSAGES

    def _load(self, runs: list[KeyRun]) -> None:
        """Load key offsets and states, drop committed entries, and defer runs of keys with deferred messages."""
        queued = [run for run in runs if run.in_line]
        for run in queued:
            self._load_line(run, max(LEAST_OF_LINE, LINE_MESSAGES // len(queued)))
        self._load_new([run for run in runs if not run.in_line])

    def _load_line(self, run: KeyRun, limit: int) -> None:
        keys = self._ledger.keys(run.stream)
        read = partial(read_queue, self._client, keys, run.mark, limit)
        queue = self._patiently(read)
        deleted = [one for one, pairs in queue.entries if pairs is None]
        if deleted:
            logger.warning(
                "%d deferred messages of stream %s were trimmed or deleted before processing; skipping them: %s",
                len(deleted), run.stream, ", ".join(deleted[:10]),
            )  # fmt: skip
        run.take_line(queue)

    def _load_new(self, runs: list[KeyRun]) -> None:
        # Before the states: so the state of a key whose queue has just emptied is loaded after its last commit. In the
        # other order a stale state would go undetected.
        deferred = self._waiting(runs)
        wanted: dict[str, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
        for run in runs:
            offset_fields, keys = wanted[run.stream]
            offset_fields.append(run.mark)
            if self._handler.wants_state and run.key is not None:
                keys.append(run.key)
        loaded = self._patiently(lambda: self._ledger.load(wanted))
        self._leave_out_done(runs)
        for run in runs:
            values = loaded[run.stream]
            state = values.get(b"s" + run.key, b"") if run.key is not None else b""
            run.resume(values.get(run.mark, b""), state, self._standings[run.stream].frontier)
        self._put_aside([run for run in runs if run.entries and (run.stream, run.mark) in deferred])

    def _waiting(self, runs: Iterable[KeyRun]) -> set[tuple[str, bytes]]:
        """Stream and key queue of the runs whose key already has deferred messages."""
        queues: dict[str, list[bytes]] = defaultdict(list)
        for run in runs:
            if run.key is not None and (self._moves is not None or self._may_wait(run.stream)):
                queues[run.stream].append(run.mark)
        deferred: set[tuple[str, bytes]] = set()
        for stream, names in queues.items():
            if self._moves is not None:
                await_keys = partial(self._moves.expect, stream, names)
                self._patiently(await_keys)
            read = partial(deferred_keys, self._ledger, stream, names)
            deferred |= {(stream, name) for name in self._patiently(read)}
        return deferred

    def _may_wait(self, stream: str) -> bool:
        return self._standings[stream].lines or self._tallies[stream].aside > 0

    def _leave_out_done(self, runs: list[KeyRun]) -> None:
        """Drop entries that workers committed beyond the committed offset before this run took over from them."""
        takeover_ids = {stream: position.floor for stream, position in self._standings.items() if position.floor}
        affected = [
            run
            for run in runs
            if run.stream in takeover_ids and run.entries and run.entries[0].id <= takeover_ids[run.stream]
        ]
        for stream in {run.stream for run in affected}:
            some = [run for run in affected if run.stream == stream]
            ids = [str(entry.id) for run in some for entry in run.entries if entry.id <= takeover_ids[stream]]
            incomplete = partial(self._ledger.still_open, stream, ids)
            committed = set(ids) - self._patiently(incomplete)
            for run in some:
                run.entries = deque(entry for entry in run.entries if str(entry.id) not in committed)

    # --- Attempts ---

    async def _outcome(self, run: KeyRun, message: Message) -> Outcome:
        refusal = refuse_unkeyed(self._handler, message)
        if refusal is not None:
            return refusal
        if self._cautious_left > 0:
            async with self._alone:
                return await self._struck_attempt(run, message)
        return await self._attempt(run, message)

    async def _struck_attempt(self, run: KeyRun, message: Message) -> Outcome:
        """Attempt a message in isolation: its crash count goes up first, and stays up if the process dies."""
        count_crash = partial(self._ledger.strike, message.stream, message.id)
        crashes = self._patiently(count_crash)
        if crashes >= max(1, self._handler.retry.attempts - 1):
            message.attempt = crashes + 1
            dead = DeadLettered("crashed", f"the process ended in each of the {crashes + 1} attempts on this message")
            return dead if self._handler.key is None else given_up(self._handler, dead)
        outcome = await self._attempt(run, message)
        if isinstance(outcome, RetryLater):  # while it backs off, another message may kill the process
            self._patiently(partial(count_crash, by=-1))
        return outcome

    async def _attempt(self, run: KeyRun, message: Message) -> Outcome:
        if not self._handler.is_async:
            return attempt_plain(self._handler, message, run.state, self._alarm.guard)
        return await self._in_a_task(attempt(self._handler, message, run.state))

    async def _in_a_task(self, run: Coroutine[Any, Any, T]) -> T:
        async with self._slots:
            outcome = await asyncio.create_task(run)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # a sibling failed: the whole Spark task fails, not this message
        return outcome

    def _settle(self, run: KeyRun, message: Message, outcome: Done | DeadLettered) -> None:
        """Add a processed message's outcome to its run's effects."""
        effects = run.unit
        effects.cover(message.id)
        if self._cautious_left > 0:
            effects.end_strikes(message.id)
        if run.in_line and message.attempt > 1:
            effects.end_strikes(message.id + FAILED)
        if isinstance(outcome, DeadLettered):
            effects.add_dead(letter(self._handler, message, outcome).items())
            self._outbox_bytes += sum(map(len, message.pairs))
        else:
            effects.add_outputs(outcome.outputs)
            self._outbox_bytes += len(outcome.state) + sum(sum(map(len, items)) for items in outcome.outputs)
            run.state = outcome.state
        run.covered.append(run.entries.popleft())
        run.attempt = 1

    # --- Committing ---

    def _post(self, run: KeyRun) -> None:
        """Add a run's effects to the commit buffer."""
        if run.unit.messages:
            if run.key is not None and run.state != run.committed_state:
                run.unit.state = run.state
            self._outbox.append(run)
            self._outbox_messages += run.unit.messages

    def _flush_if_full(self) -> None:
        if self._outbox_messages >= COMMIT_MESSAGES or self._outbox_bytes >= COMMIT_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Commit the buffer, then defer. Repeating is safe: Redis refuses what is committed, the reload drops it."""
        runs, self._outbox, self._outbox_messages, self._outbox_bytes = self._outbox, [], 0, 0
        if runs:
            self._commit(runs)
        deferred, self._leavers = self._leavers, []
        self._put_aside([run for run in deferred if run not in self._refused])

    def _commit(self, runs: Sequence[KeyRun]) -> None:
        effects: dict[str, list[Effects]] = defaultdict(list)
        for run in runs:
            effects[run.stream].append(run.unit)
        refused = {id(one) for one in self._patiently(lambda: self._ledger.commit(effects))}
        for run in runs:
            metrics = self._tallies[run.stream]
            if id(run.unit) in refused:
                metrics.refused += 1
                self._refused += (run, *run.others)
            else:
                metrics.committed += run.unit.messages
                metrics.dead += len(run.unit.dead)
                for other in run.others:
                    other.covered = []
                run.accepted()

    def _put_aside(self, runs: Iterable[KeyRun]) -> None:
        """Defer the remaining entries of `runs`, whose processed entries are all committed."""
        by_stream: dict[str, list[tuple[KeyRun, Deferral]]] = defaultdict(list)
        for run in runs:
            by_stream[run.stream].append((run, run.aside()))
        for stream, some in by_stream.items():
            defer_all = partial(defer, self._ledger, stream, [deferral for _, deferral in some])
            refused = {id(deferral) for deferral in self._patiently(defer_all)}
            metrics = self._tallies[stream]
            for run, deferral in some:
                if id(deferral) in refused:
                    metrics.refused += 1
                    self._refused.append(run)
                else:
                    metrics.aside += len(deferral.ids)
                    run.entries.clear()

    def report(self) -> pa.RecordBatch:
        """Return the task's metrics, one row per stream."""
        rows = [
            {
                "stream": stream,
                "last_id": str(metrics.last_id),
                **{name: getattr(metrics, name) for name in COUNTED},
                "lines": self._may_wait(stream),
            }
            for stream, metrics in self._tallies.items()
        ]
        return pa.RecordBatch.from_pylist(rows, schema=TALLY_SCHEMA)
