"""One Spark task of the handler engine: runs in an executor's Python worker.

The spine is `PartitionTask.process`: for each Arrow batch, make runs of one key's messages, load their marks and
state, drive every run through the handler, and commit. What is refused, because another execution of the same task
was faster, is loaded again and goes on from there.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from millstream.client import Client
from millstream.errors import Unfinished
from millstream.handlers import Handler
from millstream.ledger import ENTRY_MARK, KEY_MARK, Ledger, Standing, Unit
from millstream.lifecycle import Again, Dead, Done, Outcome, Parked, attempt, attempt_plain, letter, refuse_unkeyed
from millstream.model import ZERO_ID, EntryId, Message
from millstream.naming import REDRIVE_FIELD
from millstream.spark.alarm import Alarm
from millstream.spark.pace import Pace

COMMIT_MESSAGES = 500
COMMIT_BYTES = 1 << 20
CAUTIOUS_MESSAGES = 4 * COMMIT_MESSAGES

TALLY_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("last_id", pa.string()),
        ("messages", pa.int64()),
        ("committed", pa.int64()),
        ("dead", pa.int64()),
        ("retries", pa.int64()),
        ("refused", pa.int64()),
    ]
)

T = TypeVar("T")

_unpack = msgspec.msgpack.Decoder(list[bytes]).decode


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the driver sends to every task: the handler, where Redis is, and the run's token."""

    handler: Handler
    url: str
    token: int


@dataclass(slots=True)
class Tally:
    """What a task did on one stream."""

    last_id: EntryId
    messages: int = 0
    committed: int = 0
    dead: int = 0
    retries: int = 0
    refused: int = 0


@dataclass(slots=True)
class Entry:
    """One row: an entry id and its fields, still packed."""

    id: EntryId
    packed: bytes


@dataclass(slots=True, eq=False)
class Run:
    """The messages of one key of one stream, in order; or a single message that has no key.

    `entries` are still to do, `covered` are in `unit`, not committed yet; so are those of `others`.
    """

    stream: str
    key: bytes | None
    mark: bytes
    entries: deque[Entry]
    covered: list[Entry] = field(default_factory=list)
    unit: Unit = field(default_factory=lambda: Unit(b"", b""))
    state: bytes = b""
    committed_state: bytes = b""
    attempt: int = 1
    others: list["Run"] = field(default_factory=list)

    def resume(self, mark: bytes, state: bytes, frontier: EntryId | None) -> None:
        """Begin, or begin again, after what is committed by now."""
        self.entries.extendleft(reversed(self.covered))
        # A mark that is left over from a batch that died may lie below the frontier by now.
        done = max(EntryId.parse(mark) if mark else ZERO_ID, frontier or ZERO_ID)
        while self.entries and self.entries[0].id <= done:
            self.entries.popleft()
            self.attempt = 1
        self.state = self.committed_state = state
        self._begin_unit(mark)

    def accepted(self) -> None:
        """Its unit is committed; go on from there."""
        self.committed_state = self.state
        self._begin_unit(self.unit.last_id.encode())

    def _begin_unit(self, mark: bytes) -> None:
        self.covered = []
        self.others = []
        self.unit = Unit(self.mark, mark, self.key or b"")


def _check_finished(runs: Iterable[Run]) -> None:
    """Fail the task, so that Spark repeats it, if work was left undone: the frontier must not pass it."""
    for run in runs:
        if run.entries or run.covered:
            raise Unfinished(
                f"messages of stream {run.stream!r} were left undone from {(run.covered or run.entries)[0].id} on: a "
                "handler cancelled tasks that are not its own"
            )


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
        self._ledger = Ledger(
            client,
            app=handler.app,
            handler=handler.name,
            token=job.token,
            into=handler.into,
            into_maxlen=handler.into_maxlen,
        )
        self._token = job.token
        self._label = handler.label.encode()
        # While this is above 0, a message may be the one that killed an earlier attempt: each is tried by itself.
        self._cautious_left = CAUTIOUS_MESSAGES if retried else 0
        self._standings: dict[str, Standing] = {}
        self._tallies: dict[str, Tally] = {}
        self._outbox: list[Run] = []
        self._outbox_messages = 0
        self._outbox_bytes = 0
        self._refused: list[Run] = []
        self._alarm = Alarm()
        self._slots = asyncio.Semaphore(handler.concurrency)
        self._alone = asyncio.Lock()
        self._pace = Pace(handler.rate, self._ledger, client, what=handler.label)

    # The spine

    async def process(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Run every message of `batches` and commit its effects."""
        for batch in batches:
            runs = self._runs_of(batch)
            self._begin_streams({run.stream for run in runs})
            self._pace.expect(Counter(batch.column("stream").to_pylist()) if self._handler.rate else {})
            while runs:
                self._load(runs)
                await self._drive_all(runs)
                self._flush()
                _check_finished(run for run in runs if run not in self._refused)
                runs, self._refused = self._refused, []
                self._begin_streams({run.stream for run in runs}, again=True)

    async def _drive_all(self, runs: list[Run]) -> None:
        waiting = iter(runs)
        # In cautious mode one at a time, so that strikes fall on the message that runs and on no other.
        workers = self._handler.concurrency if self._handler.is_async and not self._cautious_left else 1
        async with asyncio.TaskGroup() as group:
            for _ in range(min(workers, len(runs))):
                group.create_task(self._work(waiting, group))

    async def _work(self, waiting: Iterator[Run], group: asyncio.TaskGroup) -> None:
        for run in waiting:
            await self._drive(run, waiting, group)

    async def _drive(self, run: Run, waiting: Iterator[Run], group: asyncio.TaskGroup) -> None:
        """Take one run through the handler, message by message."""
        while run.entries:
            message, is_meant = self._opened(run)
            if is_meant:
                if run.attempt == 1:
                    await self._pace.wait(run.stream)
                outcome = await self._outcome(run, message)
            else:
                outcome = Done((), run.state)
            if isinstance(outcome, Again):
                self._tallies[run.stream].retries += 1
                self._post(run)
                self._flush()
                if run in self._refused:
                    return
                # Another worker takes over the other keys while this one's key waits.
                group.create_task(self._work(waiting, group))
                await asyncio.sleep(outcome.delay_ms / 1000)
                run.attempt += 1
                continue
            assert not isinstance(outcome, Parked)  # a handler that parks does not get here: `check_runnable`
            self._settle(run, message, outcome)
            if self._cautious_left > 0 or run.unit.messages >= COMMIT_MESSAGES or self._outbox_bytes >= COMMIT_BYTES:
                self._cautious_left = max(0, self._cautious_left - 1)
                self._post(run)
                self._flush()
                if run in self._refused:
                    return
        self._post(run)
        self._flush_if_full()

    # Reading

    def _opened(self, run: Run) -> tuple[Message, bool]:
        """The next message of a run; False if it was redriven for another handler of the stream."""
        pairs, meant_for = open_fields(run.entries[0].packed)
        message = Message(run.stream, str(run.entries[0].id), pairs, run.key, run.attempt, self._token)
        return message, meant_for in (None, self._label)

    def _runs_of(self, batch: pa.RecordBatch) -> list[Run]:
        """Cut a sorted batch into runs of one stream and key; messages without a key stand alone."""
        runs: list[Run] = []
        last: tuple[str, bytes | None] | None = None
        columns = (batch.column(name).to_pylist() for name in ("stream", "key", "id_ms", "id_seq", "fields"))
        for stream, found, ms, seq, packed in zip(*columns, strict=True):
            key = found or None
            entry = Entry(EntryId(ms, seq), packed)
            if key is not None and (stream, key) == last:
                runs[-1].entries.append(entry)
            else:
                mark = KEY_MARK + key if key is not None else ENTRY_MARK + str(entry.id).encode()
                runs.append(Run(stream, key, mark, deque((entry,))))
                last = (stream, key)
            tally = self._tallies.get(stream)
            if tally is None:
                tally = self._tallies[stream] = Tally(entry.id)
            tally.messages += 1
            if entry.id > tally.last_id:
                tally.last_id = entry.id
        return runs

    def _begin_streams(self, streams: set[str], *, again: bool = False) -> None:
        """Learn where `streams` stand; `again`, since what refused a commit may be that a batch has ended meanwhile."""
        new = sorted(streams if again else streams - self._standings.keys())
        if new:
            standings = self._client.patiently(lambda: self._ledger.begin(new), what=self._handler.label)
            self._standings |= standings
            if any(standing.struck for standing in standings.values()):
                self._cautious_left = CAUTIOUS_MESSAGES

    def _load(self, runs: list[Run]) -> None:
        """Fetch marks and states of `runs`, and leave out what is committed."""
        wanted: dict[str, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
        for run in runs:
            marks, states = wanted[run.stream]
            marks.append(run.mark)
            if self._handler.wants_state and run.key is not None:
                states.append(run.key)
        found = self._client.patiently(lambda: self._ledger.load(wanted), what=self._handler.label)
        self._leave_out_done(runs)
        for run in runs:
            values = found[run.stream]
            state = values.get(b"s" + run.key, b"") if run.key is not None else b""
            run.resume(values.get(run.mark, b""), state, self._standings[run.stream].frontier)

    def _leave_out_done(self, runs: list[Run]) -> None:
        """Leave out what workers had committed beyond the frontier before this run took over from them."""
        floors = {stream: standing.floor for stream, standing in self._standings.items() if standing.floor}
        below = [run for run in runs if run.stream in floors and run.entries[0].id <= floors[run.stream]]
        for stream in {run.stream for run in below}:
            some = [run for run in below if run.stream == stream]
            ids = [str(entry.id) for run in some for entry in run.entries if entry.id <= floors[stream]]
            ask = partial(self._ledger.still_open, stream, ids)
            done = set(ids) - self._client.patiently(ask, what=self._handler.label)
            for run in some:
                run.entries = deque(entry for entry in run.entries if str(entry.id) not in done)

    # Running

    async def _outcome(self, run: Run, message: Message) -> Outcome:
        refusal = refuse_unkeyed(self._handler, message)
        if refusal is not None:
            return refusal
        if self._cautious_left > 0:
            async with self._alone:
                return await self._struck_attempt(run, message)
        return await self._attempt(run, message)

    async def _struck_attempt(self, run: Run, message: Message) -> Outcome:
        """Try it with a strike on it, which stays if the process dies of it."""
        strike = partial(self._ledger.strike, message.stream, message.id)
        before = self._client.patiently(strike, what=self._handler.label)
        if before >= max(1, self._handler.retry.attempts - 1):
            message.attempt = before + 1
            return Dead("crashed", f"the process ended each of the {before + 1} times that this message was tried")
        outcome = await self._attempt(run, message)
        if isinstance(outcome, Again):  # while it waits, the process may die of another
            self._client.patiently(partial(strike, by=-1), what=self._handler.label)
        return outcome

    async def _attempt(self, run: Run, message: Message) -> Outcome:
        if not self._handler.is_async:
            return attempt_plain(self._handler, message, run.state, self._alarm.guard)
        return await self._in_a_task(attempt(self._handler, message, run.state))

    async def _in_a_task(self, run: Coroutine[Any, Any, T]) -> T:
        async with self._slots:
            outcome = await asyncio.create_task(run)
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # a sibling has failed: the whole task is given up, not this message
        return outcome

    def _settle(self, run: Run, message: Message, outcome: Done | Dead) -> None:
        """Add a finished message's effects to its run's unit."""
        unit = run.unit
        unit.cover(message.id)
        if self._cautious_left > 0:
            unit.end_strikes(message.id)
        if isinstance(outcome, Dead):
            unit.add_dead(letter(self._handler, message, outcome).items())
            self._outbox_bytes += sum(map(len, message.pairs))
        else:
            unit.add_outputs(outcome.outputs)
            self._outbox_bytes += len(outcome.state) + sum(sum(map(len, items)) for items in outcome.outputs)
            run.state = outcome.state
        run.covered.append(run.entries.popleft())
        run.attempt = 1

    # Committing

    def _post(self, run: Run) -> None:
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
        if not self._outbox:
            return
        runs, self._outbox, self._outbox_messages, self._outbox_bytes = self._outbox, [], 0, 0
        units: dict[str, list[Unit]] = defaultdict(list)
        for run in runs:
            units[run.stream].append(run.unit)
        refused = self._client.patiently(lambda: self._ledger.commit(units), what=self._handler.label)
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

    def report(self) -> pa.RecordBatch:
        """One row per stream."""
        rows = [
            {
                "stream": stream,
                "last_id": str(t.last_id),
                "messages": t.messages,
                "committed": t.committed,
                "dead": t.dead,
                "retries": t.retries,
                "refused": t.refused,
            }
            for stream, t in self._tallies.items()
        ]
        return pa.RecordBatch.from_pylist(rows, schema=TALLY_SCHEMA)
