"""Calls that wait at the same time are done together, and each gets its own answer."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from millstream.services.master.call_batching import CallBatcher
from tests.support.threads import threads_named
from tests.support.waiting import FAIL_SAFE_S, eventually_async

pytestmark = [pytest.mark.master]


class Work:
    """Doubles numbers, once it may, and notes which came together; -1 makes it fail."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.batches: list[list[int]] = []

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        self.batches.append(list(numbers))
        assert self.may.wait(FAIL_SAFE_S)
        if -1 in numbers:
            raise ValueError("no such number")
        return [2 * number for number in numbers]


async def begun(batches: CallBatcher[int, int], work: Work, numbers: Sequence[int]) -> list[asyncio.Task[int]]:
    """Calls of which the first is being done and the others wait."""
    first = asyncio.create_task(batches.call(numbers[0]))
    await eventually_async(lambda: work.batches, "the first batch")
    others = [asyncio.create_task(batches.call(number)) for number in numbers[1:]]
    await asyncio.sleep(0)
    return [first, *others]


def test_calls_that_wait_while_a_batch_runs_are_the_next_batch() -> None:
    work, before = Work(), threads_named("batches")

    async def call() -> list[int]:
        with CallBatcher(work, name="batches") as batches:
            calls = await begun(batches, work, [1, 2, 3, 4])
            assert threads_named("batches") > before
            work.may.set()
            return await asyncio.gather(*calls)

    assert asyncio.run(call()) == [2, 4, 6, 8]
    assert work.batches == [[1], [2, 3, 4]]
    assert threads_named("batches") <= before


def test_a_failure_fails_all_calls_of_its_batch_and_no_other() -> None:
    work = Work()

    async def call() -> list[int | BaseException]:
        with CallBatcher(work, name="batches") as batches:
            calls = await begun(batches, work, [1, -1, 2])
            work.may.set()
            found = await asyncio.gather(*calls, return_exceptions=True)
            return [*found, await batches.call(3)]

    one, *failed, three = asyncio.run(call())
    assert (one, three) == (2, 6)
    assert [str(error) for error in failed] == ["no such number"] * 2


def test_a_cancelled_call_does_not_disturb_the_other_calls_of_its_batch() -> None:
    work = Work()

    async def call() -> int:
        with CallBatcher(work, name="batches") as batches:
            gone, stays = await begun(batches, work, [1, 2])
            gone.cancel()
            work.may.set()
            return await stays

    assert asyncio.run(call()) == 4
