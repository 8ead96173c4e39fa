"""RunLoader: makes key runs of the messages of blocks, and loads from Redis where each of them continues."""

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import pyarrow as pa

from millstream.delivery.cancellation import read_cancellations
from millstream.delivery.commit_store import ENTRY_PREFIX, KEY_PREFIX, CommitStore, CommittedPosition
from millstream.delivery.deferral import deferred_keys, read_queue
from millstream.delivery.rate_override import RateOverride
from millstream.handlers.consecutive import unpack
from millstream.handlers.handler import Handler
from millstream.model import ZERO_ID, EntryId, Message
from millstream.redis_client.client import Client
from millstream.redis_client.replies import pairs_of
from millstream.spark.engine.attempt_runner import CallRedis
from millstream.spark.engine.key_run import Entry, KeyRun, unpack_fields
from millstream.spark.engine.task_metrics import TaskMetrics
from millstream.spark.key_blocks import Chunk

if TYPE_CHECKING:
    from millstream.spark.engine.key_migration import PartitionMigration

logger = logging.getLogger(__name__)

_new = tuple.__new__
"""Makes a named tuple of the values that it holds; its class does the same at three times the cost."""

QUEUE_MESSAGES = 5_000
"""Messages that a task for deferred keys loads at most, over all its key queues..."""
MIN_QUEUE_MESSAGES = 10
"""...but at least so many of each."""


class RunLoader:
    """Makes and loads the runs of one task.

    * `metrics`: the task's counters of each stream; the loader counts there what it reads
    * `call`: calls Redis until it answers
    """

    def __init__(
        self,
        handler: Handler,
        client: Client,
        commit_store: CommitStore,
        metrics: dict[str, TaskMetrics],
        call: CallRedis,
    ) -> None:
        self._handler = handler
        self._label = handler.label.encode()
        self._client = client
        self._commit_store = commit_store
        self._metrics = metrics
        self._call = call
        self._positions: dict[str, CommittedPosition] = {}
        self.loaded_rates: dict[str, RateOverride | None] = {}
        """What operators had set on the streams whose positions were loaded last."""
        self._migration: PartitionMigration | None = None
        if handler.partitions is not None:
            self._migration = call(lambda: _partition_migration(client, handler))

    # --- From blocks to runs ---

    def split_into_runs(self, chunk: Chunk) -> list[KeyRun]:
        """Make a run of the messages of each stream and key; each message without a key is a run of its own."""
        runs: list[KeyRun] = []
        make = partial(KeyRun, may_be_redriven=chunk.may_be_redriven)
        for (stream, key), messages in chunk.messages.items():
            entries = map(_new, repeat(Entry), pairs_of(messages))
            if key is not None:
                runs.append(make(stream, key, KEY_PREFIX + key, deque(entries)))
            else:
                runs += [make(stream, None, ENTRY_PREFIX + entry.id_text, deque((entry,))) for entry in entries]
            # A key's messages are in the order of their stream, but the shuffle spreads those without a key.
            is_ordered = key is not None or self._handler.key is None
            last = EntryId.parse(messages[-2]) if is_ordered else max(map(EntryId.parse, messages[::2]))
            metrics = self._metrics_of(stream, last)
            metrics.messages += len(messages) // 2
            metrics.last_id = max(metrics.last_id, last)
        return runs

    def runs_of_queues(self, batch: pa.RecordBatch) -> list[KeyRun]:
        """Return a run for each of the key queues that a batch with the columns `stream` and `queue` names."""
        return [self._run_of_queue(**row) for row in batch.to_pylist()]

    def _run_of_queue(self, stream: str, queue: bytes) -> KeyRun:
        self._metrics_of(stream, ZERO_ID)
        return KeyRun(stream, queue[1:] if queue.startswith(KEY_PREFIX) else None, queue, deque(), from_queue=True)

    def _metrics_of(self, stream: str, entry_id: EntryId) -> TaskMetrics:
        metrics = self._metrics.get(stream)
        if metrics is None:
            metrics = self._metrics[stream] = TaskMetrics(entry_id)
        return metrics

    def next_message(self, run: KeyRun, token: int, *, after: int = 0) -> tuple[Message, bool]:
        """Return the next message of a run, `after` so many, and False if it is for another handler of the stream alone."""
        entry = run.entries[after]
        pairs, meant_for = unpack_fields(entry.packed)
        message = Message(run.stream, entry.id_text.decode(), pairs, run.key, run.attempt, token)
        if meant_for is None:
            return message, True
        if meant_for == self._label and self._migration is not None and run.key is not None:
            # A dead letter is redriven to its old partition, and its key may have migrated since.
            forward = partial(self._migration.forward, run.stream, run.key, message.id, unpack(entry.packed))
            return message, not self._call(forward)
        return message, meant_for == self._label

    # --- Where runs continue ---

    def load_positions(self, streams: Collection[str], *, again: bool = False) -> bool:
        """Load the committed positions of `streams`; `again` after a refusal, as a batch may have ended meanwhile.

        Return True if a process may have died of one of their entries.
        """
        missing = sorted(streams if again else set(streams) - self._positions.keys())
        self.loaded_rates = {}
        if not missing:
            return False
        positions = self._call(lambda: self._commit_store.begin_run(missing))
        self._positions |= positions
        self.loaded_rates = {stream: position.rate_override for stream, position in positions.items()}
        return any(position.suspects for position in positions.values())

    def load(self, runs: Iterable[KeyRun]) -> list[KeyRun]:
        """Load key offsets and states, and drop committed entries; return the runs whose keys are deferred already."""
        runs = list(runs)
        queued = [run for run in runs if run.from_queue]
        for run in queued:
            self._load_queue(run, max(MIN_QUEUE_MESSAGES, QUEUE_MESSAGES // len(queued)))
        deferred = self._load_keys([run for run in runs if not run.from_queue])
        if self._handler.retry.then == "cancel":
            self._load_cancellations([run for run in runs if run.key is not None])
        return deferred

    def may_have_queues(self, stream: str) -> bool:
        """Return True if the stream may have key queues."""
        position = self._positions.get(stream)
        return position is not None and (position.has_queues or self._metrics[stream].deferred > 0)

    def _load_queue(self, run: KeyRun, limit: int) -> None:
        keys = self._commit_store.keys(run.stream)
        read = partial(read_queue, self._client, keys, run.offset_field, limit)
        queue = self._call(read)
        deleted = [one for one, pairs in queue.entries if pairs is None]
        if deleted:
            logger.warning(
                "%d deferred messages of stream %s were trimmed or deleted before processing; skipping them: %s",
                len(deleted),
                run.stream,
                ", ".join(deleted[:10]),
            )
        run.load_queue(queue)

    def _load_keys(self, runs: list[KeyRun]) -> list[KeyRun]:
        # Before the states: so the state of a key whose queue has just emptied is loaded after its last commit. In the
        # other order a stale state would go undetected.
        deferred = self._deferred_queues(runs)
        wanted: dict[str, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
        for run in runs:
            offset_fields, keys = wanted[run.stream]
            offset_fields.append(run.offset_field)
            if self._handler.wants_state and run.key is not None:
                keys.append(run.key)
        loaded = self._call(lambda: self._commit_store.load(wanted))
        self._drop_committed(runs)
        for run in runs:
            values = loaded[run.stream]
            state = values.get(b"s" + run.key, b"") if run.key is not None else b""
            run.resume(values.get(run.offset_field, b""), state, self._positions[run.stream].committed_id)
        return [run for run in runs if run.entries and (run.stream, run.offset_field) in deferred]

    def _load_cancellations(self, runs: Iterable[KeyRun]) -> None:
        """Load which keys have canceled messages, after their offsets and queues: if another execution cancels messages
        in between, it has committed the one before them, and the commit of this one is refused.
        """
        by_stream: dict[str, list[KeyRun]] = defaultdict(list)
        for run in runs:
            by_stream[run.stream].append(run)
        for stream, some in by_stream.items():
            names = [run.offset_field for run in some]
            read = partial(read_cancellations, self._client, self._commit_store.keys(stream), names)
            found = self._call(read)
            for run in some:
                run.cancellation = found.get(run.offset_field)

    def _deferred_queues(self, runs: Iterable[KeyRun]) -> set[tuple[str, bytes]]:
        """Stream and key queue of the runs whose key already has deferred messages."""
        queues: dict[str, list[bytes]] = defaultdict(list)
        for run in runs:
            if run.key is not None and (self._migration is not None or self.may_have_queues(run.stream)):
                queues[run.stream].append(run.offset_field)
        deferred: set[tuple[str, bytes]] = set()
        for stream, names in queues.items():
            if self._migration is not None:
                self._call(partial(self._migration.await_keys, stream, names))
            read = partial(deferred_keys, self._commit_store, stream, names)
            deferred |= {(stream, name) for name in self._call(read)}
        return deferred

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
            ids = [entry.id_text.decode() for run in some for entry in run.entries if entry.id <= takeover_ids[stream]]
            incomplete = partial(self._commit_store.incomplete, stream, ids)
            committed = set(ids) - self._call(incomplete)
            for run in some:
                run.entries = deque(entry for entry in run.entries if entry.id_text.decode() not in committed)


def _partition_migration(client: Client, handler: Handler) -> "PartitionMigration":
    from millstream.spark.engine.key_migration import PartitionMigration

    return PartitionMigration(client, handler)
