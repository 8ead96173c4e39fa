"""The engine's task and messages that kill its process: which is blamed, and what becomes of the others."""

import asyncio
import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from millstream import App, Message, Retry
from millstream.delivery.commit_store import CommitStore
from millstream.errors import Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.spark.engine import watchdog
from millstream.spark.engine.watchdog import hard_limit_ms
from tests.support.task_fixtures import Item, TaskFixture, only

pytestmark = [pytest.mark.spark]


@pytest.fixture
def bench(client: Client) -> TaskFixture:
    return TaskFixture(client)


def run_in_a_process(bench: TaskFixture, work: Callable[[TaskFixture], object]) -> int:
    """Run `work` in a process of its own and return how that ended."""
    child = os.fork()
    if child == 0:
        try:
            work(TaskFixture(Client(bench.client.url)))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_message_that_killed_its_task_before_dies_while_its_neighbours_live(
    bench: TaskFixture,
) -> None:
    batch = bench.rows(*((n, b"a", {"n": n}) for n in range(1, 6)))
    killer = App("app")

    def handle(item: Item) -> dict[str, int]:
        if item.n == 3:
            os._exit(9)
        return {"n": item.n}

    handler = only(killer, handle, key="k", into="out", retry=Retry(attempts=3))
    for _ in range(2):
        assert run_in_a_process(bench, lambda own: own.process(handler, batch, retried=True)) == 9
    assert bench.outputs() == [1, 2]
    bench.process(handler, batch, retried=False)  # the crash counts alone are enough to be cautious
    assert bench.outputs() == [1, 2, 4, 5]
    (letter,) = bench.dead()
    assert (letter.id, letter.reason, letter.attempts) == ("3-0", "crashed", 3)
    assert bench.client.execute("HLEN", HandlerKeys("app", "handle", "in").crashes) == 0


def block_for_ever() -> None:
    """Compiled code that asks for no signal, and never gives up the interpreter's lock; it needs no processor."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)  # PyDLL holds the interpreter
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)  # no signal interrupts it


def backtrack_for_ever() -> None:
    """Asks for signals, but for none that another process sends to an event loop."""
    re.match(r"(a+)+$", "a" * 60 + "b")


@pytest.mark.parametrize(
    ("is_async", "never_ends", "attempts"),
    [(False, block_for_ever, 3), (True, block_for_ever, 3), (True, backtrack_for_ever, 2)],
)
def test_a_handler_that_blocks_the_interpreter_is_ended_and_only_its_message_dies(
    bench: TaskFixture,
    is_async: bool,
    never_ends: Callable[[], None],
    attempts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = bench.rows(*((n, b"%d" % n, {"n": n}) for n in range(1, 6)))
    app = App("app")

    def handle(item: Item) -> dict[str, int]:
        if item.n == 3:
            never_ends()
        return {"n": item.n}

    async def handle_soon(item: Item) -> dict[str, int]:
        await asyncio.sleep(0)
        return handle(item)

    handler = only(
        app,
        handle_soon if is_async else handle,
        name="handle",
        key="k",
        into="out",
        retry=Retry(attempts=attempts),
        time_limit_ms=1_000,  # a process that is held up for two seconds at another message must not end of that
    )
    for _ in range(attempts - 1):
        assert run_in_a_process(bench, lambda own: own.process(handler, batch, retried=True)) == -signal.SIGKILL
    monkeypatch.setattr(watchdog, "_MIN_GRACE_MS", watchdog._MAX_GRACE_MS)  # nothing blocks this process
    bench.process(handler, batch, retried=True)
    assert sorted(bench.outputs()) == [1, 2, 4, 5]
    (letter,) = bench.dead()
    assert (letter.id, letter.reason, letter.attempts) == ("3-0", "crashed", attempts)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_task_that_waits_for_redis_longer_than_an_attempt_may_take_is_not_ended(
    bench: TaskFixture, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = bench.rows((1, b"a", {"n": 1}))
    app = App("app")

    def handle(item: Item) -> dict[str, int]:
        return {"n": item.n}

    async def handle_soon(item: Item) -> dict[str, int]:
        await asyncio.sleep(0)
        return handle(item)

    # Many attempts: on a busy machine one of them may well take longer than a millisecond.
    options: dict[str, Any] = {"time_limit_ms": 1, "retry": Retry(attempts=100, delay_ms=1, max_delay_ms=1)}
    handler = only(app, handle_soon if is_async else handle, name="handle", key="k", into="out", **options)

    def outlast(own: TaskFixture) -> None:
        commit = CommitStore.commit

        def late(*args: Any) -> Any:
            time.sleep(2 * hard_limit_ms(1) / 1000)
            return commit(*args)

        monkeypatch.setattr(CommitStore, CommitStore.commit.__name__, late)
        own.process(handler, batch)

    assert run_in_a_process(bench, outlast) == 0
    assert bench.outputs() == [1]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_message_that_waits_for_its_next_attempt_gets_no_crash_count_when_the_process_dies(
    bench: TaskFixture, is_async: bool
) -> None:
    batch = bench.rows((1, b"a", {"n": 1}), (2, b"b", {"n": 2}), (3, b"c", {"n": 3}))
    app = App("app")

    def handle(item: Item, message: Message) -> dict[str, int]:
        if item.n == 2:
            os._exit(9)
        if item.n == 1 and message.attempt == 1:
            raise RuntimeError("only the second attempt works")
        return {"n": item.n}

    async def slowly(item: Item, message: Message) -> dict[str, int]:
        # The other's second attempt is due when this one's only attempt begins, and would take longer.
        await asyncio.sleep(0.3 if message.attempt == 2 else 0.1)
        return handle(item, message)

    handler = only(
        app,
        slowly if is_async else handle,
        name="handle",
        key="k",
        into="out",
        retry=Retry(attempts=3, delay_ms=1, jitter=0),
    )
    for _ in range(2):
        assert run_in_a_process(bench, lambda own: own.process(handler, batch, retried=True)) == 9
    bench.process(handler, batch, retried=True)
    assert [letter.id for letter in bench.dead()] == ["2-0"]
    assert sorted(bench.outputs()) == [1, 3]


def test_a_retried_attempt_gets_a_crash_count_as_well(bench: TaskFixture) -> None:
    batch = bench.rows((1, b"a", {"n": 1}), (2, b"b", {"n": 2}))

    def handle(item: Item, message: Message) -> dict[str, int]:
        if item.n == 1 and message.attempt == 1:
            raise RuntimeError("the second attempt is worse")
        if item.n == 1:
            os._exit(9)
        return {"n": item.n}

    handler = only(App("app"), handle, key="k", into="out", retry=Retry(attempts=3, delay_ms=1))
    for _ in range(2):
        assert run_in_a_process(bench, lambda own: own.process(handler, batch, retried=True)) == 9
    bench.process(handler, batch, retried=True)
    assert [(letter.id, letter.reason) for letter in bench.dead()] == [("1-0", "crashed")]
    assert bench.outputs() == [2]


def test_a_failing_message_in_a_retried_task_is_retried_and_not_reported_as_crashed(bench: TaskFixture) -> None:
    report = bench.process(
        bench.handler(), bench.rows((1, b"a", {"n": 1, "fail": 2}), (2, b"a", {"n": 2, "fail": 9})), retried=True
    )
    assert report["retries"] == 4
    assert bench.outputs() == [1]
    assert [letter.reason for letter in bench.dead()] == ["failed"]


class LossyClient(Client):
    """Loses the reply of every other command that goes to a handler's crash counts."""

    lost = 0
    is_repeated = False

    def execute(self, *command: Any) -> Any:
        found = super().execute(*command)
        if command[1] != HandlerKeys("app", "handle", "in").crashes:
            return found
        self.is_repeated = not self.is_repeated
        if not self.is_repeated:
            return found
        self.lost += 1
        raise Unavailable("the reply is lost")


@pytest.mark.parametrize("attempts", [2, 3])
def test_a_crash_count_whose_reply_was_lost_blames_no_message(client: Client, attempts: int) -> None:
    counts: list[int] = []

    def handle(item: Item, message: Message) -> dict[str, int]:
        counts.append(int(client.execute("HGET", HandlerKeys("app", "handle", "in").crashes, message.id)))
        if message.attempt < attempts:
            raise RuntimeError("only the last attempt works")
        return {"n": item.n}

    handler = only(App("app"), handle, key="k", into="out", retry=Retry(attempts=attempts, delay_ms=1))
    with closing(LossyClient(client.url)) as lossy:
        bench = TaskFixture(lossy)
        bench.process(handler, bench.rows((1, b"a", {"n": 1})), retried=True)
        assert lossy.lost >= attempts
        assert (bench.outputs(), bench.dead()) == ([1], [])
    assert counts == [1] * attempts, "each attempt is counted once, and subtracted once it has failed"
