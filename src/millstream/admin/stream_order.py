"""Streams by what operators look for: the longest, the oldest, those whose groups are farthest behind, or the busiest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from millstream.admin.inspection import inspect_streams
from millstream.admin.lag import StreamLag, count_lags, estimate_lag
from millstream.admin.reports import GroupReport, StreamReport
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.redis_client.client import Client

StreamOrder = Literal["entries", "oldest", "lag", "rate"]
ORDERS: tuple[StreamOrder, ...] = get_args(StreamOrder)


@dataclass(frozen=True, kw_only=True)
class ListedStream:
    """A stream, how far its groups are behind, and how many entries it gets.

    * `lag`: entries that its last group has not read or not acknowledged; None without a group
    * `lag_exact`: False if the lag is a lower bound
    * `rate`: entries added a second; None if it is not known
    """

    stream: StreamReport
    lag: int | None
    lag_exact: bool
    rate: float | None = None


def list_streams(
    client: Client, names: Sequence[str], *, budget_ms: float, clock: Clock = SYSTEM_CLOCK
) -> list[ListedStream]:
    """The streams with their lags, in the order of `names`. Omits those that are gone or no streams. Raises RedisError.

    `budget_ms`: maximum time for counting lags, in milliseconds.
    """
    streams = inspect_streams(client, names)
    lags = {
        (one.name, group.name): estimate_lag(one, group.last_delivered_id) for one in streams for group in one.groups
    }
    count_lags(client, list(lags.values()), budget_ms, clock)
    return [_listed(one, lags) for one in streams]


def ordered(found: Sequence[ListedStream], order: StreamOrder) -> list[ListedStream]:
    """The same streams, those with most first. A lag that is a lower bound may be any larger one, and comes before all others."""
    figures: Mapping[StreamOrder, Callable[[ListedStream], tuple[bool, float]]] = {
        "entries": lambda one: (True, one.stream.length),
        "oldest": lambda one: (True, one.stream.oldest_age_ms or 0),
        "lag": lambda one: (not one.lag_exact, one.lag or 0),
        "rate": lambda one: (one.rate is not None, one.rate or 0),
    }
    return sorted(found, key=figures[order], reverse=True)


def known_lag(stream: StreamReport) -> int | None:
    """The lag of the last group of a stream, without counting entries; None without a group.

    Where Redis does not know how many entries a group has read, all that the stream has count, which is the most it can be.
    """
    return max((one.pending + _unread(stream, one) for one in stream.groups), default=None)


def _unread(stream: StreamReport, group: GroupReport) -> int:
    lag = estimate_lag(stream, group.last_delivered_id)
    if not lag.is_partial:
        return lag.count or 0
    return (
        stream.length if group.entries_read is None else min(stream.length, max(0, stream.added - group.entries_read))
    )


def _listed(stream: StreamReport, lags: Mapping[tuple[str, str], StreamLag]) -> ListedStream:
    behind = [(group.pending, lags[stream.name, group.name]) for group in stream.groups]
    return ListedStream(
        stream=stream,
        lag=max(((lag.count or 0) + pending for pending, lag in behind), default=None),
        lag_exact=not any(lag.is_partial for _, lag in behind),
    )
