"""What is in Redis: streams, how far the handlers are, and the state that they keep. Reads only, but for `reset`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from millstream.attendance import count_workers
from millstream.client import Arg, Client, Command, Reply, Script, raise_if_error
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import AccessDenied, ConfigError, DecodeError, GroupMissing, RedisError
from millstream.lifecycle import load_state
from millstream.model import EntryId
from millstream.naming import PREFIX, HandlerKeys, from_wire, to_wire

_COUNT = Script("count")
_COUNT_CHUNK = 1_000
_PIPELINE = 1_000
_SCAN_PAGE = 1_000
_COUNTERS = ("committed", "written", "dead", "refused")
_OWN_PREFIX = f"{PREFIX}:"

Engine = Literal["workers", "spark"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """A consumer group: its name, consumers, pending entries and the last id that it was given."""

    name: str
    consumers: int
    pending: int
    position: str


@dataclass(frozen=True, kw_only=True)
class StreamReport:
    """A stream: its length, the ids at its ends (None if it is empty), the age of its oldest entry, its groups."""

    name: str
    length: int
    first_id: str | None
    last_id: str | None
    last_generated_id: str
    oldest_age_ms: int | None
    groups: tuple[GroupReport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HandlerReport:
    """How far a handler is on one stream.

    * `engine`: who runs it, or ran it last
    * `frontier`: all up to this id is committed, on workers but for what is pending; None before the first commit
    * `lag`: entries that are not committed; None if that is unknown. A lower bound unless `lag_exact`
    * `oldest_age_ms`: age of the first of them
    * `consumers`, `pending`: the workers that are alive, and what all of them have in hand
    * `oldest_pending_age_ms`: age of the first entry that is pending
    * `committed`, `written`, `dead`, `refused`: messages committed, outputs written, dead letters ever given,
      commits refused because another run had made them
    * `waiting`: dead letters in its box now
    * `paused`: its workers read nothing new for now
    """

    app: str
    handler: str
    stream: str
    engine: Engine
    frontier: str | None
    lag: int | None
    lag_exact: bool
    oldest_age_ms: int | None
    consumers: int
    pending: int
    oldest_pending_age_ms: int | None
    committed: int
    written: int
    dead: int
    refused: int
    waiting: int
    paused: bool


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Streams, sorted by name, and what handlers do on them, sorted by handler."""

    streams: tuple[StreamReport, ...]
    handlers: tuple[HandlerReport, ...]


def inspect(
    client: Client, app: str | None = None, *, budget_ms: float = 1_000.0, clock: Clock = SYSTEM_CLOCK
) -> Inspection:
    """Look at all streams and handlers, or at those of `app`. Raises RedisError.

    Lags are counted at the server for `budget_ms` milliseconds in all; what is not counted by then is reported
    as a lower bound. The lag that Redis itself reports is not used: it is wrong after deletions.
    """
    names = client.scan_streams()
    streams = {stream.name: stream for stream in _streams(client, names)}
    found = [keys for keys in _handlers(client, streams.values()) if app in (None, keys.app)]
    handlers = tuple(_handler_reports(client, found, streams, budget_ms, clock))
    read = {keys.stream for keys in found}
    shown = tuple(stream for name, stream in streams.items() if app is None or name in read)
    return Inspection(streams=shown, handlers=handlers)


def inspect_handlers(
    client: Client, found: Sequence[HandlerKeys], *, budget_ms: float = 1_000.0, clock: Clock = SYSTEM_CLOCK
) -> Sequence[HandlerReport]:
    """Look at these only, as `inspect` does. Streams that this user may not see are left out."""
    streams = {stream.name: stream for stream in _streams(client, [keys.stream for keys in found])}
    return [*_handler_reports(client, found, streams, budget_ms, clock)]


def find_handlers(client: Client) -> list[HandlerKeys]:
    """Every handler that has left something in Redis, on each of its streams, sorted. Raises RedisError."""
    return _handlers(client, _streams(client, client.scan_streams()))


def there(client: Client, found: Sequence[HandlerKeys]) -> list[HandlerKeys]:
    """Those of them whose stream is there, and may be seen. Raises AccessDenied if none may be, RedisError."""
    names = {stream.name for stream in _streams(client, list(dict.fromkeys(keys.stream for keys in found)))}
    return [keys for keys in found if keys.stream in names]


def handler_of(stream: str, group: str) -> HandlerKeys | None:
    """The handler whose group on `stream` this is; None if it is nobody's."""
    app, _, handler = group.removeprefix(_OWN_PREFIX).partition(".")
    try:
        keys = HandlerKeys(app, handler, stream)
    except ConfigError:
        return None  # no handler can read this stream
    return keys if keys.group == group else None


def engine_of(client: Client, keys: HandlerKeys | None) -> Engine | None:
    """Who runs a handler, or ran it last. Raises RedisError."""
    return None if keys is None else _engine(client.execute("HGET", to_wire(keys.meta), "engine"))


def read_state(client: Client, keys: HandlerKeys, key: bytes) -> dict[str, Any] | None:
    """The state of `key`, or None if it has none. Raises DecodeError if it is damaged, and RedisError."""
    blob = client.execute("HGET", to_wire(keys.state), key)
    return None if blob is None else decode_state(key, blob)


def list_states(client: Client, keys: HandlerKeys, match: str = "*") -> Iterator[tuple[bytes, bytes]]:
    """Keys whose names match the glob `match`, each with its state as `decode_state` takes it. In no order.

    A key that is added or removed meanwhile may be missed, or come twice (Redis HSCAN). Raises RedisError.
    """
    cursor: Arg = 0
    while True:
        cursor, items = client.execute("HSCAN", to_wire(keys.state), cursor, "MATCH", match, "COUNT", _SCAN_PAGE)
        yield from zip(items[::2], items[1::2], strict=True)
        if int(cursor) == 0:
            return


def decode_state(key: bytes, blob: bytes) -> dict[str, Any]:
    """Read a state as it stands in Redis. Raises DecodeError if it is damaged."""
    try:
        return load_state(blob)
    except ValueError as error:  # msgspec's own errors and invalid UTF-8
        raise DecodeError(f"the state of {key!r} is damaged ({error}); reset it to begin anew") from error


def reset_states(client: Client, keys: HandlerKeys, wanted: Sequence[bytes]) -> int:
    """Forget the state of keys and return how many had one. Raises RedisError.

    A run that is at work on one of them now may write its state back.
    """
    removed: int = client.execute("HDEL", to_wire(keys.state), *wanted)
    return removed


# --- Streams ---


def _streams(client: Client, names: Sequence[str]) -> Iterator[StreamReport]:
    now_ms = _server_time_ms(client)
    reports = _known(names, _ask(client, [("XINFO", "STREAM", to_wire(name)) for name in names]))
    known = {name: _mapping(reply) for name, reply in reports.items()}
    grouped = [name for name, values in known.items() if values[b"groups"]]
    replies = _known(grouped, _ask(client, [("XINFO", "GROUPS", to_wire(name)) for name in grouped]))
    groups = {name: tuple(_group(_mapping(group)) for group in reply) for name, reply in replies.items()}
    for name, values in known.items():
        first, last = values[b"first-entry"], values[b"last-entry"]
        yield StreamReport(
            name=name,
            length=values[b"length"],
            first_id=first[0].decode() if first else None,
            last_id=last[0].decode() if last else None,
            last_generated_id=values[b"last-generated-id"].decode(),
            oldest_age_ms=_age_ms(first[0].decode(), now_ms) if first else None,
            groups=groups.get(name, ()),
        )


def _group(values: dict[bytes, Any]) -> GroupReport:
    return GroupReport(
        name=from_wire(values[b"name"]),
        consumers=values[b"consumers"],
        pending=values[b"pending"],
        position=values[b"last-delivered-id"].decode(),
    )


# --- Handlers ---


def _handlers(client: Client, streams: Iterable[StreamReport]) -> list[HandlerKeys]:
    """Handlers that have left something in Redis: their groups on the streams, and their own keys."""
    # On Redis Cluster the scan below sees one node only; the groups are known from all.
    found: set[HandlerKeys] = set()
    for stream in streams:
        found.update(keys for group in stream.groups if (keys := handler_of(stream.name, group.name)))
    for name in _scan(client, f"{PREFIX}:*:meta"):
        try:
            found.add(HandlerKeys.parse(name))
        except ConfigError:
            continue  # some other program's key
    return sorted(found, key=lambda keys: (keys.app, keys.handler, keys.stream))


def _scan(client: Client, pattern: str) -> Iterator[str]:
    cursor: Arg = 0
    while True:
        cursor, names = client.execute("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_PAGE, "TYPE", "hash")
        yield from (from_wire(name) for name in names)
        if int(cursor) == 0:
            return


@dataclass(slots=True)
class _Lag:
    """Entries of `stream` after `position`: as many as `count`, or more if they are not all counted.

    `position` None: nothing is known. `first_id` is the first of them, if there is one.
    """

    stream: str
    position: str | None
    count: int | None = None
    first_id: str | None = None
    more: bool = False


def _lag(keys: HandlerKeys, frontier: str | None, workers: "_Workers | None", stream: StreamReport | None) -> _Lag:
    """What is known, without counting, of the entries that a handler has not begun; `more` if they must be counted.

    What a workers' group was given is committed or pending. On Spark the frontier says how far the handler is.
    """
    if stream is None:
        return _Lag(keys.stream, frontier, count=0)
    shown = next((group.position for group in stream.groups if group.name == keys.group), None)
    lag = _Lag(keys.stream, workers.group.position if workers else frontier or shown)
    if lag.position is None:
        return lag
    position = EntryId.parse(lag.position)
    if stream.first_id is None or position >= EntryId.parse(stream.last_generated_id):
        lag.count = 0
    elif position < EntryId.parse(stream.first_id):
        lag.count, lag.first_id = stream.length, stream.first_id
    else:
        lag.count, lag.more = 0, True
    return lag


def _count(client: Client, lags: Iterable[_Lag], budget_ms: float, clock: Clock) -> None:
    """Count on where there is more, each a little in turn, until all is counted or the time is over."""
    deadline_ms = clock.monotonic_ms() + budget_ms
    at = {id(lag): lag.position or "" for lag in lags}
    unfinished = [lag for lag in lags if lag.more]
    while unfinished:
        for start in range(0, len(unfinished), _PIPELINE):
            some = unfinished[start : start + _PIPELINE]
            replies = client.scripts([(_COUNT, (to_wire(lag.stream),), (at[id(lag)], _COUNT_CHUNK)) for lag in some])
            for lag, (counted, first, last, more) in zip(some, replies, strict=True):
                lag.count = (lag.count or 0) + counted
                lag.first_id = lag.first_id or first.decode() or None
                lag.more = bool(more)
                at[id(lag)] = last.decode()
        if clock.monotonic_ms() >= deadline_ms:
            return
        unfinished = [lag for lag in unfinished if lag.more]


@dataclass(frozen=True, slots=True)
class _Workers:
    """The workers' group of a handler, and the first entry that it has in hand."""

    group: GroupReport
    first_pending: str | None


def _workers(
    client: Client, metas: Mapping[HandlerKeys, list[bytes | None]], streams: Mapping[str, StreamReport]
) -> dict[HandlerKeys, _Workers]:
    groups = {
        keys: group
        for keys, (engine, *_) in metas.items()
        if _engine(engine) == "workers" and keys.stream in streams
        for group in streams[keys.stream].groups
        if group.name == keys.group
    }
    replies = _ask(client, [("XPENDING", to_wire(keys.stream), keys.group) for keys in groups])
    lowest = [None if isinstance(reply, GroupMissing) else raise_if_error(reply)[1] for reply in replies]
    return {
        keys: _Workers(group, first.decode() if first else None)
        for (keys, group), first in zip(groups.items(), lowest, strict=True)
    }


def _handler_reports(
    client: Client, found: Sequence[HandlerKeys], streams: Mapping[str, StreamReport], budget_ms: float, clock: Clock
) -> Iterator[HandlerReport]:
    metas: dict[HandlerKeys, list[bytes | None]] = _known(
        found,
        _ask(client, [("HMGET", to_wire(keys.meta), "engine", "frontier", "paused", *_COUNTERS) for keys in found]),
    )
    letters = _ask(client, [("XLEN", to_wire(keys.dead)) for keys in metas])
    workers = _workers(client, metas, streams)
    alive = count_workers(client, list(workers))
    lags = [
        _lag(keys, frontier.decode() if frontier else None, workers.get(keys), streams.get(keys.stream))
        for keys, (_, frontier, *_) in metas.items()
    ]
    _count(client, lags, budget_ms, clock)
    now_ms = _server_time_ms(client)
    for (keys, (engine, frontier, paused, *counters)), waiting, lag in zip(metas.items(), letters, lags, strict=True):
        at_work = workers.get(keys)
        pending = at_work.group.pending if at_work else 0
        first_pending = at_work.first_pending if at_work else None
        first = first_pending or lag.first_id
        yield HandlerReport(
            app=keys.app,
            handler=keys.handler,
            stream=keys.stream,
            engine=_engine(engine),
            frontier=frontier.decode() if frontier else None,
            lag=None if lag.count is None else lag.count + pending,
            lag_exact=lag.count is not None and not lag.more,
            oldest_age_ms=_age_ms(first, now_ms) if first else None,
            consumers=alive[keys] if at_work else 0,
            pending=pending,
            oldest_pending_age_ms=_age_ms(first_pending, now_ms) if first_pending else None,
            waiting=raise_if_error(waiting),
            paused=paused is not None,
            **{name: int(counter or 0) for name, counter in zip(_COUNTERS, counters, strict=True)},
        )


def _engine(found: bytes | None) -> Engine:
    return "workers" if found in (b"workers", b"keyed") else "spark"


# --- Replies ---


def _ask(client: Client, commands: Sequence[Command]) -> list[Reply]:
    """Replies of many commands, errors among them, in round trips that fit into memory."""
    return [
        reply
        for start in range(0, len(commands), _PIPELINE)
        for reply in client.pipeline(commands[start : start + _PIPELINE])
    ]


def _known(names: Sequence[T], replies: Sequence[Reply]) -> dict[T, Reply]:
    """The replies by name, without those that are gone, or that this user may not see: names are seen by everybody.

    Raises AccessDenied if it may see none.
    """
    found = {name: reply for name, reply in zip(names, replies, strict=True) if not isinstance(reply, RedisError)}
    denials = [reply for reply in replies if isinstance(reply, AccessDenied)]
    if denials and not found:
        raise denials[0]
    return found


def _server_time_ms(client: Client) -> int:
    seconds, microseconds = client.execute("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def _age_ms(entry_id: str, now_ms: int) -> int:
    return max(0, now_ms - EntryId.parse(entry_id).ms)


def _mapping(reply: Reply) -> dict[bytes, Any]:
    return dict(zip(reply[::2], reply[1::2], strict=True))
