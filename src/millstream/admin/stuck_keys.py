"""Stuck keys and dead letters, of one handler or of all: what waits for an operator."""

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.admin.inspection import existing_handlers
from millstream.admin.key_listing import read_key_queues
from millstream.admin.key_queues import KeyQueue, count_suspected_keys, is_stuck, last_errors
from millstream.admin.limit_waits import LimitWait, ShowValue, explain_wait, find_limit_waits
from millstream.admin.stuck_places import StuckScan
from millstream.delivery.last_error import LastError
from millstream.delivery.long_runs import LongRun, read_long_runs
from millstream.errors import RedisError
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import HandlerKeys, to_wire
from millstream.redis_client.pipelining import send_all

_MOST_OF_ONE = 5_000
_MOST_TOGETHER = 20_000


@dataclass(frozen=True, kw_only=True)
class StuckKey:
    """A stuck key of a handler on a stream.

    * `last`: why the last attempt on its first message failed; `limit`: the limit that this message waits for
    """

    keys: HandlerKeys
    queue: KeyQueue
    last: LastError
    limit: LimitWait | None

    def why(self, show: ShowValue) -> str:
        """Why the key waits, in words."""
        return explain_wait(self.keys, self.queue, self.last, self.limit, show)


@dataclass(frozen=True, kw_only=True)
class StuckKeys:
    """Stuck keys: parked ones first, then those with most messages.

    * `more`: how many more there are; `unreadable`: sentences about keys that cannot be read
    """

    found: Sequence[StuckKey] = ()
    more: int = 0
    unreadable: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class LetterCount:
    """The dead letters of a handler: how many there are, on how many streams."""

    label: str
    count: int
    streams: int


@dataclass(frozen=True, kw_only=True)
class StuckOverview:
    """What is stuck, of all handlers.

    * `crowded`: handlers on streams with too many stuck keys to read, and how many these may be
    * `is_partial`: there may be more
    * `age_ms`: what got stuck in the last so many milliseconds may be missing; None if all was searched just now
    """

    keys: StuckKeys
    crowded: Sequence[tuple[HandlerKeys, int]]
    letters: Sequence[LetterCount]
    is_partial: bool
    age_ms: float | None


def read_stuck_keys(
    client: Client, existing: Sequence[HandlerKeys], long_runs: Sequence[LongRun], *, most: int
) -> StuckKeys:
    """The stuck keys of these handlers, at most `most`, with those whose message has been running for long.

    Raises RedisError.
    """
    running = {(one.handler, one.stream, one.id) for one in long_runs}
    unreadable: list[str] = []

    def is_wanted(keys: HandlerKeys, one: KeyQueue) -> bool:
        return is_stuck(one) or (keys.label, escape(keys.stream), one.first_id) in running

    listed = read_key_queues(
        client, existing, None, is_wanted, running=running, stuck_only=True, report=unreadable.append
    )
    found = [(place.keys, queue) for place in listed for queue in place.queues]
    found.sort(key=lambda one: (one[1].state != "parked", -one[1].length))
    shown = found[:most]
    return StuckKeys(
        found=[
            StuckKey(keys=keys, queue=queue, last=last, limit=limit)
            for (keys, queue), last, limit in zip(
                shown, last_errors(client, shown), find_limit_waits(client, shown), strict=True
            )
        ],
        more=len(found) - len(shown),
        unreadable=unreadable,
    )


def read_stuck_overview(client: Client, scan: StuckScan, *, most_keys: int = 100) -> StuckOverview:
    """The stuck keys and dead letters of all handlers, however many streams there are, as far as `scan` has found them.

    `most_keys`: how many stuck keys to return. Raises RedisError.
    """
    places = scan.run(client)
    is_partial = places.is_partial
    existing = existing_handlers(client, places.found) if places.found else []
    counts = count_suspected_keys(client, existing)
    some, crowded, total = [], [], 0
    for keys, known in counts.items():
        count = known or 0
        if count > _MOST_OF_ONE:
            crowded.append((keys, count))
        elif total + count > _MOST_TOGETHER:
            is_partial = True
        else:
            some.append(keys)
            total += count
    runs = read_long_runs(client, {one.app for one in some})
    return StuckOverview(
        keys=read_stuck_keys(client, some, runs, most=most_keys) if some else StuckKeys(),
        crowded=crowded,
        letters=_count_letters(client, places.found),
        is_partial=is_partial,
        age_ms=places.age_ms,
    )


def _count_letters(client: Client, places: Sequence[HandlerKeys]) -> list[LetterCount]:
    counts = send_all(client, [("XLEN", to_wire(keys.dead_letters)) for keys in places])
    by_label: dict[str, list[int]] = {}
    for keys, count in zip(places, counts, strict=True):
        if count and not isinstance(count, RedisError):
            by_label.setdefault(keys.label, []).append(count)
    return [LetterCount(label=label, count=sum(some), streams=len(some)) for label, some in by_label.items()]
