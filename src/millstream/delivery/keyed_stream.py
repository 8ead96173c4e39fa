"""KeyedStream: workers share a stream by the queues of its keys, so that messages of one key run one after another.

Any worker enqueues new entries into their key queues. Then a worker leases a key queue for a while, and commits under
that lease's token, which no other lease ever has. There is no master that could die: each step is one server-side
script that any worker may run. (The problem: "Redis streaming concurrency with master and consumers", Dwarves Memo; the
token: M. Kleppmann, "How to do distributed locking", 2016.)
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from millstream.delivery.cancellation import Cancellation
from millstream.delivery.commit_store import ENTRY_PREFIX, KEY_PREFIX, WorkerKind
from millstream.delivery.effects import ERROR_SUFFIX, Effects, crash_counts_of
from millstream.delivery.permits import Permits
from millstream.delivery.reliable_stream import (
    NO_LIMIT,
    Delivery,
    LeasedKey,
    ReliableStream,
)
from millstream.errors import Unavailable
from millstream.handlers.limits import Share
from millstream.model import Retry
from millstream.redis_client.call import Call
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import is_edited
from millstream.redis_client.resp import Arg, Reply
from millstream.redis_client.scripts import Script

logger = logging.getLogger(__name__)

READ_RANGE = Script("commit/read_range")
ROUTE = Script("keys/route")
ROUTE_BY_FIELD = Script("keys/route_by_field")
LEASE_KEYS = Script("keys/lease_keys")
EXTEND_LEASES = Script("keys/extend_leases")
RELEASE_LEASES = Script("keys/release_leases")
RECOVER_LEASES = Script("keys/recover_leases")
LOWEST_QUEUED_ID = Script("keys/lowest_queued_id")

NEARLY_FULL = 0.8
"""From this share of the look-ahead on, the log and `key list` report that key queues are nearly full."""

_ENQUEUED_AT_ONCE = 1_000
_FIRST_READ = 100
_LAST_ID = b"18446744073709551615-18446744073709551615"
_MAX_QUEUES = 50_000
_OVERHEAD_BYTES, _SAMPLE = 100, 16

READ_BYTES = 4 * 2**20
"""About how many bytes are read at once, from one stream or from many together."""

ReleaseMode = Literal["requeue", "return", "backoff", "limit", "park", "hold", "move"]
"""How the lease of a key queue ends: the queue is requeued, returned untouched, backs off, waits for a permit of its
handler's limit or is parked; or its one entry moves to another queue. With "hold" the queue is parked from the end of the
lease on, which goes on.
"""


class KeyLease(LeasedKey, eq=False, kw_only=True):
    """A worker's lease of one key queue of `stream`, as `lease_keys` returns it."""

    stream: "KeyedStream"


def lease_of(delivery: Delivery) -> KeyLease:
    """Return the lease under which a worker claimed an entry of a keyed stream."""
    lease = delivery.lease
    assert isinstance(lease, KeyLease)
    return lease


class LeaseRelease(NamedTuple):
    """How a lease ends. `detail`: milliseconds for "backoff", the value of the limit's field for "limit", the reason for
    "park" and "hold", the other queue's name for "move".

    `failed_attempts`: attempts on its first entry; `last_error`: why the last one failed, as `LastError.pack` returns it.
    """

    lease: KeyLease
    mode: ReleaseMode
    detail: Arg = ""
    failed_attempts: int | None = None
    last_error: bytes = b""


class LeaseResult(NamedTuple):
    """The result of `lease_keys`: the leases, and why there are no more.

    * `wait_ms`: milliseconds until a key queue may become ready by itself; None if none waits
    * `expired_count`: how many expired leases were found
    * `unfit_bytes`: the size of the first entry that did not fit into the byte limit; 0 if all did
    """

    leases: list[KeyLease]
    wait_ms: float | None
    expired_count: int
    unfit_bytes: int


class EntrySizes:
    """The average size of a stream's entries, as of the last read in this process."""

    def __init__(self) -> None:
        self.average = READ_BYTES // _FIRST_READ

    def record(self, count: int, size: int) -> None:
        """Store that `count` entries have `size` bytes together."""
        if count:
            self.average = max(1, size // count)


class KeyedStream(ReliableStream):
    """One worker's membership in one stream for a handler with a key. Options and errors as for ReliableStream.

    `queue_of` returns the name of an entry's key queue, or b"" for an entry that is meant for another handler.
    """

    kind: ClassVar[WorkerKind] = "keyed"

    def __init__(
        self,
        client: Client,
        stream: str,
        *,
        queue_of: Callable[[bytes, Sequence[bytes]], bytes],
        app: str,
        handler: str,
        consumer: str,
        into: str | None = None,
        into_maxlen: int | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        on_trimmed: Callable[[int], None] = lambda count: None,
    ) -> None:
        super().__init__(
            client,
            stream,
            app=app,
            handler=handler,
            consumer=consumer,
            into=into,
            into_maxlen=into_maxlen,
            start=start,
            on_trimmed=on_trimmed,
        )
        self._queue_of = queue_of
        self.may_enqueue: Callable[[Sequence[tuple[bytes, Sequence[bytes]]], Sequence[bytes]], int] = (
            lambda entries, queues: len(queues)
        )
        """Returns how many of these entries may be enqueued into these queues; the rest stay in the stream for now."""
        self.key_field: bytes | None = None
        """The field that is the key, where the server may find it in each entry; None: only `queue_of` finds keys."""
        self.on_enqueued_by_field: Callable[[int], None] = lambda count: None
        """Called with the number of entries that the server has enqueued by their field, without `may_enqueue`."""
        self.loss_retry: Retry | None = None
        """The back-off of a key after its worker was lost with the lease; None: the next worker gets the key at once."""
        self.list_size = 1
        """How many entries of a key run together at most: any of them may have ended a worker that was lost with them."""
        self.list_wait_ms = 0.0
        """How long the first entry of a key waits, from its publication on, for `list_size` that run together."""
        self._enqueued_id: bytes | None = None
        self.entry_sizes = EntrySizes()
        self._reads_one = False
        self._has_backlog = False
        self.pending_count = 0
        """How many entries are pending in all, as of the last `enqueue_new`."""
        self.newly_ready = 0
        """How many key queues the last `enqueue_new` made ready."""

    def join_like(self, other: ReliableStream) -> None:
        """See ReliableStream. The two share the entry sizes."""
        super().join_like(other)
        if isinstance(other, KeyedStream):
            self.entry_sizes = other.entry_sizes

    # Enqueueing

    def enqueue_new(self, *, count: int, max_pending: int) -> int:
        """Append up to `count` new entries to their key queues; return how many were new.

        The queues hold no more than `max_pending` entries: beyond that, the rest stay in the stream.
        """
        by_field, is_done = 0, False
        self.newly_ready = 0
        if self.key_field is not None:
            by_field, is_done = self._with_rejoin(lambda: self._enqueue_by_field(count, max_pending))
        if is_done:
            return by_field
        ready, self.newly_ready = self.newly_ready, 0
        new_count = by_field + self._with_rejoin(lambda: self._enqueue_new(count - by_field, max_pending))
        self.newly_ready += ready
        return new_count

    def _enqueue_by_field(self, count: int, max_pending: int) -> tuple[int, bool]:
        """Enqueue up to `count` new entries whose keys the server finds; return how many were new, and whether that is all.

        It is not if the next entry has no such key.
        """
        full = (self.list_size,) if self.list_wait_ms else ()
        # Where many are unread, several calls in one round trip, between which Redis serves others.
        counts = [_ENQUEUED_AT_ONCE] * (count // _ENQUEUED_AT_ONCE if self._has_backlog else 0)
        one_call = (min(count, 1 if self._reads_one else _ENQUEUED_AT_ONCE),)
        args = (self.token, self.group, max_pending, self.key_field or b"")
        calls = [(self.stream, (*args, some, READ_BYTES, *full)) for some in counts or one_call]
        try:
            replies = self._store.run_scripts(ROUTE_BY_FIELD, calls)
        except Unavailable:  # perhaps since the entries were too large for its memory
            self.on_failed_read()
            raise
        self._reads_one = False
        new_count = sum([self._apply_enqueue(reply[:4]) for reply in replies])
        self.newly_ready = sum(int(reply[1]) for reply in replies)
        self._has_backlog = int(replies[-1][0]) == _ENQUEUED_AT_ONCE
        self.entry_sizes.record(new_count, sum(int(reply[4]) for reply in replies) + _OVERHEAD_BYTES * new_count)
        self.on_enqueued_by_field(new_count)
        return new_count, not replies[-1][5]

    @property
    def enqueued_id(self) -> bytes:
        """The id up to which all entries are enqueued, as far as this worker knows."""
        return self._enqueued_id or b"0-0"

    def _enqueue_new(self, count: int, max_pending: int) -> int:
        if self._enqueued_id is None or self.pending_count >= max_pending:
            self._enqueue_all([self._enqueue_args(self.enqueued_id, (), max_pending)])
        count = min(count, max_pending - self.pending_count, self.max_read_count)
        if count <= 0:
            return 0
        after = self.enqueued_id  # another thread may advance it meanwhile
        entries = self._read_new(after, count)
        # Without new entries, the call returns the committed id: a Redis that lost data may have gone back behind ours.
        calls: list[Sequence[Arg]] = []
        for at in range(0, max(1, len(entries)), _ENQUEUED_AT_ONCE):
            some = entries[at : at + _ENQUEUED_AT_ONCE]
            queues = self._queue_args(some)
            self._before_enqueue(queues[1::2])
            calls.append(self._enqueue_args(after, queues, max_pending))
            if len(queues) < 2 * len(some):
                break
            after = some[-1][0] if some else after
        return self._enqueue_all(calls)

    def _read_new(self, after: bytes, count: int) -> Sequence[Any]:
        if after == _LAST_ID:  # Redis allows no id after it
            return ()
        try:
            return self._parse_read(self._client.script(READ_RANGE, (self.stream,), (after, count, READ_BYTES, 1)))[0]
        except Unavailable:
            self.on_failed_read()
            raise

    def _enqueue_all(self, calls: Sequence[Sequence[Arg]]) -> int:
        """Enqueue in one round trip, in chunks between which Redis serves others; return how many entries were new."""
        replies = self._store.run_scripts(ROUTE, [(self.stream, call) for call in calls])
        new_count = sum([self._apply_enqueue(reply) for reply in replies])
        self.newly_ready = sum(int(reply[1]) for reply in replies)
        return new_count

    @property
    def max_read_count(self) -> int:
        """How many of its entries may be read at once."""
        return 1 if self._reads_one else max(1, READ_BYTES // self.entry_sizes.average)

    def on_failed_read(self) -> None:
        """Read one entry next: the last read may have been larger than the server sends."""
        self._reads_one, self._has_backlog = True, False

    def _before_enqueue(self, queues: Sequence[Arg]) -> None:
        """Prepare these key queues before entries are appended to them (a hook for partitions)."""

    def _queue_args(self, entries: Sequence[Any]) -> list[Arg]:
        queues = [self._queue_name(entry_id, pairs) for entry_id, pairs in entries]
        most = self.may_enqueue(entries, queues)
        return [part for (entry_id, _), name in zip(entries[:most], queues, strict=False) for part in (entry_id, name)]

    def move_to_their_keys(self, leases: Sequence[KeyLease]) -> Sequence[KeyLease]:
        """Release entries that an app with another key enqueued without one into the queues of their keys.

        Return the other leases, but for those of these queues, which are released first: older entries go before them.
        """
        queues = {lease: queue for lease in leases if (queue := self._key_queue_of(lease))}
        if not queues:
            return leases
        targets = list(dict.fromkeys(queues.values()))
        self._before_enqueue(targets)
        returned = [LeaseRelease(lease, "return") for lease in leases if lease.queue in targets]
        self.release_leases(returned + [LeaseRelease(lease, "move", queue) for lease, queue in queues.items()])
        text = "%s: %d messages of %s were queued without the key that they have now; moved to its queue"
        logger.info(text, self._store.keys(self.stream).label, len(queues), self.stream)
        return [lease for lease in leases if lease not in queues and lease.queue not in targets]

    def _key_queue_of(self, lease: KeyLease) -> bytes | None:
        """Return the queue of the key that the entry of a lease without a key has by now; None if it has none."""
        if lease.key is not None:
            return None
        name = self._queue_of(lease.entries[0].id, lease.entries[0].pairs)
        return name if name not in (b"", lease.queue) else None

    def _queue_name(self, entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        return self._queue_of(entry_id, pairs)

    def _enqueue_args(self, after: bytes, queues: Sequence[Arg], max_pending: int) -> Sequence[Arg]:
        full: Sequence[Arg] = ("full", self.list_size) if self.list_wait_ms else ()
        return (self.token, self.group, after, max_pending, *full, *queues)

    # The steps of `enqueue_new`, for callers that pipeline many streams. If one fails, `enqueue_new` repeats it safely

    def read_call(
        self, *, count: int, max_pending: int, max_bytes: int = READ_BYTES, one_at_least: bool = True
    ) -> Call[tuple[Sequence[Any], int]] | None:
        """Return the call that reads the entries to enqueue next; None if `enqueue_new` has to query Redis first.

        Its result: the entries, and the size of the first that did not fit, 0 if all did.
        """
        if self._enqueued_id in (None, _LAST_ID) or self.pending_count >= max_pending:
            return None
        count = min(count, max_pending - self.pending_count, self.max_read_count)
        args = (self.enqueued_id, count, max_bytes, int(one_at_least))
        return Call(READ_RANGE.command((self.stream,), args), self._parse_read)

    def _parse_read(self, reply: Reply) -> tuple[Sequence[Any], int]:
        unfit, entries = reply
        self._reads_one = False
        self.entry_sizes.record(len(entries), _size_of(entries))
        if unfit and not entries:
            self.entry_sizes.record(1, unfit)
        return entries, unfit

    def enqueue_call(self, entries: Sequence[Any], *, max_pending: int) -> Call[int]:
        """Return the call that enqueues the entries of `read_call`. Its result: how many of them were new."""
        queues = self._queue_args(entries)
        self._before_enqueue(queues[1::2])
        args = self._enqueue_args(self.enqueued_id, queues, max_pending)
        return Call(self._store.script_command(ROUTE, self.stream, args), self._apply_enqueue)

    def _apply_enqueue(self, reply: Reply) -> int:
        new_count, self.newly_ready, self.pending_count, self._enqueued_id = reply
        return int(new_count)

    def trim(self) -> int:
        """See ReliableStream. Entries in key queues stay too, even if acknowledged; with too many queues, nothing is
        trimmed.
        """
        lowest = self._with_rejoin(lambda: self._run_script(LOWEST_QUEUED_ID, (_MAX_QUEUES,)))
        return 0 if lowest is None else self._trim_below(lowest)

    # Leasing

    def lease_keys(
        self,
        *,
        queues: int,
        entries: int,
        run: int,
        lease_ms: int,
        now_ms: float,
        with_state: bool = True,
        max_bytes: int = NO_LIMIT,
        one_at_least: bool = True,
    ) -> LeaseResult:
        """Lease up to `queues` key queues with up to `entries` entries, `run` of each queue, for `lease_ms`
        milliseconds.

        `max_bytes`: limit for the names and values together; with `one_at_least`, one entry is leased however large it
        is. `now_ms`: the worker's monotonic clock. Entries that were trimmed while they waited are logged.
        """
        room = (max_bytes, one_at_least)
        return self._with_rejoin(
            lambda: self._lease_keys(queues, entries, run, lease_ms, now_ms, with_state, room=room)
        )

    def _lease_keys(
        self,
        queues: int,
        entries: int,
        run: int,
        lease_ms: int,
        now_ms: float,
        with_state: bool,
        *more: Arg,
        room: tuple[int, bool] = (NO_LIMIT, True),
    ) -> LeaseResult:
        args = self._lease_args(queues, entries, run, lease_ms, with_state, room)
        return self._parse_lease_keys(now_ms + lease_ms, self._run_script(LEASE_KEYS, (*args, *more)))

    def _lease_args(
        self, queues: int, entries: int, run: int, lease_ms: int, with_state: bool, room: tuple[int, bool]
    ) -> Sequence[Arg]:
        consumer = (self.token, self.group, self.consumer, self._incarnation)
        max_bytes, one_at_least = room
        limits = (queues, entries, run, int(with_state), max_bytes, self.entry_sizes.average, int(one_at_least))
        wait: Sequence[Arg] = ("", self.list_wait_ms) if self.list_wait_ms else ()
        return (*consumer, lease_ms, *limits, *self._loss_args, *wait)

    @property
    def _loss_args(self) -> Sequence[Arg]:
        retry = self.loss_retry
        delay = (0, 1, 0) if retry is None else (retry.delay_ms, retry.factor, retry.max_delay_ms)
        return (*delay, self.list_size)

    def lease_keys_call(
        self,
        *,
        queues: int,
        entries: int,
        run: int,
        lease_ms: int,
        now_ms: float,
        with_state: bool = True,
        max_bytes: int = NO_LIMIT,
        one_at_least: bool = True,
    ) -> Call[LeaseResult]:
        """Return the call that `lease_keys` makes, for callers that pipeline many streams."""
        args = self._lease_args(queues, entries, run, lease_ms, with_state, (max_bytes, one_at_least))
        command = self._store.script_command(LEASE_KEYS, self.stream, args)
        return Call(command, partial(self._parse_lease_keys, now_ms + lease_ms))

    def _parse_lease_keys(self, until_ms: float, reply: Reply) -> LeaseResult:
        """Parse the reply of the script. `until_ms`: when the leases end, by the worker's monotonic clock."""
        wait_ms, trimmed, expired, unfit, *found = reply
        if trimmed:
            self._log_trimmed(trimmed)
        leases = [self._to_lease(until_ms, *one) for one in found]
        self.entry_sizes.record(
            sum(one.in_flight_count for one in leases), sum(entry.size for one in leases for entry in one.entries)
        )
        if unfit and not leases:
            self.entry_sizes.record(1, int(unfit))
        return LeaseResult(leases, None if wait_ms < 0 else float(wait_ms), int(expired), int(unfit))

    def _to_lease(
        self,
        until_ms: float,
        queue: bytes,
        token: bytes,
        state: bytes,
        expired: int,
        failed: int,
        entries: list[Any],
        canceled: bytes,
    ) -> KeyLease:
        lease = KeyLease(
            stream=self,
            queue=queue,
            token=token,
            state=state,
            expires_ms=until_ms,
            in_flight_count=len(entries) // 2,
            committed_state=state,
            cancellation=Cancellation.parse(canceled),
        )
        ids_and_pairs = iter(entries)
        lease.entries = [
            Delivery(self, entry_id, pairs, 1, 1, lease)
            for entry_id, pairs in zip(ids_and_pairs, ids_and_pairs, strict=True)
        ]
        lease.queued.extend(lease.entries)
        first = lease.entries[0]
        first.attempt, first.deliveries = max(0, failed) + 1, expired + 1
        first.has_waited = failed == 0
        return lease

    def renew_leases(self, leases: Sequence[KeyLease], lease_ms: int, now_ms: float) -> list[KeyLease]:
        """Renew leases for `lease_ms` milliseconds from now; mark those that are lost, and return them."""
        args: list[Arg] = [part for one in leases for part in (one.queue, one.token)]
        lost = set(self._with_rejoin(lambda: self._run_script(EXTEND_LEASES, (self.token, lease_ms, *args))))
        for one in leases:
            if one.token in lost:  # no name: a worker may have leased a queue again whose lease an operator has ended
                one.expired = True
            else:
                one.expires_ms = now_ms + lease_ms
        return [one for one in leases if one.expired]

    def recover_leases(self, known: Sequence[KeyLease], run: int) -> tuple[int, int]:
        """End the leases under this worker's name except `known`, so that other workers may lease the key queues.

        The keys of an earlier process back off first, as `loss_retry` says: it may have died of their first entries.
        Return how many belong to an earlier process of the worker, and how many were granted in replies that were lost.
        """
        tokens: list[Arg] = [one.token for one in known]
        args: list[Arg] = [self.group, self.consumer, self._incarnation, run, *self._loss_args, *tokens]
        earlier, unknown = self._with_rejoin(lambda: self._run_script(RECOVER_LEASES, (self.token, *args)))
        return int(earlier), int(unknown)

    def record_error(self, delivery: Delivery, last_error: bytes) -> None:
        """Store why the current attempt on an entry has failed, as `LastError.pack` returns it; its lease goes on."""
        field = delivery.id + ERROR_SUFFIX.encode()
        self._client.execute("HSET", self._store.keys(self.stream).crashes, field, last_error)

    def release_leases(self, endings: Sequence[LeaseRelease]) -> list[KeyLease]:
        """Release leases; return those that were lost already, of which nothing was changed. May safely be repeated."""
        args: list[Arg] = []
        for lease, how, detail, failed, last_error in endings:
            args += (lease.queue, lease.token, lease.in_flight_count, how, detail)
            args += ("" if failed is None else failed, last_error)
        refused = set(self._with_rejoin(lambda: self._run_script(RELEASE_LEASES, (self.token, self.group, *args))))
        return [ending.lease for ending in endings if ending.lease.token in refused]

    # Limits

    def exchange_permits(
        self, permits: Permits, returned: Sequence[tuple[Delivery, Share]], asked: Sequence[tuple[Delivery, Share]]
    ) -> list[float]:
        """Return permits of entries whose runs are over, then take those to run others, until their leases end; in one
        round trip.

        Of each that is asked for: 0, or after how many milliseconds to ask again.
        """
        calls = [
            permits.give_back_call(self._store, self.stream, share, _holder_of(lease_of(one), one))
            for one, share in returned
        ]
        for one, share in asked:
            lease = lease_of(one)
            calls.append(permits.take_call(self._store, self.stream, lease.queue, share, _holder_of(lease, one)))
        return [raise_if_error(result) for result in self._client.run_all(calls)][len(returned) :]

    # Committing

    def key_effects_of(self, lease: KeyLease, deliveries: Sequence[Delivery]) -> Effects:
        """Return an empty commit unit for the first entries of a key queue, to fill and to commit under its lease."""
        ids = [one.id.decode() for one in deliveries]
        unit = Effects(
            lease.queue, lease.token, lease.key or b"", first_id=ids[0], last_id=ids[-1], message_count=len(ids)
        )
        unit.other_ids = ids[:-1]
        for one, entry_id in zip(deliveries, ids, strict=True):
            if one.may_have_crash_counts:
                unit.clear_crash_counts(*crash_counts_of(entry_id))
            if is_edited(one.pairs):
                unit.add_copy(entry_id)
        return unit

    def _run_script(self, script: Script, args: Sequence[Arg]) -> Any:
        return self._store.run_script(script, self.stream, args)


def _size_of(entries: Sequence[Any]) -> int:
    """Return about how many bytes they have."""
    sample = entries[:: 1 + len(entries) // _SAMPLE]
    size = sum(_OVERHEAD_BYTES + sum(map(len, pairs)) for _, pairs in sample)
    return size * len(entries) // max(1, len(sample))


def _holder_of(lease: KeyLease, delivery: Delivery) -> bytes:
    return b"%b %b" % (lease.token, delivery.id)


def queue_of_key(key: bytes | None, entry_id: bytes) -> bytes:
    """Return the name of the queue of a key, or of an entry without a key, which has a queue of its own."""
    return ENTRY_PREFIX + entry_id if key is None else KEY_PREFIX + key
