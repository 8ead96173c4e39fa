"""The time limit of plain handlers on Spark: attempts share one timer, and each has its whole limit."""

import contextlib
import signal
import time
from collections.abc import Iterator

import pytest

from millstream.handlers.attempt import RunResult
from millstream.handlers.time_limit import TimeLimit
from millstream.spark.engine import watchdog
from millstream.spark.engine.time_limit import AttemptTimeLimit
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.spark]

DONE: RunResult = ((), (), None)
ENDLESS_S = 3_600.0


def at_once() -> RunResult:
    return DONE


def endless() -> RunResult:
    time.sleep(ENDLESS_S)
    return DONE


@pytest.fixture
def time_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttemptTimeLimit]:
    for name in ("_MIN_GRACE_MS", "_MAX_GRACE_MS"):  # no watchdog kills a process that stands still
        monkeypatch.setattr(watchdog, name, FAIL_SAFE_S * 1_000)
    before = signal.getsignal(signal.SIGALRM)
    limit = AttemptTimeLimit()
    try:
        yield limit
    finally:
        limit.disarm()
        signal.signal(signal.SIGALRM, before)


def may_stand_still() -> contextlib.suppress:
    """A short attempt during which this process may get no processor for as long as the limit: it is interrupted then."""
    return contextlib.suppress(TimeLimit)


def seconds_left() -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


def test_attempts_share_one_timer(time_limit: AttemptTimeLimit, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[float] = []
    set_timer = signal.setitimer

    def count(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        settings.append(seconds)
        return set_timer(which, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", count)
    for _ in range(1_000):
        assert time_limit.guard(at_once, 3_600_000) == DONE
    assert settings == [3_600.0]
    time_limit.disarm()
    time_limit.disarm()
    assert settings == [3_600.0, 0]


def test_an_attempt_has_its_whole_limit_though_the_timer_was_set_for_an_earlier_one(
    time_limit: AttemptTimeLimit,
) -> None:
    with may_stand_still():
        time_limit.guard(at_once, 200)
    began_s = time.monotonic()
    with pytest.raises(TimeLimit):
        time_limit.guard(endless, 400)
    assert time.monotonic() - began_s >= 0.4


def test_a_shorter_limit_holds_though_the_timer_was_set_for_a_longer_one(time_limit: AttemptTimeLimit) -> None:
    time_limit.guard(at_once, ENDLESS_S * 1_000)
    with pytest.raises(TimeLimit):
        time_limit.guard(endless, 100)


def test_an_attempt_is_interrupted_again_if_it_swallows_the_first_interruption(time_limit: AttemptTimeLimit) -> None:
    def swallow() -> RunResult:
        with contextlib.suppress(TimeLimit):
            endless()
        return endless()

    with pytest.raises(TimeLimit):
        time_limit.guard(swallow, 100)


def test_nothing_is_interrupted_between_attempts(time_limit: AttemptTimeLimit) -> None:
    with may_stand_still():
        time_limit.guard(at_once, 50)
    time.sleep(0.2)
    assert time_limit.guard(at_once, ENDLESS_S * 1_000) == DONE
    time_limit.disarm()
    assert seconds_left() == 0


def test_a_handler_that_stops_the_timer_does_so_for_one_limit_at_most(time_limit: AttemptTimeLimit) -> None:
    def stop_the_timer() -> RunResult:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return DONE

    with may_stand_still():
        time_limit.guard(stop_the_timer, 100)
    time.sleep(0.1)
    with pytest.raises(TimeLimit):
        time_limit.guard(endless, 100)
