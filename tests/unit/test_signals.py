"""Signals that ask a command to stop, at any moment."""

import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest

from millstream.cli.signals import interrupted_at_signals, orderly_stop, set_from_signal
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.worker]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_arrives_while_the_event_is_locked_is_received(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext(), orderly_stop() as stopping:
        with stopping._cond:  # type: ignore[attr-defined]  # as `wait` has it for moments
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        assert stopping.wait(FAIL_SAFE_S)


def test_the_second_signal_calls_its_function_and_the_former_handler_is_restored() -> None:
    calls: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    with orderly_stop(at_second=lambda: calls.append(1)) as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.wait(FAIL_SAFE_S)
        assert calls == []
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: calls == [1])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stop_says_whether_a_signal_has_come_also_after_it_was_set() -> None:
    with orderly_stop() as stopping:
        stopping.set()
        assert not stopping.is_signalled
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: stopping.is_signalled)


def test_an_event_is_set_a_moment_after_the_signal() -> None:
    event = threading.Event()
    set_from_signal(event)
    assert event.wait(FAIL_SAFE_S)


def test_the_first_signal_interrupts_the_block_and_later_ones_leave_its_clean_up_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned = False
    with interrupted_at_signals() as received:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        cleaned = True
    assert cleaned
    assert received == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before
