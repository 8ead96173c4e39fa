"""One Spark task of the handler engine: runs in an executor's Python worker.

The spine is `PartitionTask._work_off`: load the marks and states of runs of one key's messages, drive every run through
the handler, and commit. What is refused, because another execution of the same task was faster, is loaded again and goes
on from there. What has to wait, for long or for a person, is set aside (`millstream.delivery.deferral`), and its batch goes on.
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
LINE_MESSAGES, LEAST_OF_LINE = 5_000, 10
"""What a job that works lines off has in memory: so many messages of all its lines, but at least some of each."""
MOST_WAIT_MS = 1_000.0
"""What a batch waits for a key's next attempts in all; the key is set aside if it takes longer."""

_MOST_SLEEP_S = 1.0

T = TypeVar("T")

_unpack = msgspec.msgpack.Decoder(list[bytes]).decode
_pack = msgspec.msgpack.Encoder().encode
_FOR_NOBODY = _pack([REDRIVE_FIELD, b""])


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the driver sends to every task: the handler, where Redis is, and the run's token."""

    handler: Handler
    url: str = field(repr=False)
    token: int


@dataclass(slots=True)
class Entry:
    """One row: an entry id and its fields, still packed."""

    id: EntryId
    packed: bytes


class DeferReason(NamedTuple):
    """Why the rest of a run is set aside; by itself, since others of its key wait. See Aside."""

    how: How = "join"
    detail: Arg = ""
    failed: int | None = None


@dataclass(slots=True, eq=False)
class KeyRun:
    """The messages of one key of one stream, in order; or a single message that has no key.

    * `entries`: those that are still to do; `covered`: those in `unit`, not committed yet; so are those of `others`
    * `in_line`: they were set aside before, and run from the line of the key
    * `waited_ms`: for how long its batch has waited for it
    * `leaving`: why the rest of it is to be set aside
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

    def resume(self, mark: bytes, state: bytes, frontier: EntryId | None) -> None:
        """Begin, or begin again, after what is committed by now."""
        self.entries.extendleft(reversed(self.covered))
        # A mark that is left over from a batch that died may lie below the frontier by now.
        done = max(EntryId.parse(mark) if mark else ZERO_ID, frontier or ZERO_ID)
        while self.entries and self.entries[0].id <= done:
            self.entries.popleft()
            self.attempt = 1
        self._begin(state, mark)

    def take_line(self, waiting: DeferredKey) -> None:
        """Begin, or begin again, with what its line has."""
        self.entries = deque(
            Entry(EntryId.parse(one), _FOR_NOBODY if pairs is None else _pack(pairs)) for one, pairs in waiting.entries
        )
        self.attempt = waiting.failed + 1
        self._begin(waiting.state, b"")

    def _begin(self, state: bytes, mark: bytes) -> None:
        self.state = self.committed_state = state
        self.leaving = DeferReason()
        self._begin_unit(mark)

    def aside(self) -> Deferral:
        """What is to be set aside of it, once its unit is committed."""
        ids = [str(entry.id) for entry in self.entries]
        how, detail, failed = self.leaving
        return Deferral(
            line=self.mark, expected=self.unit.expected, how=how, detail=detail, failed=failed,
            ids=ids[:1] if self.in_line else ids,
        )  # fmt: skip

    def accepted(self) -> None:
        """Its unit is committed; go on from there."""
        self.committed_state = self.state
        self._begin_unit(self.unit.last_id.encode())

    def _begin_unit(self, mark: bytes) -> None:
        self.covered = []
        self.others = []
        self.unit = Effects(self.mark, IN_LINE if self.in_line else mark, self.key or b"")


def _check_finished(runs: Iterable[KeyRun]) -> None:
    """Fail the task, so that Spark repeats it, if work was left undone: the frontier must not pass it."""
    for run in runs:
        if run.entries or run.covered:
            raise Unfinished(
                f"messages of stream {run.stream!r} were left undone from {(run.covered or run.entries)[0].id} on: a "
                "handler cancelled tasks that are not its own"
            )


def _partition_moves(client: Client, handler: Handler) -> "PartitionMigration":
    from millstream.spark.engine.key_migration import PartitionMigration

    return PartitionMigration(client, handler)


def open_fields(packed: bytes) -> tuple[list[bytes], bytes | None]:
    """Unpack an entry's fields; return them and, if it was redriven, the handler that it is meant for."""
    pairs = _unpack(packed)
    if pairs and pairs[0] == REDRIVE_FIELD:
        return pairs[2:], pairs[1]
    return pairs, None


class PartitionTask:
    """Runs a handler over the sorted rows of one partition. `retried`: an earlier attempt of the task has died."""

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
        # While this is above 0, a message may be the one that killed an earlier attempt: each is tried by itself.
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
        self._pace = RateLimit(handler.rate, self._ledger, ask=self._patiently, sleep=self._sleep)
        self._moves: PartitionMigration | None = None
        if handler.partitions is not None:
            self._moves = self._patiently(lambda: _partition_moves(client, handler))

    # The spine

    async def process(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Run every message of `batches` and commit its effects."""
        for batch in batches:
            self._pace.expect(Counter(batch.column("stream").to_pylist()) if self._handler.rate else {})
            await self._work_off(self._runs_of(batch))

    async def catch_up(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Run what waits in lines: `batches` have the columns `stream` and `line`. Of each line, the first few hundred."""
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
        waiting = iter(runs)
        # In cautious mode one at a time, so that strikes fall on the message that runs and on no other.
        workers = self._handler.concurrency if self._handler.is_async and not self._cautious_left else 1
        async with self._pulse.beating(), asyncio.TaskGroup() as group:
            for _ in range(min(workers, len(runs))):
                group.create_task(self._work(waiting, group))

    async def _work(self, waiting: Iterator[KeyRun], group: asyncio.TaskGroup) -> None:
        for run in waiting:
            await self._drive(run, waiting, group)

    async def _drive(self, run: KeyRun, waiting: Iterator[KeyRun], group: asyncio.TaskGroup) -> None:
        """Take one run through the handler, message by message."""
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
                # Another worker takes over the other keys while this one's key waits.
                group.create_task(self._work(waiting, group))
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

    def _leave(self, run: KeyRun, leaving: DeferReason) -> None:
        """Have the rest of a run set aside, after what is done of it is committed."""
        run.leaving = leaving
        self._post(run)
        self._leavers.append(run)
        self._outbox_messages += 1
        if self._cautious_left > 0:
            self._flush()
        else:
            self._flush_if_full()

    async def _wait(self, runs: Iterable[KeyRun], outcome: RetryLater) -> None:
        """Wait for the next attempt on the first message of each."""
        await self._sleep(outcome.delay_ms)
        for run in runs:
            run.waited_ms += outcome.delay_ms
            run.attempt += 1

    async def _sleep(self, duration_ms: float) -> None:
        """Wait. What runs meanwhile and is over has left the alarm on."""
        until_s = asyncio.get_running_loop().time() + duration_ms / 1000
        while (left_s := until_s - asyncio.get_running_loop().time()) > 0:
            self._rest()
            await asyncio.sleep(min(left_s, _MOST_SLEEP_S))

    def _rest(self) -> None:
        if not self._handler.is_async:  # of an async one the pulse goes on
            self._alarm.rest()

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Ask Redis, for as long as it takes: while nothing else can run, nothing else is late."""
        self._rest()
        with self._pulse.held():
            return self._client.patiently(ask, what=self._handler.label)

    # Reading

    def _opened(self, run: KeyRun) -> tuple[Message, bool]:
        """The next message of a run; False if it was redriven for another handler of the stream."""
        entry = run.entries[0]
        pairs, meant_for = open_fields(entry.packed)
        message = Message(run.stream, str(entry.id), pairs, run.key, run.attempt, self._token)
        if meant_for is None:
            return message, True
        if meant_for == self._label and self._moves is not None and run.key is not None:
            # A dead letter goes back to where it came from, and its key may have left since.
            send = partial(self._moves.send_on, run.stream, run.key, message.id, _unpack(entry.packed))
            return message, not self._patiently(send)
        return message, meant_for == self._label

    def _runs_of(self, batch: pa.RecordBatch) -> list[KeyRun]:
        """Cut a sorted batch into runs of one stream and key; messages without a key stand alone."""
        runs: list[KeyRun] = []
        last: tuple[str, bytes | None] | None = None
        columns = (batch.column(name).to_pylist() for name in ("stream", "key", "id_ms", "id_seq", "fields"))
        for stream, found, ms, seq, packed in zip(*columns, strict=True):
            key = found or None
            entry = Entry(EntryId(ms, seq), packed)
            if key is not None and (stream, key) == last:
                runs[-1].entries.append(entry)
            else:
                mark = KEY_MARK + key if key is not None else ENTRY_MARK + str(entry.id).encode()
                runs.append(KeyRun(stream, key, mark, deque((entry,))))
                last = (stream, key)
            tally = self._tally(stream, entry.id)
            tally.messages += 1
            if entry.id > tally.last_id:
                tally.last_id = entry.id
        return runs

    def _run_of_line(self, stream: str, line: bytes) -> KeyRun:
        self._tally(stream, ZERO_ID)
        return KeyRun(stream, line[1:] if line.startswith(KEY_MARK) else None, line, deque(), in_line=True)

    def _tally(self, stream: str, entry_id: EntryId) -> TaskMetrics:
        tally = self._tallies.get(stream)
        if tally is None:
            tally = self._tallies[stream] = TaskMetrics(entry_id)
        return tally

    def _begin_streams(self, streams: set[str], *, again: bool = False) -> None:
        """Learn where `streams` stand; `again`, since what refused a commit may be that a batch has ended meanwhile."""
        new = sorted(streams if again else streams - self._standings.keys())
        if new:
            standings = self._patiently(lambda: self._ledger.begin(new))
            self._standings |= standings
            if any(standing.struck for standing in standings.values()):
                self._cautious_left = CAUTIOUS_MESSAGES

    def _load(self, runs: list[KeyRun]) -> None:
        """Fetch what `runs` go on from, leave out what is committed, and set aside what waits behind others of its key."""
        in_line = [run for run in runs if run.in_line]
        for run in in_line:
            self._load_line(run, max(LEAST_OF_LINE, LINE_MESSAGES // len(in_line)))
        self._load_new([run for run in runs if not run.in_line])

    def _load_line(self, run: KeyRun, most: int) -> None:
        keys = self._ledger.keys(run.stream)
        ask = partial(read_queue, self._client, keys, run.mark, most)
        waiting = self._patiently(ask)
        gone = [one for one, pairs in waiting.entries if pairs is None]
        if gone:
            logger.warning(
                "%d messages of stream %s that were set aside were trimmed or deleted before they were processed: %s",
                len(gone), run.stream, ", ".join(gone[:10]),
            )  # fmt: skip
        run.take_line(waiting)

    def _load_new(self, runs: list[KeyRun]) -> None:
        # Asked first: a key that waits no more by then may have left a newer state, but an older one could not be told.
        waiting = self._waiting(runs)
        wanted: dict[str, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
        for run in runs:
            marks, states = wanted[run.stream]
            marks.append(run.mark)
            if self._handler.wants_state and run.key is not None:
                states.append(run.key)
        found = self._patiently(lambda: self._ledger.load(wanted))
        self._leave_out_done(runs)
        for run in runs:
            values = found[run.stream]
            state = values.get(b"s" + run.key, b"") if run.key is not None else b""
            run.resume(values.get(run.mark, b""), state, self._standings[run.stream].frontier)
        self._put_aside([run for run in runs if run.entries and (run.stream, run.mark) in waiting])

    def _waiting(self, runs: Iterable[KeyRun]) -> set[tuple[str, bytes]]:
        """Stream and line of those of which others of the same key wait."""
        marks: dict[str, list[bytes]] = defaultdict(list)
        for run in runs:
            if run.key is not None and (self._moves is not None or self._may_wait(run.stream)):
                marks[run.stream].append(run.mark)
        waiting: set[tuple[str, bytes]] = set()
        for stream, some in marks.items():
            if self._moves is not None:
                wait = partial(self._moves.expect, stream, some)
                self._patiently(wait)
            look = partial(deferred_keys, self._ledger, stream, some)
            waiting |= {(stream, mark) for mark in self._patiently(look)}
        return waiting

    def _may_wait(self, stream: str) -> bool:
        return self._standings[stream].lines or self._tallies[stream].aside > 0

    def _leave_out_done(self, runs: list[KeyRun]) -> None:
        """Leave out what workers had committed beyond the frontier before this run took over from them."""
        floors = {stream: standing.floor for stream, standing in self._standings.items() if standing.floor}
        below = [
            run for run in runs if run.stream in floors and run.entries and run.entries[0].id <= floors[run.stream]
        ]
        for stream in {run.stream for run in below}:
            some = [run for run in below if run.stream == stream]
            ids = [str(entry.id) for run in some for entry in run.entries if entry.id <= floors[stream]]
            ask = partial(self._ledger.still_open, stream, ids)
            done = set(ids) - self._patiently(ask)
            for run in some:
                run.entries = deque(entry for entry in run.entries if str(entry.id) not in done)

    # Running

    async def _outcome(self, run: KeyRun, message: Message) -> Outcome:
        refusal = refuse_unkeyed(self._handler, message)
        if refusal is not None:
            return refusal
        if self._cautious_left > 0:
            async with self._alone:
                return await self._struck_attempt(run, message)
        return await self._attempt(run, message)

    async def _struck_attempt(self, run: KeyRun, message: Message) -> Outcome:
        """Try it with a strike on it, which stays if the process dies of it."""
        strike = partial(self._ledger.strike, message.stream, message.id)
        before = self._patiently(strike)
        if before >= max(1, self._handler.retry.attempts - 1):
            message.attempt = before + 1
            dead = DeadLettered(
                "crashed", f"the process ended each of the {before + 1} times that this message was tried"
            )
            return dead if self._handler.key is None else given_up(self._handler, dead)
        outcome = await self._attempt(run, message)
        if isinstance(outcome, RetryLater):  # while it waits, the process may die of another
            self._patiently(partial(strike, by=-1))
        return outcome

    async def _attempt(self, run: KeyRun, message: Message) -> Outcome:
        if not self._handler.is_async:
            return attempt_plain(self._handler, message, run.state, self._alarm.guard)
        return await self._in_a_task(attempt(self._handler, message, run.state))

    async def _in_a_task(self, run: Coroutine[Any, Any, T]) -> T:
        async with self._slots:
            outcome = await asyncio.create_task(run)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # a sibling has failed: the whole task is given up, not this message
        return outcome

    def _settle(self, run: KeyRun, message: Message, outcome: Done | DeadLettered) -> None:
        """Add a finished message's effects to its run's unit."""
        unit = run.unit
        unit.cover(message.id)
        if self._cautious_left > 0:
            unit.end_strikes(message.id)
        if run.in_line and message.attempt > 1:
            unit.end_strikes(message.id + FAILED)
        if isinstance(outcome, DeadLettered):
            unit.add_dead(letter(self._handler, message, outcome).items())
            self._outbox_bytes += sum(map(len, message.pairs))
        else:
            unit.add_outputs(outcome.outputs)
            self._outbox_bytes += len(outcome.state) + sum(sum(map(len, items)) for items in outcome.outputs)
            run.state = outcome.state
        run.covered.append(run.entries.popleft())
        run.attempt = 1

    # Committing

    def _post(self, run: KeyRun) -> None:
        """Put a run's unit into the outbox."""
        if run.unit.messages:
            if run.key is not None and run.state != run.committed_state:
                run.unit.state = run.state
            self._outbox.append(run)
            self._outbox_messages += run.unit.messages

    def _flush_if_full(self) -> None:
        if self._outbox_messages >= COMMIT_MESSAGES or self._outbox_bytes >= COMMIT_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Commit the outbox. Repeating a commit is safe: what was executed already is refused, then left out."""
        runs, self._outbox, self._outbox_messages, self._outbox_bytes = self._outbox, [], 0, 0
        if runs:
            self._commit(runs)
        leavers, self._leavers = self._leavers, []
        self._put_aside([run for run in leavers if run not in self._refused])

    def _commit(self, runs: Sequence[KeyRun]) -> None:
        units: dict[str, list[Effects]] = defaultdict(list)
        for run in runs:
            units[run.stream].append(run.unit)
        refused = self._patiently(lambda: self._ledger.commit(units))
        refused_marks = {id(unit) for unit in refused}
        for run in runs:
            tally = self._tallies[run.stream]
            if id(run.unit) in refused_marks:
                tally.refused += 1
                self._refused += (run, *run.others)
            else:
                tally.committed += run.unit.messages
                tally.dead += len(run.unit.dead)
                for other in run.others:
                    other.covered = []
                run.accepted()

    def _put_aside(self, runs: Iterable[KeyRun]) -> None:
        """Set aside the rest of `runs`, of which nothing is uncommitted."""
        by_stream: dict[str, list[tuple[KeyRun, Deferral]]] = defaultdict(list)
        for run in runs:
            by_stream[run.stream].append((run, run.aside()))
        for stream, some in by_stream.items():
            put = partial(defer, self._ledger, stream, [aside for _, aside in some])
            refused = {id(aside) for aside in self._patiently(put)}
            tally = self._tallies[stream]
            for run, aside in some:
                if id(aside) in refused:
                    tally.refused += 1
                    self._refused.append(run)
                else:
                    tally.aside += len(aside.ids)
                    run.entries.clear()

    def report(self) -> pa.RecordBatch:
        """One row per stream."""
        rows = [
            {
                "stream": stream,
                "last_id": str(t.last_id),
                **{name: getattr(t, name) for name in COUNTED},
                "lines": self._may_wait(stream),
            }
            for stream, t in self._tallies.items()
        ]
        return pa.RecordBatch.from_pylist(rows, schema=TALLY_SCHEMA)
