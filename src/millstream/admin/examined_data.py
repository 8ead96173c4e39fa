"""Data: what the checks of the data examine, read from Redis in a bounded number of calls."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from millstream.admin.delayed_streams import first_due_ms
from millstream.admin.inspection import inspect
from millstream.admin.lag import COUNT_ENTRIES
from millstream.admin.lag_trend import TREND_MS
from millstream.admin.reports import GroupReport, HandlerReport, Inspection
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.query_progress import QueryProgress, read_progress
from millstream.delivery.reliable_stream import NACK_IDLE_MS
from millstream.errors import RedisError, WrongType
from millstream.groups.group import ConsumerInfo, consumers_of
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import WAITING, HandlerKeys, stage_of, to_wire
from millstream.redis_client.pipelining import call_all, send_all, server_time_ms
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Command

_WATCHED = 100
_COUNTED_LETTERS = 200
_PIPELINE = 1_000
_MOST_PARKED = 1_000
_MIGRATES = b"migrating from "
"""Begins the reason of a key that waits until it has left another partition: no operator has to act."""
_MOST_DIGITS = 15
_MEASURED_STREAMS = 100


@dataclass(frozen=True, kw_only=True)
class IdleEntries:
    """Pending entries of a group that consumers hold and that were idle for long, of the hundred lowest of these.

    `idle_ms`: how long the first of them has been idle, in milliseconds; since it was nacked, if it was.
    """

    count: int
    idle_ms: int


@dataclass(frozen=True, kw_only=True)
class NewLetters:
    """Dead letters of a handler that came within `TREND_MS`.

    * `count`: how many, a lower bound unless `is_exact`; `since_ms`: when the first of them came, in Unix milliseconds
    """

    count: int
    is_exact: bool
    since_ms: int


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data that the checks examine.

    * `found`: streams and handlers; `consumers`: of each handler on a stream
    * `idle`: pending entries that were idle for `old_ms`, on streams with a live worker
    * `damage`: why the keys of a handler on a stream are unreadable that its report does not look at
    * `due_ms`: when the first delayed message of each stream that has some is due, in Unix milliseconds
    * `letters_since_ms`: when the oldest dead letter of a handler was written, by its label, in Unix milliseconds
    * `new_letters`: by label, of the handlers that have any
    * `parked_since_ms`: since when the first of the parked keys of a handler has been parked, likewise
    * `queries`: what runs on Spark report of their queries, by app and name of the handler or stage
    * `now_ms`: when all this had been read, in Unix milliseconds, by the clock of Redis
    * `known`: names of the handlers in the app's file, by app; {} if no file was given
    * `cli`: the redis-cli command that reaches the streams
    """

    found: Inspection
    consumers: Mapping[tuple[str, str], Sequence[ConsumerInfo]]
    idle: Mapping[tuple[str, str], IdleEntries]
    damage: Mapping[HandlerKeys, str]
    due_ms: Mapping[str, int]
    letters_since_ms: Mapping[str, int]
    new_letters: Mapping[str, NewLetters]
    parked_since_ms: Mapping[str, int]
    queries: Mapping[tuple[str, str], QueryProgress]
    now_ms: int
    old_ms: int
    known: Mapping[str, Collection[str]]
    cli: str

    @cached_property
    def by_handler(self) -> Mapping[str, Sequence[HandlerReport]]:
        """The reports of each handler, by its label."""
        found: dict[str, list[HandlerReport]] = {}
        for one in self.found.handlers:
            found.setdefault(one.label, []).append(one)
        return found

    @cached_property
    def by_stage(self) -> Mapping[tuple[str, str], Sequence[tuple[str, GroupReport]]]:
        """The progress of each stage, by app and name: its streams, and the group on each."""
        found: dict[tuple[str, str], list[tuple[str, GroupReport]]] = {}
        for stream in self.found.streams:
            for group in stream.groups:
                if stage := stage_of(group.name):
                    found.setdefault(stage, []).append((stream.name, group))
        return found


def read_data(
    client: Client,
    *,
    app: str | None,
    known: Mapping[str, Collection[str]],
    cli: str,
    max_streams: int,
    old_ms: int,
    clock: Clock = SYSTEM_CLOCK,
) -> Data:
    """Read the data of at most `max_streams` streams, in a bounded number of calls. Raises RedisError."""
    found = inspect(client, app, max_streams=max_streams, stuck_first=True, clock=clock)
    places = [(one.stream, one.keys.group) for one in found.handlers if one.problem is None]
    consumers = consumers_of(client, places)
    alive = [one for one in found.handlers if one.pending and one.consumers]
    streams = sorted({one.name for one in found.streams} | {one.stream for one in found.handlers})
    return Data(
        found=found,
        consumers=consumers,
        idle=_find_idle(client, alive, old_ms),
        damage=_find_damage(client, [one.keys for one in found.handlers if one.problem is None]),
        due_ms=first_due_ms(client, streams),
        letters_since_ms=_oldest_letters_ms(client, found.handlers),
        new_letters=_find_new_letters(client, found.handlers, _whole_minute_ms(server_time_ms(client) - TREND_MS)),
        parked_since_ms=_oldest_parks_ms(client, found.handlers),
        queries=read_progress(client, _queries_of(found)),
        now_ms=server_time_ms(client),
        old_ms=old_ms,
        known=known,
        cli=cli,
    )


def largest_mean_entry_bytes(client: Client) -> int:
    """Average size of the entries of the stream with the largest ones, of some streams. Raises RedisError.

    No entry is read: one that is too large for the output buffer would end the connection.
    """
    names = [to_wire(name) for name in islice(chain.from_iterable(client.scan_pages("*")), _MEASURED_STREAMS)]
    lengths = call_all(client, [("XLEN", name) for name in names])
    sizes = call_all(client, [("MEMORY", "USAGE", name) for name in names])
    return max((size // length for size, length in zip(sizes, lengths, strict=True) if size and length), default=0)


def _find_damage(client: Client, places: Sequence[HandlerKeys]) -> dict[HandlerKeys, str]:
    """Why the key queues of these handlers are unreadable, where another program has written."""
    replies = iter(
        send_all(
            client,
            [one for keys in places for one in (("HLEN", keys.owners), ("ZCARD", keys.leases), ("LLEN", keys.ready))],
        )
    )
    found = {keys: each for keys, *each in zip(places, replies, replies, replies, strict=True)}
    return {keys: str(one) for keys, each in found.items() for one in each if isinstance(one, WrongType)}


def _find_idle(client: Client, handlers: Sequence[HandlerReport], old_ms: int) -> dict[tuple[str, str], IdleEntries]:
    """The lowest pending entries of each handler that were idle for so long, without those in key queues."""
    commands: list[Command] = [
        ("XPENDING", to_wire(one.stream), to_wire(one.keys.group), "IDLE", old_ms, "-", "+", _WATCHED)
        for one in handlers
    ]
    idle: dict[tuple[str, str], IdleEntries] = {}
    for one, reply in zip(handlers, send_all(client, commands), strict=True):
        entries = () if isinstance(reply, RedisError) else reply
        if one.keyed or one.engine == "spark":
            entries = [entry for entry in entries if entry[1] != WAITING.encode()]
        idle_ms = [ms for entry in entries if (ms := _idle_ms_of(entry[2])) >= old_ms]
        if idle_ms:
            idle[one.stream, one.keys.group] = IdleEntries(count=len(idle_ms), idle_ms=max(idle_ms))
    return idle


def _idle_ms_of(found_ms: int) -> int:
    """How long an entry has been idle, by the idle time that Redis has; a nack has raised that by NACK_IDLE_MS."""
    return found_ms - NACK_IDLE_MS if found_ms >= NACK_IDLE_MS else found_ms


def _oldest_letters_ms(client: Client, handlers: Sequence[HandlerReport]) -> dict[str, int]:
    """When the oldest dead letter of each handler was written, of those of `_first_of`. Their ids tell it."""
    some = _first_of([one for one in handlers if one.dead_letters])
    calls = [(COUNT_ENTRIES, (to_wire(one.keys.dead_letters),), ("0-0", 1, "+")) for one in some]
    replies = zip(some, client.try_scripts(calls), strict=True)
    return _earliest(
        (one.label, _ms_of(reply[1])) for one, reply in replies if not isinstance(reply, RedisError) and reply[1]
    )


def _whole_minute_ms(at_ms: int) -> int:
    """The beginning of that minute: within it the same calls are made, whose replies a TrackedClient keeps."""
    return at_ms // 60_000 * 60_000


def _find_new_letters(client: Client, handlers: Sequence[HandlerReport], start_ms: int) -> dict[str, NewLetters]:
    """The dead letters that came after `start_ms`, by handler. Their ids tell it."""
    having = [one for one in handlers if one.dead_letters]
    args = (f"{start_ms}-0", _COUNTED_LETTERS, "+")
    found: dict[str, NewLetters] = {}
    for at in range(0, len(having), _PIPELINE):
        some = having[at : at + _PIPELINE]
        replies = client.try_scripts([(COUNT_ENTRIES, (to_wire(one.keys.dead_letters),), args) for one in some])
        for one, reply in zip(some, replies, strict=True):
            if isinstance(reply, RedisError) or not reply[0]:
                continue
            count, first, _, more = reply
            known = found.get(one.label, NewLetters(count=0, is_exact=True, since_ms=_ms_of(first)))
            found[one.label] = NewLetters(
                count=known.count + count,
                is_exact=known.is_exact and not more,
                since_ms=min(known.since_ms, _ms_of(first)),
            )
    return found


def _oldest_parks_ms(client: Client, handlers: Sequence[HandlerReport]) -> dict[str, int]:
    """Since when the first parked key of each handler has been parked, of those of `_first_of`.

    A handler with more than a thousand such keys on a stream is left out, those that wait until they have left another
    partition included.
    """
    some = _first_of([one for one in handlers if one.parked])
    counts = send_all(client, [("HLEN", one.keys.parked) for one in some])
    with_many = {
        one.label
        for one, count in zip(some, counts, strict=True)
        if isinstance(count, RedisError) or count > _MOST_PARKED
    }
    some = [one for one in some if one.label not in with_many]
    replies = zip(some, send_all(client, [("HGETALL", one.keys.parked) for one in some]), strict=True)
    texts = (
        (one.label, *text.partition(b" ")[::2])
        for one, reply in replies
        if not isinstance(reply, RedisError)
        for text in mapping_of(reply).values()
    )
    return _earliest(
        (label, int(ms))
        for label, ms, why in texts
        if ms.isdigit() and len(ms) <= _MOST_DIGITS and not why.startswith(_MIGRATES)
    )


def _queries_of(found: Inspection) -> list[tuple[str, str]]:
    """The handlers and stages that may run on Spark, by app and name."""
    handlers = [(one.app, one.handler) for one in found.handlers if one.engine == "spark"]
    stages = [stage for stream in found.streams for group in stream.groups if (stage := stage_of(group.name))]
    return list(dict.fromkeys([*handlers, *stages]))


def _first_of(having: Sequence[HandlerReport]) -> list[HandlerReport]:
    """The first hundred handlers on streams, without those with another stream beyond these: they may have older ones."""
    beyond = {one.label for one in having[_WATCHED:]}
    return [one for one in having[:_WATCHED] if one.label not in beyond]


def _earliest(times_ms: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The earliest time of each name."""
    found: dict[str, int] = {}
    for name, at_ms in times_ms:
        found[name] = min(at_ms, found.get(name, at_ms))
    return found


def _ms_of(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])
