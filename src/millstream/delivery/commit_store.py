"""CommitStore: stores in Redis which messages of a stream are committed for a handler.

The *key offset* of a key is the id of its last committed message in the batch in flight. The *committed id* is the id
up to which the whole stream is committed. A commit names the key offset that was loaded with the state, and is refused
if that offset has moved. So of two executions of a message at most one takes effect, in stream order, whatever the
clocks say.
Both engines commit through this one module and its one script.
"""

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec

from millstream.delivery.effects import FAILED_SUFFIX, U, last_ids_of, split_bare
from millstream.delivery.pause import Pause, parse_pause
from millstream.delivery.rate_override import RateOverride, parse_rate_override
from millstream.delivery.state_expiry import live_states
from millstream.errors import (
    CommandFailed,
    ConfigError,
    GroupMissing,
    Incompatible,
    OutOfMemory,
    RedisError,
    StaleOwner,
    Unavailable,
)
from millstream.model import EntryId
from millstream.redis_client.call import Call
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import call_all, server_time_us
from millstream.redis_client.resp import Arg, Command, Reply
from millstream.redis_client.scripts import Script

BEGIN_RUN = Script("commit/begin_run")
COMMIT = Script("commit/commit")
COMMIT_AT_MAXMEMORY = Script("commit/commit", allow_oom=True)
JOIN_WORKERS = Script("commit/join_workers")
SET_IDLE_TIME = Script("commit/set_idle_time")
CHECKPOINT = Script("commit/checkpoint")
ADVANCE_COMMITTED = Script("commit/advance_committed")
FORGET_PROGRESS = Script("commit/forget_progress")
RESERVE_RATE = Script("commit/reserve_rate")


WorkerKind = Literal["workers", "keyed"]
"""How workers share a stream: by its entries, or by the queues of its keys."""

Checkpoint = Literal["noted", "later", "too many"]
"""Outcome of a checkpoint."""

_CHECKPOINTS: Mapping[int, Checkpoint] = {1: "noted", 0: "later", -1: "too many"}

KEY_PREFIX = b"k"
"""Prefix of the offset field, and of the queue name, of a key."""
ENTRY_PREFIX = b"i"
"""Prefix of the offset field, and of the queue name, of an entry without a key: its id follows."""


FORMAT = 1
"""Number of the format in which the keys of handlers are stored. A change that earlier code would misread adds 1."""

_LOAD_CHUNK = 1_000
_MAX_INCOMPLETE = 100_000
_BURST_S = 0.2


def describe_newer_format(stored: int | str) -> str:
    """Return why this process cannot use keys in a format above FORMAT, for errors and reports."""
    return f"stored in format {stored} by a newer millstream, and this one reads formats up to {FORMAT}: upgrade this process"


def may_repeat(error: RedisError) -> bool:
    """Return whether to send a commit again at once after this error, under its call number.

    Then it has written nothing, or gets its first reply. After most other errors Redis may have written a part of it;
    after OutOfMemory it has not, but would refuse it again.
    """
    if isinstance(error, CommandFailed):
        return error.code in ("STALE", "FORMAT", "PARKED")
    return isinstance(error, (Unavailable, GroupMissing)) and not isinstance(error, OutOfMemory)


def reservation_size(rate: float) -> int:
    """Return how many messages of `rate` a second are reserved at a time: a fifth of a second's worth, at least 1."""
    return max(1, int(rate * _BURST_S))


def _id_or_none(text: bytes) -> EntryId | None:
    return EntryId.parse(text) if text else None


class CommittedPosition(msgspec.Struct, frozen=True):
    """How far a stream is committed when a run begins, and how many of its entries are poison-pill suspects.

    Workers have committed all entries up to `takeover_offset` (the takeover offset), if there is one, except those that
    `CommitStore.incomplete` returns. `has_queues`: entries wait in key queues. `rate_override`: the rate that an operator
    has set.
    """

    committed_id: EntryId | None
    suspects: int
    takeover_offset: EntryId | None = None
    has_queues: bool = False
    rate_override: RateOverride | None = None


class CommitStore:
    """The commit store of one handler, over all its streams, as written by the run that holds `token`.

    `into` is the handler's output stream, or None; `into_maxlen` trims it to about so many entries. `consumer` is the
    name of a worker, which commits only entries that are pending with it; "" on Spark. `keyed`: the handler has a key.
    `state_ttl_ms`: states expire so many milliseconds after the last commit that set them; None: never.
    Each method is one round trip per Redis node, however many streams it names, and may safely be repeated when its
    reply is lost. Each raises RedisError, and those that write raise StaleOwner if a newer run has begun.
    """

    def __init__(
        self,
        client: Client,
        *,
        app: str,
        handler: str,
        token: int = 0,
        into: str | None = None,
        into_maxlen: int | None = None,
        consumer: str = "",
        keyed: bool = False,
        state_ttl_ms: int | None = None,
    ) -> None:
        self._client = client
        self._owner = (app, handler)
        self.token = token
        self._into = (into,) if into else ()
        self._maxlen = into_maxlen or 0
        self._group = HandlerKeys(app, handler, "").group
        self._worker = (self._group, consumer)
        self._keyed = keyed
        self.state_ttl_ms = state_ttl_ms

    def with_token(self, token: int) -> "CommitStore":
        """Return the same store for the run that holds `token`."""
        fresh = copy.copy(self)
        fresh.token = token
        return fresh

    def keys(self, stream: str) -> HandlerKeys:
        """Return the names of the handler's keys on `stream`."""
        return HandlerKeys(*self._owner, stream)

    def new_token(self, streams: Iterable[str]) -> int:
        """Return a token for a new run, greater than the epoch of every earlier run on `streams`.

        It is the server's time in microseconds, so a failover to a replica that missed the last epoch cannot repeat it.
        """
        now_us = server_time_us(self._client)
        epochs = self._client.pipeline([("HGET", self.keys(stream).meta, "epoch") for stream in streams])
        known = max((int(raise_if_error(epoch) or 0) for epoch in epochs), default=0)
        return max(now_us, known + 1)

    def begin_run(self, streams: Sequence[str]) -> dict[str, CommittedPosition]:
        """Raise the epoch of each stream to this run's token, and return how far each stream is committed.

        Also raises AccessDenied if the Redis user lacks a right that `commit` will need, ConfigError if keys are parked
        and the handler has none, and Incompatible if a newer version of millstream has stored the progress.
        """
        args = (self.token, self._group, "1" if self._keyed else "", self._expires, FORMAT)
        replies = self._run(BEGIN_RUN, [(self._script_keys(stream), args) for stream in streams])
        return {
            stream: CommittedPosition(
                _id_or_none(committed_id),
                int(suspects),
                _id_or_none(takeover_offset),
                bool(has_queues),
                parse_rate_override(rate),
            )
            for stream, (committed_id, suspects, takeover_offset, has_queues, rate) in zip(
                streams, replies, strict=True
            )
        }

    def committed_ids(self, streams: Sequence[str]) -> dict[str, EntryId]:
        """Return the committed id of each stream that has one. Writes nothing."""
        replies = self._client.pipeline([("HGET", self.keys(stream).meta, "committed_id") for stream in streams])
        found = zip(streams, replies, strict=True)
        return {stream: EntryId.parse(value) for stream, value in found if raise_if_error(value)}

    def begun_streams(self, streams: Sequence[str]) -> list[str]:
        """Return those of `streams` on which something has been committed. Writes nothing."""
        replies = self._client.pipeline([("HEXISTS", self.keys(stream).meta, "committed") for stream in streams])
        return [stream for stream, reply in zip(streams, replies, strict=True) if raise_if_error(reply)]

    def load(self, wanted: Mapping[str, tuple[Sequence[bytes], Sequence[bytes]]]) -> dict[str, dict[bytes, bytes]]:
        """Load offsets and states: per stream, the values of the offset fields and state fields that exist.

        `wanted` maps a stream to its offset fields and state fields. Offsets are read before states: a commit in
        between then shows as a moved offset, never as an unseen state. State fields come back prefixed with b"s"; a
        state that has expired is none.
        """
        commands: list[Command] = []
        requests: list[tuple[str, bytes, Sequence[bytes]]] = []
        for stream, (offset_fields, state_fields) in wanted.items():
            names = self.keys(stream)
            for key, prefix, fields in ((names.offsets, b"", offset_fields), (names.state, b"s", state_fields)):
                for at in range(0, len(fields), _LOAD_CHUNK):
                    chunk = fields[at : at + _LOAD_CHUNK]
                    commands.append(("HMGET", key, *chunk))
                    requests.append((stream, prefix, chunk))
        found: dict[str, dict[bytes, bytes]] = {stream: {} for stream in wanted}
        for (stream, prefix, chunk), reply in zip(requests, self._client.pipeline(commands), strict=True):
            values, stored = found[stream], raise_if_error(reply)
            live = live_states(self._client, self.keys(stream).state, stored) if prefix else stored
            for name, value in zip(chunk, live, strict=True):
                if value is not None:
                    values[prefix + name] = value
        return found

    def incomplete(self, stream: str, ids: Sequence[str]) -> set[str]:
        """Return those of `ids`, none above the takeover offset, that workers have not committed."""
        found: set[str] = set()
        for at in range(0, len(ids), _LOAD_CHUNK):
            chunk = ids[at : at + _LOAD_CHUNK]
            values = self._client.execute("HMGET", self.keys(stream).incomplete, *chunk)
            found.update(one for one, value in zip(chunk, values, strict=True) if value is not None)
        return found

    def commit(self, units: Mapping[str, Sequence[U]], *, allow_oom: bool = False, call_number: str = "") -> list[U]:
        """Commit each stream's units in one atomic step per stream; return the units that were refused.

        A refused unit wrote nothing: part of it is committed already, or another worker holds the entry now. Also
        raises OutOfMemory if Redis cannot store the effects now; a stream whose step failed has nothing written.
        `allow_oom`: commit at maxmemory too; for units without effects, which free memory in the end. `call_number`:
        the worker's number of this call; a repetition under the same number gets the reply that was lost.
        """
        calls = [(self._script_keys(stream), self._commit_args(group, call_number)) for stream, group in units.items()]
        replies = self._run(COMMIT_AT_MAXMEMORY if allow_oom else COMMIT, calls)
        return [
            one
            for group, reply in zip(units.values(), replies, strict=True)
            for one in self._parse_commit(group, reply)
        ]

    def commit_call(self, stream: str, units: Sequence[U], call_number: str) -> Call[list[U]]:
        """Return the call that `commit` makes, for callers that pipeline many streams. If the reply is an error, call
        `commit` instead.
        """
        command = self.script_command(COMMIT, stream, self._commit_args(units, call_number))
        return Call(command, partial(self._parse_commit, units))

    def _parse_commit(self, units: Sequence[U], reply: Reply) -> list[U]:
        if not reply:  # almost always: this saves sorting a thousand units again
            return []
        *numbers, last = reply
        if isinstance(last, bytes):
            for unit in units:
                if not isinstance(unit, bytes):
                    unit.lowest_pending_id = last
        else:
            numbers.append(last)
        if not numbers:
            return []
        bare, full = self._split_bare(units)
        sent = [*bare, *full]
        return [sent[int(number) - 1] for number in numbers]

    def _commit_args(self, units: Sequence[U], call_number: str) -> list[Arg]:
        bare, full = self._split_bare(units)
        args: list[Arg] = [self.token, *self._worker, call_number, len(bare), *last_ids_of(bare)]
        for unit in full:
            if isinstance(unit, bytes):
                raise TypeError("ids alone are committed by workers only")
            args += unit.args(self._maxlen, self.state_ttl_ms)
        return args

    def _split_bare(self, units: Sequence[U]) -> tuple[list[U], list[U]]:
        """Return the units without effects, for which the ids are enough, and the others."""
        return split_bare(units) if self._worker[1] else ([], list(units))

    def advance_committed(self, ends: Mapping[str, EntryId]) -> None:
        """Move the committed id of each stream to the given id, and drop the key offsets up to it."""
        calls = []
        for stream, end in ends.items():
            k = self.keys(stream)
            calls.append(((k.meta, k.offsets, k.crashes, k.incomplete), (self.token, str(end))))
        self._run(ADVANCE_COMMITTED, calls)

    def crash_count(self, stream: str, entry_id: str) -> int:
        """Return how many tasks have started an entry and may have died of it. Writes nothing."""
        return int(self._client.execute("HGET", self.keys(stream).crashes, entry_id) or 0)

    def set_crash_count(self, stream: str, entry_id: str, count: int) -> None:
        """Set the crash count of an entry: one more before a task starts it, the former one if the task survived it.

        It is set, not added to, so that a repeated call counts once. An older run is not refused.
        """
        self._client.execute("HSET", self.keys(stream).crashes, entry_id, count)

    def drop_progress(self, streams: Sequence[str]) -> None:
        """Drop committed id, offsets, crash counts, counters and all keyed state, to process the streams anew.

        This run must have begun on them, so that an older run that is still alive commits nothing afterwards. Dead
        letters and outputs stay.
        """
        self._run(FORGET_PROGRESS, [(self._script_keys(stream), (self.token, self._group)) for stream in streams])

    # Workers

    def join_workers(
        self, stream: str, start: Literal["0", "$"], kind: WorkerKind = "workers", newest: int | None = None
    ) -> tuple["CommitStore", bool]:
        """Join the workers of `stream`; return their commit store, and whether their consumer group was lost.

        The first worker takes the stream over from Spark, or from workers of another `kind`, and begins at `start` if
        nothing was done before. Raises StaleOwner if it would take over from a run that began after `newest`, a server
        time in microseconds; and as `begin_run` does.
        """
        args = (self._group, start, kind, "" if newest is None else newest, self._expires, FORMAT)
        ((token, lost),) = self._run(JOIN_WORKERS, [(self._script_keys(stream), args)])
        return self.with_token(int(token)), bool(lost)

    def check(self, stream: str) -> tuple[Pause | None, RateOverride | None]:
        """Return the handler's pause and the rate that an operator has set on `stream`. Raises StaleOwner if a newer
        run has begun.
        """
        return self._client.run(self.check_call(stream))

    def check_call(self, stream: str) -> Call[tuple[Pause | None, RateOverride | None]]:
        """Return the call that `check` makes, for callers that pipeline many streams."""
        return Call(("HMGET", self.keys(stream).meta, "epoch", "paused", "rate"), self._parse_check)

    def _parse_check(self, reply: Reply) -> tuple[Pause | None, RateOverride | None]:
        epoch, paused, rate = reply
        if epoch is not None and int(epoch) > self.token:
            raise self._stale_owner()
        return parse_pause(paused, time.time() * 1000), parse_rate_override(rate)

    def check_owner(self, streams: Sequence[str]) -> None:
        """Raise StaleOwner if a newer run has begun on one of `streams`. Writes nothing."""
        for result in self._client.run_all([self.check_call(stream) for stream in streams]):
            raise_if_error(result)

    def is_owned_by_workers(self, stream: str, kind: WorkerKind = "workers") -> bool:
        """Return whether workers of that kind own `stream`, under any token."""
        return bool(self._client.execute("HGET", self.keys(stream).meta, "owner") == kind.encode())

    def set_paused(self, streams: Sequence[str], *, paused: bool, why: Pause | None = None) -> None:
        """Pause or resume the handler on `streams`: paused workers read nothing new, and finish the entries in flight.

        `why`: the pause that is stored; default: an operator's.
        """
        stored = (why or Pause(at_ms=time.time_ns() // 1_000_000)).encode()
        self._write_meta(streams, ("HSET", "paused", stored) if paused else ("HDEL", "paused"))

    def paused_streams(self, streams: Sequence[str]) -> dict[str, Pause]:
        """Return the pause of each of `streams` on which the handler is paused. Raises RedisError."""
        replies = call_all(self._client, [("HGET", self.keys(stream).meta, "paused") for stream in streams])
        now_ms = time.time() * 1000
        pauses = {stream: parse_pause(stored, now_ms) for stream, stored in zip(streams, replies, strict=True)}
        return {stream: pause for stream, pause in pauses.items() if pause is not None}

    def reserve_rate(self, stream: str, rate: float, count: int, override: RateOverride | None = None) -> float | None:
        """Reserve `count` messages of the handler's `rate` a second on `stream`; return the wait until then, in
        milliseconds.

        `override`: the rate that an operator has set, as far as the caller knows. None, and nothing is reserved, if
        that has changed: read `rate_override`.
        """
        args = (rate, count, "" if override is None else override.rate)
        wait_us = self._client.script(RESERVE_RATE, (self.keys(stream).meta,), args)
        return None if wait_us == -1 else float(wait_us) / 1000

    def set_rate(self, streams: Sequence[str], rate: float | None) -> None:
        """Set the handler's rate on `streams` in place of the one in code; None: that in code holds again.

        What was reserved ahead at the earlier rate is void.
        """
        if rate is None:
            self._write_meta(streams, ("HDEL", "rate", "rate_at"))
        else:
            override = RateOverride(rate=rate, at_ms=time.time_ns() // 1_000_000)
            self._write_meta(streams, ("HSET", "rate", override.encode(), "rate_at", 0))

    def _write_meta(self, streams: Sequence[str], command: Command) -> None:
        """Execute `command`, given without its key, on the metadata of each stream."""
        name, *items = command
        call_all(self._client, [(name, self.keys(stream).meta, *items) for stream in streams])

    def rate_override(self, stream: str) -> RateOverride | None:
        """Return the handler's rate on `stream` that an operator has set; None if the rate in code holds."""
        return parse_rate_override(self._client.execute("HGET", self.keys(stream).meta, "rate"))

    def committed_entries(self, stream: str) -> Iterator[bytes]:
        """Yield the ids of single entries with an offset: committed, and above the committed id if Spark owned the
        stream before.
        """
        cursor = b"0"
        while True:
            cursor, found = self._client.execute("HSCAN", self.keys(stream).offsets, cursor, "COUNT", _LOAD_CHUNK)
            yield from (name.removeprefix(ENTRY_PREFIX) for name in found[::2] if name.startswith(ENTRY_PREFIX))
            if cursor == b"0":
                return

    def set_idle_time(self, stream: str, ids: Sequence[bytes], idle_ms: int) -> list[bytes]:
        """Set the idle time of the worker's pending entries; return those that it does not hold any more."""
        lost: list[bytes] = []
        for at in range(0, len(ids), _LOAD_CHUNK):
            args: list[Arg] = [self.token, *self._worker, idle_ms, *ids[at : at + _LOAD_CHUNK]]
            lost += self._run(SET_IDLE_TIME, [((self.keys(stream).meta, stream), args)])[0]
        return lost

    def checkpoint(self, stream: str) -> Checkpoint:
        """Move the committed id to the last id delivered to the workers' group, and store the incomplete ids before it.

        "later": a checkpoint was stored too recently for the number of pending entries. "too many": more entries are
        pending than one checkpoint can store.
        """
        return _CHECKPOINTS[self.run_script(CHECKPOINT, stream, self._checkpoint_args)]

    def checkpoint_call(self, stream: str) -> Call[Checkpoint]:
        """Return the call that `checkpoint` makes, for callers that pipeline many streams. If the reply is an error, call
        `checkpoint` instead.
        """
        return Call(self.script_command(CHECKPOINT, stream, self._checkpoint_args), _CHECKPOINTS.__getitem__)

    @property
    def _checkpoint_args(self) -> Sequence[Arg]:
        return (self.token, self._group, _MAX_INCOMPLETE)

    def failed_attempts(self, stream: str, ids: Sequence[bytes]) -> list[int]:
        """Return the number of failed attempts of each entry."""
        if not ids:
            return []
        fields = [entry_id + FAILED_SUFFIX.encode() for entry_id in ids]
        return [int(count or 0) for count in self._client.execute("HMGET", self.keys(stream).crashes, *fields)]

    def record_failures(self, stream: str, attempts: Mapping[bytes, int]) -> None:
        """Store the number of failed attempts of each entry."""
        items = [part for entry_id, count in attempts.items() for part in (entry_id + FAILED_SUFFIX.encode(), count)]
        self._client.execute("HSET", self.keys(stream).crashes, *items)

    def run_script(self, script: Script, stream: str, args: Sequence[Arg]) -> Reply:
        """Run a script that works on key queues, and whose keys are those of the commit."""
        return self.run_scripts(script, [(stream, args)])[0]

    def run_scripts(self, script: Script, calls: Iterable[tuple[str, Sequence[Arg]]]) -> list[Reply]:
        """Run `script` on several streams with their arguments, in order and in one round trip; raise the first
        error.
        """
        return self._run(script, [(self._script_keys(stream), args) for stream, args in calls])

    def script_command(self, script: Script, stream: str, args: Sequence[Arg]) -> Command:
        """Return the command that `run_script` sends, for callers that pipeline it. If the reply is an error, call `run_script`,
        which translates it.
        """
        return script.command(self._script_keys(stream), args)

    @property
    def _expires(self) -> str:
        return "" if self.state_ttl_ms is None else "1"

    def _script_keys(self, stream: str) -> tuple[str, ...]:
        return (*self.keys(stream).commit_keys, *self._into)

    def _run(self, script: Script, calls: Sequence[tuple[Sequence[Arg], Sequence[Arg]]]) -> list[Reply]:
        try:
            return self._client.scripts([(script, keys, args) for keys, args in calls])
        except CommandFailed as error:
            if error.code == "STALE":
                raise self._stale_owner() from error
            if error.code == "FORMAT":
                stored, _, stream = error.detail.partition(" ")
                raise Incompatible(
                    f"{'.'.join(self._owner)} on {stream} is {describe_newer_format(stored)}; nothing is lost"
                ) from error
            if error.code == "PARKED":
                raise ConfigError(
                    f"{'.'.join(self._owner)} has parked keys, but the handler has no key: "
                    "list them with `millstream key list`, then unpark them or skip their messages"
                ) from error
            raise

    def _stale_owner(self) -> StaleOwner:
        return StaleOwner(f"a newer run of {'.'.join(self._owner)} has taken over; this run stops, nothing is lost")
