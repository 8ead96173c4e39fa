"""One worker process: a reading loop for each handler of an app, until it is told to stop."""

import gc
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from millstream.app import App
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import ConfigError, HandlerStuck
from millstream.observability.health import Health
from millstream.observability.metrics import NOBODY, Metrics
from millstream.worker.loop import ReadingLoop
from millstream.worker.policy import WorkerPolicy
from millstream.worker.running.poison_isolation import ProcessIsolation

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_FROZEN_SHARE = 2 / 3
_LEAST_FROZEN_MS, _GRACE_MS = 1_000.0, 1_000.0
_COLLECT_AFTER = (10_000, 20, 20)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker process is told.

    * `url`: where Redis is
    * `consumer`: its name in the consumer groups
    * `incarnation`: under which name its supervisor notes how it ended; "" if there is none
    * `only`: names of the handlers to run; () for all
    * `start`: where a handler begins that has done nothing yet
    """

    url: str = field(repr=False)
    consumer: str
    incarnation: str = ""
    only: tuple[str, ...] = ()
    start: Literal["earliest", "latest"] = "earliest"
    policy: WorkerPolicy = field(default_factory=WorkerPolicy)


def collect_rarely() -> None:
    """Have Python look for cyclic garbage less often in this process, and never again among what is loaded by now.

    Each message is a few objects that live until it is committed; to walk them as often as by default, on the way to
    all modules there are, takes a tenth of a worker's time (Python docs, "gc.freeze").
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


class WorkerProcess:
    """Runs the handlers of `app`, each in its own reading loop; if one loop ends, all do.

    `on_figures` is told the counts of each handler, by name, about every `every_ms` milliseconds, at the end, and soon after
    the first commit, so that the supervisor knows of it if the process dies then. `end_process` is called to end it at once,
    because of a handler that runs on though its lease is about to end.
    Raises ConfigError for handlers that a worker cannot run, before anything is read.
    """

    def __init__(
        self,
        app: App,
        settings: WorkerSettings,
        *,
        metrics: Metrics = NOBODY,
        health: Health | None = None,
        on_figures: Callable[[Mapping[str, Mapping[str, int]]], Any] = lambda figures: None,
        every_ms: float = 1_000.0,
        end_process: Callable[[HandlerStuck], object] = lambda error: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not app.handlers:
            raise ConfigError(f"app {app.name!r} has only stages, which need Spark: use millstream run")
        unknown = set(settings.only) - app.handlers.keys()
        if unknown:
            raise ConfigError(
                f"app {app.name!r} has no handler {sorted(unknown)[0]!r}; it has {', '.join(app.handlers)}"
            )
        quiet = ProcessIsolation(settings.incarnation, end_process)
        self._loops = {
            name: ReadingLoop(
                handler,
                settings.url,
                consumer=settings.consumer,
                policy=settings.policy,
                start=settings.start,
                metrics=metrics,
                health=health,
                quiet=quiet,
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
        self._leftovers: list[Delivery] = []

    @property
    def frozen_after_ms(self) -> float:
        """For how long a handler may stop all threads of the process, so that none of its leases runs out meanwhile.

        And for no longer than its time limit, which cannot be kept then.
        """
        longest_ms = max(loop.handler.time_limit_ms for loop in self._loops.values()) + _GRACE_MS
        return max(_LEAST_FROZEN_MS, min(_FROZEN_SHARE * self._policy.claim_ms, longest_ms))

    def run(self, stopping: threading.Event) -> Sequence[Delivery]:
        """Work until `stopping`; return what was still running then. Raises what made a loop end before."""
        collect_rarely()
        threads = [threading.Thread(target=self._run, args=(loop,), daemon=True) for loop in self._loops.values()]
        for thread in threads:
            thread.start()
        told_ms, has_worked = self._clock.monotonic_ms(), False
        while not stopping.wait(_TICK_S) and not self._failures:
            began, has_worked = has_worked, any(loop.report.committed for loop in self._loops.values())
            if (has_worked and not began) or self._clock.monotonic_ms() - told_ms >= self._every_ms:
                told_ms = self._clock.monotonic_ms()
                self._tell()
        if self._health is not None:
            self._health.stopping()
        deadline_ms = self._clock.monotonic_ms() + self._longest_stop_ms
        for loop in self._loops.values():
            loop.stop(deadline_ms)
        for thread in threads:
            thread.join()
        self._tell()
        if self._failures:
            raise self._failures[0]
        return self._leftovers

    def stop_within(self, longest_ms: float) -> None:
        """Have a stop that begins from now on wait no longer than so many milliseconds for what runs."""
        self._longest_stop_ms = min(self._longest_stop_ms, longest_ms)

    def _run(self, loop: ReadingLoop) -> None:
        try:
            self._leftovers += loop.run()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._failures.append(error)

    def _tell(self) -> None:
        self._on_figures({name: loop.report.figures() for name, loop in self._loops.items()})
