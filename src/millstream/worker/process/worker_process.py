"""Worker process: runs a reading loop for each handler of an app, until it is stopped."""

import gc
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from millstream.app import App
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import ConfigError, HandlerStuck
from millstream.observability.health import Health
from millstream.observability.metrics import NO_METRICS, Metrics
from millstream.producer.schedule_loop import ScheduleThreads
from millstream.worker.loop import ReadingLoop
from millstream.worker.policy import LEAST_FROZEN_MS, TIME_LIMIT_GRACE_MS, WorkerPolicy
from millstream.worker.running.poison_isolation import ProcessIsolation

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_LAST_REPORT_S = 0.1
_FROZEN_SHARE = 2 / 3
_GC_THRESHOLDS = (10_000, 20, 20)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings of a worker process.

    * `url`: where Redis is
    * `consumer`: its name in the consumer groups
    * `incarnation`: the name under which its supervisor records how it ended; "" without a supervisor
    * `only`: names of the handlers to run; () for all
    * `start`: where a handler begins that has processed nothing yet
    """

    url: str = field(repr=False)
    consumer: str
    incarnation: str = ""
    only: tuple[str, ...] = ()
    start: Literal["earliest", "latest"] = "earliest"
    policy: WorkerPolicy = field(default_factory=WorkerPolicy)


def tune_gc() -> None:
    """Make Python collect cyclic garbage less often in this process, and exempt all objects loaded by now.

    A message takes a few objects that live until it is committed. Traversing these as often as by default, together
    with all loaded modules, takes a tenth of a worker's time (Python docs, "gc.freeze").
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def _no_handlers(app: App) -> str:
    if app.stages:
        return f"app {app.name!r} has only stages, which need Spark: use millstream run"
    return f'app {app.name!r} has no handlers; add one with @app.handler("stream")'


def describe_leftover(delivery: Delivery) -> str:
    """Return the text for a delivery that was still running at a stop."""
    return (
        f"message {delivery.id.decode()} of {delivery.stream.stream} was still running at the stop; "
        "another worker processes it again"
    )


class WorkerProcess:
    """Runs the handlers of `app`, each in its own reading loop; if one loop ends, all are stopped.

    * `on_figures`: called with the counts of each handler, by name, about every `every_ms` milliseconds, at the end,
      and soon after the first commit, so that the supervisor knows of that commit even if the process dies then
    * `end_process`: called to end the process at once, because a handler runs on though its lease is about to expire;
      `on_figures` was called just before, unless that takes longer than a tenth of a second

    Raises ConfigError for handlers that a worker cannot run, before anything is read.
    """

    def __init__(
        self,
        app: App,
        settings: WorkerSettings,
        *,
        metrics: Metrics = NO_METRICS,
        health: Health | None = None,
        on_figures: Callable[[Mapping[str, Mapping[str, int]]], Any] = lambda figures: None,
        every_ms: float = 1_000.0,
        end_process: Callable[[HandlerStuck], object] = lambda error: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not app.handlers:
            raise ConfigError(_no_handlers(app))
        unknown = set(settings.only) - app.handlers.keys()
        if unknown:
            raise ConfigError(
                f"app {app.name!r} has no handler {sorted(unknown)[0]!r}; it has {', '.join(app.handlers)}"
            )
        self._end_at_once = end_process
        isolation = ProcessIsolation(settings.incarnation, self._end_process)
        self._loops = {
            name: ReadingLoop(
                handler,
                settings.url,
                consumer=settings.consumer,
                policy=settings.policy,
                start=settings.start,
                metrics=metrics,
                health=health,
                isolation=isolation,
                clock=clock,
            )
            for name, handler in app.handlers.items()
            if not settings.only or name in settings.only
        }
        self._health = health
        self._on_figures = on_figures
        self._every_ms = every_ms
        self._policy = settings.policy
        self._longest_stop_ms: float = settings.policy.stop_ms
        self._clock = clock
        self._failures: list[BaseException] = []
        schedules = tuple(app.schedules.values())
        self._schedules = ScheduleThreads(settings.url, schedules, self._failures.append, clock)
        self._leftovers: list[Delivery] = []

    @property
    def frozen_after_ms(self) -> float:
        """How long a handler may stop all threads of the process, in milliseconds.

        Short enough that no lease expires meanwhile, but a second at least; as the policy says or, where it says
        nothing, no longer than the longest time limit of its handlers, which the process cannot enforce in that state.
        """
        longest_ms: float | None = self._policy.frozen_ms
        if longest_ms is None:
            longest_ms = max(loop.handler.time_limit_ms for loop in self._loops.values()) + TIME_LIMIT_GRACE_MS
        return max(LEAST_FROZEN_MS, min(_FROZEN_SHARE * self._policy.claim_ms, longest_ms))

    def run(self, stopping: threading.Event) -> Sequence[Delivery]:
        """Work until `stopping`; return the deliveries still running then. Raises the error that ended a loop early."""
        threads = [threading.Thread(target=self._run, args=(loop,), daemon=True) for loop in self._loops.values()]
        for thread in threads:
            thread.start()
        self._schedules.start()
        reported_ms, has_worked = self._clock.monotonic_ms(), False
        while not stopping.wait(_TICK_S) and not self._failures and self._first_deadline_ms == inf:
            had_worked, has_worked = has_worked, any(loop.loop_metrics.committed for loop in self._loops.values())
            if (has_worked and not had_worked) or self._clock.monotonic_ms() - reported_ms >= self._every_ms:
                reported_ms = self._clock.monotonic_ms()
                self._report()
        if self._health is not None:
            self._health.on_stopping()
        # One for all: the others must not begin their stop when that of the loop that has failed is over.
        deadline_ms = min(self._first_deadline_ms, self._clock.monotonic_ms() + self._longest_stop_ms)
        self._schedules.stop()
        for loop in self._loops.values():
            loop.stop(deadline_ms)
        for thread in threads:
            thread.join()
        self._schedules.join(deadline_ms)
        self._report()
        for error in self._failures[1:]:
            logger.error("another handler has failed as well: %s", error)
        if self._failures:
            raise self._failures[0]
        return self._leftovers

    @property
    def _first_deadline_ms(self) -> float:
        """The deadline of a loop that stops by itself, as it cannot continue; infinity while there is none."""
        return min(loop.deadline_ms for loop in self._loops.values())

    def stop_within(self, longest_ms: float) -> None:
        """Limit how long a stop that begins from now on waits for running messages, in milliseconds."""
        self._longest_stop_ms = min(self._longest_stop_ms, longest_ms)

    def _run(self, loop: ReadingLoop) -> None:
        try:
            self._leftovers += loop.run()
        except BaseException as error:  # noqa: BLE001 - `run` raises it, after it has ended the other loops
            self._failures.append(error)

    def _end_process(self, error: HandlerStuck) -> None:
        """Report the last counts, which end with this process, and end it. The lease does not last for much longer."""
        reporting = threading.Thread(target=self._report, name="millstream-last-report", daemon=True)
        reporting.start()
        reporting.join(_LAST_REPORT_S)
        self._end_at_once(error)

    def _report(self) -> None:
        self._on_figures({name: loop.loop_metrics.counts() for name, loop in self._loops.items()})
