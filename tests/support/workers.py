"""Reading loops in this process, on a real Redis, and helpers for their messages."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millstream import App, Message, Retry
from millstream.admin.redis_metrics import RedisMetrics, all_places
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import GroupMissing
from millstream.handlers.dead_letter import DeadLetter
from millstream.handlers.handler import Handler
from millstream.observability.health import Health
from millstream.observability.metrics import Metric, Recorder
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.replies import time_us_of
from millstream.worker import HandlerSteps, ReadingLoop, WorkerPolicy
from millstream.worker.breaker import HandlerBreaker
from millstream.worker.context import WorkerContext
from millstream.worker.fetch_outage import FetchOutage
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from tests.support.clocks import LeapClock
from tests.support.waiting import FAIL_SAFE_S, eventually

KEYS = HandlerKeys("app", "handle", "in")
QUICK = WorkerPolicy(block_ms=100, claim_ms=60_000, sweep_ms=50, stop_ms=60_000)
"""Refreshes often, and expires late: no claim expires because a thread got no processor for some seconds.

Tests of the end of a claim or of a stop set their own durations.
"""
LONG_AGO_MS = 3_600_000
"""Longer than any claim of a test lasts, in milliseconds."""
READ_WITHIN_MS = 600_000
"""The read limit of the health that `wait_for_reads` takes, in milliseconds."""


class RecordingLoop(ReadingLoop):
    """A reading loop that records how it ended."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.leftovers: list[Delivery] = []
        self.failure: Exception | None = None
        self.ended = threading.Event()

    def work(self) -> None:
        """Run to the end, and record how it ended."""
        try:
            self.leftovers = self.run()
        except Exception as error:  # noqa: BLE001 - `working` raises it
            self.failure = error
        finally:
            self.ended.set()


@contextmanager
def working(client: Client, handler: Handler, name: str = "w1", **options: Any) -> Iterator[RecordingLoop]:
    """Run a loop during the block; raises the error that ended it, if any."""
    loop = RecordingLoop(handler, client.url, consumer=name, **{"policy": QUICK, **options})
    thread = threading.Thread(target=loop.work, daemon=True)
    thread.start()
    try:
        yield loop
    except AssertionError as error:
        if loop.failure is not None:  # what the block waited for in vain may have needed the loop
            raise error from loop.failure
        raise
    finally:
        loop.stop()
        thread.join(FAIL_SAFE_S)
    assert not thread.is_alive(), f"the loop of {name} does not stop"
    if loop.failure is not None:
        raise loop.failure


@contextmanager
def ending(
    error: type[Exception],
    client: Client,
    handler: Handler,
    name: str = "w1",
    *,
    match: str | None = None,
    **options: Any,
) -> Iterator[RecordingLoop]:
    """Run a loop that must end by itself with this error, at the end of the block at the latest."""
    with pytest.raises(error, match=match), working(client, handler, name, **options) as loop:  # noqa: PT012 - no other line raises these
        yield loop
        eventually(loop.ended.is_set, f"the end of the loop by {error.__name__}")


def give_up_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it to the event loop of async handlers to end what exceeds its time limit, however late it gets a processor.

    Else maintenance may be the first to get one, and end the worker.
    """
    monkeypatch.setattr("millstream.worker.settling.maintenance.TIME_LIMIT_GRACE_MS", 1_000 * FAIL_SAFE_S)


def make(function: Callable[..., Any], **options: Any) -> Handler:
    """Make a handler `app.handle` of the function, by default of the stream `in`, into the stream `out`."""
    app = App("app")
    streams = () if {"pattern", "announced"} & options.keys() else ("in",)
    app.handler(*streams, **{"name": "handle", "into": "out", "retry": Retry(attempts=3, delay_ms=10), **options})(
        function
    )
    return app.handlers["handle"]


def either(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Return the function, or a coroutine function that does the same."""
    if kind == "plain":
        return function

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return function(*args, **kwargs)

    coroutine.__annotations__ = function.__annotations__
    coroutine.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return coroutine


KINDS = pytest.mark.parametrize("kind", ["plain", "async"])
"""Both kinds of handlers, for `either`."""


def make_context(
    client: Client, handler: Handler, *, in_flight: InFlight | None = None, clock: Clock = SYSTEM_CLOCK
) -> WorkerContext:
    """What the parts of a worker share, for a part that a test runs by itself."""
    loop_metrics = LoopMetrics(handler.label, time_limit_ms=handler.time_limit_ms)
    return WorkerContext(
        handler=handler,
        steps=HandlerSteps(handler),
        in_flight=InFlight(WorkerPolicy(), 1) if in_flight is None else in_flight,  # an empty one is false
        clock=clock,
        loop_metrics=loop_metrics,
        policy=WorkerPolicy(),
        consumer="w",
        start="earliest",
        url=client.url,
        client=client,
        blocking_client=client,
        on_suspect=lambda delivery: None,
        cancel_run=lambda delivery: None,
        traceback_of_run=lambda delivery: None,
        breaker=HandlerBreaker(handler, "w"),
        give_up=lambda: False,
        fetch_outage=FetchOutage(handler.label, loop_metrics, clock),
    )


def double(message: Message) -> dict[str, Any]:
    """A handler with an output that holds the number of its attempt."""
    return {"n": message.text("n"), "attempt": message.attempt}


def fill(client: Client, count: int, stream: str = "in", first: int = 0) -> None:
    """Add entries with increasing numbers."""
    client.pipeline([("XADD", stream, "*", "n", n) for n in range(first, first + count)])


def fill_at_maxmemory(client: Client, count: int, stream: str = "in", first: int = 0) -> None:
    """Add entries as `fill`, though Redis refuses writes."""
    add = "#!lua flags=allow-oom\nfor n = ARGV[1], ARGV[2] do redis.call('XADD', KEYS[1], '*', 'n', n) end"
    client.execute("EVAL", add, 1, stream, first, first + count - 1)


def deliver_to(client: Client, consumer: str, *, times: int) -> None:
    """Deliver new entries to a consumer that is gone, `times` times, and leave them idle for other consumers."""
    client.execute("XREADGROUP", "GROUP", KEYS.group, consumer, "STREAMS", "in", ">")
    for entry_id, *_ in client.execute("XPENDING", "in", KEYS.group, "-", "+", 1_000, consumer):
        client.execute(
            "XCLAIM", "in", KEYS.group, consumer, 0, entry_id, "IDLE", LONG_AGO_MS, "RETRYCOUNT", times, "JUSTID"
        )


def pause(client: Client, *loops: RecordingLoop) -> None:
    """Pause the handler on the stream `in`; wait until the loops have noticed and their current reads have ended."""
    CommitStore(client, app="app", handler="handle").set_paused(["in"], paused=True)
    for loop in loops:
        eventually(lambda: all(one.paused for one in loop._ordering.streams.values()), "the pause")  # noqa: B023 - at once
        eventually(lambda: not loop.loop_metrics._is_poll_wanted, "the end of its reads")  # noqa: B023 - at once


def resume(client: Client) -> None:
    """Resume the handler on the stream `in`."""
    CommitStore(client, app="app", handler="handle").set_paused(["in"], paused=False)


def wait_for_reads(health: Health, clock: LeapClock, times: int = 3) -> None:
    """Wait until all loops that report to `health` have read from Redis, `times` times each."""
    for _ in range(times):
        clock.leap(READ_WITHIN_MS + 1_000)
        eventually(lambda: not health.failures(), "a sign of life")


def figure(client: Client, metric: Metric, **labels: str) -> float:
    """Return a figure of the handler, as it is read from Redis now."""
    recorder = Recorder()
    RedisMetrics(client, all_places, recorder).read_all()
    return recorder.value(metric, handler="app.handle", **labels)


@contextmanager
def configured(client: Client, name: str, value: str, normal: str = "0") -> Iterator[None]:
    """Change a setting of the server during the block."""
    client.execute("CONFIG", "SET", name, value)
    try:
        yield
    finally:
        client.execute("CONFIG", "SET", name, normal)


def outputs(client: Client) -> list[int]:
    """Return the numbers of all outputs, in the order of their commits."""
    return [int(pairs[1]) for _, pairs in client.execute("XRANGE", "out", "-", "+")]


def dead(client: Client) -> list[DeadLetter]:
    """Return the dead letters of the handler."""
    return [DeadLetter.parse(*entry) for entry in client.execute("XRANGE", KEYS.dead_letters, "-", "+")]


def pending(client: Client) -> int | None:
    """Return the number of pending entries; None before the first worker has joined."""
    try:
        return int(client.execute("XPENDING", "in", KEYS.group)[0])
    except GroupMissing:
        return None


def now_ms(client: Client) -> float:
    """Return the server's time, in milliseconds."""
    return time_us_of(client.execute("TIME")) / 1_000


def entries(client: Client) -> list[Any]:
    """Return the pending list: id, consumer, idle time, deliveries."""
    found: list[Any] = client.execute("XPENDING", "in", KEYS.group, "-", "+", 1_000)
    return found
