"""Deferral on Spark: messages that have to wait move to the queues of their keys, so that their batch can end.

A batch ends when all of it is committed, so it cannot wait for a back-off or for an operator. Deferred messages go to
the same key queues as on workers (`keyed_stream`), where `millstream key list` shows them. Deferred jobs run them from
there once their wait is over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from millstream.delivery.commit_store import CommitStore
from millstream.delivery.effects import FAILED_SUFFIX
from millstream.delivery.state_expiry import live_states
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import call_all
from millstream.redis_client.resp import Arg
from millstream.redis_client.scripts import Script

DEFER = Script("keys/defer")
DEFERRED_KEYS = Script("keys/deferred_keys")
RUNNABLE_KEYS = Script("keys/runnable_keys")

DeferMode = Literal["append", "backoff", "limit", "park"]
"""Why messages are deferred: behind others of their key; until the next attempt on the first; until the handler's limit
allows the first; until an operator acts.
"""

_AT_ONCE = 1_000
_STREAMS_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Deferral:
    """Messages of one key to defer.

    * `queue`, `expected_offset`: the field of their key offset, and its value as it was loaded, or FROM_QUEUE for entries that
      were run from their key queue
    * `mode`; `detail`: milliseconds for "backoff", the value of the limit's field for "limit", the reason for "park"
    * `failed_attempts`: how many attempts on the first have failed, None if that is not known; `last_error`: why the
      last one failed, as `LastError.pack` returns it
    * `ids`: all messages of the key in the batch, from the first deferred one on
    """

    queue: bytes
    expected_offset: bytes
    mode: DeferMode = "append"
    detail: Arg = ""
    failed_attempts: int | None = None
    last_error: bytes = b""
    ids: Sequence[str]


class RunnableKeys(NamedTuple):
    """The key queues of a stream on Spark.

    * `has_queues`: whether there are any; `entry_count`: how many entries wait in them
    * `awaiting`: how many queues wait for their key to migrate from an earlier partition
    * `wait_ms`: milliseconds until another queue may run; None if none waits for a time
    * `queues`: the names of those that may run now
    """

    has_queues: bool
    entry_count: int
    awaiting: int
    wait_ms: float | None
    queues: list[bytes]


class DeferredKey(NamedTuple):
    """The content of a key queue: ids with names and values (None if the entry is gone), failed attempts, state."""

    entries: list[tuple[str, list[bytes] | None]]
    failed_attempts: int
    state: bytes


def defer(store: CommitStore, stream: str, deferrals: Sequence[Deferral]) -> list[Deferral]:
    """Defer messages, each `Deferral` in one step; return those that were refused: their first 1,000 ids are in no
    queue.

    Raises StaleOwner if a newer run has begun, RedisError. May be repeated.
    """
    refused: list[Deferral] = []
    group = store.keys(stream).group
    for calls in _chunks(deferrals):
        args = [part for _, deferral in calls for part in _defer_args(deferral)]
        numbers = store.run_script(DEFER, stream, (store.token, group, *args))
        refused += [calls[int(number) - 1][0] for number in numbers]
    return refused


def _chunks(deferrals: Sequence[Deferral]) -> Iterator[list[tuple[Deferral, Deferral]]]:
    """Split them into calls of at most 1,000 ids, so that Redis serves other clients between two calls.

    Yields for each call its parts of deferrals, each with the whole deferral.
    """
    call: list[tuple[Deferral, Deferral]] = []
    size = 0
    for deferral in deferrals:
        for at in range(0, len(deferral.ids), _AT_ONCE):
            ids = deferral.ids[at : at + _AT_ONCE]
            if call and size + len(ids) > _AT_ONCE:
                yield call
                call, size = [], 0
            before = deferral.ids[at - 1].encode() if at else b""
            part = (
                replace(deferral, ids=ids, expected_offset=before, mode="append", detail="")
                if at
                else replace(deferral, ids=ids)
            )
            call.append((deferral, part))
            size += len(ids)
    if call:
        yield call


def _defer_args(deferral: Deferral) -> list[Arg]:
    failed = "" if deferral.failed_attempts is None else deferral.failed_attempts
    return [
        deferral.queue,
        deferral.expected_offset,
        deferral.mode,
        deferral.detail,
        failed,
        deferral.last_error,
        len(deferral.ids),
        *deferral.ids,
    ]


def deferred_keys(store: CommitStore, stream: str, names: Sequence[bytes]) -> set[bytes]:
    """Return those of the key queues `names` that later messages of their keys must join. Raises RedisError."""
    found: set[bytes] = set()
    for at in range(0, len(names), _AT_ONCE):
        some = names[at : at + _AT_ONCE]
        found.update(
            name for name, waits in zip(some, store.run_script(DEFERRED_KEYS, stream, some), strict=True) if waits
        )
    return found


def runnable_keys(store: CommitStore, streams: Sequence[str], most: int) -> dict[str, RunnableKeys]:
    """Return the key queues of each of `streams` that may run, up to `most` of them. Raises StaleOwner, RedisError."""
    found: dict[str, RunnableKeys] = {}
    for at in range(0, len(streams), _STREAMS_AT_ONCE):
        some = streams[at : at + _STREAMS_AT_ONCE]
        calls = [(stream, (store.token, store.keys(stream).group, most)) for stream in some]
        replies = store.run_scripts(RUNNABLE_KEYS, calls)
        for stream, (has_any, entries, awaiting, wait_ms, *queues) in zip(some, replies, strict=True):
            wait = None if wait_ms < 0 else float(wait_ms)
            found[stream] = RunnableKeys(bool(has_any), int(entries), int(awaiting), wait, queues)
    return found


def read_queue(client: Client, keys: HandlerKeys, name: bytes, most: int) -> DeferredKey:
    """Return the first `most` entries of a key queue; none if it is parked. Raises RedisError."""
    head, state, parked = call_all(
        client,
        [("LRANGE", keys.queue(name), 0, most - 1), ("HGET", keys.state, name[1:]), ("HEXISTS", keys.parked, name)],
    )
    if parked or not head:
        return DeferredKey([], 0, b"")
    failed, *found = call_all(
        client,
        [
            ("HGET", keys.crashes, head[0] + FAILED_SUFFIX.encode()),
            *(("XRANGE", keys.stream, one, one) for one in head),
        ],
    )
    entries = [(one.decode(), entry[0][1] if entry else None) for one, entry in zip(head, found, strict=True)]
    (live,) = live_states(client, keys.state, [state])
    return DeferredKey(entries, int(failed or 0), live or b"")
