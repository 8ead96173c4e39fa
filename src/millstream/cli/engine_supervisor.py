"""EngineSupervisor: runs one engine of an app at a time, as a child process, and changes it by a policy."""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from millstream.admin.waiting_messages import Waiting
from millstream.cli.engine_policy import Engine, EnginePolicy
from millstream.cli.lag_reader import LagReader
from millstream.clock import SYSTEM_CLOCK, Backoff, Clock
from millstream.errors import ConfigError, MillstreamError, PipelineFailed
from millstream.redis_client.formats import format_age, pluralize
from millstream.worker.process.supervisor import describe_end

logger = logging.getLogger(__name__)

NAMES: Mapping[Engine, str] = {"workers": "the workers", "spark": "Spark"}
"""The engines as messages name them."""

_STDERR = 2
_CONFIG_CODE = 2
_TICK_S = 0.1
_WAITS_MS = (100.0, 30_000.0)
_STEADY_MS: Mapping[Engine, float] = {"workers": 60_000.0, "spark": 300_000.0}
"""A run that lasts longer is no short one. Spark may take minutes to start, and to fail in it."""
_MAX_SHORT_RUNS: Mapping[Engine, int] = {"workers": 10, "spark": 3}
"""How many short runs in a row are followed by a restart. The workers can take over from Spark, and no engine can take over from them."""
_SPARK_PAUSE_MS = 600_000.0

OnEvent = Callable[[Mapping[str, Any]], object]


class EngineSupervisor:
    """Runs the engine that `policy` chooses, until it is stopped.

    A change stops the child that runs, waits until it has ended, and starts the other one. A child that dies is started
    again, after growing waits. Where Spark cannot run, the workers do, and Spark is tried again after ten minutes.

    * `lag`: returns how many messages wait; raises Unavailable while Redis is
    * `arguments`: returns the arguments of `millstream` for an engine, at each start
    * `environment`: that of the children
    * `stop_ms`: how long a child may take to stop before it is killed
    * `poll_ms`: how often the lag is read, but for at most a tenth of the time
    * `on_event`: called with each event
    """

    def __init__(
        self,
        policy: EnginePolicy,
        lag: Callable[[], Waiting],
        arguments: Callable[[Engine], Sequence[str]],
        *,
        environment: Mapping[str, str],
        stop_ms: float,
        poll_ms: float,
        on_event: OnEvent,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._policy = policy
        self._lag = LagReader(lag, poll_ms=poll_ms, clock=clock)
        self._arguments = arguments
        self._environment = dict(environment)
        self._stop_ms = stop_ms
        self._on_event = on_event
        self._clock = clock
        self._engine: Engine = "workers"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._changed_ms = self._started_ms = self._start_due_ms = 0.0
        self._spark_due_ms = float("-inf")
        self._spark_has_failed = False
        self._last_lag = Waiting(0)
        self._stop_seconds: float | None = None
        self._backoff = Backoff(*_WAITS_MS)
        self._short_runs = 0
        self._changes = 0

    def run(self, stopping: threading.Event) -> None:
        """Run the engines until `stopping`, or until a child ends in order by itself.

        Raises ConfigError and PipelineFailed for workers that cannot run, and RedisError.
        """
        self._run_children(stopping)
        self._on_event({"event": "stopped", "changes": self._changes})

    def kill(self) -> None:
        """Kill the child at once, or as soon as it is started; what it started ends by itself."""
        self._is_killed = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _run_children(self, stopping: threading.Event) -> None:
        self._lag.start(stopping)
        try:
            if (lag := self._first_lag(stopping)) is None:
                return
            self._engine = self._policy.first(lag)
            self._changed_ms = self._clock.monotonic_ms()
            self._on_event({"event": "started", "engine": self._engine, **_fields_of(lag)})
            while not stopping.wait(_TICK_S):
                if not self._check_child():
                    return
                self._check_lag(stopping)
        finally:
            self._stop_child()

    def _first_lag(self, stopping: threading.Event) -> Waiting | None:
        """The lag, once Redis has answered; None if it is to stop before that."""
        while (reading := self._lag.take()) is None:
            if stopping.wait(_TICK_S):
                return None
        self._last_lag = reading.lag
        return reading.lag

    def _check_lag(self, stopping: threading.Event) -> None:
        if (reading := self._lag.take()) is None:
            return
        lag = self._last_lag = reading.lag
        engine = self._policy.decide(lag, self._engine, reading.at_ms - self._changed_ms)
        is_early = engine == "spark" and reading.at_ms < self._spark_due_ms
        if engine == self._engine or is_early or stopping.is_set():
            return
        self._change(engine, self._policy.explain(lag, engine))
        if not (stopping.is_set() or self._is_killed):
            self._start_child()

    def _change(self, engine: Engine, cause: str) -> None:
        """Stop the child that runs, if there is one; the next start is that of the other engine."""
        self._on_event({"event": "change", "engine": engine, **_fields_of(self._last_lag), "cause": cause})
        began_ms = self._clock.monotonic_ms()
        self._stop_child()
        self._changed_ms = self._clock.monotonic_ms()
        self._engine = engine
        self._stop_seconds = round((self._changed_ms - began_ms) / 1000, 3)
        self._start_due_ms, self._short_runs = 0.0, 0
        self._backoff.reset()

    def _check_child(self) -> bool:
        """Start the child if it is due; False if it has ended in order."""
        if self._process is None:
            if self._clock.monotonic_ms() >= self._start_due_ms:
                self._start_child()
        elif (code := self._process.poll()) is not None and not self._is_killed:
            self._close_child()
            if code == 0:
                logger.warning("%s: its command has ended in order, by itself; this one ends", NAMES[self._engine])
                return False
            self._on_died(code)
        return True

    def _on_died(self, code: int) -> None:
        now_ms = self._clock.monotonic_ms()
        name = NAMES[self._engine]
        if code == _CONFIG_CODE:
            self._give_up(ConfigError(f"{name} cannot run with these settings; see the error above"))
            return
        if now_ms - self._started_ms > _STEADY_MS[self._engine]:
            self._short_runs = 0
            self._backoff.reset()
            self._spark_has_failed = False
        self._short_runs += 1
        # A later try costs one start: no message is processed in it.
        most = 0 if self._engine == "spark" and self._spark_has_failed else _MAX_SHORT_RUNS[self._engine]
        if self._short_runs > most:
            times = f"{pluralize(self._short_runs, 'time')} in a row soon after the start"
            self._give_up(PipelineFailed(f"{name} ended {times}; see its errors above"))
            return
        wait_ms = self._backoff.next_ms()
        self._start_due_ms = now_ms + wait_ms
        reason = describe_end(code)
        logger.warning("%s: the process %s; restarting in %.1f s", name, reason, wait_ms / 1000)
        self._on_event({"event": "restarting", "engine": self._engine, "reason": reason})

    def _give_up(self, error: MillstreamError) -> None:
        """Change to the workers for a while if Spark cannot run; raise the error if the workers cannot."""
        if self._engine == "workers":
            raise error
        self._spark_has_failed = True
        self._spark_due_ms = self._clock.monotonic_ms() + _SPARK_PAUSE_MS
        pause = format_age(_SPARK_PAUSE_MS)
        self._change(
            "workers", f"{error}; the workers take over, and Spark is tried again in {pause} if the lag needs it"
        )

    def _start_child(self) -> None:
        # -P: the process finds modules where this one does, and not first in the working folder.
        program = (sys.executable, "-P", "-m", "millstream.cli.child", "engine_child", *self._arguments(self._engine))
        self._started_ms = self._clock.monotonic_ms()
        # A session of its own: Ctrl-C reaches this process alone, which stops the child in order.
        try:
            self._process = subprocess.Popen(
                program, stdin=subprocess.PIPE, stdout=_STDERR, env=self._environment, start_new_session=True
            )
        except OSError as error:  # no memory, or too many processes
            wait_ms = self._backoff.next_ms()
            self._start_due_ms = self._started_ms + wait_ms
            logger.warning("cannot start %s: %s; retrying in %.1f s", NAMES[self._engine], error, wait_ms / 1000)
            return
        if self._is_killed:  # by a signal while the process was being started
            self._process.kill()
        if self._stop_seconds is not None:
            self._changes += 1
            self._on_event({"event": "changed", "engine": self._engine, "stop_seconds": self._stop_seconds})
            self._stop_seconds = None

    def _stop_child(self) -> None:
        """Stop the child in order; kill it if it has not ended after `stop_ms`, or after `kill`."""
        process = self._process
        if process is None:
            return
        process.terminate()
        deadline_ms = self._clock.monotonic_ms() + self._stop_ms
        while process.poll() is None and not self._is_killed and self._clock.monotonic_ms() < deadline_ms:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_TICK_S)
        if process.poll() is None:
            if not self._is_killed:
                logger.warning(
                    "%s: process %d did not stop within %g s; killing it, its running messages are processed again",
                    NAMES[self._engine],
                    process.pid,
                    self._stop_ms / 1000,
                )
            process.kill()
            process.wait()
        self._close_child()

    def _close_child(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None


def _fields_of(lag: Waiting) -> Mapping[str, Any]:
    return {"lag": lag.count, "lag_exact": not lag.is_partial}
