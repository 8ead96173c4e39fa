"""ActivityReader: the current work of handlers and the messages that wait, from Redis alone, for `millstream top`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from millstream.admin.handler_figures import HandlerFigures, read_figures
from millstream.admin.key_queues import blocked_queues, having_stuck_keys
from millstream.admin.liveness import announced_workers, find_runs
from millstream.admin.redis_metrics import KnownPlaces, Places
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.query_progress import QueryProgress, read_progress
from millstream.delivery.run_times import RunSummary, read_run_times, summarize_runs
from millstream.errors import AccessDenied, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys

_DISCOVERY_MS = 5_000.0
_MOST_WITH_BLOCKED = 100


@dataclass(frozen=True, kw_only=True)
class HandlerActivity:
    """The current work of one handler, summed up over its streams.

    * `handler`: its label; `figures`: its figures in Redis
    * `committed_per_s`: messages committed per second since the reading before; None if there was none, or if it has
      other streams now
    * `blocked`: keys whose first message has failed all its attempts or waits for newer code, and is retried without end, on
      up to 100 streams
    * `workers`: workers that their supervisors announce, and runs on Spark
    * `runs`: how long its runs took on workers, and how many are repeated; `query`: its last micro-batch on Spark, if it runs there
    """

    handler: str
    figures: HandlerFigures
    committed_per_s: float | None
    blocked: int
    workers: int
    runs: RunSummary
    query: QueryProgress | None

    @property
    def is_paused(self) -> bool:
        """True if it is paused on all its streams."""
        return 0 < self.figures.streams == self.figures.paused


@dataclass(frozen=True, kw_only=True)
class _Reading:
    at_ms: float
    figures: HandlerFigures


class ActivityReader:
    """Reads the activity of handlers again and again.

    * `discover`: finds the handlers and their streams; called anew from time to time

    A handler costs some round trips, and about 15 commands for each of its streams; its workers cost the same
    however many streams it has, and its blocked keys are read only where keys back off or are leased.
    """

    def __init__(self, client: Client, discover: Callable[[Client], Places], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._known = KnownPlaces(discover, every_ms=_DISCOVERY_MS, clock=clock)
        self._clock = clock
        self._before: Mapping[str, _Reading] = {}
        self.hidden = 0
        """How many handlers this user may not access, at the last reading."""

    def read(self) -> list[HandlerActivity]:
        """The activity of each handler, with most waiting messages first.

        Raises AccessDenied if this user may access none of them, what `discover` raises, and RedisError.
        """
        self._known.refresh(self._client)
        places = self._known.places
        readings: dict[str, _Reading] = {}
        denied: list[AccessDenied] = []
        for label, some in places.items():
            try:
                figures = read_figures(self._client, some, self._clock)
            except AccessDenied as error:
                denied.append(error)
                continue
            readings[label] = _Reading(at_ms=self._clock.monotonic_ms(), figures=figures)
        self.hidden = len(denied)
        if denied and not readings:
            raise denied[0]
        handlers = [some[0] for label, some in places.items() if label in readings]
        workers = self._count_workers(handlers)
        names = [(keys.app, keys.handler) for keys in handlers]
        runs, queries = read_run_times(self._client, names), read_progress(self._client, names)
        found = [
            HandlerActivity(
                handler=label,
                figures=reading.figures,
                committed_per_s=_rate(self._before.get(label), reading),
                blocked=self._count_blocked(places[label], reading.figures),
                workers=workers[label],
                runs=summarize_runs(runs[places[label][0].app, places[label][0].handler]),
                query=queries.get((places[label][0].app, places[label][0].handler)),
            )
            for label, reading in readings.items()
        ]
        self._before = readings
        return sorted(found, key=lambda one: (-one.figures.waiting, one.handler))

    def _count_workers(self, handlers: Sequence[HandlerKeys]) -> Mapping[str, int]:
        """How many workers, or runs, of each of these handlers are alive."""
        announced = announced_workers(self._client, handlers)
        runs = find_runs(self._client, {(keys.app, keys.handler) for keys in handlers})
        return {keys.label: len(announced[keys.label]) + ((keys.app, keys.handler) in runs) for keys in handlers}

    def _count_blocked(self, places: Sequence[HandlerKeys], figures: HandlerFigures) -> int:
        if not figures.keys["backing_off"] and not figures.keys["leased"]:
            return 0
        count = 0
        for keys in having_stuck_keys(self._client, places)[:_MOST_WITH_BLOCKED]:
            with suppress(WrongType):
                count += len(blocked_queues(self._client, keys))
        return count


def _rate(before: _Reading | None, now: _Reading) -> float | None:
    if before is None or before.figures.streams != now.figures.streams or now.at_ms <= before.at_ms:
        return None
    return max(0, now.figures.committed - before.figures.committed) * 1000 / (now.at_ms - before.at_ms)
