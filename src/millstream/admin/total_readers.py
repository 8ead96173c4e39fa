"""Totals: where there are so many streams that the overview checks a sample, the figures of handlers on all of them."""

from collections.abc import Sequence
from dataclasses import replace

from millstream.admin.consumption_summary import ReaderReport, status_of
from millstream.admin.figure_history import FigureHistory, HandlerSample, Sample
from millstream.admin.liveness import announced_workers, find_runs
from millstream.errors import AccessDenied, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import server_time_ms

_USABLE_MS = 600_000
"""So old may totals be: a console that begins to collect has to read all streams first."""


def newest_totals(client: Client) -> Sample | None:
    """The newest sample of the history, if it is less than ten minutes old and this user may read it. Raises RedisError."""
    try:
        found = FigureHistory(client).newest()
    except (AccessDenied, WrongType):
        return None
    if found is None or not found.handlers or server_time_ms(client) - found.at_ms >= _USABLE_MS:
        return None
    return found


def with_totals(client: Client, readers: Sequence[ReaderReport], totals: Sample) -> tuple[ReaderReport, ...]:
    """The readers of a sample of streams, those handlers that have totals with these. Raises RedisError.

    Adds the handlers that are on no stream of the sample: for each, a command about its workers and one about its run.
    """
    known = {one.name: one for one in readers if one.kind == "handler"}
    names = [label.partition(".") for label in totals.handlers if label not in known]
    missing = [HandlerKeys(app, handler, "") for app, _, handler in names]
    announced = announced_workers(client, missing) if missing else {}
    runs = find_runs(client, [(one.app, one.handler) for one in missing])
    for keys in missing:
        known[keys.label] = _unseen(keys.label, len(announced[keys.label]) + ((keys.app, keys.handler) in runs))
    found = [
        _with_totals(one, totals.handlers[name]) if name in totals.handlers else one for name, one in known.items()
    ]
    return (*sorted(found, key=lambda one: one.name), *(one for one in readers if one.kind != "handler"))


def _unseen(name: str, alive: int) -> ReaderReport:
    """A handler that is on no stream of the sample, without figures."""
    return ReaderReport(
        name=name,
        kind="handler",
        modes=(),
        alive=alive,
        status="idle",
        streams=0,
        lag=None,
        lag_exact=True,
        lag_min=None,
        lag_avg=None,
        lag_max=None,
        largest_lags=(),
        oldest_age_ms=None,
        pending=0,
        in_flight=None,
        parked=0,
        backing_off=0,
        blocked=0,
        dead_letters=0,
        paused=0,
        added=0,
        done=None,
    )


def _with_totals(reader: ReaderReport, total: HandlerSample) -> ReaderReport:
    return replace(
        reader,
        modes=total.modes,
        status=status_of(
            is_readable=total.done is not None,
            streams=total.streams,
            paused=total.paused,
            alive=reader.alive,
            lag=total.lag or 0,
            is_crashing=reader.status == "crash loop",  # which is known of its app's workers, and not of streams
        ),
        streams=total.streams,
        lag=total.lag,
        lag_exact=total.is_exact,
        oldest_age_ms=total.oldest_ms,
        pending=total.pending,
        in_flight=total.in_flight,
        parked=total.parked,
        backing_off=total.stuck - total.parked,
        dead_letters=total.dead_letters,
        paused=total.paused,
        added=total.added or 0,
        done=total.done,
    )
