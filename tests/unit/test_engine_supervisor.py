"""The process that runs the engines of `millstream auto`: starts that fail, short runs, signals and a lag without answer."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream.admin.waiting_messages import Waiting
from millstream.cli import lag_reader
from millstream.cli.engine_policy import Engine, EnginePolicy
from millstream.cli.engine_supervisor import EngineSupervisor
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import PipelineFailed
from tests.support.clocks import ManualClock

pytestmark = [pytest.mark.cli]

ENDS_IN_ORDER = ("--version",)
FAILS = ("info", "--url", "redis://127.0.0.1:1")
REFUSED = ("info", "--no-such-option")
TOO_LONG = ("x" * 1_000_000,)
"""No process can be started with it: the kernel refuses the argument."""
FOREVER_MS = float("inf")
POLICY = EnginePolicy(spark_above=10, workers_below=5, minimum_ms=0)


@pytest.fixture
def stopping() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


class Lags:
    """Returns these lags; then the reading never ends, until the test does."""

    def __init__(self, stopping: threading.Event, *counts: int) -> None:
        self._stopping = stopping
        self._counts = list(counts)

    def __call__(self) -> Waiting:
        if not self._counts:
            self._stopping.wait()
        return Waiting(self._counts.pop(0) if self._counts else 0)


def supervisor(
    lag: Callable[[], Waiting],
    arguments: Callable[[Engine], Sequence[str]],
    on_event: Callable[[Mapping[str, Any]], object] = lambda _: None,
    clock: Clock = SYSTEM_CLOCK,
    policy: EnginePolicy = POLICY,
) -> EngineSupervisor:
    return EngineSupervisor(
        policy,
        lag,
        arguments,
        environment=os.environ,
        stop_ms=FOREVER_MS,
        poll_ms=0,
        on_event=on_event,
        clock=clock,
    )


def test_a_lag_without_an_answer_does_not_keep_an_engine_from_being_started(stopping: threading.Event) -> None:
    events: list[str] = []
    supervisor(Lags(stopping, 0), lambda _: ENDS_IN_ORDER, lambda one: events.append(one["event"])).run(stopping)
    assert events == ["started", "stopped"]


def test_an_error_of_the_lag_other_than_an_outage_ends_the_command(stopping: threading.Event) -> None:
    def lag() -> Waiting:
        raise PermissionError("no rights")

    with pytest.raises(PermissionError, match="no rights"):
        supervisor(lag, lambda _: ENDS_IN_ORDER).run(stopping)


def test_an_engine_that_ends_more_than_ten_times_soon_after_its_start_ends_the_command(
    stopping: threading.Event,
) -> None:
    clock = ManualClock()
    starts: list[Engine] = []

    def arguments(engine: Engine) -> Sequence[str]:
        starts.append(engine)
        return FAILS

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "restarting":
            clock.sleep_ms(30_000)  # the longest wait before a start

    with pytest.raises(PipelineFailed, match="the workers ended 11 times in a row soon after the start"):
        supervisor(Lags(stopping, 0), arguments, on_event, clock).run(stopping)
    assert starts == ["workers"] * 11


@pytest.mark.parametrize(
    ("fails", "starts", "cause"),
    [
        (FAILS, 4, "Spark ended 4 times in a row soon after the start; see its errors above"),
        (REFUSED, 1, "Spark cannot run with these settings; see the error above"),
    ],
    ids=["ends", "is refused"],
)
def test_where_spark_cannot_run_the_workers_take_over(
    stopping: threading.Event, fails: Sequence[str], starts: int, cause: str
) -> None:
    clock, steps, causes = ManualClock(), list[str](), list[str]()

    def arguments(engine: Engine) -> Sequence[str]:
        steps.append(engine)
        return fails if engine == "spark" else ENDS_IN_ORDER

    def on_event(event: Mapping[str, Any]) -> None:
        causes.extend([event["cause"]] if event["event"] == "change" else [])
        if event["event"] == "restarting":
            clock.sleep_ms(30_000)

    supervisor(Lags(stopping, 11), arguments, on_event, clock).run(stopping)
    assert steps == ["spark"] * starts + ["workers"]
    assert causes == [f"{cause}; the workers take over, and Spark is tried again in 10 min if the lag needs it"]


def test_spark_is_tried_again_after_ten_minutes_on_the_workers_each_time_by_one_start(
    stopping: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag_reader, "REST", 0)  # a reading during which the clock leaps has not taken long
    clock, starts, decided = ManualClock(), list[Engine](), list[Engine]()
    endless = tmp_path / "endless_app.py"
    endless.write_text("import time\ntime.sleep(1_000_000)\n")

    class Policy(EnginePolicy):
        """Lets ten minutes pass at each third decision on the workers."""

        def decide(self, lag: Waiting | None, engine: Engine, since_ms: float) -> Engine:
            decided.append(engine)
            if engine == "workers" and decided.count("workers") % 3 == 0:
                clock.sleep_ms(600_000)
            return super().decide(lag, engine, since_ms)

    def arguments(engine: Engine) -> Sequence[str]:
        starts.append(engine)
        if engine == "workers":
            return ("worker", str(endless))
        return FAILS if starts.count("spark") <= 5 else ENDS_IN_ORDER

    def lag() -> Waiting:
        stopping.wait(0.01)
        return Waiting(11)

    policy = Policy(spark_above=10, workers_below=5, minimum_ms=0)

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "restarting":
            clock.sleep_ms(30_000)

    supervisor(lag, arguments, on_event, clock, policy).run(stopping)
    assert starts == [*["spark"] * 4, "workers", "spark", "workers", "spark"]
    assert decided.count("workers") > 6


def test_a_process_that_cannot_be_started_is_tried_again_and_the_change_is_reported_once_it_runs(
    stopping: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[str] = []

    def arguments(engine: Engine) -> Sequence[str]:
        steps.append(f"start {engine}")
        return ENDS_IN_ORDER if steps.count("start spark") == 2 else TOO_LONG

    def lag() -> Waiting:
        if "started" not in steps:
            return Waiting(0)
        stopping.wait(0.01)  # read so often that a reading begins after each change
        return Waiting(11)

    supervisor(lag, arguments, lambda one: steps.append(one["event"])).run(stopping)
    tries = [one for one in steps if one != "start workers"]
    assert tries == ["started", "change", "start spark", "start spark", "changed", "stopped"]
    assert "cannot start Spark" in caplog.text


def test_a_second_signal_while_a_process_is_started_kills_it(stopping: threading.Event, tmp_path: Path) -> None:
    endless = tmp_path / "endless_app.py"
    endless.write_text("import time\ntime.sleep(1_000_000)\n")

    def arguments(_: Engine) -> Sequence[str]:
        stopping.set()
        one.kill()
        return ("worker", str(endless))

    one = supervisor(Lags(stopping, 0), arguments)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child inherits it: only a kill ends it
    try:
        one.run(stopping)
    finally:
        signal.signal(signal.SIGTERM, before)
