"""Tasks of async handlers: messages that do not wait may share one, and none finds what another has left in it."""

import asyncio
from math import inf
from typing import Any

import pytest

from millstream import Message, Retry
from millstream.delivery.keyed_stream import KeyLease
from millstream.delivery.reliable_stream import ReliableStream
from millstream.handlers.attempt import NO_EFFECTS, Done
from millstream.handlers.deadlines import Deadlines, deadlines_of
from millstream.worker.in_flight import InFlight
from millstream.worker.running.async_runner import AsyncRunner
from tests.support.runners import delivery, runner_of, running
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker]

ALONE: dict[str, Any] = {"concurrency": 1, "retry": Retry(attempts=1)}


def outcomes(in_flight: InFlight, count: int) -> list[object]:
    eventually(lambda: len(in_flight.completions) == count)
    finished, _ = in_flight.completions.collect(0)
    return [outcome for _, outcome in finished]


@pytest.fixture
def endless_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """No iteration ends by the clock."""
    monkeypatch.setattr("millstream.worker.running.async_runner._ITERATION_MS", inf)


def tasks_of_five(stream: ReliableStream, in_flight: InFlight, *, waits: bool) -> int:
    """Run five messages that wait, or not; return how many tasks they had."""
    seen: list[str] = []

    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        seen.append(task.get_name())
        if waits:
            await asyncio.sleep(0)

    in_flight.add([delivery(stream, number) for number in range(1, 6)], 0)
    with running(runner_of(handle, AsyncRunner, in_flight, **(ALONE if waits else {})), in_flight):
        assert outcomes(in_flight, 5) == [NO_EFFECTS] * 5
    return len(set(seen))


@pytest.mark.usefixtures("endless_iterations")
def test_messages_that_do_not_wait_share_a_task(stream: ReliableStream, in_flight: InFlight) -> None:
    assert tasks_of_five(stream, in_flight, waits=False) == 1


@pytest.mark.usefixtures("endless_iterations")
def test_a_message_that_waits_is_the_last_of_its_task(stream: ReliableStream, in_flight: InFlight) -> None:
    assert tasks_of_five(stream, in_flight, waits=True) == 5


def test_the_loop_goes_on_between_messages_that_do_not_wait(
    stream: ReliableStream, in_flight: InFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With iterations of no time, a callback of the loop comes before the last of many messages."""
    monkeypatch.setattr("millstream.worker.running.async_runner._ITERATION_MS", -inf)
    called: list[str] = []

    async def handle(message: Message) -> None:
        if message.id == "1-0":
            asyncio.get_running_loop().call_soon(called.append, "callback")
        called.append(message.id)

    in_flight.add([delivery(stream, number) for number in range(1, 4)], 0)
    with running(runner_of(handle, AsyncRunner, in_flight, **ALONE), in_flight):
        assert outcomes(in_flight, 3) == [NO_EFFECTS] * 3
    assert called.index("callback") < called.index("3-0")


def test_a_runner_keeps_no_task_whose_messages_have_run(stream: ReliableStream, in_flight: InFlight) -> None:
    async def handle(message: Message) -> None:
        await asyncio.sleep(0)

    in_flight.add([delivery(stream, number) for number in range(1, 3)], 0)
    runner = runner_of(handle, AsyncRunner, in_flight, **ALONE)
    assert isinstance(runner, AsyncRunner)
    with running(runner, in_flight):
        assert outcomes(in_flight, 2) == [NO_EFFECTS] * 2
        eventually(lambda: not runner._tasks)


@pytest.mark.usefixtures("endless_iterations")
def test_a_task_that_its_message_has_kept_runs_no_other(stream: ReliableStream, in_flight: InFlight) -> None:
    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        if message.id == "1-0":
            asyncio.get_running_loop().call_later(0.02, task.cancel)
        else:
            await asyncio.sleep(0.05)  # the timer of the first message fires meanwhile

    in_flight.add([delivery(stream, number) for number in range(1, 3)], 0)
    with running(runner_of(handle, AsyncRunner, in_flight, **ALONE), in_flight):
        assert outcomes(in_flight, 2) == [NO_EFFECTS] * 2


def test_a_cancellation_that_comes_after_the_end_of_its_message_cancels_no_other(
    stream: ReliableStream, in_flight: InFlight
) -> None:
    """The messages of a key share a task: the runner looks up what it runs when it cancels it."""

    async def handle(message: Message) -> None:
        if message.id == "1-0":
            runner.cancel_run(lease.entries[0])
        else:
            await asyncio.sleep(0.01)

    lease = KeyLease(stream=stream, queue=b"kA", token=b"1 a w", state=b"", expires_ms=inf)  # type: ignore[arg-type]
    lease.entries = [delivery(stream, number) for number in range(1, 3)]
    for one in lease.entries:
        one.lease = lease
    lease.queued.extend(lease.entries)
    in_flight.add_leases([lease], 0)
    runner = runner_of(handle, AsyncRunner, in_flight, key="n", **ALONE)
    with running(runner, in_flight):
        assert all(isinstance(one, Done) for one in outcomes(in_flight, 2))


def test_the_run_of_one_message_of_several_that_wait_can_be_cancelled(
    stream: ReliableStream, in_flight: InFlight
) -> None:
    started, cancelled = [], []
    released: list[asyncio.Event] = []

    async def handle(message: Message) -> None:
        released.append(asyncio.Event())
        started.append(message.id)
        try:
            await released[-1].wait()
        except asyncio.CancelledError:
            cancelled.append(message.id)
            for one in released:
                one.set()

    entries = [delivery(stream, number) for number in range(1, 4)]
    runner = runner_of(handle, AsyncRunner, in_flight, concurrency=3)
    in_flight.add(entries, 0)
    with running(runner, in_flight):
        eventually(lambda: len(started) == 3)
        runner.cancel_run(entries[1])
        assert outcomes(in_flight, 3) == [NO_EFFECTS] * 3
    assert cancelled == ["2-0"]


class SteppedLoop(asyncio.SelectorEventLoop):
    """Its time stands still until a test moves it."""

    now_s = 0.0

    def time(self) -> float:
        """Where the test put it."""
        return self.now_s


def test_a_timer_of_all_attempts_cancels_each_that_is_due_and_no_other() -> None:
    cancelled: list[str] = []
    loop, goes_on = SteppedLoop(), asyncio.Event()

    async def run(name: str, *, ends: bool = False) -> None:
        task = asyncio.current_task()
        assert task is not None
        deadlines = deadlines_of(loop, 50)
        deadlines.begin(task)
        try:
            await (asyncio.sleep(0) if ends else goes_on.wait())
            assert not deadlines.end(task)
            await goes_on.wait()  # as the next message of its task does
        except asyncio.CancelledError:
            assert deadlines.end(task)
            cancelled.append(name)

    async def cancelled_at(now_s: float) -> str:
        loop.now_s = now_s
        for _ in range(10):  # a timer that is due, and what it cancels
            await asyncio.sleep(0)
        return "".join(cancelled)

    async def main() -> list[str]:
        first = [asyncio.create_task(run(name, ends=name == "b")) for name in ("a", "b", "c")]
        await cancelled_at(0)
        await cancelled_at(20)
        last = asyncio.create_task(run("d"))
        found = [await cancelled_at(now_s) for now_s in (20, 49, 50, 69, 70)]
        goes_on.set()
        await asyncio.gather(*first, last)
        return found

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(main()) == ["", "", "ac", "ac", "acd"]


def test_each_loop_and_each_time_limit_has_deadlines_of_its_own() -> None:
    async def find() -> list[Deadlines]:
        loop = asyncio.get_running_loop()
        return [deadlines_of(loop, limit_s) for limit_s in (1.0, 1.0, 2.0)]

    first, again, other = asyncio.run(find())
    assert first is again
    assert other is not first
    assert asyncio.run(find())[2] is not other
