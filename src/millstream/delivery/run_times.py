"""RunTimes: how long the runs of a handler took in the last minute, reported by each worker so that operators see it."""

from collections.abc import Iterable, Sequence

import msgspec

from millstream.delivery.expiring_members import read_members, replace_members
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import run_times_key
from millstream.redis_client.pipelining import server_time_ms

HELD_MS = 60_000
"""How long a report is kept, unless a later one replaces it."""


class RunTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a handler that ended on one worker within `over_ms` milliseconds.

    * `worker`: its consumer
    * `committed`, `retried`: messages that were committed, and failed runs that will be repeated
    * `p50_ms`, `p99_ms`, `longest_ms`: how long a run took, in milliseconds, by the last runs of the time; with many
      runs by a sample of them; None if no run ended, but only earlier ones were committed
    """

    worker: str
    over_ms: int
    committed: int
    retried: int
    p50_ms: float | None
    p99_ms: float | None
    longest_ms: float | None


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a handler that ended on all its workers in the last minute.

    * `p50_ms`: the median of the medians of its workers; `p99_ms`: the greatest of theirs; None if no run ended
    * `retried_per_s`: failed runs that will be repeated, per second
    """

    p50_ms: float | None
    p99_ms: float | None
    retried_per_s: float


def summarize_runs(found: Sequence[RunTimes]) -> RunSummary:
    """Sum up the reports of the workers of one handler."""
    medians = sorted(one.p50_ms for one in found if one.p50_ms is not None)
    return RunSummary(
        p50_ms=medians[len(medians) // 2] if medians else None,
        p99_ms=max((one.p99_ms for one in found if one.p99_ms is not None), default=None),
        retried_per_s=sum((one.retried * 1000 / one.over_ms for one in found if one.over_ms > 0), 0.0),
    )


def report_run_times(
    client: Client, app: str, handler: str, found: RunTimes | None, *, earlier: RunTimes | None = None
) -> None:
    """Replace the report of a worker, if it has one: `earlier`. Without `found` it is removed. Raises RedisError."""
    kept, ended = ([one] if one is not None else [] for one in (found, earlier))
    replace_members(client, run_times_key(app, handler), HELD_MS, kept=kept, ended=ended)


def read_run_times(client: Client, handlers: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Sequence[RunTimes]]:
    """The run times of each handler, by app and name, one for each worker on which runs ended in the last minute.

    () for one that this user may not read. Raises RedisError.
    """
    asked = list(handlers)
    found = read_members(client, [run_times_key(*one) for one in asked], RunTimes, server_time_ms(client))
    return {
        # A worker that could not remove its earlier report has two: the one that is kept longer is the later one.
        handler: sorted({one.worker: one for one, _ in some}.values(), key=lambda one: one.worker)
        for handler, some in zip(asked, found, strict=True)
    }
