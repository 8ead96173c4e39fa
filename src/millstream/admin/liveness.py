"""Liveness: finds the live workers of handlers, consumers of groups and runs on Spark.

A consumer group alone does not show it: it keeps every consumer that ever read an entry.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from millstream.balancer.protocol import service_of
from millstream.errors import AccessDenied, ConfigError, WrongType
from millstream.groups.group import consumers_of
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import (
    WAITING,
    HandlerKeys,
    ServiceKeys,
    from_wire,
    live_workers_key,
    run_name,
    worker_name_key,
)
from millstream.redis_client.pipelining import call_all, send_all, server_time_ms
from millstream.redis_client.replies import pairs_of, time_ms_of
from millstream.redis_client.resp import Command

_LIVE_MS = 60_000.0
_EPOCH = re.compile(rb"[0-9]{1,18}")

StreamGroup = tuple[str, str]
"""A stream and a consumer group on it."""


def find_workers(
    client: Client, found: Sequence[HandlerKeys], *, idle_ms: float = _LIVE_MS
) -> Mapping[HandlerKeys, frozenset[str]]:
    """The live workers of each handler on a stream.

    If workers lease whole streams, it is the owner. Otherwise it is each worker that a supervisor announces, and each
    consumer of the group with an idle time below `idle_ms`, in milliseconds, or whose name a supervisor holds. Raises
    RedisError, except AccessDenied.
    """
    announced = announced_workers(client, found)
    owners = {label: _owners(client, label) for label in {keys.label for keys in found}}
    consumers = _consumers(client, [(keys.stream, keys.group) for keys in found])
    idle = {keys: consumers[keys.stream, keys.group] for keys in found}
    silent = {(keys.app, name) for keys, some in idle.items() for name, ms in some.items() if ms >= idle_ms}
    gone = silent - _holders(client, silent)
    alive: dict[HandlerKeys, frozenset[str]] = {}
    for keys, some in idle.items():
        leased = owners[keys.label]
        if leased is None:
            readers = [name for name in some if (keys.app, name) not in gone]
            alive[keys] = announced[keys.label].union(readers)
        else:
            alive[keys] = frozenset(leased.get(keys.stream, ()))
    return alive


def find_consumers(client: Client, places: Sequence[StreamGroup]) -> Mapping[StreamGroup, Mapping[str, bool]]:
    """The consumers of groups, and whether each was active within a minute. Raises RedisError, except AccessDenied."""
    found = _consumers(client, places)
    return {place: {name: ms < _LIVE_MS for name, ms in some.items()} for place, some in found.items()}


def find_runs(client: Client, pipelines: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of `pipelines`, handlers or stages by app and name, whose run on Spark is alive, by its liveness key."""
    asked = {(app, run_name(name)): (app, name) for app, name in pipelines}
    return {asked[one] for one in _holders(client, asked)}


def read_epochs(client: Client, pipelines: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """The epochs of those of `pipelines`, handlers or stages by app and name, whose run on Spark is alive.

    An epoch is about the time at which its run began, in Unix microseconds. Leaves out those that this user may not
    read, and what another program has written there. Raises RedisError.
    """
    asked = list(pipelines)
    replies = send_all(client, [("GET", worker_name_key(app, run_name(name))) for app, name in asked])
    known = [None if isinstance(one, AccessDenied | WrongType) else raise_if_error(one) for one in replies]
    return {one: int(epoch) for one, epoch in zip(asked, known, strict=True) if epoch and _EPOCH.fullmatch(epoch)}


def _holders(client: Client, names: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of `names`, by app and name, that are held."""
    asked = sorted(names)
    replies = send_all(client, [("EXISTS", worker_name_key(*one)) for one in asked])
    return {one for one, is_held in zip(asked, replies, strict=True) if is_held == 1}


def announced_workers(client: Client, found: Sequence[HandlerKeys]) -> dict[str, frozenset[str]]:
    """The workers of each handler that their supervisors announce, by its label; none where this user may not read them.

    A command for each handler, however many streams it has. Raises RedisError.
    """
    handlers = {keys.label: live_workers_key(keys.app, keys.handler) for keys in found}
    now_ms = server_time_ms(client)
    replies = send_all(client, [("ZRANGE", key, 0, -1, "WITHSCORES") for key in handlers.values()])
    return {
        label: frozenset()
        if isinstance(reply, AccessDenied | WrongType)
        else frozenset(from_wire(name) for name, until in pairs_of(raise_if_error(reply)) if float(until) > now_ms)
        for label, reply in zip(handlers, replies, strict=True)
    }


def _owners(client: Client, label: str) -> dict[str, list[str]] | None:
    """The live owner of each stream of the handler; None if its workers are not known to lease streams."""
    try:
        service = service_of(client, label)
        if service is None:
            return None
        keys = ServiceKeys(service)
        asked: list[Command] = [("TIME",), ("ZRANGE", keys.alive, 0, -1, "WITHSCORES"), ("HGETALL", keys.owners)]
        time, alive, owners = call_all(client, asked)
    except (AccessDenied, ConfigError, WrongType):  # WrongType: another program has written these keys
        return None
    living = {name for name, until in pairs_of(alive) if float(until) > time_ms_of(time)}
    if not living:
        return None
    pairs = ((stream, owner.partition(b" ")[2]) for stream, owner in pairs_of(owners))
    return {from_wire(stream): [from_wire(name)] for stream, name in pairs if name in living}


def _consumers(client: Client, places: Sequence[StreamGroup]) -> dict[StreamGroup, dict[str, int]]:
    """Name and idle time, in milliseconds, of each consumer except WAITING."""
    found = consumers_of(client, places)
    return {place: {one.name: one.idle_ms for one in found.get(place, ()) if one.name != WAITING} for place in places}
