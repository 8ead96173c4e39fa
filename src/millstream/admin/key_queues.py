"""The key queues of a handler, for operators: the owner of each, why it waits, and how to park, unpark or skip."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from millstream.delivery.effects import ERROR_SUFFIX, EXPIRED_SUFFIX, FAILED_SUFFIX, SINCE_SUFFIX
from millstream.delivery.last_error import LastError
from millstream.delivery.pause import parse_pause
from millstream.delivery.rate_override import parse_rate_override
from millstream.errors import CommandFailed, ConfigError, GroupMissing, RedisError, WrongType
from millstream.handlers.dead_letter import DeadLetter, Reason
from millstream.model import EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.formats import format_age
from millstream.redis_client.key_names import HandlerKeys, from_wire, own_pairs, to_wire
from millstream.redis_client.pipelining import call_all, send_all
from millstream.redis_client.replies import mapping_of, pairs_of, time_ms_of
from millstream.redis_client.resp import Arg, Reply
from millstream.redis_client.scripts import Script

PARK_UNPARK_SKIP = Script("keys/park_unpark_skip")
QUEUED_KEYS = Script("keys/queued_keys")

_FIELDS_OF_A_FAILURE = 3
"""How many fields the failed attempts on an entry have: their number, the first time, the last error."""
_META_FIELDS = ("owner", "paused", "rate_at", "rate")
_COUNTS = tuple(one.encode() for one in (FAILED_SUFFIX, EXPIRED_SUFFIX, SINCE_SUFFIX))

QueueState = Literal["leased", "ready", "backing off", "parked", "unreadable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyQueue:
    """The queue of one key, and what it waits for.

    * `name`: b"k" and the key, or b"i" and the id of an entry without a key
    * `state`: "leased" to a worker; "ready" for one; "backing off" until its next attempt; "parked" until an operator
      acts; "unreadable" if its data in Redis were not written by millstream
    * `length`, `first_id`: how many entries it has, and the id of the first; "" if it has none: a worker has just
      committed them all, or it is parked for entries to come
    * `worker`, `since_ms`: the worker that leased it; since when, or since when it is parked (Unix milliseconds)
    * `until_ms`: when the lease ends, or the next attempt is due (Unix milliseconds)
    * `failed_attempts`, `expired_leases`: failed attempts and expired leases of its first entry
    * `failing_since_ms`: when the first of these attempts failed (Unix milliseconds); None if none has
    * `parked_reason`: why it is parked, or will be when its lease ends; None if it is not
    * `why`: what it waits for, in words
    """

    name: bytes
    state: QueueState
    length: int
    first_id: str
    worker: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    failed_attempts: int = 0
    expired_leases: int = 0
    failing_since_ms: int | None = None
    parked_reason: str | None = None
    why: str

    @property
    def key(self) -> bytes | None:
        """The key, or None if its entry has none."""
        return _key_of(self.name)


def queue_names(client: Client, keys: HandlerKeys) -> list[bytes]:
    """Return the names of all key queues that have entries or are parked, sorted. Raises RedisError."""
    return sorted(set(client.script(QUEUED_KEYS, keys.commit_keys, ())))


def read_queues(client: Client, keys: HandlerKeys, names: Sequence[bytes]) -> list[KeyQueue]:
    """Return those of these key queues that still exist, in the same order. Raises RedisError.

    For a ready queue, its position among the ready ones is left out: that would mean reading all of them.
    """
    return _describe(client, keys, _Snapshot.of_names(client, keys, names), names) if names else []


def list_queues(client: Client, keys: HandlerKeys, *, most: int = 10_000) -> list[KeyQueue]:
    """Return up to `most` key queues that have entries or a worker or are parked, the longest first.

    The ready ones are read last, in their order. Each queue is as it was at some moment of the call, as workers go on
    meanwhile. Raises RedisError.
    """
    snapshot = _Snapshot.read(client, keys, most)
    names = list(dict.fromkeys((*snapshot.owners, *snapshot.parked, *snapshot.backoff, *snapshot.ready)))[:most]
    return sorted(_describe(client, keys, snapshot, names), key=lambda one: -one.length)


def count_suspected_keys(client: Client, places: Sequence[HandlerKeys]) -> dict[HandlerKeys, int | None]:
    """About how many keys of each of these handlers on their streams may be stuck; None if they cannot be counted.

    These are parked, back off, or have failed attempts on an entry: for 0 there is none. Raises Unavailable.
    """
    commands = [
        one for keys in places for one in (("HLEN", keys.parked), ("ZCARD", keys.backoff), ("HLEN", keys.crashes))
    ]
    replies = iter(send_all(client, commands))
    return {
        keys: None if any(isinstance(one, RedisError) for one in found) else _suspected(*found)
        for keys, *found in zip(places, replies, replies, replies, strict=True)
    }


def _suspected(parked: int, backing_off: int, failures: int) -> int:
    """The keys that back off have failures, too, with several fields for each entry."""
    return parked + max(backing_off, math.ceil(failures / _FIELDS_OF_A_FAILURE))


def having_stuck_keys(client: Client, places: Sequence[HandlerKeys]) -> list[HandlerKeys]:
    """Return those of these handlers on their streams that may have stuck keys. Raises RedisError.

    Those that cannot be read are among them, so that reading their keys raises the error.
    """
    return [keys for keys, count in count_suspected_keys(client, places).items() if count != 0]


def is_stuck(queue: KeyQueue) -> bool:
    """True if a key is parked, unreadable, or its first entry has failed: it backs off, or is attempted again."""
    return queue.state in ("parked", "backing off", "unreadable") or queue.failed_attempts > 0


def _describe(client: Client, keys: HandlerKeys, snapshot: "_Snapshot", names: Sequence[bytes]) -> list[KeyQueue]:
    counted = send_all(
        client, [(verb, keys.queue(one), *rest) for one in names for verb, *rest in (("LLEN",), ("LINDEX", 0))]
    )
    # A key that holds no list is no key queue: it has no length, and is shown as unreadable.
    counted = [None if isinstance(reply, WrongType) else raise_if_error(reply) for reply in counted]
    lengths = dict(zip(names, pairs_of(counted), strict=True))
    counts_of_first = call_all(
        client,
        [("HMGET", keys.crashes, *((first or b"") + one for one in _COUNTS)) for _, first in lengths.values()],
    )
    return [
        snapshot.describe(name, length, from_wire(first or b""), counts)
        for (name, (length, first)), counts in zip(lengths.items(), counts_of_first, strict=True)
        if length != 0 or name in snapshot.owners or name in snapshot.parked
    ]


def count_parked(client: Client, places: Sequence[HandlerKeys]) -> tuple[int, int]:
    """Return how many key queues are parked on all of these, and how many entries wait in them. Raises RedisError.

    A queue that only waits for its key to migrate is not counted.
    """
    queues = [keys.queue(name) for keys, names in parked_queues(client, places).items() for name in names]
    return len(queues), sum(call_all(client, [("LLEN", queue) for queue in queues]))


def parked_queues(client: Client, places: Sequence[HandlerKeys]) -> dict[HandlerKeys, list[bytes]]:
    """Return the names of the key queues that are parked on each of these. Raises RedisError.

    Those that only wait for their key to migrate are left out: no operator can unpark them.
    """
    replies = call_all(client, [("HKEYS", key) for keys in places for key in (keys.parked, keys.awaiting)])
    found = zip(places, pairs_of(replies), strict=True)
    return {keys: sorted(set(parked) - set(awaiting)) for keys, (parked, awaiting) in found}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    """The state of the key queues, as read in one round trip."""

    now_ms: int
    owners: dict[bytes, bytes]
    leases: dict[bytes, bytes]
    backoff: dict[bytes, bytes]
    parked: dict[bytes, bytes]
    ready: dict[bytes, int]
    waits_for: str

    @classmethod
    def read(cls, client: Client, keys: HandlerKeys, most: int) -> "_Snapshot":
        time, owners, leases, backoff, parked, ready, meta = call_all(
            client,
            [
                ("TIME",),
                ("HGETALL", keys.owners),
                ("ZRANGE", keys.leases, 0, -1, "WITHSCORES"),
                ("ZRANGE", keys.backoff, 0, most - 1, "WITHSCORES"),
                ("HGETALL", keys.parked),
                ("LRANGE", keys.ready, 0, most - 1),
                ("HMGET", keys.meta, *_META_FIELDS),
            ],
        )
        return cls(
            now_ms=time_ms_of(time),
            owners=mapping_of(owners),
            leases=mapping_of(leases),
            backoff=mapping_of(backoff),
            parked=mapping_of(parked),
            ready={name: place for place, name in enumerate(ready, 1)},
            waits_for=_waits_for(meta, time_ms_of(time)),
        )

    @classmethod
    def of_names(cls, client: Client, keys: HandlerKeys, names: Sequence[bytes]) -> "_Snapshot":
        """Read the state of these key queues only."""
        time, meta, owners, parked, leases, backoff = call_all(
            client,
            [
                ("TIME",),
                ("HMGET", keys.meta, *_META_FIELDS),
                ("HMGET", keys.owners, *names),
                ("HMGET", keys.parked, *names),
                ("ZMSCORE", keys.leases, *names),
                ("ZMSCORE", keys.backoff, *names),
            ],
        )
        return cls(
            now_ms=time_ms_of(time),
            owners=_present(names, owners),
            leases=_present(names, leases),
            backoff=_present(names, backoff),
            parked=_present(names, parked),
            ready={},
            waits_for=_waits_for(meta, time_ms_of(time)),
        )

    def describe(self, name: bytes, length: int | None, first: str, counts: Sequence[bytes | None]) -> KeyQueue:
        """Return a key queue; state "unreadable" if its data in Redis were not written by millstream."""
        try:
            if length is None:
                raise ValueError("its key holds no list")
            if first:
                EntryId.parse(first)
            failed, expired, failing_since_ms = (int(count or 0) for count in counts)
            return self._describe(name, length, first, failed, expired, failing_since_ms)
        except (ValueError, OverflowError, ConfigError) as error:
            why = f"its data in Redis were not written by millstream: {error}"
            return KeyQueue(name=name, state="unreadable", length=length or 0, first_id=first, why=why)

    def _describe(
        self, name: bytes, length: int, first: str, failed: int, expired: int, failing_since_ms: int
    ) -> KeyQueue:
        parked_ms, _, reason = self.parked.get(name, b"").partition(b" ")
        parked = from_wire(reason) if parked_ms else None
        state: QueueState
        worker = since_ms = until_ms = None
        failing = _format_wait(self.now_ms - failing_since_ms) if failing_since_ms else ""
        if name in self.owners:
            fence, _, worker_name = self.owners[name].split(b" ", 2)
            state, worker, since_ms = "leased", from_wire(worker_name), int(fence) // 1000
            until_ms = int(float(self.leases.get(name, 0)))
            why = self._why_leased(worker, since_ms, until_ms)
            why += f"; its first entry has failed for {failing}" if failing else ""
            why += "" if parked is None else f"; then it stays parked: {parked}"
        elif parked is not None:
            state, since_ms = "parked", int(parked_ms)
            why = f"parked for {_format_wait(self.now_ms - since_ms)}: {parked}"
        elif name in self.backoff:
            state, until_ms = "backing off", int(float(self.backoff[name]))
            since = f", which has failed for {failing}," if failing else ""
            why = f"attempt {failed + 1} of its first entry{since} is due in {_format_wait(until_ms - self.now_ms)}"
        else:
            state = "ready"
            why = f"waits for {self.waits_for}"
            why += f", number {self.ready[name]} of the ready queues" if name in self.ready else ""
        if expired:
            times = "once" if expired == 1 else f"{expired} times"
            why += f"; its lease expired {times} with this first entry, which now runs alone"
        return KeyQueue(
            name=name,
            state=state,
            length=length,
            first_id=first,
            worker=worker,
            since_ms=since_ms,
            until_ms=until_ms,
            failed_attempts=failed,
            expired_leases=expired,
            failing_since_ms=failing_since_ms or None,
            parked_reason=parked,
            why=why,
        )

    def _why_leased(self, worker: str, since_ms: int, until_ms: int) -> str:
        has = f"worker {worker} has leased it for {_format_wait(self.now_ms - since_ms)}"
        if until_ms > self.now_ms:
            return f"{has}; the lease expires in {_format_wait(until_ms - self.now_ms)} unless it is renewed"
        return f"{has}; the lease expired {_format_wait(self.now_ms - until_ms)} ago, and the next worker that fetches gets it"


def queue_usage(client: Client, keys: HandlerKeys) -> tuple[int, int] | None:
    """Return how many entries wait in the key queues of a handler on workers, and the limit; None if that is not
    known.
    """
    known, pending = send_all(
        client, [("HMGET", keys.meta, "owner", "look_ahead"), ("XPENDING", keys.stream, keys.group)]
    )
    if isinstance(pending, GroupMissing):
        return None
    engine, most = raise_if_error(known)
    is_known = engine == b"keyed" and most is not None and most.isdigit()
    return (int(raise_if_error(pending)[0]), int(most)) if is_known else None


def last_errors(client: Client, queues: Sequence[tuple[HandlerKeys, KeyQueue]]) -> list[LastError]:
    """Return why the last attempt on the first entry of each key queue failed; empty where it is not known.

    Raises RedisError.
    """
    field = [(keys, to_wire(queue.first_id) + ERROR_SUFFIX.encode()) for keys, queue in queues]
    return [LastError.parse(reply) for reply in call_all(client, [("HGET", keys.crashes, one) for keys, one in field])]


def blocked_queues(client: Client, keys: HandlerKeys, *, most: int = 100) -> list[KeyQueue]:
    """Return those that are blocked, of `most` key queues that back off and `most` that are leased. Raises RedisError.

    The first message of a blocked key runs again at times: then the key is leased.
    """
    backing_off, leased = call_all(
        client, [("ZRANGE", keys.backoff, 0, most - 1), ("ZRANGE", keys.leases, 0, most - 1)]
    )
    queues = read_queues(client, keys, [*backing_off, *leased])
    errors = last_errors(client, [(keys, one) for one in queues])
    return [one for one, last in zip(queues, errors, strict=True) if is_blocked(one, last)]


def is_blocked(queue: KeyQueue, last: LastError) -> bool:
    """True if the first entry of a key queue is retried without end: its attempts have failed, or it waits for newer code."""
    return last.blocks and queue.parked_reason is None and queue.failed_attempts >= last.attempts


def explain(queue: KeyQueue, last: LastError) -> str:
    """Return what a key queue waits for, in words; `last`: its last error, as far as it is known."""
    if is_blocked(queue, last):
        if not last.attempts:
            return f"blocked, as it waits for newer code: {queue.why}"
        return f"blocked, as {queue.failed_attempts} attempts have failed: {queue.why}"
    if queue.state == "backing off" and last.attempts and not last.blocks:
        return f"{queue.why}, of {last.attempts} attempts"
    return queue.why


def park(client: Client, keys: HandlerKeys, queue: bytes, reason: str) -> bool:
    """Park a key queue, from the end of its current lease on; False if it is parked already.

    This and the two below raise ConfigError if neither a worker with a key nor a Spark run has begun on the stream, and
    RedisError.
    """
    return bool(_run_park_unpark_skip(client, keys, (queue, "park", reason)))


def unpark(client: Client, keys: HandlerKeys, queue: bytes) -> bool:
    """Unpark a key queue; False if it is not parked."""
    return bool(_run_park_unpark_skip(client, keys, (queue, "unpark")))


def skip(
    client: Client,
    keys: HandlerKeys,
    queue: bytes,
    *,
    error: str,
    reason: Reason = "skipped",
    only: str | None = None,
) -> str | None:
    """Make the first entry of a key queue a dead letter with the text `error`, and return its id.

    None if it has none, if its id is not `only`, or if that entry was committed during this call. Redis refuses the
    commit of a worker that processes it. A parked queue stays parked. The dead letter also says why the last attempt on
    the entry failed.
    """
    (first,) = call_all(client, [("LINDEX", keys.queue(queue), 0)])
    if first is None or only not in (None, first.decode()):
        return None
    found, (*counts, packed), time = call_all(
        client,
        [
            ("XRANGE", keys.stream, first, first),
            ("HMGET", keys.crashes, first + b"f", first + b"l", first + ERROR_SUFFIX.encode()),
            ("TIME",),
        ],
    )
    last = LastError.parse(packed)
    error = f"{error}; last error: {last.error}" if last.error else error
    letter = DeadLetter(
        stream=keys.stream,
        id=first.decode(),
        pairs=own_pairs(found[0][1]) if found else [],
        key=_key_of(queue),
        app=keys.app,
        handler=keys.handler,
        attempts=sum(int(count or 0) for count in counts),
        reason=reason,
        error=error,
        traceback=last.traceback,
        time_ms=time_ms_of(time),
    )
    done = _run_park_unpark_skip(client, keys, (queue, "skip", first, *letter.items()))
    return first.decode() if done else None


def _run_park_unpark_skip(client: Client, keys: HandlerKeys, args: Sequence[Arg]) -> Reply:
    try:
        return client.script(PARK_UNPARK_SKIP, keys.commit_keys, (keys.group, *args))
    except CommandFailed as error:
        if error.code == "NOTKEYED":
            raise ConfigError(
                f"{keys.label} has not begun on {keys.stream} as a handler with a key, so its keys cannot be "
                "parked, unparked or skipped: start it first, with `millstream worker` or `millstream run`"
            ) from error
        if error.code == "MIGRATING":
            raise ConfigError(
                f"the key migrates to {keys.stream} and goes on by itself when its messages in the earlier partition are "
                "done: wait for that"
            ) from error
        raise


def _waits_for(meta: Sequence[bytes | None], now_ms: float) -> str:
    engine, paused, rate_at_us, stored_rate = meta
    if parse_pause(paused, now_ms):
        return "the end of the handler's pause"
    engine_name = "the Spark run" if engine is None else "a free worker"
    reserved_ms = _reserved_ms(rate_at_us, now_ms)
    if reserved_ms <= 0:
        return engine_name
    override = parse_rate_override(stored_rate)
    source = "" if override is None else f" ({override.source})"
    return f"{engine_name}, and for the handler's rate{source}, whose next {format_age(reserved_ms)} are reserved"


def _reserved_ms(rate_at_us: bytes | None, now_ms: float) -> float:
    """For how long messages of the handler's rate are reserved already; 0 without a rate."""
    try:
        return max(0.0, int(rate_at_us or 0) / 1000 - now_ms)
    except (ValueError, OverflowError):
        return 0.0  # another program wrote it


def _present(names: Sequence[bytes], values: Sequence[bytes | None]) -> dict[bytes, bytes]:
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _format_wait(ms: int) -> str:
    return format_age(max(0, ms))  # the clocks of a worker and of Redis may differ


def _key_of(name: bytes) -> bytes | None:
    return name[1:] if name.startswith(b"k") else None
