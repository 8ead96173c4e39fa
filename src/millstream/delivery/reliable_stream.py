"""A reliable stream: one worker's hold on a stream that it reads with others through a consumer group.

An entry that was read is pending until its effects are committed, and pending with one worker at a time. It is
acknowledged, together with its effects, by the one commit script of all engines, which asks who holds it. What a worker
that died or hangs has left pending is read by another. (The layers: O. Zakharchenko, "The Redis Streams We Have
Known and Loved", 2023.)
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import ClassVar, Literal, NamedTuple, TypeVar

from millstream.delivery.commit_store import (
    ENTRY_MARK,
    FAILED,
    ISOLATED,
    KEY_MARK,
    LEASES_LOST,
    Checkpoint,
    CommitStore,
    Effects,
    Kind,
)
from millstream.delivery.key_queues import WAITING
from millstream.errors import GroupMissing, MillstreamError, RedisError, StaleOwner
from millstream.groups import Batch, Consumer, Group, PendingEntry, delete_if_empty
from millstream.handlers.dead_letter import DeadLetter, Reason
from millstream.redis_client.client import Arg, Client, Command, Reply, Script, raise_if_error
from millstream.redis_client.key_names import REDRIVE_FIELD, held_name

logger = logging.getLogger(__name__)

READ_ENTRIES = Script("commit/read_entries", allow_oom=True)
TRIM = Script("commit/trim")

HANDED_BACK_MS = 86_400_000
"""Idle time of an entry that was handed back: more than any worker waits before it adopts."""

NO_LIMIT = 2**53
"""More bytes, or entries, than there can be."""

_REJOINS = 3
T = TypeVar("T")

_MOST_TRIMMED = 10_000
_WATCHED = 100


@dataclass(eq=False)
class Delivery:
    """One entry in a worker's hands.

    * `id`, `pairs`: the entry, as Redis sent it
    * `attempt`: 1, or one more than the attempts on it that are known to have failed
    * `deliveries`: how often Redis has delivered it; above 1, others may have died of it
    * `since_ms`: since when it waits, or runs, by the worker's clock; `running` says which
    * `ran`: its attempt has ended, and what came of it is to be committed
    * `settling`: it is being committed
    * `due_ms`: when its next attempt may begin, by the worker's clock
    * `in_batch`: it runs in a batch of several
    * `isolated_by`: the mark under which this process runs it in isolation; "" if it does not
    * `took_ms`: how long the last attempt took
    * `lease`: of a handler with a key, the turn of its line that it was given out with
    """

    stream: "ReliableStream"
    id: bytes
    pairs: Sequence[bytes]
    attempt: int = 1
    deliveries: int = 1
    lease: "LeasedKey | None" = None
    # These stay with the class until they change: most deliveries of a fast handler never need most of them.
    since_ms: float = field(init=False, default=0.0)
    running: bool = field(init=False, default=False)
    ran: bool = field(init=False, default=False)
    settling: bool = field(init=False, default=False)
    due_ms: float = field(init=False, default=0.0)
    in_batch: bool = field(init=False, default=False)
    isolated_by: str = field(init=False, default="")
    took_ms: float = field(init=False, default=0.0)

    place: tuple[str, bytes] = field(init=False)
    """Its stream and id."""
    size: int = field(init=False)
    """How many bytes its names and values have."""

    def __post_init__(self) -> None:
        self.place = (self.stream.stream, self.id)
        self.size = sum(map(len, self.pairs))


class StreamBacklog(NamedTuple):
    """What waits on a stream.

    * `lag`: how many entries the group was not given yet; None where Redis cannot say
    * `oldest_ms`: when the lowest pending entry was added, in Unix milliseconds, by its id; None if nothing is pending
    * `dead_letters`: how many dead letters lie there, whoever wrote them
    """

    lag: int | None
    oldest_ms: int | None
    dead_letters: int


@dataclass(slots=True, eq=False)
class LeasedKey:
    """A worker's turn with one line.

    * `line`: the line's name: that of the key's mark, or of the entry's that has no key
    * `token`: under which it commits
    * `state`: the key's state, as of what has run so far
    * `entries`: those that were given out with it, in order; `waiting`: those of them that have not begun
    * `until_ms`: until when it lasts for certain, by the worker's clock
    * `given`: how many of its entries were given out and are not committed
    * `committed_state`: the key's state as it stands in Redis
    * `last`: the last entry that was run under it, once that is known
    * `ending`: it is being ended
    * `lost`: another worker may have the line by now: nothing more may begin
    """

    line: bytes
    token: bytes
    state: bytes
    until_ms: float
    entries: Sequence[Delivery] = ()
    waiting: deque[Delivery] = field(default_factory=deque)
    given: int = 0
    committed_state: bytes = b""
    last: Delivery | None = None
    ending: bool = False
    lost: bool = False

    @property
    def key(self) -> bytes | None:
        """The key, or None if the entry has none."""
        return self.line[1:] if self.line.startswith(KEY_MARK) else None

    @property
    def fence(self) -> int:
        """The number of its token: greater than that of every earlier lease of the line."""
        return int(self.token.partition(b" ")[0])

    def forget(self) -> None:
        """Let go of its entries, when it is over: as each knows its turn, they would all wait for the garbage collector."""
        self.entries, self.last = (), None


class ReliableStream:
    """One worker's hold on one stream for one handler. Threads may share it as they may share its client.

    * `app`, `handler`: whose progress it is; they name the consumer group and what is kept in Redis
    * `consumer`: this worker's name, unique among the workers that live at the same time
    * `into`, `into_maxlen`: the stream that outputs go to, and its length
    * `start`: where a handler begins that has done nothing on the stream yet
    * `on_trimmed`: told how many entries were found gone from the stream while they were pending

    Every method raises RedisError; those that name a token's owner raise StaleOwner once Spark has taken over. But for
    `read` they join again by themselves where the group is gone.
    """

    kind: ClassVar[Kind] = "workers"
    silent_ms = 3_600_000
    """A consumer that has asked for nothing for so long may be removed; see `dismiss_silent`."""

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
        self._ledger = CommitStore(
            client, app=app, handler=handler, into=into, into_maxlen=into_maxlen, consumer=consumer
        )
        self._owner = (app, handler)
        self._start: Literal["0", "$"] = "0" if start == "earliest" else "$"
        self._group = Group(client, stream, self._ledger.keys(stream).group)
        self._reader = Consumer(client, group=self._group.name, name=consumer, streams=[stream])
        self._on_trimmed = on_trimmed
        self._incarnation = secrets.token_hex(4)
        self._calls = count(1)
        self._done_before: frozenset[bytes] = frozenset()
        self._watched: dict[tuple[bytes, str], float] = {}
        self.room_bytes: Callable[[], int] = lambda: NO_LIMIT
        """How many bytes of entries may be taken over now: no more are, but for one."""
        self.newest: int | None = None
        """Runs on Spark that began after this time of the server, in microseconds, are not taken over from."""
        self.leaving = False
        """The worker has to leave the stream: nothing new of it is to be taken."""
        self.leave_out: Callable[[MillstreamError], None] | None = None
        """Told of what is wrong with this stream only, where it is one of many; None if that is to be raised."""
        self.paused = False
        """Somebody wants no more entries of this stream to be read for now; as of the last `look`."""

    @property
    def readable(self) -> bool:
        """True if entries may be taken from it for now."""
        return not (self.paused or self.leaving)

    @property
    def token(self) -> int:
        """The fencing token of the workers, once this one has joined."""
        return self._ledger.token

    @property
    def group(self) -> str:
        """The consumer group's name."""
        return self._group.name

    def join(self) -> None:
        """Join the workers of the stream. The first takes over from Spark what is not committed there.

        Makes the group, and the stream, if there is none; one that was lost is made again where it stood.
        Raises AccessDenied if the Redis user lacks a right that is needed later.
        """
        before = self.token
        self._ledger, lost = self._ledger.joined(self.stream, self._start, self.kind, self.newest)
        # Where nothing is known of us any more, "latest" would skip what came since.
        self._start = "0"
        if lost:
            at = self._client.execute("HGET", self._ledger.keys(self.stream).meta, "frontier") or b"0-0"
            logger.warning(
                "the group %s of stream %s was lost and is made again at %s: what has an id up to that counts as done, also "
                "in a stream that was made anew", self._group.name, self.stream, at.decode(),
            )  # fmt: skip
        elif before and before != self.token:
            logger.warning(
                "Redis has lost the progress of the group %s on stream %s (or a run on Spark had it meanwhile): workers "
                "begin anew with what the stream holds", self._group.name, self.stream,
            )  # fmt: skip
        self._done_before = frozenset(self._ledger.marked(self.stream))

    def join_as(self, other: "ReliableStream") -> None:
        """Take part as `other` does, the same worker on the same stream, which has joined over another connection."""
        self._ledger = self._ledger.renewed(other.token)
        self._start = "0"
        self._done_before = other._done_before

    def dismiss_silent(self) -> list[str]:
        """Remove the consumers of the group that were workers, and are none any more; return their names.

        That is, those that hold nothing, have asked for nothing for `silent_ms`, and whose names no supervisor holds. The
        first two are asked again in the step that removes each: nothing that is pending is dropped. A worker without a
        supervisor that was silent for so long is a consumer again with its next entry.
        """
        return self._as_member(self._dismiss_silent)

    def _dismiss_silent(self) -> list[str]:
        silent = [one.name for one in self._group.consumers() if one.idle_ms >= self.silent_ms and not one.pending]
        others = [name for name in silent if name not in (self.consumer, WAITING)]
        held = self._client.pipeline([("EXISTS", held_name(self._owner[0], name)) for name in others])
        gone = [name for name, is_held in zip(others, held, strict=True) if not raise_if_error(is_held)]
        return self._group.delete_idle_consumers(self.silent_ms, only=gone) if gone else []

    def look(self) -> None:
        """See whether the stream is paused, and whether workers are still in charge of it."""
        self.paused = self._as_member(lambda: self._ledger.look(self.stream))

    def to_look(self) -> Command:
        """The command that `look` sends, for who sends those of many streams together."""
        return self._ledger.to_look(self.stream)

    def looked(self, reply: Reply) -> None:
        """Do as `look` with its reply."""
        try:
            self.paused = self._ledger.looked(raise_if_error(reply))
        except MillstreamError:
            self.look()  # which joins again, if that is all

    # Reading

    def read(self, *, count: int, block_ms: int = 0) -> list[Delivery]:
        """Take up to `count` new entries, waiting for the first up to `block_ms` milliseconds (0: do not wait).

        The client's timeout must be longer than that. Raises GroupMissing if the group is gone: join again.
        """
        return self.delivered(self._reader.read_new(count=count, block_ms=block_ms))

    # The same within so many bytes, but for one entry, and without a wait, for who reads many streams together

    def to_receive(self, *, count: int, most_bytes: int) -> Command:
        """The command that takes up to `count` new entries, of no more than `most_bytes` together if they are several."""
        return ("EVALSHA", READ_ENTRIES.sha, 1, self.stream, *self._receiving(count, most_bytes))

    def received(self, reply: Reply) -> list[Delivery]:
        """Understand its answer."""
        return self.delivered([Batch(self.stream, reply)])

    def receive(self, *, count: int, most_bytes: int) -> list[Delivery]:
        """Send it, and understand its answer. Raises GroupMissing as `read` does."""
        return self.received(self._client.script(READ_ENTRIES, (self.stream,), self._receiving(count, most_bytes)))

    def _receiving(self, count: int, most_bytes: int) -> Sequence[Arg]:
        return (self.group, self.consumer, count, most_bytes)

    def delivered(self, batches: Iterable[Batch]) -> list[Delivery]:
        """The entries of a read, without those that Spark had committed beyond its frontier; they are acknowledged."""
        entries = [entry for batch in batches for entry in batch.raw]
        done = [entry_id for entry_id, _ in entries if entry_id in self._done_before] if self._done_before else ()
        if done:
            self._group.ack(done)
        return [Delivery(self, entry_id, pairs) for entry_id, pairs in entries if entry_id not in done]

    def read_pending(
        self, *, excluding: Container[bytes] = (), idle_ms: int = 0, own: bool = False, count: int = 100
    ) -> list[Delivery]:
        """Take over up to `count` entries that have been pending for `idle_ms` milliseconds, lowest id first.

        `own`: only those that this worker holds already, such as those of its last life. `excluding`: ids to leave
        alone. Never waits. Entries that were trimmed while they were pending are logged, as nobody can process them.
        """
        return self._as_member(lambda: self._take_over(excluding, idle_ms, own, count))

    def _take_over(self, excluding: Container[bytes], idle_ms: int, own: bool, count: int) -> list[Delivery]:
        pending = self._group.pending
        while self.room_bytes():
            found = pending.walk(consumer=self.consumer if own else None, min_idle_ms=idle_ms)
            wanted = list(islice((one for one in found if one.id not in excluding), count))
            claimed = self._claim(wanted, idle_ms)
            # If all of these are gone from the stream, they are off the list now, and others come after them.
            if claimed or not wanted:
                return claimed
        return []

    def read_stuck(self, *, longest_ms: float, now_ms: float) -> list[Delivery]:
        """Take over entries that another consumer has held for `longest_ms`, though it keeps asking for them.

        Reading one's pending entries again resets their idle time, so a consumer that does nothing else would hold
        them for ever. Since when it holds them is what this worker has seen: call it now and then, with the time of a
        monotonic clock. It watches the lowest hundred.
        """
        return self._as_member(lambda: self._take_stuck(longest_ms, now_ms))

    def _take_stuck(self, longest_ms: float, now_ms: float) -> list[Delivery]:
        others = [one for one in self._group.pending.entries(count=_WATCHED) if one.consumer != self.consumer]
        self._watched = {(one.id, one.consumer): self._watched.get((one.id, one.consumer), now_ms) for one in others}
        return self._claim((one for one in others if now_ms - self._watched[one.id, one.consumer] > longest_ms), 0)

    def _claim(self, wanted: Iterable[PendingEntry], idle_ms: int) -> list[Delivery]:
        times = {one.id: one.deliveries for one in wanted}
        claimed = [entry for some in self._claim_within_room(list(times), idle_ms) for entry in some.raw]
        failed = self._ledger.failures(self.stream, [entry_id for entry_id, _ in claimed])
        return [
            Delivery(self, entry_id, pairs, before + 1, times[entry_id] + 1)
            for (entry_id, pairs), before in zip(claimed, failed, strict=True)
        ]

    def _claim_within_room(self, ids: Sequence[bytes], idle_ms: int) -> Iterator[Batch]:
        """Claim a few, then more, until there is no room for any more: how large they are is not known before."""
        left, step = self.room_bytes(), 1
        while ids and left > 0:
            some, ids = ids[:step], ids[step:]
            batch = self._group.pending.claim(some, consumer=self.consumer, min_idle_ms=idle_ms)
            self._report_trimmed(set(some) - set(batch.ids))
            size = sum(len(part) for _, pairs in batch.raw for part in pairs)
            left -= size
            step = max(1, min(2 * step, left * len(batch) // size)) if size else 2 * step
            yield batch

    def report_trimmed(self, missing: Iterable[bytes]) -> None:
        """Say which of the entries that could not be claimed or kept are gone from the stream, in the log too."""
        self._as_member(lambda: self._report_trimmed(missing))

    def _report_trimmed(self, missing: Iterable[bytes]) -> None:
        gone = [
            entry_id
            for entry_id in sorted(missing)
            if not self._group.pending.entries(entry_id, entry_id, count=1)
            and not self._client.execute("XRANGE", self.stream, entry_id, entry_id)
        ]
        if gone:
            self._say_trimmed(gone)

    def _say_trimmed(self, gone: Sequence[bytes]) -> None:
        some = ", ".join(entry_id.decode() for entry_id in gone[:10])
        logger.warning(
            "%d pending entries of stream %s were trimmed or deleted before they were processed: %s", len(gone),
            self.stream, some,
        )  # fmt: skip
        self._on_trimmed(len(gone))

    # Holding

    def extend(self, ids: Sequence[bytes]) -> list[bytes]:
        """Keep entries from being adopted by others for as long again; return those that are lost already."""
        return self._hold(ids, 0)

    def hand_back(self, ids: Sequence[bytes], *, idle_ms: int = HANDED_BACK_MS) -> list[bytes]:
        """Give entries up, as if their delivery had not been; return those that were lost already.

        They count as idle for `idle_ms` (at least 1): another worker adopts them once that is its claim time, by
        default at once.
        """
        return self._hold(ids, max(1, idle_ms))

    def _hold(self, ids: Sequence[bytes], idle_ms: int) -> list[bytes]:
        return self._as_member(lambda: self._ledger.hold(self.stream, ids, idle_ms))

    def reserve(self, rate: float, count: int) -> float:
        """Reserve `count` messages of `rate` a second, which all workers share; return the wait until then, in ms."""
        return self._ledger.reserve(self.stream, rate, count)

    # Committing

    def unit(self, delivery: Delivery, *rest: Delivery) -> Effects:
        """An empty unit of effects for `delivery`, or for all of a batch together, to fill and to commit."""
        entry_id = delivery.id.decode()
        # Names of parameters would double what this costs, and there is one for every message.
        unit = Effects(ENTRY_MARK + delivery.id, b"", b"", None, entry_id, entry_id, 1)
        if delivery.deliveries > 1 or delivery.attempt > 1:
            unit.end_strikes(*crash_counts_of(entry_id))
        if rest:
            unit.others = [one.id.decode() for one in rest]
            unit.messages += len(rest)
            for one, other_id in zip(rest, unit.others, strict=True):
                if one.deliveries > 1 or one.attempt > 1:
                    unit.end_strikes(*crash_counts_of(other_id))
        return unit

    def new_call(self) -> str:
        """A number for a commit that may have to be repeated; greater than those before."""
        return f"{self._incarnation}:{next(self._calls)}"

    def commit(self, units: Sequence[Effects], *, allow_oom: bool = False, call: str = "") -> list[Effects]:
        """Commit and acknowledge in one atomic step; return the units that were refused, as `CommitStore.commit` does.

        `allow_oom`: even at maxmemory; only for units without effects. May safely be repeated; with the same `call`, of
        `new_call`, a repetition is answered as the first was, if no other came in between.
        """
        return self._as_member(lambda: self._ledger.commit({self.stream: units}, allow_oom=allow_oom, call=call))

    def to_commit(self, units: Sequence[Effects], call: str) -> Command:
        """The command that `commit` sends, for who sends those of many streams together.

        If an error or nothing comes back, `commit` with the same `call` does the rest.
        """
        return self._ledger.to_commit(self.stream, units, call)

    def committed(self, units: Sequence[Effects], reply: Reply) -> list[Effects]:
        """Understand its answer: the units that were refused."""
        return self._ledger.committed(units, reply)

    def acknowledge(self, *deliveries: Delivery) -> list[Effects]:
        """Commit entries that have no effects in Redis; return what was refused."""
        return self.commit([self.unit(delivery) for delivery in deliveries], allow_oom=True)

    def letter(self, delivery: Delivery, *, reason: Reason, error: str, traceback: str = "") -> DeadLetter:
        """A dead letter of an entry, to be given to `dead_letter`. Raises ConfigError for a reason that there is not."""
        app, handler = self._owner
        pairs = delivery.pairs
        return DeadLetter(
            stream=self.stream,
            id=delivery.id.decode(),
            pairs=pairs[2:] if pairs[0] == REDRIVE_FIELD else pairs,
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
        """Move entries to the dead letters; return what was refused."""
        units = []
        for delivery, letter in letters:
            units.append(self.unit(delivery))
            units[-1].add_dead(letter.items())
        return self.commit(units)

    def isolation(self, delivery: Delivery) -> tuple[int, str]:
        """How many processes died of an entry that they ran in isolation, and the mark of a run whose end is not known.

        "" if there is none.
        """
        strikes = self._ledger.keys(self.stream).strikes
        deaths, mark = self._client.execute("HMGET", strikes, delivery.id, delivery.id + ISOLATED.encode())
        return int(deaths or 0), (mark or b"").decode()

    def isolate(self, delivery: Delivery, mark: str) -> None:
        """Note, before it begins, that a process runs an entry in isolation. May safely be repeated."""
        delivery.isolated_by = mark
        self._client.execute("HSET", self._ledger.keys(self.stream).strikes, delivery.id + ISOLATED.encode(), mark)

    def note_deaths(self, delivery: Delivery, deaths: int) -> None:
        """Note how many processes have died of an entry, with that the end of all its runs is known."""
        strikes = self._ledger.keys(self.stream).strikes
        self._client.execute("HSET", strikes, delivery.id, deaths, delivery.id + ISOLATED.encode(), "")

    def end_isolation(self, deliveries: Iterable[Delivery]) -> None:
        """Note that isolated runs have ended otherwise than by the death of this process, though they may not count."""
        strikes = self._ledger.keys(self.stream).strikes
        for one in deliveries:
            if one.isolated_by:
                field_name = one.id + ISOLATED.encode()
                mark = self._client.execute("HGET", strikes, field_name)
                if mark is not None and mark.decode() == one.isolated_by:  # another may run it by now
                    self._client.execute("HDEL", strikes, field_name)
                one.isolated_by = ""

    def note_failures(self, deliveries: Sequence[Delivery]) -> None:
        """Remember that the present attempts have failed, so that they count for whoever tries next."""
        self._ledger.note_failures(self.stream, {delivery.id: delivery.attempt for delivery in deliveries})

    def waiting(self) -> StreamBacklog:
        """What waits on the stream."""
        return self._as_member(self._waiting)

    def _waiting(self) -> StreamBacklog:
        info = self._group.info()
        lowest = self._group.pending.summary().lowest
        dead_letters = self._client.execute("XLEN", self._ledger.keys(self.stream).dead)
        return StreamBacklog(
            None if info is None else info.lag,
            None if lowest is None else int(lowest.partition(b"-")[0]),
            int(dead_letters),
        )

    def trim(self) -> int:
        """Remove, about, the entries before the lowest that any group of the stream still needs; return how many."""
        return self._trim_below(b"")

    def _trim_below(self, needed: bytes) -> int:
        return int(self._client.script(TRIM, (self.stream,), (_MOST_TRIMMED, needed)))

    def checkpoint(self) -> Checkpoint:
        """Note in Redis how far all workers are, so that marks can be dropped and a lost group be made again.

        The more is pending, the less often it is done; see `CommitStore.checkpoint`.
        """
        return self._as_member(lambda: self._ledger.checkpoint(self.stream))

    def _as_member(self, step: Callable[[], T]) -> T:
        """Take a step; join again and repeat it where the group is gone, or where others had to begin anew."""
        for _ in range(_REJOINS):
            try:
                return step()
            except GroupMissing:
                pass
            except StaleOwner:
                if not self._ledger.is_with_workers(self.stream, self.kind):
                    raise
            self.join()
        return step()


def crash_counts_of(entry_id: str) -> tuple[str, ...]:
    """The fields of the strikes about an entry, whoever has written them."""
    return entry_id, entry_id + FAILED, entry_id + LEASES_LOST, entry_id + ISOLATED


def leave_all(client: Client, streams: Iterable[ReliableStream]) -> None:
    """Have workers leave the consumer groups of their streams, but for those in which they hold anything.

    What is held there, others adopt. Where Redis does not answer, the consumer stays until others find it silent.
    """
    by_name: dict[str, list[Group]] = {}
    for one in streams:
        by_name.setdefault(one.consumer, []).append(Group(client, one.stream, one.group))
    for consumer, groups in by_name.items():
        try:
            delete_if_empty(client, groups, consumer)
        except RedisError as error:
            logger.debug("consumer %s may still be in groups that it has left: %s", consumer, error)
