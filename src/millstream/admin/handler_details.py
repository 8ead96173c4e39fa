"""HandlerDetails: one handler with its figures, its streams and its stuck keys."""

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.admin.handler_figures import HandlerFigures, add_figures
from millstream.admin.inspection import inspect_handlers, inspect_streams
from millstream.admin.key_listing import read_key_queues
from millstream.admin.key_queues import KeyQueue, is_stuck, last_errors
from millstream.admin.reports import HandlerReport
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.last_error import LastError
from millstream.delivery.long_runs import read_long_runs
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import HandlerKeys

_MOST_STREAMS = 500
_MOST_REPORTS = 100


@dataclass(frozen=True, kw_only=True)
class StuckKey:
    """A stuck key of a handler on a stream, and why the last attempt on its first message failed."""

    keys: HandlerKeys
    queue: KeyQueue
    last: LastError


@dataclass(frozen=True, kw_only=True)
class HandlerDetails:
    """One handler.

    * `places`: the handler on each of its streams
    * `figures`: of at most 500 of these; `reports`: of at most 100, those with the largest lag first
    * `stuck`: its stuck keys, parked ones first, then those with most messages; `more_stuck`: how many more there are
    * `unreadable`: sentences about keys that cannot be read
    """

    places: Sequence[HandlerKeys]
    figures: HandlerFigures
    reports: Sequence[HandlerReport]
    stuck: Sequence[StuckKey]
    more_stuck: int
    unreadable: Sequence[str]

    @property
    def is_complete(self) -> bool:
        """Whether the figures are of all its streams."""
        return len(self.places) <= _MOST_STREAMS


def read_handler(
    client: Client, places: Sequence[HandlerKeys], *, most_keys: int = 100, clock: Clock = SYSTEM_CLOCK
) -> HandlerDetails:
    """Read the details of the handler on these streams. `most_keys`: how many stuck keys to read; 0 for none. Raises RedisError."""
    figures, unreadable = HandlerFigures(), list[str]()
    some = places[:_MOST_STREAMS]
    add_figures(client, some, figures, clock)
    streams = {one.name: one for one in inspect_streams(client, list(dict.fromkeys(keys.stream for keys in some)))}
    existing = [keys for keys in some if keys.stream in streams]
    reports = inspect_handlers(client, existing[:_MOST_REPORTS], streams=streams, clock=clock) if existing else ()
    running = {(one.handler, one.stream, one.id) for one in read_long_runs(client, {keys.app for keys in existing})}

    def is_wanted(keys: HandlerKeys, one: KeyQueue) -> bool:
        return is_stuck(one) or (keys.label, escape(keys.stream), one.first_id) in running

    found: list[tuple[HandlerKeys, KeyQueue]] = []
    if most_keys:
        listed = read_key_queues(
            client, existing, None, is_wanted, running=running, stuck_only=True, report=unreadable.append
        )
        found = [(one.keys, queue) for one in listed for queue in one.queues]
    found.sort(key=lambda one: (one[1].state != "parked", -one[1].length))
    shown = found[:most_keys]
    return HandlerDetails(
        places=places,
        figures=figures,
        reports=sorted(reports, key=lambda one: (one.problem is None, -(one.lag or 0))),
        stuck=[
            StuckKey(keys=keys, queue=queue, last=last)
            for (keys, queue), last in zip(shown, last_errors(client, shown), strict=True)
        ],
        more_stuck=len(found) - len(shown),
        unreadable=unreadable,
    )
