"""Runners without a reading loop, for tests of how they run the messages in flight."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from millstream import App
from millstream.clock import SYSTEM_CLOCK
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.redis_client.client import Client
from millstream.worker import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.running.runner import Runner
from tests.support.waiting import FAIL_SAFE_S


@contextmanager
def unreachable_stream() -> Iterator[ReliableStream]:
    """A stream of a server that is not there: what calls Redis fails."""
    with Client("redis://127.0.0.1:1") as nowhere:
        yield ReliableStream(nowhere, "in", app="app", handler="handle", consumer="w")


def delivery(stream: ReliableStream, number: int = 1) -> Delivery:
    """An entry of the stream."""
    return Delivery(stream, b"%d-0" % number, [b"n", b"1"])


def runner_of(
    function: Callable[..., Any], kind: type[Any], in_flight: InFlight, threads: int = 1, **options: Any
) -> Runner:
    """The runner of this kind for a handler of the function."""
    app = App("app")
    app.handler("in", name="handle", **options)(function)
    handler = app.handlers["handle"]
    means = HandlerSteps(handler), in_flight, LoopMetrics(handler.label, time_limit_ms=1_000), SYSTEM_CLOCK
    runner: Runner = kind(*means) if handler.is_async else kind(*means, threads)
    return runner


@contextmanager
def running(runner: Runner, in_flight: InFlight) -> Iterator[None]:
    """Run messages within the block."""
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        yield
    finally:
        in_flight.buffer.put(None)
        runner.notify()
        thread.join(FAIL_SAFE_S)
    assert not thread.is_alive()
