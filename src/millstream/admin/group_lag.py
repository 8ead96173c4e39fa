"""Lag and live consumers of groups that are not handlers': those of stages, of queries (readAs=group), and others."""

from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec.structs import replace

from millstream.admin.lag import age_ms, count_lags, estimate_lag
from millstream.admin.liveness import StreamGroup, find_consumers, find_runs
from millstream.admin.reports import GroupReport, StreamReport
from millstream.clock import Clock
from millstream.errors import ConfigError, RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import GroupBatchKeys, HandlerKeys, run_name, stage_of, to_wire
from millstream.redis_client.pipelining import send_all, server_time_ms
from millstream.redis_client.resp import Command


def has_stage_group(app: str, stream: StreamReport) -> bool:
    """Whether a stage of the app has read the stream."""
    return any(stage is not None and stage[0] == app for stage in (stage_of(group.name) for group in stream.groups))


def other_groups(
    streams: Iterable[StreamReport], handlers: Iterable[HandlerKeys], app: str | None
) -> list[StreamGroup]:
    """The groups that are not those of `handlers`; of stages' groups, only those of `app`, or all if it is None."""
    own = {(keys.stream, keys.group) for keys in handlers}
    found = []
    for stream in streams:
        for group in stream.groups:
            stage = stage_of(group.name)
            if (stream.name, group.name) not in own and (app is None or stage is None or stage[0] == app):
                found.append((stream.name, group.name))
    return found


def complete_groups(
    client: Client,
    streams: Mapping[str, StreamReport],
    places: Sequence[StreamGroup],
    *,
    budget_ms: float,
    clock: Clock,
) -> tuple[StreamReport, ...]:
    """The streams, sorted, with complete reports of the groups at `places`. Raises RedisError, except AccessDenied.

    `budget_ms`: maximum time for counting lags, in milliseconds.
    """
    groups = {(stream.name, group.name): group for stream in streams.values() for group in stream.groups}
    consumers = find_consumers(client, places)
    runs = find_runs(client, {stage for _, group in places if (stage := stage_of(group))})
    queries = _queries(client, consumers)
    lags = [estimate_lag(streams[place[0]], groups[place].last_delivered_id) for place in places]
    count_lags(client, lags, budget_ms, clock)
    pending = _first_pending(client, [place for place in places if groups[place].pending])
    now_ms = server_time_ms(client)
    for place, lag in zip(places, lags, strict=True):
        group, stage = groups[place], stage_of(place[1])
        first = pending.get(place) or lag.first_id
        live = {_owner(place[1], name, queries) for name, is_live in consumers[place].items() if is_live}
        groups[place] = replace(
            group,
            alive=tuple(sorted(live)) if stage is None else (run_name(stage[1]),) * (stage in runs),
            has_lag=True,
            lag=None if lag.count is None else lag.count + group.pending,
            lag_exact=lag.count is not None and not lag.is_partial,
            oldest_age_ms=age_ms(first, now_ms) if first else None,
            shared=any((place[1], name) in queries for name in consumers[place]),
        )
    return tuple(_with(streams[name], groups) for name in sorted(streams))


def _with(stream: StreamReport, groups: Mapping[StreamGroup, GroupReport]) -> StreamReport:
    return replace(stream, groups=tuple(groups[stream.name, group.name] for group in stream.groups))


def _first_pending(client: Client, places: Sequence[StreamGroup]) -> dict[StreamGroup, str]:
    replies = send_all(client, [("XPENDING", to_wire(stream), to_wire(group)) for stream, group in places])
    found = {place: reply for place, reply in zip(places, replies, strict=True) if not isinstance(reply, RedisError)}
    return {place: reply[1].decode() for place, reply in found.items() if reply[1]}


def _queries(client: Client, consumers: Mapping[StreamGroup, Iterable[str]]) -> set[StreamGroup]:
    """Group and consumer of each Spark query that shares a group. A query keeps a record beside each of its streams."""
    records: dict[StreamGroup, Command] = {}
    for (stream, group), names in consumers.items():
        for name in names:
            if (group, name) not in records:
                try:
                    records[group, name] = ("HGET", to_wire(GroupBatchKeys(stream, group, name).record), "epoch")
                except ConfigError:
                    continue  # not a valid name of a query, or of a stream that one reads
    replies = send_all(client, list(records.values()))
    return {one for one, reply in zip(records, replies, strict=True) if isinstance(reply, bytes)}


def _owner(group: str, consumer: str, queries: Set[StreamGroup]) -> str:
    """The query of a consumer, or the consumer itself: a partition of a query's batch reads as `<query>:<number>`."""
    query, _, number = consumer.rpartition(":")
    return query if number.isdigit() and (group, query) in queries else consumer
