"""The engine's task with a handler that takes lists, and one with a rate, on real Redis and Arrow batches."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from millstream import App, Message, Retry
from millstream.delivery.commit_store import ENTRY_PREFIX, CommitStore
from millstream.delivery.effects import Effects
from millstream.delivery.rate_override import RateOverride
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD
from millstream.spark import key_blocks
from millstream.spark.engine import watchdog
from tests.support.reservations import count_reservations
from tests.support.stream_reports import counted
from tests.support.task_fixtures import Item, Row, TaskFixture, hanging_on, only

pytestmark = [pytest.mark.spark]

ENDLESS_S = 1e6
KINDS = pytest.mark.parametrize("kind", ["plain", "async"])


@pytest.fixture
def bench(client: Client) -> TaskFixture:
    return TaskFixture(client)


def listing(kind: str, took: list[list[int]], **options: Any) -> Handler:
    """A handler that notes which lists it took, refuses those with 13 in them, and gives each number back."""

    def handle(items: list[Item]) -> list[dict[str, int]]:
        took.append([item.n for item in items])
        if any(item.n == 13 for item in items):
            raise RuntimeError("unlucky")
        return [{"n": item.n} for item in items]

    async def handle_async(items: list[Item]) -> list[dict[str, int]]:
        await asyncio.sleep(0)
        return handle(items)

    function: Callable[..., Any] = handle if kind == "plain" else handle_async
    defaults: dict[str, Any] = {"into": "out", "retry": Retry(attempts=2, delay_ms=1), "batch_size": 8}
    return only(App("app"), function, **{"name": "handle", **defaults, **options})


def numbered(count: int) -> list[Row]:
    return [(n, None, {"n": n}) for n in range(1, count + 1)]


@KINDS
def test_a_list_has_the_messages_of_a_stream_and_each_is_committed_once(
    bench: TaskFixture, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_blocks, "CHUNK_MESSAGES", 12)
    took: list[list[int]] = []
    handler = listing(kind, took)
    report = bench.process(handler, bench.rows(*numbered(12)), bench.rows(*numbered(12)))
    assert took == [list(range(1, 9)), list(range(9, 13))]
    assert bench.outputs() == list(range(1, 13))
    assert (report["committed"], report["refused"]) == (12, 0)


@KINDS
def test_only_the_message_that_fails_its_list_becomes_a_dead_letter(bench: TaskFixture, kind: str) -> None:
    took: list[list[int]] = []
    report = bench.process(listing(kind, took), bench.rows(*numbered(16)))
    assert sorted(took, key=len) == [*([n] for n in range(9, 17)), list(range(1, 9)), list(range(9, 17))]
    assert sorted(bench.outputs()) == [n for n in range(1, 17) if n != 13]
    (letter,) = bench.dead()
    assert (letter.id, letter.reason, letter.attempts) == ("13-0", "failed", 2)
    assert (report["committed"], report["dead"], report["retries"]) == (16, 1, 8)


@KINDS
def test_undecodable_messages_and_those_redriven_to_another_handler_are_not_in_the_list(
    bench: TaskFixture, kind: str
) -> None:
    took: list[list[int]] = []
    rows = numbered(3)
    rows[0] = (1, None, {"n": "one"})
    rows[1] = (2, None, {REDRIVE_FIELD: "app.other", "n": 2})
    report = bench.process(listing(kind, took), bench.rows(*rows))
    assert took == [[3]]
    assert [letter.id for letter in bench.dead()] == ["1-0"]
    assert (bench.outputs(), report["committed"]) == ([3], 2)
    assert counted(bench.client, "handle") == [(2, 1)]


@KINDS
def test_each_list_has_messages_of_one_stream(bench: TaskFixture, kind: str) -> None:
    took: list[list[int]] = []
    handler = listing(kind, took)
    task = bench.task(handler)
    asyncio.run(task.process([bench.rows(*numbered(3)), bench.rows(*numbered(2), stream="other")]))
    assert took == [[1, 2, 3], [1, 2]]
    assert len(task.report()) == 2


def test_a_list_is_committed_as_a_whole_or_run_again_without_the_committed_messages(bench: TaskFixture) -> None:
    took: list[list[int]] = []
    handler = listing("plain", took)
    rival = CommitStore(bench.client, app="app", handler="handle", token=bench.token)

    def handle(items: list[Item]) -> list[dict[str, int]]:
        took.append([item.n for item in items])
        if len(took) == 1:  # another execution of the same task is faster with one of them
            unit = Effects(ENTRY_PREFIX + b"2-0", b"", first_id="2-0", last_id="2-0", message_count=1)
            assert not rival.commit({"in": [unit]})
        return [{"n": item.n} for item in items]

    report = bench.process(replace(handler, function=handle), bench.rows(*numbered(4)))
    assert took == [[1, 2, 3, 4], [1, 3, 4]]
    assert bench.outputs() == [1, 3, 4]
    assert (report["committed"], report["refused"]) == (3, 1)


def test_a_list_without_outputs_is_committed_message_by_message(bench: TaskFixture) -> None:
    def handle(items: list[Item]) -> None: ...

    report = bench.process(only(App("app"), handle, name="handle"), bench.rows(*numbered(30)))
    assert (report["committed"], bench.outputs()) == (30, [])


@KINDS
def test_a_list_beyond_its_time_limit_is_split_and_only_its_cause_becomes_a_dead_letter(
    bench: TaskFixture, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The watchdog timer would kill this process, were it held up for two seconds.
    monkeypatch.setattr(watchdog, "_MIN_GRACE_MS", watchdog._MAX_GRACE_MS)
    # Many attempts, for the others too: a slow machine may hold up a message for longer than the time limit.
    options: dict[str, Any] = {"time_limit_ms": 100, "retry": Retry(attempts=10, delay_ms=1)}
    handler = replace(listing(kind, [], **options), function=hanging_on(3, kind))
    bench.process(handler, bench.rows(*numbered(4)))
    assert sorted(bench.outputs()) == [1, 2, 4]
    assert [letter.id for letter in bench.dead()] == ["3-0"]


def test_each_message_of_a_list_is_attempted_alone_after_a_crash(bench: TaskFixture) -> None:
    took: list[list[int]] = []
    bench.process(listing("plain", took), bench.rows(*numbered(4)), retried=True)
    assert took == [[1], [2], [3], [4]]


# A rate


def test_tasks_keep_a_rate_together_and_reserve_no_more_than_they_use(
    bench: TaskFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(message: Message) -> None: ...

    handler = only(App("app"), handle, name="handle", rate=50)
    reserved, began = count_reservations(monkeypatch), time.monotonic()
    for at in range(1, 31, 3):  # as many tasks, of fewer messages than are reserved at a time
        bench.process(handler, bench.rows(*((n, None, {"n": n}) for n in range(at, at + 3))))
    assert time.monotonic() - began >= 27 / 50, "the last three messages wait for all others"
    assert reserved == {"in": 30}


@KINDS
def test_a_list_waits_for_the_rate_of_all_its_messages(
    bench: TaskFixture, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_blocks, "CHUNK_MESSAGES", 12)
    took: list[list[int]] = []
    began = time.monotonic()
    bench.process(
        listing(kind, took, rate=40),
        bench.rows(*numbered(12)),
        bench.rows(*((n, None, {"n": n}) for n in range(20, 24))),
    )
    assert len(took) == 3
    assert time.monotonic() - began >= 12 / 40


def test_a_repeated_attempt_takes_nothing_from_the_rate(bench: TaskFixture) -> None:
    tried: list[int] = []

    def handle(message: Message) -> None:
        tried.append(message.attempt)
        raise RuntimeError("never")

    handler = only(App("app"), handle, name="handle", rate=1 / ENDLESS_S, retry=Retry(attempts=5, delay_ms=1))
    bench.process(handler, bench.rows((1, None, {"n": 1})))
    assert tried == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("in_code", [None, 1 / ENDLESS_S])
def test_a_task_keeps_a_rate_that_an_operator_has_set_and_follows_another_while_it_waits(
    bench: TaskFixture, monkeypatch: pytest.MonkeyPatch, in_code: float | None
) -> None:
    ran: list[int] = []
    counts: list[int] = []

    def handle(item: Item) -> None:
        ran.append(item.n)

    store = CommitStore(bench.client, app="app", handler="handle")
    store.set_rate(["in"], 2 / ENDLESS_S)
    sleep = asyncio.sleep

    async def raised_meanwhile(delay_s: float) -> None:
        if delay_s > 0.5 and not counts:
            counts.append(len(ran))
            store.set_rate(["in"], 1_000)
        await sleep(delay_s)

    looked: list[RateOverride | None] = []
    look = CommitStore.rate_override

    def noted(store: CommitStore, stream: str) -> RateOverride | None:
        looked.append(look(store, stream))
        return looked[-1]

    monkeypatch.setattr(asyncio, "sleep", raised_meanwhile)
    monkeypatch.setattr(CommitStore, CommitStore.rate_override.__name__, noted)
    handler = only(App("app"), handle, name="handle", rate=in_code)
    bench.process(handler, bench.rows(*numbered(12)))
    assert [one and one.rate for one in looked] == [1_000], "it reads the rate once for each look"
    assert counts == [1], "it waited for the second one"
    assert ran == list(range(1, 13))
