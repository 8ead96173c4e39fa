"""A runner says that it has been woken and has not run since: then the thread that woke it leaves the interpreter to it."""

import sys
import threading

import pytest

from millstream import Message
from millstream.delivery.reliable_stream import ReliableStream
from millstream.worker.in_flight import InFlight
from millstream.worker.running.async_runner import AsyncRunner
from millstream.worker.running.runner import Runner
from millstream.worker.running.thread_runner import ThreadRunner
from tests.support.runners import delivery, runner_of, running
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.worker]

_UNTIL_IT_BLOCKS_S = 3600.0
"""A thread that has the interpreter keeps it for so long, unless it waits."""


def waking_after_two_messages(runner: Runner, in_flight: InFlight, stream: ReliableStream) -> list[bool]:
    """Whether the runner is waking: while it is idle, as soon as a message was added, and when it is idle again."""
    in_flight.on_buffered = runner.notify
    in_flight.add([delivery(stream, 1)], 0)
    eventually(lambda: len(in_flight.completions) == 1 and is_idle(runner))
    found = [runner.is_waking]

    def look_and_notify() -> None:
        found.append(runner.is_waking)
        runner.notify()

    in_flight.on_buffered = look_and_notify
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_UNTIL_IT_BLOCKS_S)
    try:
        in_flight.add([delivery(stream, 2)], 0)
    finally:
        sys.setswitchinterval(interval_s)
    eventually(lambda: len(in_flight.completions) == 2 and is_idle(runner))
    return [*found, runner.is_waking]


def is_idle(runner: Runner) -> bool:
    return runner._is_idle if isinstance(runner, AsyncRunner) else bool(runner._idle_threads)  # type: ignore[attr-defined]


def test_a_thread_that_was_woken_and_has_not_run_is_waking(stream: ReliableStream, in_flight: InFlight) -> None:
    def handle(message: Message) -> None: ...

    runner = runner_of(handle, ThreadRunner, in_flight, 1)
    with running(runner, in_flight):
        assert waking_after_two_messages(runner, in_flight, stream) == [False, True, False]


def test_an_event_loop_that_was_woken_and_has_not_run_is_waking(stream: ReliableStream, in_flight: InFlight) -> None:
    async def handle(message: Message) -> None: ...

    runner = runner_of(handle, AsyncRunner, in_flight)
    with running(runner, in_flight):
        assert waking_after_two_messages(runner, in_flight, stream) == [False, True, False]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_runner_that_is_busy_is_not_waking(stream: ReliableStream, in_flight: InFlight, kind: str) -> None:
    started, released = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        started.set()
        assert released.wait(FAIL_SAFE_S)

    async def handle_async(message: Message) -> None:
        handle(message)

    runner = (
        runner_of(handle, ThreadRunner, in_flight, 1)
        if kind == "plain"
        else runner_of(handle_async, AsyncRunner, in_flight, concurrency=1)
    )
    in_flight.on_buffered = runner.notify
    with running(runner, in_flight):
        in_flight.add([delivery(stream, 1), delivery(stream, 2)], 0)
        assert started.wait(FAIL_SAFE_S)
        assert not runner.is_waking, "a message waits for the one that runs"
        released.set()
        eventually(lambda: len(in_flight.completions) == 2)
