"""HandlerDetails: one handler with its figures, its streams and its stuck keys."""

from collections.abc import Sequence
from dataclasses import dataclass

from millstream.admin.handler_figures import HandlerFigures, add_figures
from millstream.admin.inspection import inspect_handlers, inspect_streams
from millstream.admin.reports import HandlerReport
from millstream.admin.stuck_keys import StuckKeys, read_stuck_keys
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.long_runs import read_long_runs
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys

_MOST_STREAMS = 500
_MOST_REPORTS = 100


@dataclass(frozen=True, kw_only=True)
class HandlerDetails:
    """One handler.

    * `places`: the handler on each of its streams
    * `figures`: of at most 500 of these; `reports`: of at most 100, those with the largest lag first
    * `stuck`: its stuck keys
    """

    places: Sequence[HandlerKeys]
    figures: HandlerFigures
    reports: Sequence[HandlerReport]
    stuck: StuckKeys

    @property
    def is_complete(self) -> bool:
        """Whether the figures are of all its streams."""
        return len(self.places) <= _MOST_STREAMS


def read_handler(
    client: Client, places: Sequence[HandlerKeys], *, most_keys: int = 100, clock: Clock = SYSTEM_CLOCK
) -> HandlerDetails:
    """Read the details of the handler on these streams. `most_keys`: how many stuck keys to read; 0 for none. Raises RedisError."""
    figures = HandlerFigures()
    some = places[:_MOST_STREAMS]
    add_figures(client, some, figures, clock)
    streams = {one.name: one for one in inspect_streams(client, list(dict.fromkeys(keys.stream for keys in some)))}
    existing = [keys for keys in some if keys.stream in streams]
    reports = inspect_handlers(client, existing[:_MOST_REPORTS], streams=streams, clock=clock) if existing else ()
    long_runs = read_long_runs(client, {keys.app for keys in existing})
    return HandlerDetails(
        places=places,
        figures=figures,
        reports=sorted(reports, key=lambda one: (one.problem is None, -(one.lag or 0))),
        stuck=read_stuck_keys(client, existing, long_runs, most=most_keys) if most_keys else StuckKeys(),
    )
