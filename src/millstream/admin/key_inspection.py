"""Inspection of one key of a handler, on each of its streams. Reads only."""

from collections.abc import Sequence
from itertools import islice

from millstream.admin.delayed_streams import delayed_of
from millstream.admin.inspection import inspect_handlers
from millstream.admin.key_explanation import KeyReport
from millstream.admin.key_queues import last_errors, queue_usage, read_queues
from millstream.admin.limit_waits import find_limit_waits
from millstream.admin.reports import HandlerReport
from millstream.delivery.dead_letter_queue import DeadLetterQueue
from millstream.delivery.keyed_stream import queue_of_key
from millstream.delivery.last_error import LastError
from millstream.delivery.long_runs import LongRun, read_long_runs
from millstream.errors import MillstreamError
from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import server_time_ms

_MOST_LETTERS = 1_000
"""How many of the newest dead letters of a handler on a stream are searched for those of the key."""


def inspect_key(client: Client, places: Sequence[HandlerKeys], key: bytes, *, is_only: bool) -> list[KeyReport]:
    """The reports of a key of a handler, on each of its streams `places` that this user may access.

    `is_only`: whether the handler has run on one stream alone. Raises MillstreamError if the handler has no key, and
    RedisError.
    """
    by_stream = {keys.stream: keys for keys in places}
    handlers = inspect_handlers(client, places)
    if all(one.engine == "workers" and not one.keyed for one in handlers):
        raise MillstreamError(
            f"{places[0].label} has no key: its messages run in no order, and none waits for another; see: "
            f"millstream info {places[0].app}"
        )
    long_runs = read_long_runs(client, {places[0].app})
    now_ms = server_time_ms(client)
    return [_read(client, by_stream[one.stream], one, key, long_runs, now_ms, is_only=is_only) for one in handlers]


def _read(
    client: Client,
    keys: HandlerKeys,
    handler: HandlerReport,
    key: bytes,
    long_runs: Sequence[LongRun],
    now_ms: int,
    *,
    is_only: bool,
) -> KeyReport:
    name = queue_of_key(key, b"")
    queue = next(iter(read_queues(client, keys, [name])), None)
    last = last_errors(client, [(keys, queue)])[0] if queue is not None else LastError()
    first = (keys.label, escape(keys.stream), "" if queue is None else queue.first_id)
    is_parked = queue is not None and queue.parked_reason is not None
    return KeyReport(
        handler=handler,
        key=key,
        is_only_stream=is_only,
        queue=queue,
        last=last,
        long_run=next((one for one in long_runs if (one.handler, one.stream, one.id) == first), None),
        limit=None if queue is None else find_limit_waits(client, [(keys, queue)])[0],
        is_migrating=is_parked and client.execute("HEXISTS", keys.awaiting, name) == 1,
        queued=queue_usage(client, keys) if queue is None and handler.lag else None,
        delayed=next(iter(delayed_of(client, [keys.stream])), None) if queue is None else None,
        dead_letters=_dead_letters(client, keys, key) if handler.dead_letters else (),
        now_ms=now_ms,
    )


def _dead_letters(client: Client, keys: HandlerKeys, key: bytes) -> Sequence[DeadLetter]:
    newest = islice(DeadLetterQueue(client).newest(keys), _MOST_LETTERS)
    return [one.letter for one in newest if one.letter is not None and one.letter.key == key]
