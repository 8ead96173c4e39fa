"""ReliableStream: one worker's membership in a stream that it shares with other workers through a consumer group.

An entry that was read is pending until its effects are committed, and pending with one worker at a time. The one commit
script of all engines acknowledges it together with its effects, and checks which worker holds it. Entries that a dead
or hanging worker left pending are claimed by another. (The layers: O. Zakharchenko, "The Redis Streams We Have Known
and Loved", 2023.)
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from millstream.delivery.cancellation import Cancellation
from millstream.delivery.commit_store import ENTRY_PREFIX, KEY_PREFIX, Checkpoint, CommitStore, WorkerKind
from millstream.delivery.effects import ISOLATED_SUFFIX, Effects, U, crash_counts_of
from millstream.delivery.held_entries import HeldEntries
from millstream.delivery.pause import Pause
from millstream.delivery.rate_override import RateOverride
from millstream.errors import GroupMissing, MillstreamError, StaleOwner
from millstream.groups import Batch, Consumer, Group, PendingEntry
from millstream.handlers.dead_letter import DeadLetter, Reason
from millstream.redis_client.call import Call
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import WAITING, is_edited, own_pairs, worker_name_key
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.replies import pairs_of
from millstream.redis_client.resp import Reply
from millstream.redis_client.scripts import Script

logger = logging.getLogger(__name__)

READ_ENTRIES = Script("commit/read_entries", allow_oom=True)
TRIM = Script("commit/trim")
COMPARE_AND_SET = Script("shared/compare_and_set", allow_oom=True)

NACK_IDLE_MS = 86_400_000
"""Idle time of a nacked entry, in milliseconds: longer than any worker's claim time."""

NO_LIMIT = 2**53
"""More bytes, or entries, than there can be."""

_REJOINS = 3
T = TypeVar("T")

_MAX_TRIMMED = 10_000
_WATCHED = 100


# Slots: without them each of thousands would get a dict of its own, as most attributes are set late.
@dataclass(eq=False, slots=True)
class Delivery:
    """One entry in flight on a worker.

    * `id`, `pairs`: the entry, as Redis sent it
    * `attempt`: 1 plus the number of failed attempts
    * `deliveries`: how often Redis has delivered it; above 1, it may have crashed other workers
    * `state_since_ms`: when it began to wait or to run, by the worker's clock; `running` is True if it runs
    * `finished`: its attempt has finished and its outcome waits for the commit
    * `committing`: its commit is under way
    * `due_ms`: when its next attempt may begin, by the worker's clock
    * `in_batch`: it runs in a batch of several
    * `isolated_by`: the isolation mark under which this process runs it in isolation; "" if it does not
    * `attempt_ms`: duration of the last attempt
    * `lease`: for a handler with a key, the key lease under which it was claimed
    * `has_waited`: it has waited for newer code or for its limit, and no attempt has failed; or its run is being given up
    * `asks`: it asks for a permit, and its run begins after that
    """

    stream: "ReliableStream"
    id: bytes
    pairs: Sequence[bytes]
    attempt: int = 1
    deliveries: int = 1
    lease: "LeasedKey | None" = None
    state_since_ms: float = field(init=False, default=0.0)
    running: bool = field(init=False, default=False)
    finished: bool = field(init=False, default=False)
    committing: bool = field(init=False, default=False)
    due_ms: float = field(init=False, default=0.0)
    in_batch: bool = field(init=False, default=False)
    isolated_by: str = field(init=False, default="")
    attempt_ms: float = field(init=False, default=0.0)
    has_waited: bool = field(init=False, default=False)
    asks: bool = field(init=False, default=False)

    entry_ref: tuple[str, bytes] = field(init=False)
    """Its stream and id."""
    size: int = field(init=False)
    """Total bytes of its names and values."""

    def __post_init__(self) -> None:
        self.entry_ref = (self.stream.stream, self.id)
        self.size = sum(map(len, self.pairs))

    @property
    def may_have_crash_counts(self) -> bool:
        """True if it has failed or waited, or if Redis has delivered it before: its commit clears what was counted."""
        return self.attempt > 1 or self.deliveries > 1 or self.has_waited


class LeasedKey(msgspec.Struct, eq=False):
    """A worker's lease of one key queue.

    * `queue`: the queue's name: b"k" and the key, or b"i" and the id of an entry without a key
    * `token`: the fencing token under which the worker commits
    * `state`: the key's state after the entries that have run so far
    * `entries`: those that were claimed with it, in order; `queued`: those of them that have not begun
    * `expires_ms`: until when it is certain to last, by the worker's clock
    * `in_flight_count`: how many of its entries were claimed and are not committed
    * `committed_state`: the key's state in Redis
    * `last_run`: the last entry that was run under it, once that is known
    * `releasing`: its release is under way; `returned`: its entries that have not begun are counted as returned
    * `cancellation`: which of its entries an earlier dead letter of the key has canceled
    * `expired`: another worker may have leased the queue: nothing more may begin
    * `key`: the key, or None if the entry has none
    * `fence`: the number in its token, greater than that of every earlier lease of the queue
    """

    queue: bytes
    token: bytes
    state: bytes
    expires_ms: float
    entries: Sequence[Delivery] = ()
    queued: deque[Delivery] = msgspec.field(default_factory=deque)
    in_flight_count: int = 0
    committed_state: bytes = b""
    last_run: Delivery | None = None
    releasing: bool = False
    returned: bool = False
    expired: bool = False
    cancellation: Cancellation | None = None
    key: bytes | None = None
    fence: int = 0

    def __post_init__(self) -> None:
        self.key = self.queue[1:] if self.queue.startswith(KEY_PREFIX) else None
        self.fence = int(self.token.partition(b" ")[0])

    def clear(self) -> None:
        """Drop the references to its entries at its end: each refers back to it, a cycle for the garbage collector."""
        self.entries, self.last_run = (), None


class ReliableStream:
    """One worker's membership in one stream for one handler. Threads may share it as they may share its client.

    * `app`, `handler`: whose progress it is; they name the consumer group and the keys in Redis
    * `consumer`: this worker's name, unique among the workers that live at the same time
    * `into`, `into_maxlen`: the output stream, and the length it is trimmed to
    * `start`: where a handler without progress on the stream begins
    * `on_trimmed`: called with the number of pending entries that were found to be trimmed or deleted

    Every method raises RedisError; those that send the token raise StaleOwner once Spark has taken over. All methods
    except those that fetch new entries join again by themselves if the group is gone.
    """

    kind: ClassVar[WorkerKind] = "workers"
    consumer_idle_ms = 3_600_000
    """Idle time in milliseconds after which a consumer may be removed; see `remove_idle_consumers`."""

    def __init__(
        self,
        client: Client,
        stream: str,
        *,
        app: str,
        handler: str,
        consumer: str,
        into: str | None = None,
        into_maxlen: int | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        on_trimmed: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.stream = stream
        self.consumer = consumer
        self._client = client
        self._store = CommitStore(
            client, app=app, handler=handler, into=into, into_maxlen=into_maxlen, consumer=consumer
        )
        self._owner = (app, handler)
        self._start: Literal["0", "$"] = "0" if start == "earliest" else "$"
        self._group = Group(client, stream, self._store.keys(stream).group)
        self._reader = Consumer(client, group=self._group.name, name=consumer, streams=[stream])
        self._on_trimmed = on_trimmed
        self._incarnation = secrets.token_hex(4)
        self._calls = count(1)
        self._commits = count(1)
        self.commit_count = 0
        """How many calls of `commit` of this process have committed entries: another number after each of them."""
        self._committed_by_spark: frozenset[bytes] = frozenset()
        self._held = HeldEntries(consumer)
        self.claim_room_bytes: Callable[[], int] = lambda: NO_LIMIT
        """Returns how many bytes of entries may be claimed now; one entry may be in any case."""
        self.max_takeover_epoch: int | None = None
        """Server time in microseconds: this worker takes over from no Spark run that began later. None: from any."""
        self.leaving = False  # then it must read nothing new of the stream
        self.on_stream_error: Callable[[MillstreamError], None] | None = None
        """Called with an error that concerns only this stream, where it is one of many; None raises the error."""
        self.pause: Pause | None = None
        """The handler's pause that is stored in Redis, as of the last `refresh`."""
        self.rate_override: RateOverride | None = None
        """The handler's rate that an operator has set, as of the last `refresh` or refused reservation."""
        self.is_held: Callable[[], bool] = lambda: False  # whether this process must read nothing, whatever Redis says

    @property
    def paused(self) -> bool:
        """True if the handler is paused, or if this process must read nothing."""
        return self.pause is not None or self.is_held()

    @property
    def readable(self) -> bool:
        """True if new entries may be read from it now."""
        return not (self.paused or self.leaving)

    @property
    def token(self) -> int:
        """The fencing token of the workers, once this one has joined."""
        return self._store.token

    def let_states_expire(self, state_ttl_ms: int | None) -> None:
        """Let states expire so many milliseconds after the last commit that set them; None: never. Call it before `join`."""
        self._store.state_ttl_ms = state_ttl_ms

    @property
    def group(self) -> str:
        """The consumer group's name."""
        return self._group.name

    def join(self) -> None:
        """Join the workers of the stream. The first one takes over from Spark what is not committed there.

        Creates the group, and the stream, if they are missing; a group that was lost is recreated at its committed id.
        Raises AccessDenied if the Redis user lacks a right that is needed later.
        """
        before = self.token
        self._store, lost = self._store.join_workers(self.stream, self._start, self.kind, self.max_takeover_epoch)
        # If Redis loses all progress later, "latest" would skip the entries added since.
        self._start = "0"
        if lost:
            at = self._client.execute("HGET", self._store.keys(self.stream).meta, "committed_id") or b"0-0"
            logger.warning(
                "consumer group %s of stream %s was lost; recreated at %s. Entries with ids up to that are treated as "
                "processed, even if the stream was recreated",
                *(self._group.name, self.stream, at.decode()),
            )
        elif before and before != self.token:
            logger.warning(
                "Redis lost the progress of consumer group %s on stream %s, or a Spark run owned it meanwhile; workers "
                "process the entries of the stream anew",
                *(self._group.name, self.stream),
            )
        self._committed_by_spark = frozenset(self._store.committed_entries(self.stream))

    def join_like(self, other: "ReliableStream") -> None:
        """Share the membership of `other`, the same worker on the same stream, which joined over another connection."""
        self._store = self._store.with_token(other.token)
        self._start = "0"
        self._committed_by_spark = other._committed_by_spark

    def remove_idle_consumers(self) -> list[str]:
        """Remove the group's consumers that belong to workers which have ended; return their names.

        These are consumers without pending entries, idle for `consumer_idle_ms`, and whose names no supervisor holds. The step
        that removes a consumer checks the first two again, so no pending entry is dropped. A worker without a
        supervisor that was idle for so long becomes a consumer again with its next entry.
        """
        return self._with_rejoin(self._remove_idle_consumers)

    def _remove_idle_consumers(self) -> list[str]:
        silent = [
            one.name for one in self._group.consumers() if one.idle_ms >= self.consumer_idle_ms and not one.pending
        ]
        others = [name for name in silent if name not in (self.consumer, WAITING)]
        held = call_all(self._client, [("EXISTS", worker_name_key(self._owner[0], name)) for name in others])
        gone = [name for name, is_held in zip(others, held, strict=True) if not is_held]
        return self._group.delete_idle_consumers(self.consumer_idle_ms, only=gone) if gone else []

    def refresh(self) -> None:
        """Refresh whether the stream is paused and its rate, and check that workers still own it."""
        self.pause, self.rate_override = self._with_rejoin(lambda: self._store.check(self.stream))

    def refresh_call(self) -> Call[None]:
        """Return the call that `refresh` makes, for callers that pipeline many streams. An error reply repeats it."""
        check = self._store.check_call(self.stream)

        def apply(reply: Reply) -> None:
            try:
                self.pause, self.rate_override = check.parse(reply)
            except StaleOwner:
                self.refresh()  # which joins again, if that is enough

        return Call(check.command, apply, on_error=lambda _: self.refresh())

    def store_pause(self, pause: Pause) -> None:
        """Pause the handler here, for all its workers. May safely be repeated."""
        self._store.set_paused([self.stream], paused=True, why=pause)

    # Reading

    def fetch(self, *, count: int, block_ms: int = 0) -> list[Delivery]:
        """Fetch up to `count` new entries, waiting up to `block_ms` milliseconds for the first (0: do not wait).

        The client's timeout must be longer than that. Raises GroupMissing if the group is gone: join again.
        """
        return self.to_deliveries(self._reader.read_new(count=count, block_ms=block_ms))

    def fetch_call(self, *, count: int, max_bytes: int) -> Call[tuple[int, Iterator[Delivery]]]:
        """Return the call that fetches up to `count` new entries, of at most `max_bytes` if they are several; never waits.

        Its result: how many were fetched, and those of them that are to be processed (`to_deliveries`), made as read.
        """
        args = (self.group, self.consumer, count, max_bytes)
        return Call(READ_ENTRIES.command((self.stream,), args), self._parse_fetch)

    def fetch_within(self, *, count: int, max_bytes: int) -> list[Delivery]:
        """Make the call of `fetch_call`. Raises GroupMissing as `fetch` does."""
        return list(self._client.run(self.fetch_call(count=count, max_bytes=max_bytes))[1])

    def _parse_fetch(self, reply: Reply) -> tuple[int, Iterator[Delivery]]:
        return len(reply) // 2, self._new_deliveries(pairs_of(reply))

    def to_deliveries(self, batches: Iterable[Batch]) -> list[Delivery]:
        """Return the fetched entries, without (but acknowledging) those that Spark committed beyond its
        committed id.
        """
        return list(self._new_deliveries(entry for batch in batches for entry in batch.raw))

    def _new_deliveries(self, entries: Iterable[Sequence[Any]]) -> Iterator[Delivery]:
        if self._committed_by_spark:
            entries = list(entries)
            done = [entry_id for entry_id, _ in entries if entry_id in self._committed_by_spark]
            if done:
                self._group.ack(done)
            entries = [entry for entry in entries if entry[0] not in self._committed_by_spark]
        for entry_id, pairs in entries:  # a generator: a caller may send its next read before these are made
            yield Delivery(self, entry_id, pairs)

    def claim_idle(
        self, *, excluding: Container[bytes] = (), idle_ms: int = 0, own: bool = False, count: int = 100
    ) -> list[Delivery]:
        """Claim up to `count` entries that have been pending for `idle_ms` milliseconds, lowest id first.

        `own`: only entries already pending with this worker, such as those of its previous process. `excluding`: ids to
        leave alone. Never waits. Trimmed entries are logged, since they can never be processed.
        """
        return self._with_rejoin(lambda: self._claim_idle(excluding, idle_ms, own, count))

    def _claim_idle(self, excluding: Container[bytes], idle_ms: int, own: bool, count: int) -> list[Delivery]:
        pending = self._group.pending
        while self.claim_room_bytes():
            found = pending.iter_entries(consumer=self.consumer if own else None, min_idle_ms=idle_ms)
            wanted = list(islice((one for one in found if one.id not in excluding), count))
            claimed = self._claim_entries(wanted, idle_ms)
            # If all of these are gone from the stream, XCLAIM has taken them off the pending list: try the next.
            if claimed or not wanted:
                return claimed
        return []

    def may_claim_call(self, idle_ms: int) -> Call[bool]:
        """Return the call that checks whether `claim_idle` may find entries, for callers that pipeline many streams."""
        return self._group.pending.has_idle_call(idle_ms)

    def claim_stuck(self, *, longest_ms: float, now_ms: float) -> list[Delivery]:
        """Claim entries that another consumer has held for `longest_ms`, even though it keeps renewing its claims.

        Reading pending entries again resets their idle time, so a consumer could hold them for ever. This worker
        measures the holding time: call it regularly, with the time of a monotonic clock. It watches the 100 lowest
        pending entries.
        """
        return self._with_rejoin(lambda: self._claim_stuck(longest_ms, now_ms))

    def _claim_stuck(self, longest_ms: float, now_ms: float) -> list[Delivery]:
        pending = self._group.pending.entries(count=_WATCHED)
        return self._claim_entries(self._held.find_stuck(pending, longest_ms, now_ms), 0)

    def has_stuck_call(self, *, longest_ms: float, now_ms: float) -> Call[bool]:
        """Return the call that checks whether `claim_stuck` may find entries, for callers that pipeline many streams."""
        call = self._group.pending.lowest_call(_WATCHED)

        def has_stuck(reply: Reply) -> bool:
            return bool(self._held.find_stuck(call.parse(reply), longest_ms, now_ms))

        return Call(call.command, has_stuck, on_error=lambda _: True)

    def _claim_entries(self, wanted: Iterable[PendingEntry], idle_ms: int) -> list[Delivery]:
        times = {one.id: one.deliveries for one in wanted}
        claimed = [entry for some in self._claim_within_room(list(times), idle_ms) for entry in some.raw]
        failed = self._store.failed_attempts(self.stream, [entry_id for entry_id, _ in claimed])
        return [
            Delivery(self, entry_id, pairs, before + 1, times[entry_id] + 1)
            for (entry_id, pairs), before in zip(claimed, failed, strict=True)
        ]

    def _claim_within_room(self, ids: Sequence[bytes], idle_ms: int) -> Iterator[Batch]:
        """Claim in growing steps until the room is used up: sizes are not known before."""
        left, step = self.claim_room_bytes(), 1
        while ids and left > 0:
            some, ids = ids[:step], ids[step:]
            batch = self._group.pending.claim(some, consumer=self.consumer, min_idle_ms=idle_ms)
            self._report_trimmed(set(some) - set(batch.ids))
            size = sum(len(part) for _, pairs in batch.raw for part in pairs)
            left -= size
            step = max(1, min(2 * step, left * len(batch) // size)) if size else 2 * step
            yield batch

    def report_trimmed(self, missing: Iterable[bytes]) -> None:
        """Log and count those of the entries that could not be claimed or renewed which are gone from the stream."""
        self._with_rejoin(lambda: self._report_trimmed(missing))

    def _report_trimmed(self, missing: Iterable[bytes]) -> None:
        gone = [
            entry_id
            for entry_id in sorted(missing)
            if not self._group.pending.entries(entry_id, entry_id, count=1)
            and not self._client.execute("XRANGE", self.stream, entry_id, entry_id)
        ]
        if gone:
            self._log_trimmed(gone)

    def _log_trimmed(self, gone: Sequence[bytes]) -> None:
        some = ", ".join(entry_id.decode() for entry_id in gone[:10])
        logger.warning(
            "%d pending entries of stream %s were trimmed or deleted before they were processed: %s",
            *(len(gone), self.stream, some),
        )
        self._on_trimmed(len(gone))

    # Claims

    def renew_claims(self, ids: Sequence[bytes]) -> list[bytes]:
        """Renew the claims on entries, so that other workers do not claim them; return those that are lost already."""
        return self._set_idle_time(ids, 0)

    def nack(self, ids: Sequence[bytes], *, idle_ms: int = NACK_IDLE_MS) -> list[bytes]:
        """Nack entries: make them claimable, and lower their delivery counts; return those that were lost already.

        They are pending with the consumer WAITING, and count as idle for `idle_ms` (at least 1): another worker claims
        them once that reaches its claim time, by default at once.
        """
        return self._set_idle_time(ids, max(1, idle_ms))

    def _set_idle_time(self, ids: Sequence[bytes], idle_ms: int) -> list[bytes]:
        return self._with_rejoin(lambda: self._store.set_idle_time(self.stream, ids, idle_ms))

    def reserve_rate(self, rate: float, count: int, override: RateOverride | None) -> float | None:
        """Reserve `count` messages of `rate` a second, which all workers share; return the wait until then, in ms.

        None if `override` is not the rate that an operator has set: `rate_override` is, now.
        """
        wait_ms = self._store.reserve_rate(self.stream, rate, count, override)
        if wait_ms is None:
            self.rate_override = self._store.rate_override(self.stream)
        return wait_ms

    # Committing

    def effects_of(self, delivery: Delivery, *rest: Delivery) -> Effects:
        """Return an empty commit unit for `delivery`, or for a whole batch together, to fill and to commit."""
        entry_id = delivery.id.decode()
        # Positional, as keyword arguments would double the cost, and there is one unit per message.
        unit = Effects(ENTRY_PREFIX + delivery.id, b"", b"", None, entry_id, entry_id, 1)
        if delivery.may_have_crash_counts:
            unit.clear_crash_counts(*crash_counts_of(entry_id))
        if is_edited(delivery.pairs):
            unit.add_copy(entry_id)
        if rest:
            unit.other_ids = [one.id.decode() for one in rest]
            unit.message_count += len(rest)
            for one, other_id in zip(rest, unit.other_ids, strict=True):
                if one.may_have_crash_counts:
                    unit.clear_crash_counts(*crash_counts_of(other_id))
                if is_edited(one.pairs):
                    unit.add_copy(other_id)
        return unit

    def new_call_number(self) -> str:
        """Return a number for a commit that may have to be repeated; greater than those before."""
        return f"{self._incarnation}:{next(self._calls)}"

    def commit(self, units: Sequence[U], *, allow_oom: bool = False, call_number: str = "") -> list[U]:
        """Commit and acknowledge in one atomic step; return the units that were refused, as `CommitStore.commit` does.

        `allow_oom`: even at maxmemory; only for units without effects. May safely be repeated: with the same
        `call_number`, from `new_call_number`, a repetition gets the first reply, if no other call came in between.
        """
        refused = self._with_rejoin(  # a lambda: joining again makes another store
            lambda: self._store.commit({self.stream: units}, allow_oom=allow_oom, call_number=call_number)
        )
        return self._note_commit(units, refused)

    def commit_call(self, units: Sequence[U], call_number: str) -> Call[list[U]]:
        """Return the call that `commit` makes. If the reply is an error or is lost, `commit` with its `call_number`."""
        call = self._store.commit_call(self.stream, units, call_number)
        return Call(call.command, lambda reply: self._note_commit(units, call.parse(reply)))

    def _note_commit(self, units: Sequence[U], refused: list[U]) -> list[U]:
        if len(refused) < len(units):
            self.commit_count = next(self._commits)
        return refused

    def ack(self, *deliveries: Delivery) -> list[Effects]:
        """Commit entries that have no effects in Redis; return the units that were refused."""
        return self.commit([self.effects_of(delivery) for delivery in deliveries], allow_oom=True)

    def new_dead_letter(self, delivery: Delivery, *, reason: Reason, error: str, traceback: str = "") -> DeadLetter:
        """Return a dead letter of an entry, to be passed to `dead_letter`. Raises ConfigError for an unknown reason."""
        app, handler = self._owner
        return DeadLetter(
            stream=self.stream,
            id=delivery.id.decode(),
            pairs=own_pairs(delivery.pairs),
            key=None if delivery.lease is None else delivery.lease.key,
            app=app,
            handler=handler,
            attempts=delivery.attempt,
            reason=reason,
            error=error,
            traceback=traceback,
            time_ms=time.time_ns() // 1_000_000,
        )

    def dead_letter(self, *letters: tuple[Delivery, DeadLetter]) -> list[Effects]:
        """Move entries to the dead letters; return the units that were refused."""
        units = []
        for delivery, letter in letters:
            units.append(self.effects_of(delivery))
            units[-1].add_dead_letter(letter.items())
        return self.commit(units)

    def isolation_state(self, delivery: Delivery) -> tuple[int, str]:
        """Return how many processes died of an entry in isolation, and the mark of an unfinished run ("" if none)."""
        crash_counts = self._store.keys(self.stream).crashes
        deaths, mark = self._client.execute("HMGET", crash_counts, delivery.id, delivery.id + ISOLATED_SUFFIX.encode())
        return int(deaths or 0), (mark or b"").decode()

    def begin_isolation(self, delivery: Delivery, mark: str) -> None:
        """Store, before it begins, that a process runs an entry in isolation. May safely be repeated."""
        delivery.isolated_by = mark
        self._client.execute(
            "HSET", self._store.keys(self.stream).crashes, delivery.id + ISOLATED_SUFFIX.encode(), mark
        )

    def record_deaths(self, delivery: Delivery, deaths: int) -> None:
        """Store how many processes have died of an entry, and clear its isolation mark: how its runs ended is known."""
        crash_counts = self._store.keys(self.stream).crashes
        self._client.execute("HSET", crash_counts, delivery.id, deaths, delivery.id + ISOLATED_SUFFIX.encode(), "")

    def end_isolation(self, deliveries: Iterable[Delivery]) -> None:
        """Store that isolated runs have ended without the death of this process, whatever their outcome."""
        crash_counts = self._store.keys(self.stream).crashes
        for one in deliveries:
            if one.isolated_by:
                # Another process may run it by now, and have stored its own mark.
                self._client.script(
                    COMPARE_AND_SET, (crash_counts,), (one.id + ISOLATED_SUFFIX.encode(), one.isolated_by, "")
                )
                one.isolated_by = ""

    def record_failures(self, deliveries: Sequence[Delivery]) -> None:
        """Store that the current attempts have failed, so that the worker that tries next counts them."""
        self._store.record_failures(self.stream, {delivery.id: delivery.attempt for delivery in deliveries})

    def trim(self) -> int:
        """Remove, about, the entries before the lowest that any group of the stream still needs; return how many."""
        return self._trim_below(b"")

    def _trim_below(self, needed: bytes) -> int:
        return int(self._client.script(TRIM, (self.stream,), (_MAX_TRIMMED, needed)))

    def checkpoint(self) -> Checkpoint:
        """Store the progress of all workers, so that offsets can be dropped and a lost group be recreated.

        The more entries are pending, the less often it is stored; see `CommitStore.checkpoint`.
        """
        return self._with_rejoin(lambda: self._store.checkpoint(self.stream))

    def checkpoint_call(self) -> Call[Checkpoint]:
        """Return the call that `checkpoint` makes, for callers that pipeline many streams. An error reply repeats it."""
        call = self._store.checkpoint_call(self.stream)
        return Call(call.command, call.parse, on_error=lambda _: self.checkpoint())

    def _with_rejoin(self, step: Callable[[], T]) -> T:
        """Run a step; join again and repeat it if the group is gone, or if other workers had to begin anew."""
        for _ in range(_REJOINS):
            try:
                return step()
            except GroupMissing:
                pass
            except StaleOwner:
                if not self._store.is_owned_by_workers(self.stream, self.kind):
                    raise
            self.join()
        return step()
