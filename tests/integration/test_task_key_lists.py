"""The engine's task with a handler of lists of messages of one key, on real Redis and Arrow batches."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from millstream import App, Message, Reject, Retry, State
from millstream.admin.key_queues import list_queues, skip, unpark
from millstream.delivery.commit_store import KEY_PREFIX, CommitStore
from millstream.delivery.effects import Effects
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD, HandlerKeys
from millstream.spark.engine import watchdog
from tests.support.stream_reports import counted
from tests.support.task_fixtures import Item, Row, TaskFixture, hanging_on, only

pytestmark = [pytest.mark.spark, pytest.mark.keys]

KEYS = HandlerKeys("app", "handle", "in")
KINDS = pytest.mark.parametrize("kind", ["plain", "async"])
ENDLESS_S = 1e6


@pytest.fixture
def bench(client: Client) -> TaskFixture:
    return TaskFixture(client)


def listing(kind: str, took: list[list[int]], **options: Any) -> Handler:
    """A handler that notes which lists it took, counts on its state, and fails on 13 and rejects 77."""

    def handle(items: list[Item], messages: list[Message], state: State) -> list[dict[str, int]]:
        assert len({message.key for message in messages}) == 1
        took.append([item.n for item in items])
        state["count"] = state.get("count", 0) + len(items)
        if any(item.n == 13 and message.attempt <= item.fail for item, message in zip(items, messages, strict=True)):
            raise RuntimeError("unlucky")
        if any(item.n == 77 for item in items):
            raise Reject("no")
        return [{"n": item.n} for item in items]

    async def handle_async(items: list[Item], messages: list[Message], state: State) -> list[dict[str, int]]:
        await asyncio.sleep(0)
        return handle(items, messages, state)

    function: Callable[..., Any] = handle if kind == "plain" else handle_async
    defaults: dict[str, Any] = {"key": "k", "into": "out", "retry": Retry(attempts=2, delay_ms=1), "batch_size": 8}
    return only(App("app"), function, **{"name": "handle", **defaults, **options})


def numbered(*numbers: int, key: bytes = b"a", fail: int = 9) -> list[Row]:
    return [(n, key, {"n": n, "k": key, "fail": fail}) for n in numbers]


def state(client: Client, key: str = "a") -> Any:
    return msgspec.msgpack.decode(client.execute("HGET", KEYS.state, key))


@KINDS
def test_consecutive_messages_of_a_key_are_lists_on_its_state_and_a_repeated_batch_commits_nothing(
    bench: TaskFixture, kind: str
) -> None:
    took: list[list[int]] = []
    rows = bench.rows(*numbered(*range(1, 13)), *numbered(20, 21, 22, key=b"b"), *numbered(30, key=b"c"))
    report = bench.process(listing(kind, took), rows)
    lists = [list(range(1, 9)), [9, 10, 11, 12], [20, 21, 22], [30]]
    assert sorted(took) == lists
    assert sorted(bench.outputs()) == [*range(1, 13), 20, 21, 22, 30]
    assert (report["committed"], report["refused"], report["retries"]) == (16, 0, 0)
    again = bench.process(listing(kind, took), rows)
    assert (len(took), again["committed"]) == (4, 0)
    assert [state(bench.client, key) for key in "abc"] == [{"count": 12}, {"count": 3}, {"count": 1}]


@KINDS
def test_a_failing_message_is_split_off_its_list_keeps_its_place_and_alone_has_attempts(
    bench: TaskFixture, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    took: list[list[int]] = []
    with caplog.at_level(logging.INFO):
        report = bench.process(listing(kind, took), bench.rows(*numbered(11, 12, 13, 14, 15, *range(20, 24))))
    assert took == [[11, 12, 13, 14, 15, 20, 21, 22], [11], [12], [13], [13], [14], [15], [20], [21], [22], [23]]
    assert (
        "a list of 8 messages of a key of in failed: RuntimeError: unlucky; running each of them alone" in caplog.text
    )
    assert bench.outputs() == [11, 12, 14, 15, 20, 21, 22, 23]
    (letter,) = bench.dead()
    assert (letter.id, letter.reason, letter.attempts, letter.key) == ("13-0", "failed", 2, b"a")
    assert (report["committed"], report["dead"], report["retries"]) == (9, 1, 1)
    assert state(bench.client) == {"count": 8}


def test_after_the_messages_of_a_failed_list_the_key_has_lists_again(bench: TaskFixture) -> None:
    took: list[list[int]] = []
    bench.process(listing("plain", took, batch_size=3), bench.rows(*numbered(12, 77, 78, *range(80, 85))))
    assert took == [[12, 77, 78], [12], [77], [78], [80, 81, 82], [83, 84]]
    assert [(one.reason, one.attempts) for one in bench.dead()] == [("rejected", 1)]
    assert bench.outputs() == [12, 78, *range(80, 85)]


@KINDS
def test_the_first_failing_message_of_a_list_parks_its_key_and_the_later_ones_run_as_a_list_once_it_is_unparked(
    bench: TaskFixture, kind: str
) -> None:
    took: list[list[int]] = []
    handler = listing(kind, took, retry=Retry(attempts=2, delay_ms=1, then="park"))
    bench.token = CommitStore(bench.client, app="app", handler="handle").new_token(["in"])
    rows = numbered(12, 13, 14, 15, 16)
    for n, _, fields in rows:
        bench.client.execute("XADD", "in", f"{n}-0", *[part for item in fields.items() for part in item])
    report = bench.process(handler, bench.rows(*rows))
    assert (report["committed"], report["deferred"], report["dead"]) == (1, 4, 0)
    (queue,) = list_queues(bench.client, KEYS)
    assert (queue.state, queue.first_id, queue.length, queue.failed_attempts) == ("parked", "13-0", 4, 2)
    assert skip(bench.client, KEYS, b"ka", error="x") == "13-0"
    assert unpark(bench.client, KEYS, b"ka")
    took.clear()
    assert bench.process_deferred(handler)["committed"] == 3
    assert (took, bench.outputs(), state(bench.client)) == ([[14, 15, 16]], [12, 14, 15, 16], {"count": 4})
    assert bench.client.execute("EXISTS", KEYS.parked, KEYS.ready, KEYS.crashes) == 0


@KINDS
def test_undecodable_messages_and_those_for_another_handler_are_not_in_the_lists(bench: TaskFixture, kind: str) -> None:
    took: list[list[int]] = []
    rows = numbered(*range(1, 9))
    rows[2][2]["n"] = "three"
    rows[4] = (5, b"a", {REDRIVE_FIELD: "app.other", "n": 5, "k": "a"})
    rows[6] = (7, b"a", {REDRIVE_FIELD: "app.handle", "n": 7, "k": "a"})
    report = bench.process(listing(kind, took), bench.rows(*rows, (50, None, {"n": 50})))
    assert took == [[1, 2], [4], [6, 7, 8]]
    assert [(one.id, one.reason) for one in sorted(bench.dead(), key=lambda one: one.id)] == [
        ("3-0", "undecodable"),
        ("50-0", "missing-key"),
    ]
    assert (bench.outputs(), report["committed"], state(bench.client)) == ([1, 2, 4, 6, 7, 8], 8, {"count": 6})
    assert counted(bench.client, "handle") == [(8, 6)]


def test_messages_without_a_key_are_lists_of_their_own_and_have_no_state(bench: TaskFixture) -> None:
    took: list[list[int]] = []
    handler = listing("plain", took, missing_key="unordered")
    bench.process(handler, bench.rows((1, None, {"n": 1}), (2, None, {"n": 2}), *numbered(3, 4)))
    assert took == [[1], [2], [3, 4]]
    assert bench.client.execute("HGETALL", KEYS.state) == [b"a", b"\x81\xa5count\x02"]


def test_a_list_that_another_execution_has_committed_in_part_runs_again_without_that_part(bench: TaskFixture) -> None:
    took: list[list[int]] = []
    rival = CommitStore(bench.client, app="app", handler="handle", token=bench.token, keyed=True)

    def handle(items: list[Item], state: State) -> list[dict[str, int]]:
        took.append([item.n for item in items])
        if len(took) == 1:
            unit = Effects(KEY_PREFIX + b"a", b"", b"a", first_id="1-0", last_id="2-0", message_count=2)
            unit.state = msgspec.msgpack.encode({"count": 2})
            assert not rival.commit({"in": [unit]})
        state["count"] = state.get("count", 0) + len(items)
        return [{"n": item.n} for item in items]

    handler = only(App("app"), handle, name="handle", key="k", into="out")
    report = bench.process(handler, bench.rows(*numbered(1, 2, 3, 4)))
    assert took == [[1, 2, 3, 4], [3, 4]]
    assert (bench.outputs(), state(bench.client)) == ([3, 4], {"count": 4})
    assert (report["committed"], report["refused"]) == (2, 1)


@KINDS
def test_a_list_beyond_its_time_limit_is_split_and_only_its_cause_becomes_a_dead_letter(
    bench: TaskFixture, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The watchdog timer would kill this process, were it held up for two seconds.
    monkeypatch.setattr(watchdog, "_MIN_GRACE_MS", watchdog._MAX_GRACE_MS)
    # Many attempts, for the others too: a slow machine may hold up a message for longer than the time limit.
    options: dict[str, Any] = {"time_limit_ms": 100, "retry": Retry(attempts=10, delay_ms=1)}
    bench.process(
        only(App("app"), hanging_on(3, kind), name="handle", key="k", into="out", **options),
        bench.rows(*numbered(1, 2, 3, 4)),
    )
    assert bench.outputs() == [1, 2, 4]
    assert [letter.id for letter in bench.dead()] == ["3-0"]


def test_each_message_of_a_list_is_attempted_alone_after_a_crash(bench: TaskFixture) -> None:
    took: list[list[int]] = []
    bench.process(listing("plain", took), bench.rows(*numbered(1, 2, 3, 4)), retried=True)
    assert took == [[1], [2], [3], [4]]
    assert state(bench.client) == {"count": 4}


def test_the_rate_counts_each_message_of_a_list_once_also_if_the_list_is_split(bench: TaskFixture) -> None:
    took: list[list[int]] = []
    rows = numbered(*range(10, 18))
    rows[6][2]["n"] = "sixteen"
    # The eight messages use up what is reserved for them at once; one more would wait for as good as ever.
    bench.process(listing("plain", took, rate=1 / ENDLESS_S), bench.rows(*rows))
    assert took == [[10, 11, 12, 13, 14, 15], [10], [11], [12], [13], [13], [14], [15], [17]]


def test_a_state_that_cannot_be_stored_splits_its_list(bench: TaskFixture) -> None:
    def handle(items: list[Item], state: State) -> dict[str, int]:
        if any(item.n == 3 for item in items):
            state["bad"] = object()
        return {"n": sum(item.n for item in items)}

    handler = only(App("app"), handle, name="handle", key="k", into="out")
    bench.process(handler, bench.rows(*numbered(1, 2, 3, 4, 5)))
    assert [(one.id, one.reason, one.attempts) for one in bench.dead()] == [("3-0", "bad-output", 1)]
    assert bench.outputs() == [1, 2, 4, 5]


def test_a_list_of_more_messages_than_a_commit_collects_is_committed_as_one(bench: TaskFixture) -> None:
    took: list[list[int]] = []
    handler = replace(listing("plain", took, batch_size=1_000))
    report = bench.process(handler, bench.rows(*numbered(*range(100, 1_400))))
    assert [len(one) for one in took] == [1_000, 300]
    assert (report["committed"], state(bench.client)) == (1_300, {"count": 1_300})
