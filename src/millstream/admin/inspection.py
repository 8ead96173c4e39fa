"""Inspection of streams, handlers and the state of keys. Reads only, except `reset_states`."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from millstream.admin.group_lag import complete_groups, has_stage_group, other_groups
from millstream.admin.handler_figures import count_queued
from millstream.admin.key_queues import KeyQueue, blocked_queues
from millstream.admin.lag import StreamLag, age_ms, count_lags, estimate_lag
from millstream.admin.liveness import find_runs, find_workers
from millstream.admin.reports import Engine, GroupReport, HandlerReport, Inspection, StreamReport
from millstream.admin.stream_types import types_of_others
from millstream.admin.stuck_places import StuckScan
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.commit_store import FORMAT, describe_newer_format
from millstream.delivery.long_runs import read_long_runs
from millstream.delivery.pause import Pause, parse_pause
from millstream.delivery.rate_override import RateOverride, parse_rate_override
from millstream.delivery.restarts import read_restarts
from millstream.delivery.state_expiry import live_states, live_states_and_expiries
from millstream.errors import AccessDenied, ConfigError, DecodeError, GroupMissing, RedisError, WrongType
from millstream.handlers.upcasting import parse_version_and_state
from millstream.model import EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import PREFIX, HandlerKeys, from_wire, run_name, to_wire
from millstream.redis_client.pipelining import send_all, server_time_ms
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Arg, Command, Reply

_SCAN_PAGE = 1_000
_MAX_BLOCKED = 100
_COUNTERS = ("committed", "written", "dead", "refused", "skipped")
_OWN_PREFIX = f"{PREFIX}:"

T = TypeVar("T")
C = TypeVar("C", bound=Collection[object])


def inspect(
    client: Client,
    app: str | None = None,
    *,
    max_streams: int | None = None,
    stuck_first: bool = False,
    budget_ms: float = 1_000.0,
    clock: Clock = SYSTEM_CLOCK,
) -> Inspection:
    """Inspect all streams and handlers, or those of `app`, that this user may access. Raises RedisError.

    Lags are counted at the server for `budget_ms` milliseconds in total, but at least one chunk each. A lag that is not
    counted completely is reported as a lower bound. `max_streams`: inspect a sample of this size, which is scanned for
    during `budget_ms`; then handlers are known by their groups only, unless there are no more streams. With
    `stuck_first` up to half of the sample are streams of a StuckScan, which scans during another `budget_ms`.
    """
    names, is_sample = _find_streams(client, max_streams, budget_ms, clock)
    if is_sample and stuck_first and max_streams:
        stuck = StuckScan(app, most=max_streams, budget_ms=budget_ms, clock=clock).run(client)
        first = islice(dict.fromkeys(keys.stream for keys in stuck.found), max_streams // 2)
        names = sorted(islice(dict.fromkeys([*first, *names]), max_streams))
    end_ms = clock.monotonic_ms() + budget_ms
    hidden_streams: list[AccessDenied] = []
    hidden_handlers: list[AccessDenied] = []
    streams = {stream.name: stream for stream in _streams(client, names, hidden_streams)}
    known = _handlers(client, streams.values(), by_group_only=is_sample)
    found = [keys for keys in known if app in (None, keys.app)]
    handlers = tuple(_handler_reports(client, found, streams, budget_ms, clock, hidden_handlers))
    shown = {name: stream for name, stream in streams.items() if app is None or has_stage_group(app, stream)}
    shown |= {keys.stream: streams[keys.stream] for keys in found if keys.stream in streams}
    places = other_groups(shown.values(), known, app)
    left_ms = end_ms - clock.monotonic_ms()
    apps = [app] if app else {keys.app for keys in found}
    return Inspection(
        streams=complete_groups(client, shown, places, budget_ms=left_ms, clock=clock),
        handlers=handlers,
        restarts=read_restarts(client, apps),
        long_runs=read_long_runs(client, apps),
        hidden_streams=len(hidden_streams),
        hidden_handlers=len(hidden_handlers),
        is_sample=is_sample,
    )


def inspect_streams(client: Client, names: Sequence[str]) -> Sequence[StreamReport]:
    """Inspect only these streams, in this order; their groups without lags. Omits those that are gone or no streams.

    Raises AccessDenied if this user may access none of them, and RedisError.
    """
    hidden: list[AccessDenied] = []
    return _or_denied([*_streams(client, names, hidden)], hidden)


def inspect_stream(
    client: Client, name: str, *, budget_ms: float = 1_000.0, clock: Clock = SYSTEM_CLOCK
) -> StreamReport | None:
    """Inspect one stream with all its groups and their lags, those of handlers included; None if it does not exist.

    `budget_ms`: as in `inspect`. Raises RedisError.
    """
    found = inspect_streams(client, [name])
    if not found:
        return None
    places = [(name, group.name) for group in found[0].groups]
    return complete_groups(client, {name: found[0]}, places, budget_ms=budget_ms, clock=clock)[0]


def find_stream_names(
    client: Client, prefix: str = "", *, budget_ms: float = 1_000.0, clock: Clock = SYSTEM_CLOCK
) -> tuple[list[str], bool]:
    """The names of all streams that begin with `prefix`, sorted, and whether there may be more.

    There may be more where Redis has so many keys that they cannot be scanned within `budget_ms` milliseconds.
    Those of millstream itself are left out unless the prefix begins with theirs. Raises RedisError.
    """
    end_ms = clock.monotonic_ms() + budget_ms
    found: set[str] = set()
    for page in client.scan_pages(f"{_literal(prefix)}*"):
        found.update(page)
        if clock.monotonic_ms() >= end_ms:
            return sorted(found), True
    return sorted(found), False


def inspect_handlers(
    client: Client,
    found: Sequence[HandlerKeys],
    *,
    streams: Mapping[str, StreamReport] | None = None,
    with_workers: bool = True,
    budget_ms: float = 1_000.0,
    clock: Clock = SYSTEM_CLOCK,
) -> Sequence[HandlerReport]:
    """Inspect only these handlers. Omits those that this user may not access; raises AccessDenied if none remains.

    * `streams`: the reports of their streams by name, if they are known
    * `with_workers`: without them, the reports name no worker and no run, and count no blocked key, which takes longer
    """
    hidden: list[AccessDenied] = []
    if streams is None:
        streams = {stream.name: stream for stream in _streams(client, [keys.stream for keys in found], hidden)}
    reports = _handler_reports(client, found, streams, budget_ms, clock, hidden, with_workers=with_workers)
    return _or_denied([*reports], hidden)


def find_handlers(client: Client) -> list[HandlerKeys]:
    """Every handler that has keys or a group in Redis, on each of its streams, sorted. Raises RedisError."""
    hidden: list[AccessDenied] = []
    return _handlers(client, _or_denied([*_streams(client, client.scan_streams(), hidden)], hidden))


def existing_handlers(client: Client, found: Sequence[HandlerKeys]) -> list[HandlerKeys]:
    """Those whose stream exists and may be accessed. Raises AccessDenied if none may be, and RedisError."""
    hidden: list[AccessDenied] = []
    names = {one.name for one in _streams(client, list(dict.fromkeys(keys.stream for keys in found)), hidden)}
    return [keys for keys in found if keys.stream in _or_denied(names, hidden)]


def handler_of(stream: str, group: str) -> HandlerKeys | None:
    """The handler whose group on `stream` this is; None if it is not a handler's."""
    app, _, handler = group.removeprefix(_OWN_PREFIX).partition(".")
    try:
        keys = HandlerKeys(app, handler, stream)
    except ConfigError:
        return None  # no handler can read this stream
    return keys if keys.group == group else None


def engine_of(client: Client, keys: HandlerKeys | None) -> Engine | None:
    """The engine that runs a handler, or ran it last. Raises RedisError."""
    return None if keys is None else _engine(client.execute("HGET", to_wire(keys.meta), "owner"))


def read_state(client: Client, keys: HandlerKeys, key: bytes) -> dict[str, Any] | None:
    """The state of `key`, or None if it has none. Raises DecodeError if it is damaged, and RedisError."""
    found = read_version_and_state(client, keys, key)
    return None if found is None else found[1]


def read_version_and_state(client: Client, keys: HandlerKeys, key: bytes) -> tuple[int, dict[str, Any]] | None:
    """The version and the state of `key`; None if it has none. Raises DecodeError if it is damaged, and RedisError."""
    (blob,) = live_states(client, to_wire(keys.state), [client.execute("HGET", to_wire(keys.state), key)])
    return None if blob is None else decode_version_and_state(key, blob)


def list_states(
    client: Client, keys: HandlerKeys, match: str = "*"
) -> Iterator[tuple[bytes, tuple[bytes, int | None]]]:
    """Keys whose names match the glob `match`, each with its encoded state (see `decode_version_and_state`) and the expiry
    that is stored with it (see `split_expiry`). In no order.

    A key that is added or removed meanwhile may be missing or come twice (Redis HSCAN). Raises RedisError.
    """
    cursor: Arg = 0
    while True:
        cursor, items = client.execute("HSCAN", to_wire(keys.state), cursor, "MATCH", match, "COUNT", _SCAN_PAGE)
        found = zip(items[::2], live_states_and_expiries(client, to_wire(keys.state), items[1::2]), strict=True)
        yield from ((key, state) for key, state in found if state is not None)
        if int(cursor) == 0:
            return


def state_expiry(client: Client, keys: HandlerKeys, key: bytes) -> int | None:
    """When the state of `key` expires: see `state_expiries`."""
    (state,) = live_states_and_expiries(client, to_wire(keys.state), [client.execute("HGET", to_wire(keys.state), key)])
    return None if state is None else state_expiries(client, keys, [(key, state[1])])[0]


def state_expiries(client: Client, keys: HandlerKeys, wanted: Sequence[tuple[bytes, int | None]]) -> list[int | None]:
    """When the state of each of these keys expires, in Unix milliseconds; None for never, or where there is no state.

    `wanted`: each key, and the expiry that is stored with its state. Without one the server is asked; None, too, where this
    user may not ask. Raises RedisError.
    """
    found: list[int | None] = []
    for at in range(0, len(wanted), _SCAN_PAGE):
        some = wanted[at : at + _SCAN_PAGE]
        names = [key for key, _ in some]
        (reply,) = client.pipeline([("HPEXPIRETIME", to_wire(keys.state), "FIELDS", len(names), *names)])
        of_fields = reply if isinstance(reply, list) else [-1] * len(names)
        found += [stored if field < 0 else field for (_, stored), field in zip(some, of_fields, strict=True)]
    return found


def decode_version_and_state(key: bytes, blob: bytes) -> tuple[int, dict[str, Any]]:
    """Decode a state as stored in Redis, with its version. Raises DecodeError if it is damaged."""
    try:
        return parse_version_and_state(blob)
    except ValueError as error:  # msgspec's own errors and invalid UTF-8
        raise DecodeError(f"the state of {key!r} is damaged ({error}); reset it to start without a state") from error


def count_states(client: Client, keys: HandlerKeys, wanted: Sequence[bytes]) -> int:
    """How many of these keys have a state. Raises RedisError."""
    found = send_all(client, [("HGET", to_wire(keys.state), key) for key in wanted])
    states = live_states(client, to_wire(keys.state), [raise_if_error(blob) for blob in found])
    return sum(state is not None for state in states)


def reset_states(client: Client, keys: HandlerKeys, wanted: Sequence[bytes]) -> int:
    """Delete the state of keys; return how many had one. Raises RedisError.

    A run that is processing one of the keys may write its state back.
    """
    count = count_states(client, keys, wanted)  # HDEL counts those that have expired, too
    client.execute("HDEL", to_wire(keys.state), *wanted)
    return count


# --- Streams ---


def _literal(prefix: str) -> str:
    """A glob pattern that matches this text alone."""
    return "".join(f"\\{char}" if char in "*?[]\\^" else char for char in prefix)


def _find_streams(client: Client, most: int | None, budget_ms: float, clock: Clock) -> tuple[list[str], bool]:
    """Names of streams, sorted, and whether there may be more: Redis returns keys in the order of their hashes."""
    if most is None:
        return client.scan_streams(), False
    end_ms = clock.monotonic_ms() + budget_ms
    found: set[str] = set()
    for page in client.scan_pages("*"):
        found.update(page)
        if len(found) > most or clock.monotonic_ms() >= end_ms:
            return sorted(islice(found, most)), True
    return sorted(found), False


def _streams(client: Client, names: Sequence[str], hidden: list[AccessDenied]) -> Iterator[StreamReport]:
    now_ms = server_time_ms(client)
    reports = _readable(names, send_all(client, [("XINFO", "STREAM", to_wire(name)) for name in names]), hidden)
    known = {name: mapping_of(reply) for name, reply in reports.items()}
    grouped = [name for name, values in known.items() if values[b"groups"]]
    replies = _readable(grouped, send_all(client, [("XINFO", "GROUPS", to_wire(name)) for name in grouped]), hidden)
    groups = {name: tuple(_group(mapping_of(group)) for group in reply) for name, reply in replies.items()}
    for name, values in known.items():
        first, last = values[b"first-entry"], values[b"last-entry"]
        yield StreamReport(
            name=name,
            length=values[b"length"],
            added=values[b"entries-added"],
            first_id=first[0].decode() if first else None,
            last_id=last[0].decode() if last else None,
            last_generated_id=values[b"last-generated-id"].decode(),
            oldest_age_ms=age_ms(first[0].decode(), now_ms) if first else None,
            groups=groups.get(name, ()),
        )


def _group(values: dict[bytes, Any]) -> GroupReport:
    return GroupReport(
        name=from_wire(values[b"name"]),
        consumers=values[b"consumers"],
        pending=values[b"pending"],
        last_delivered_id=values[b"last-delivered-id"].decode(),
        entries_read=values[b"entries-read"],
    )


# --- Handlers ---


def _handlers(client: Client, streams: Iterable[StreamReport], *, by_group_only: bool = False) -> list[HandlerKeys]:
    """Handlers that have a group on the streams, or, unless `by_group_only`, keys of their own."""
    # On Redis Cluster the scan below covers one node only; the groups are known from all nodes.
    found: set[HandlerKeys] = set()
    for stream in streams:
        found.update(keys for group in stream.groups if (keys := handler_of(stream.name, group.name)))
    for name in () if by_group_only else _scan(client, f"{PREFIX}:*:meta"):
        try:
            found.add(HandlerKeys.parse(name))
        except ConfigError:
            continue  # a key of another program
    return sorted(found, key=lambda keys: (keys.app, keys.handler, keys.stream))


def _scan(client: Client, pattern: str) -> Iterator[str]:
    cursor: Arg = 0
    while True:
        cursor, names = client.execute("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_PAGE, "TYPE", "hash")
        yield from (from_wire(name) for name in names)
        if int(cursor) == 0:
            return


def _lag_of(
    keys: HandlerKeys, committed_id: str | None, workers: "_Workers | None", stream: StreamReport | None
) -> StreamLag:
    """The lag of a handler without its pending entries, as far as it is known without counting.

    On workers, all delivered entries of the group are committed or pending. On Spark the committed id counts.
    """
    if stream is None:
        return StreamLag(keys.stream, committed_id, count=0)
    delivered = next((group.last_delivered_id for group in stream.groups if group.name == keys.group), None)
    return estimate_lag(stream, workers.group.last_delivered_id if workers else committed_id or delivered)


@dataclass(frozen=True, slots=True)
class _Workers:
    """The group of a handler, its first pending entry, and how many of its pending entries workers have.

    The others were nacked, wait in key queues, or are deferred by Spark.
    """

    group: GroupReport
    first_pending: str | None
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meta:
    """The metadata of a handler on a stream; with a `problem` if it is unreadable."""

    engine: bytes | None = None
    keyed: bool = False
    committed_id: str | None = None
    pause: Pause | None = None
    rate_override: RateOverride | None = None
    counters: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    dead_letters: int = 0
    parked: int = 0
    backing_off: int = 0
    failed: int = 0
    problem: str | None = None
    stored_format: int | None = None

    @property
    def totals(self) -> dict[str, int]:
        """The totals of a report. The counter `committed` has also the entries that are for another handler alone."""
        committed = self.counters["committed"] - self.counters["skipped"]
        kept = {name: self.counters[name] for name in ("written", "dead", "refused")}
        return {**kept, "committed": committed, "processed": max(0, committed - kept["dead"])}

    @classmethod
    def read(
        cls, values: Reply, dead_letters: Reply, parked: Reply, awaiting: Reply, backing_off: Reply, failed: Reply
    ) -> "_Meta":
        """Parse the replies: the fields of the hash, and the numbers of dead letters, parked keys, those of them that
        only wait until they have left another partition, keys that back off, and counts of failures.
        """
        for reply in (values, dead_letters, parked, awaiting, backing_off, failed):
            if isinstance(reply, WrongType) or (isinstance(reply, AccessDenied) and reply.concerns_key):
                return cls(problem=str(reply))
            raise_if_error(reply)
        engine, keyed, committed_id, paused, rate, stored_format, *counters = values
        try:
            number = None if stored_format is None else int(stored_format)
            if number is not None and number > FORMAT:
                return cls(problem=describe_newer_format(number), stored_format=number)
            return cls(
                stored_format=number,
                engine=engine,
                keyed=engine == b"keyed" or (engine is None and keyed is not None),
                committed_id=None if committed_id is None else str(EntryId.parse(committed_id)),
                pause=parse_pause(paused, time.time() * 1000),
                rate_override=parse_rate_override(rate),
                counters={name: int(count or 0) for name, count in zip(_COUNTERS, counters, strict=True)},
                dead_letters=dead_letters,
                parked=max(0, parked - awaiting),
                backing_off=backing_off,
                failed=failed,
            )
        except (ValueError, ConfigError) as error:
            return cls(problem=str(error))


def _metas(client: Client, found: Sequence[HandlerKeys], hidden: list[AccessDenied]) -> dict[HandlerKeys, _Meta]:
    fields = ("owner", "keyed", "committed_id", "paused", "rate", "format", *_COUNTERS)
    values = send_all(client, [("HMGET", to_wire(keys.meta), *fields) for keys in found])
    visible = [keys for keys, reply in zip(found, values, strict=True) if not _is_hidden(reply, hidden)]
    counts = iter(send_all(client, [one for keys in visible for one in _counts_of(keys)]))
    by_keys = dict(zip(found, values, strict=True))
    return {
        keys: _Meta.read(by_keys[keys], *each)
        for keys, *each in zip(visible, counts, counts, counts, counts, counts, strict=True)
    }


def _counts_of(keys: HandlerKeys) -> Iterator[Command]:
    """The commands whose replies `_Meta.read` takes, but for the first."""
    for verb, key in (("XLEN", keys.dead_letters), ("HLEN", keys.parked), ("HLEN", keys.awaiting)):
        yield verb, to_wire(key)
    yield "ZCARD", to_wire(keys.backoff)
    yield "HLEN", to_wire(keys.crashes)


def _workers(
    client: Client, metas: Mapping[HandlerKeys, _Meta], streams: Mapping[str, StreamReport]
) -> dict[HandlerKeys, _Workers]:
    groups = {
        keys: group
        for keys, meta in metas.items()
        if keys.stream in streams
        for group in streams[keys.stream].groups
        if group.name == keys.group and (group.pending or _engine(meta.engine) == "workers")
    }
    replies = send_all(client, [("XPENDING", to_wire(keys.stream), keys.group) for keys in groups])
    # The group may have been deleted, or the right revoked, meanwhile.
    gone = [isinstance(one, GroupMissing) or (isinstance(one, AccessDenied) and one.concerns_key) for one in replies]
    known = [
        (0, None, None, None) if is_gone else raise_if_error(one) for one, is_gone in zip(replies, gone, strict=True)
    ]
    return {
        keys: _Workers(group, first.decode() if first else None, count - count_queued(consumers))
        for (keys, group), (count, first, _, consumers) in zip(groups.items(), known, strict=True)
    }


def _handler_reports(
    client: Client,
    found: Sequence[HandlerKeys],
    streams: Mapping[str, StreamReport],
    budget_ms: float,
    clock: Clock,
    hidden: list[AccessDenied],
    *,
    with_workers: bool = True,
) -> Iterator[HandlerReport]:
    metas = _metas(client, found, hidden)
    types = types_of_others(client, [keys.stream for keys in metas if keys.stream not in streams])
    with_pending = _workers(client, metas, streams)
    workers = {keys: one for keys, one in with_pending.items() if _engine(metas[keys].engine) == "workers"}
    alive = find_workers(client, list(workers)) if with_workers else {}
    runs = find_runs(client, {(keys.app, keys.handler) for keys in metas}) if with_workers else set()
    lags = [
        _lag_of(keys, meta.committed_id, workers.get(keys), streams.get(keys.stream))
        if meta.problem is None and keys.stream not in types
        else StreamLag(keys.stream, None)
        for keys, meta in metas.items()
    ]
    count_lags(client, lags, budget_ms, clock)
    blocked = _find_blocked(client, metas) if with_workers else {}
    now_ms = server_time_ms(client)
    for (keys, meta), lag in zip(metas.items(), lags, strict=True):
        group = with_pending.get(keys)
        pending = group.group.pending if group else 0
        first_pending = group.first_pending if group else None
        first = first_pending or lag.first_id
        names = sorted(alive[keys]) if keys in alive else [run_name(keys.handler)] * ((keys.app, keys.handler) in runs)
        yield HandlerReport(
            app=keys.app,
            handler=keys.handler,
            stream=keys.stream,
            engine=_engine(meta.engine),
            keyed=meta.keyed,
            committed_id=meta.committed_id,
            lag=None if lag.count is None else lag.count + pending,
            lag_exact=lag.count is not None and not lag.is_partial,
            oldest_age_ms=age_ms(first, now_ms) if first else None,
            consumers=len(names),
            workers=tuple(names),
            pending=pending,
            in_flight=group.in_flight if group else 0,
            oldest_pending_age_ms=age_ms(first_pending, now_ms) if first_pending else None,
            dead_letters=meta.dead_letters,
            parked=meta.parked,
            backing_off=meta.backing_off,
            blocked=len(blocked.get(keys, ())),
            blocked_since_ms=min(filter(None, (one.failing_since_ms for one in blocked.get(keys, ()))), default=None),
            paused=meta.pause is not None,
            pause=meta.pause,
            rate_override=meta.rate_override,
            problem=meta.problem or _problem_of(keys.stream, types.get(keys.stream)),
            stream_type=types.get(keys.stream, "stream"),
            stored_format=meta.stored_format,
            **meta.totals,
        )


def _problem_of(stream: str, type_of_key: str | None) -> str | None:
    return type_of_key and f"{escape(stream)} holds a {type_of_key} where a stream is needed: rename or delete that key"


def _find_blocked(client: Client, metas: Mapping[HandlerKeys, _Meta]) -> dict[HandlerKeys, Sequence[KeyQueue]]:
    """The blocked keys, of each of the first handlers on a stream that have keys with failures."""
    blocked: dict[HandlerKeys, Sequence[KeyQueue]] = {}
    for keys in islice(
        (keys for keys, meta in metas.items() if meta.failed and (meta.keyed or meta.backing_off)), _MAX_BLOCKED
    ):
        with suppress(AccessDenied, WrongType):
            blocked[keys] = blocked_queues(client, keys)
    return blocked


def _engine(found: bytes | None) -> Engine:
    return "workers" if found in (b"workers", b"keyed") else "spark"


# --- Replies ---


def _is_hidden(reply: Reply, hidden: list[AccessDenied]) -> bool:
    """Whether this user may not access the key of the command; if so, add the error to `hidden`.

    Any user may see names. Raises AccessDenied if the user has no right to the command at all.
    """
    if not isinstance(reply, AccessDenied):
        return False
    if not reply.concerns_key:
        raise reply
    hidden.append(reply)
    return True


def _readable(names: Sequence[T], replies: Sequence[Reply], hidden: list[AccessDenied]) -> dict[T, Reply]:
    """The replies by name, without deleted keys and hidden ones, which are added to `hidden`. Raises AccessDenied."""
    return {
        name: reply
        for name, reply in zip(names, replies, strict=True)
        if not _is_hidden(reply, hidden) and not isinstance(reply, RedisError)
    }


def _or_denied(found: C, hidden: Sequence[AccessDenied]) -> C:
    """`found`. Raises AccessDenied if it is empty because everything is hidden."""
    if hidden and not found:
        raise hidden[0]
    return found
