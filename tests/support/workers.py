"""Reading loops at work in this process, on a real Redis, and what comes of their messages."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millstream import App, Message, Retry
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import GroupMissing
from millstream.handlers.dead_letter import DeadLetter
from millstream.handlers.handler import Handler
from millstream.observability.health import Health
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.worker import ReadingLoop, WorkerPolicy
from tests.support.clocks import LeapClock
from tests.support.waiting import FAIL_SAFE_S, eventually

KEYS = HandlerKeys("app", "handle", "in")
QUICK = WorkerPolicy(block_ms=100, claim_ms=60_000, sweep_ms=50, stop_ms=60_000)
"""Looks often, and is patient: nothing runs out because a thread got no CPU for some seconds.

Where the end of a claim or of a stop is the point, the test says how long they last.
"""
LONG_AGO_MS = 3_600_000
"""Longer than any claim of a test lasts."""
READ_WITHIN_MS = 600_000
"""Of the health that `look_again` takes."""


class RememberingLoop(ReadingLoop):
    """A reading loop that remembers how it ended."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.leftovers: list[Delivery] = []
        self.failure: Exception | None = None
        self.ended = threading.Event()

    def work(self) -> None:
        """Run to the end, whatever it is."""
        try:
            self.leftovers = self.run()
        except Exception as error:  # noqa: BLE001 - `working` raises it
            self.failure = error
        finally:
            self.ended.set()


@contextmanager
def working(client: Client, handler: Handler, name: str = "w1", **options: Any) -> Iterator[RememberingLoop]:
    """A loop that works meanwhile; whatever ended it is raised."""
    loop = RememberingLoop(handler, client.url, consumer=name, **{"policy": QUICK, **options})
    thread = threading.Thread(target=loop.work, daemon=True)
    thread.start()
    try:
        yield loop
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
) -> Iterator[RememberingLoop]:
    """A loop that has to end by itself, at the end of the block at the latest, and with such an error."""
    with pytest.raises(error, match=match), working(client, handler, name, **options) as loop:  # noqa: PT012 - no other line raises these
        yield loop
        eventually(loop.ended.is_set, f"the end of the loop by {error.__name__}")


def make(function: Callable[..., Any], **options: Any) -> Handler:
    """The function as the handler `app.handle`: of the stream `in`, into the stream `out`, unless told otherwise."""
    app = App("app")
    streams = () if {"pattern", "announced"} & options.keys() else ("in",)
    app.handler(*streams, **{"name": "handle", "into": "out", "retry": Retry(attempts=3, delay_ms=10), **options})(
        function
    )
    return app.handlers["handle"]


def double(message: Message) -> dict[str, Any]:
    """A handler with an output that says which attempt it was."""
    return {"n": message.text("n"), "attempt": message.attempt}


def fill(client: Client, count: int, stream: str = "in", first: int = 0) -> None:
    """Add entries with numbers that count up."""
    client.pipeline([("XADD", stream, "*", "n", n) for n in range(first, first + count)])


def fill_at_maxmemory(client: Client, count: int, stream: str = "in", first: int = 0) -> None:
    """`fill`, though Redis refuses writes."""
    add = "#!lua flags=allow-oom\nfor n = ARGV[1], ARGV[2] do redis.call('XADD', KEYS[1], '*', 'n', n) end"
    client.execute("EVAL", add, 1, stream, first, first + count - 1)


def deliver_to(client: Client, consumer: str, *, times: int) -> None:
    """Have a consumer that is gone hold what is new, delivered so often, and leave it to others."""
    client.execute("XREADGROUP", "GROUP", KEYS.group, consumer, "STREAMS", "in", ">")
    for entry_id, *_ in client.execute("XPENDING", "in", KEYS.group, "-", "+", 1_000, consumer):
        client.execute(
            "XCLAIM", "in", KEYS.group, consumer, 0, entry_id, "IDLE", LONG_AGO_MS, "RETRYCOUNT", times, "JUSTID"
        )  # fmt: skip


def pause(client: Client, *loops: RememberingLoop) -> None:
    """Pause the handler on the stream `in`, and wait until the loops have noticed, and the reads under way have ended."""
    CommitStore(client, app="app", handler="handle").pause(["in"], paused=True)
    for loop in loops:
        eventually(lambda: all(one.paused for one in loop._side.streams.values()), "the pause")  # noqa: B023 - at once
        eventually(lambda: not loop.report._reading, "the end of its reads")  # noqa: B023 - at once


def goes_on(client: Client) -> None:
    """Resume it."""
    CommitStore(client, app="app", handler="handle").pause(["in"], paused=False)


def look_again(health: Health, clock: LeapClock, times: int = 3) -> None:
    """Wait until loops that tell `health` have looked at Redis, each so many times from now on."""
    for _ in range(times):
        clock.leap(READ_WITHIN_MS + 1_000)
        eventually(lambda: not health.failures(), "a sign of life")


def outputs(client: Client) -> list[int]:
    """The numbers of all outputs, in the order of their commits."""
    return [int(pairs[1]) for _, pairs in client.execute("XRANGE", "out", "-", "+")]


def dead(client: Client) -> list[DeadLetter]:
    """The dead letters of the handler."""
    return [DeadLetter.parse(*entry) for entry in client.execute("XRANGE", KEYS.dead, "-", "+")]


def pending(client: Client) -> int | None:
    """How many entries workers hold; None before the first worker has joined."""
    try:
        return int(client.execute("XPENDING", "in", KEYS.group)[0])
    except GroupMissing:
        return None


def scripts_called(client: Client) -> int:
    """How many scripts the server has run for all clients."""
    stats = client.execute("INFO", "commandstats").decode()
    return int(stats.partition("cmdstat_evalsha:calls=")[2].partition(",")[0] or 0)


def now_ms(client: Client) -> float:
    """The server's clock, to the microsecond."""
    seconds, microseconds = client.execute("TIME")
    return int(seconds) * 1_000 + int(microseconds) / 1_000
