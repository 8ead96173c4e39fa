"""HandlerFigures: figures of a handler on its streams, read from Redis at a bounded cost, for metrics and scaling."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import get_args

import msgspec

from millstream.admin.lag import StreamLag, age_ms, count_lags
from millstream.clock import Clock
from millstream.delivery.pause import parse_pause
from millstream.errors import AccessDenied, ConfigError, RedisError, Unavailable
from millstream.handlers.dead_letter import Reason
from millstream.model import ZERO_ID
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import WAITING, HandlerKeys, StreamKeys, from_wire, to_wire
from millstream.redis_client.pipelining import send_all, server_time_ms
from millstream.redis_client.replies import mapping_of, pairs_of
from millstream.redis_client.resp import Arg, Command, Reply
from millstream.redis_client.scripts import Script

COUNT_DEAD_LETTERS = Script("commit/count_dead_letters")

STATES = ("ready", "leased", "backing_off", "parked")
"""The states of a key with messages."""

REASONS: Sequence[str] = (*get_args(Reason), "other")
"""The reasons by which dead letters are counted; `other` if unreadable, or older than those that are read."""

AT_ONCE = 500
"""How many streams are read in one go."""

_MOST_KEYS = 100
_MOST_LETTERS = 1_000
_COUNT_MS = 50.0


class HandlerFigures(msgspec.Struct, kw_only=True):
    """The figures of one handler, summed up over the streams that were read.

    * `streams`, `paused`, `paused_by_breaker`: the number of its streams, and of those on which it is paused
    * `waiting`: messages that are not committed: unread, nacked, in key queues or in flight; a lower bound if `is_partial`
    * `in_flight`: those of them that workers have; `unread`: those that its group has not delivered yet; `nacked`: those
      that a worker of a handler without a key has released
    * `oldest_ms`: age of the oldest of them, in milliseconds; None if there is none
    * `dead_letters`: dead letters by reason, one of REASONS
    * `delayed`: delayed messages
    * `keys`, `oldest_key_ms`: keys by state, one of STATES, and the greatest age of a first message among at most 100 of
      them on each stream
    * `look_ahead_used`: the used part of the look-ahead, on the stream where it is greatest
    * `awaiting`: keys that wait until they have left another partition
    * `delivered`: changes whenever its group delivers an entry; `committed`: messages that it has committed so far
    """

    streams: int = 0
    paused: int = 0
    paused_by_breaker: int = 0
    waiting: int = 0
    is_partial: bool = False
    in_flight: int = 0
    unread: int = 0
    nacked: int = 0
    oldest_ms: int | None = None
    dead_letters: Counter[str] = msgspec.field(default_factory=Counter)
    delayed: int = 0
    keys: Counter[str] = msgspec.field(default_factory=Counter)
    oldest_key_ms: dict[str, int] = msgspec.field(default_factory=dict)
    look_ahead_used: float = 0.0
    awaiting: int = 0
    delivered: int = 0
    committed: int = 0


class _Place(msgspec.Struct):
    """A handler on one stream, while its figures are read."""

    keys: HandlerKeys
    length: int
    group: Mapping[bytes, Reply]
    meta: Sequence[bytes | None]
    pending: Sequence[Reply]
    letters: int
    delayed: int
    lag: StreamLag

    @property
    def has_keys(self) -> bool:
        """Whether it may have key queues: workers with a key have, and Spark, for deferred keys."""
        return self.meta[0] != b"workers"

    @property
    def pending_count(self) -> int:
        return int(self.pending[0])

    @property
    def queued_count(self) -> int:
        """The entries that no worker has: they wait in key queues, or were nacked."""
        return count_queued(self.pending[3])


def count_queued(consumers: Reply) -> int:
    """How many entries no worker has, by the consumers and their counts of XPENDING; None for no pending entry."""
    return sum(int(count) for name, count in consumers or () if from_wire(name) == WAITING)


def read_figures(client: Client, places: Sequence[HandlerKeys], clock: Clock, *, at_least: int = 0) -> HandlerFigures:
    """The figures of a handler on all these streams, read without a rest; see `add_figures`."""
    figures = HandlerFigures()
    for at in range(0, len(places), AT_ONCE):
        add_figures(client, places[at : at + AT_ONCE], figures, clock, at_least=at_least - figures.waiting)
    return figures


def add_figures(
    client: Client, places: Sequence[HandlerKeys], figures: HandlerFigures, clock: Clock, *, at_least: int = 0
) -> None:
    """Add the figures of a handler on some of its streams to `figures`.

    A few round trips, about 15 commands for each stream; what is expensive is read in part: see HandlerFigures. Streams
    that were deleted or hold something else count as empty. `at_least`: so many of the messages that wait on them are
    counted, however long that takes. Raises RedisError.
    """
    now_ms = server_time_ms(client)
    found = _read_places(client, places)
    _complete_lags(client, found, clock, at_least)
    _add_first_unread(client, found)
    for one in found:
        figures.streams += 1
        pause = parse_pause(one.meta[2], now_ms)
        figures.paused += pause is not None
        figures.paused_by_breaker += pause is not None and pause.by == "breaker"
        figures.waiting += (one.lag.count or 0) + one.pending_count
        figures.is_partial |= one.lag.is_partial
        figures.in_flight += one.pending_count - one.queued_count
        figures.nacked += 0 if one.has_keys else one.queued_count
        figures.unread += max(one.lag.count or 0, one.lag.is_partial)
        figures.delivered ^= hash((one.keys.stream, one.group.get(b"last-delivered-id")))
        figures.delayed += one.delayed
        figures.committed += (_number(one.meta[4]) or 0) - (_number(one.meta[5]) or 0)
        first = one.pending[1].decode() if one.pending[1] else one.lag.first_id
        if first is not None:
            figures.oldest_ms = max(figures.oldest_ms or 0, age_ms(first, now_ms))
        look_ahead = _number(one.meta[3])
        if one.meta[0] == b"keyed" and look_ahead:
            figures.look_ahead_used = max(figures.look_ahead_used, one.pending_count / look_ahead)
    _add_dead_letters(client, [one for one in found if one.letters], figures)
    _add_keys(client, [one.keys for one in found if one.has_keys], figures, now_ms)


def _read_places(client: Client, places: Sequence[HandlerKeys]) -> list[_Place]:
    commands: list[Command] = []
    for keys in places:
        commands += [
            ("XLEN", to_wire(keys.stream)),
            ("XINFO", "GROUPS", to_wire(keys.stream)),
            ("HMGET", to_wire(keys.meta), "owner", "committed_id", "paused", "look_ahead", "committed", "skipped"),
            ("XPENDING", to_wire(keys.stream), to_wire(keys.group)),
            ("XLEN", to_wire(keys.dead_letters)),
            ("ZCARD", to_wire(StreamKeys(keys.stream).due)),
        ]
    replies = present(send_all(client, commands))
    found = []
    for keys, (length, groups, meta, pending, letters, delayed) in zip(places, _rows(replies, 6), strict=True):
        if length is None or meta is None:
            continue
        named = [mapping_of(one) for one in groups or ()]
        group = next((one for one in named if from_wire(one[b"name"]) == keys.group), {})
        found.append(
            _Place(
                keys,
                length,
                group,
                meta,
                pending or (0, None, None, None),
                letters or 0,
                delayed or 0,
                _lag(keys.stream, length, group, meta),
            )
        )
    return found


def _lag(stream: str, length: int, group: Mapping[bytes, Reply], meta: Sequence[bytes | None]) -> StreamLag:
    """The entries that the handler's group has not delivered yet; `is_partial` if they have to be counted.

    Where nothing was deleted, Redis knows their number; entries that were trimmed unread are in it, but not in the
    stream. On Spark the group follows the committed id.
    """
    if not group:
        after = (meta[1] or b"").decode() or str(ZERO_ID)
        return StreamLag(stream, after, count=0, is_partial=True) if meta[1] else StreamLag(stream, after, count=length)
    after = group[b"last-delivered-id"].decode()
    if group[b"lag"] is None:
        return StreamLag(stream, after, count=0, is_partial=True)
    return StreamLag(stream, after, count=min(length, group[b"lag"]))


def _complete_lags(client: Client, found: Sequence[_Place], clock: Clock, at_least: int) -> None:
    """Count the lags that Redis does not know, in part if that takes long."""
    unknown = [one.lag for one in found if one.lag.is_partial]
    if unknown:
        known = sum((one.lag.count or 0) + one.pending_count for one in found)
        count_lags(client, unknown, _COUNT_MS, clock, at_least=at_least - known)


def _add_first_unread(client: Client, found: Sequence[_Place]) -> None:
    """Find the first unread entry of each stream where it is the oldest that is not committed."""
    asked = [one.lag for one in found if one.lag.count and one.lag.first_id is None and not one.pending_count]
    replies = send_all(client, [("XRANGE", to_wire(lag.stream), f"({lag.after_id}", "+", "COUNT", 1) for lag in asked])
    for lag, entries in zip(asked, present(replies), strict=True):
        lag.first_id = entries[0][0].decode() if entries else None


def _add_dead_letters(client: Client, found: Sequence[_Place], figures: HandlerFigures) -> None:
    calls = [(COUNT_DEAD_LETTERS, (to_wire(one.keys.dead_letters),), (_MOST_LETTERS,)) for one in found]
    for one, reply in zip(found, present(client.try_scripts(calls)), strict=True):
        counts = {from_wire(reason): count for reason, count in pairs_of(reply or ())}
        known = Counter({reason: counts[reason] for reason in get_args(Reason) if reason in counts})
        figures.dead_letters += known
        figures.dead_letters["other"] += max(0, one.letters - known.total())


def _add_keys(client: Client, places: Sequence[HandlerKeys], figures: HandlerFigures, now_ms: int) -> None:
    commands: list[Command] = []
    for keys in places:
        commands += [
            ("LLEN", keys.ready),
            ("HLEN", keys.owners),
            ("ZCARD", keys.backoff),
            ("HLEN", keys.parked),
            ("HLEN", keys.awaiting),
            ("LRANGE", keys.ready, 0, _MOST_KEYS - 1),
            ("ZRANGE", keys.leases, 0, _MOST_KEYS - 1),
            ("ZRANGE", keys.backoff, 0, _MOST_KEYS - 1),
            ("HSCAN", keys.parked, 0, "COUNT", _MOST_KEYS),
        ]
    sampled: list[tuple[str, Arg]] = []
    for keys, row in zip(places, _rows(present(send_all(client, commands)), 9), strict=True):
        ready, leased, backing_off, parked, awaiting = (count or 0 for count in row[:5])
        # A key that waits until it has left another partition is parked in Redis, but not for an operator.
        counts = (ready, leased, backing_off, max(0, parked - awaiting))
        figures.keys += Counter(dict(zip(STATES, counts, strict=True)))
        figures.awaiting += awaiting
        names = (row[5], row[6], row[7], row[8][1][::2] if parked > awaiting and row[8] else ())
        for state, some in zip(STATES, names, strict=True):
            sampled += [(state, keys.queue(name)) for name in (some or ())[:_MOST_KEYS]]
    firsts = present(send_all(client, [("LINDEX", queue, 0) for _, queue in sampled]))
    for (state, _), first in zip(sampled, firsts, strict=True):
        with suppress(ConfigError):  # of a damaged key queue it is no id
            age = age_ms(from_wire(first or b""), now_ms)
            figures.oldest_key_ms[state] = max(figures.oldest_key_ms.get(state, 0), age)


def present(replies: Sequence[Reply]) -> list[Reply]:
    """The replies; None where the key or group is gone, or holds something else. Raises Unavailable, AccessDenied."""
    for reply in replies:
        if isinstance(reply, (Unavailable, AccessDenied)):
            raise reply
    return [None if isinstance(reply, RedisError) else reply for reply in replies]


def _rows(replies: Sequence[Reply], width: int) -> list[Sequence[Reply]]:
    return [replies[at : at + width] for at in range(0, len(replies), width)]


def _number(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None
