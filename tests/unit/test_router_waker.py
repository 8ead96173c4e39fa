"""How tasks wait for a subscription: nothing is made for it, and whatever ends the wait, nothing is lost."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from millstream.clock import SYSTEM_CLOCK
from millstream.errors import MillstreamError
from millstream.model import Message
from millstream.router.budget import Batch, Budget
from millstream.router.reactor import ThreadReactor
from millstream.router.subscriber_buffer import SubscriberBuffer, WakeTarget
from millstream.router.subscription import Subscription
from millstream.router.waker import Waker
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.router]

BUDGET = Budget(1 << 30)


class NoCallbacks:
    def on_drained(self, inbox: SubscriberBuffer) -> None:
        pass

    def on_left(self, inbox: SubscriberBuffer) -> None:
        pass


class Bench:
    """A subscription, and what its task has received."""

    def __init__(self) -> None:
        self.inbox = SubscriberBuffer("s", BUDGET, limit=1000, limit_bytes=1 << 20, when_full="wait")
        self.subscription = Subscription(self.inbox, NoCallbacks())
        self.received: list[str] = []

    async def follow(self) -> None:
        async for item in self.subscription:
            assert isinstance(item, Message)
            self.received.append(item.id)

    def waker(self) -> Waker:
        assert isinstance(self.inbox.waker, Waker)
        return self.inbox.waker

    def put(self, *numbers: int) -> Waker:
        """As the router does it; the caller wakes the waker."""
        waker = self.waker()
        self.inbox.put(Batch([[b"%d-0" % number, []] for number in numbers], BUDGET))
        self.inbox.waker = None
        return waker


def in_loop(body: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body(Bench()))


async def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return task


def test_a_task_that_waits_again_uses_the_same_waker() -> None:
    async def body(bench: Bench) -> None:
        await started(bench.follow())
        first = bench.waker()
        wake = first._callback
        for number in range(3):
            asyncio.get_running_loop().call_soon(bench.put(number).wake)
            await asyncio.sleep(0)
            assert bench.received[-1] == f"{number}-0", "it went on at once"
            assert bench.waker() is first
            assert first._callback is wake

    in_loop(body)


def test_a_cancelled_wait_loses_no_message_even_after_its_wake_up() -> None:
    async def body(bench: Bench) -> None:
        for number in range(2):
            task = await started(bench.follow())
            woken = bench.put(number) if number else bench.waker()
            task.cancel()
            asyncio.get_running_loop().call_soon(woken.wake)
            with pytest.raises(asyncio.CancelledError):
                await task
        assert bench.received == []
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(bench.follow(), 0.01)
        assert bench.received == ["1-0"]

    in_loop(body)


def test_a_wake_up_without_a_message_does_no_harm() -> None:
    async def body(bench: Bench) -> None:
        task = await started(bench.follow())
        for _ in range(2):
            asyncio.get_running_loop().call_soon(bench.waker().wake)
            await asyncio.sleep(0)
        assert not task.done()
        asyncio.get_running_loop().call_soon(bench.put(1, 2).wake)
        await asyncio.sleep(0)
        assert bench.received == ["1-0", "2-0"]

    in_loop(body)


def test_an_iterator_may_be_awaited_with_a_timeout() -> None:
    async def body(bench: Bench) -> None:
        items = aiter(bench.subscription)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(items), 0.01)
        waiting = await started(asyncio.wait_for(anext(items), FAIL_SAFE_S))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(bench.put(1).wake)
        assert (await waiting).id == "1-0"

    in_loop(body)


def test_one_iterator_is_for_one_task() -> None:
    async def body(bench: Bench) -> None:
        items = aiter(bench.subscription)

        async def take() -> Any:
            return await anext(items)

        await started(take())
        with pytest.raises(MillstreamError, match="subscribe once more"):
            await take()

    in_loop(body)


class Overtaken(SubscriberBuffer):
    """The router's thread delivers as soon as it can know of a waker, before the task goes on."""

    reactor: ThreadReactor

    def prepare_wait(self, waker: WakeTarget) -> bool:
        free = super().prepare_wait(waker)
        if free and not self.put_count:
            delivered = threading.Event()
            self.put(Batch([[b"1-0", []]], BUDGET))
            self.reactor.call(lambda: self.reactor.wake(self))
            self.reactor.call(delivered.set)
            assert delivered.wait(FAIL_SAFE_S)
        return free


def test_a_message_that_arrives_while_the_first_wait_begins_is_received() -> None:
    inbox = Overtaken("s", BUDGET, limit=1000, limit_bytes=1 << 20, when_full="wait")
    inbox.reactor = reactor = ThreadReactor(SYSTEM_CLOCK, print)
    reactor.start()

    async def body() -> Any:
        return await asyncio.wait_for(anext(aiter(Subscription(inbox, NoCallbacks()))), FAIL_SAFE_S)

    try:
        assert asyncio.run(body()).id == "1-0"
    finally:
        assert reactor.stop(FAIL_SAFE_S * 1000)


def test_a_waker_without_an_event_loop_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    inbox = SubscriberBuffer("s", BUDGET, limit=1000, limit_bytes=1 << 20, when_full="wait")
    inbox.waker = Waker()
    reactor = ThreadReactor(SYSTEM_CLOCK, print)
    reactor.wake(inbox)
    reactor._end_round()
    assert "in no event loop" in caplog.text


@pytest.mark.parametrize("default", [(), (None,)])
def test_waiting_for_the_next_message_can_be_cancelled_with_and_without_a_default(default: tuple[None, ...]) -> None:
    async def body(bench: Bench) -> None:
        items = aiter(bench.subscription)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(items, *default)
        asyncio.get_running_loop().call_soon(lambda: bench.put(1).wake())
        item = await anext(items, *default)
        assert isinstance(item, Message)
        bench.inbox.ending = True
        if default:
            assert await anext(items, None) is None

    in_loop(body)


def test_waiting_for_the_next_message_can_be_a_task_of_its_own() -> None:
    async def body(bench: Bench) -> None:
        items: Any = aiter(bench.subscription)
        task = asyncio.create_task(anext(items))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(bench.put(1).wake)
        assert (await task).id == "1-0"
        task = asyncio.create_task(anext(items))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_loop(body)


@pytest.mark.parametrize("rings_first", [True, False])
def test_a_cancellation_reaches_only_its_task_although_another_task_waits_at_once(rings_first: bool) -> None:
    async def body(bench: Bench) -> None:
        items = aiter(bench.subscription)

        async def take() -> Any:
            return await anext(items)

        def ring() -> None:
            bench.put(1).wake()

        loop = asyncio.get_running_loop()
        first = await started(take())
        if rings_first:
            loop.call_soon(ring)
        first.cancel()
        if not rings_first:
            loop.call_soon(ring)
        assert (await take()).id == "1-0"
        await asyncio.sleep(0)
        assert first.cancelled()

    in_loop(body)
