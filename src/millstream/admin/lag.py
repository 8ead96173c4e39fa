"""Lag: counts the entries of a stream after an id, from the stream's first and last ids, or at the server.

The lag that Redis itself reports is not used, as it is wrong after deletions.
"""

from collections.abc import Sequence

import msgspec

from millstream.admin.reports import StreamReport
from millstream.clock import Clock
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import to_wire
from millstream.redis_client.scripts import Script

COUNT_ENTRIES = Script("groups/count_entries")
_COUNT_CHUNK = 1_000
_PIPELINE = 1_000


class StreamLag(msgspec.Struct):
    """The number of entries of `stream` after `after_id`, up to `last_id`; if `is_partial`, `count` is a lower bound.

    `after_id` None: unknown. `first_id`: id of the first of these entries, or None. `last_id` "+": to the end.
    """

    stream: str
    after_id: str | None
    count: int | None = None
    first_id: str | None = None
    is_partial: bool = False
    last_id: str = "+"


def estimate_lag(stream: StreamReport, after: str | None) -> StreamLag:
    """The lag after an id, as far as the ends of the stream show it; `is_partial` if the entries must be counted."""
    lag = StreamLag(stream.name, after)
    if lag.after_id is None:
        return lag
    position = EntryId.parse(lag.after_id)
    if stream.first_id is None or position >= EntryId.parse(stream.last_generated_id):
        lag.count = 0
    elif position < EntryId.parse(stream.first_id):
        lag.count, lag.first_id = stream.length, stream.first_id
    else:
        lag.count, lag.is_partial = 0, True
    return lag


def count_lags(client: Client, lags: Sequence[StreamLag], budget_ms: float, clock: Clock, *, at_least: int = 0) -> None:
    """Count the lags that are partial, in round-robin chunks, until all are counted or `budget_ms` has passed.

    `at_least`: after that it goes on until so many entries are counted.
    """
    deadline_ms = clock.monotonic_ms() + budget_ms
    at = {id(lag): lag.after_id or "" for lag in lags}
    unfinished = [lag for lag in lags if lag.is_partial]
    while unfinished:
        for start in range(0, len(unfinished), _PIPELINE):
            some = unfinished[start : start + _PIPELINE]
            replies = client.scripts(
                [(COUNT_ENTRIES, (to_wire(lag.stream),), (at[id(lag)], _COUNT_CHUNK, lag.last_id)) for lag in some]
            )
            for lag, (counted, first, last, more) in zip(some, replies, strict=True):
                lag.count = (lag.count or 0) + counted
                lag.first_id = lag.first_id or first.decode() or None
                lag.is_partial = bool(more)
                at[id(lag)] = last.decode()
        if clock.monotonic_ms() >= deadline_ms and sum(lag.count or 0 for lag in lags) >= at_least:
            return
        unfinished = [lag for lag in unfinished if lag.is_partial]


def count_between(
    client: Client, stream: StreamReport, after: EntryId, last: EntryId, *, budget_ms: float, clock: Clock
) -> StreamLag:
    """The number of entries after an id up to another one, counted for `budget_ms` milliseconds. Raises RedisError."""
    if last >= EntryId.parse(stream.last_generated_id):
        found = estimate_lag(stream, str(after))
    else:
        found = StreamLag(stream.name, str(after), count=0, is_partial=after < last, last_id=str(last))
    count_lags(client, [found], budget_ms, clock)
    return found


def age_ms(entry_id: str, now_ms: int) -> int:
    """Age of an entry in milliseconds, by its id; `now_ms` is the server's time in Unix milliseconds."""
    return max(0, now_ms - EntryId.parse(entry_id).ms)
