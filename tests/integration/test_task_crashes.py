"""The engine's task and messages that kill its process: who is blamed, and what becomes of the others."""

import asyncio
import os
from collections.abc import Callable

import pytest

from millstream import App, Message, Retry
from millstream.client import Client
from millstream.naming import HandlerKeys
from tests.support.task_fixtures import Bench, Item, only

pytestmark = [pytest.mark.spark]


@pytest.fixture
def bench(client: Client) -> Bench:
    return Bench(client)


def run_in_a_process(bench: Bench, work: Callable[[Bench], object]) -> int:
    """Run `work` in a process of its own and return how that ended."""
    child = os.fork()
    if child == 0:
        try:
            work(Bench(Client(bench.client.url)))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_message_that_killed_its_task_before_is_struck_and_dies_while_its_neighbours_live(
    bench: Bench,
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
    bench.process(handler, batch, retried=False)  # the strikes alone are enough to be cautious
    assert bench.outputs() == [1, 2, 4, 5]
    (letter,) = bench.dead()
    assert (letter.id, letter.reason, letter.attempts) == ("3-0", "crashed", 3)
    assert bench.client.execute("HLEN", HandlerKeys("app", "handle", "in").strikes) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_message_that_waits_for_its_next_attempt_is_not_blamed_for_the_death_of_the_process(
    bench: Bench, is_async: bool
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


def test_an_attempt_after_a_failed_one_is_struck_as_well(bench: Bench) -> None:
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


def test_a_failing_message_in_a_retried_task_is_retried_as_ever_and_not_taken_for_a_killer(bench: Bench) -> None:
    report = bench.process(
        bench.handler(), bench.rows((1, b"a", {"n": 1, "fail": 2}), (2, b"a", {"n": 2, "fail": 9})), retried=True
    )
    assert report["retries"] == 4
    assert bench.outputs() == [1]
    assert [letter.reason for letter in bench.dead()] == ["failed"]
