"""Handlers that take lists of messages of one key, on a worker: order, state, one commit, and what happens to failures."""

import asyncio
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from millstream import Message, Reject, Retry, State
from millstream.admin.key_queues import list_queues, unpark
from millstream.delivery import DeadLetterFilter, DeadLetterQueue
from millstream.delivery.keyed_stream import KeyedStream
from millstream.errors import HandlerStuck
from millstream.partitions import PartitionedProducer
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD
from millstream.testing.invariants import check_invariants
from millstream.worker import HandlerSteps
from millstream.worker.dry_run import dry_run
from tests.support.clocks import LeapClock
from tests.support.fields import text_fields
from tests.support.pages import run_python
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, KINDS, QUICK, dead, either, ending, give_up_no_run, make, pending, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]


@dataclass
class Event:
    """A model."""

    n: int
    key: str


def add(client: Client, *numbers: int | str, key: str = "a") -> None:
    client.pipeline([("XADD", "in", "*", "n", n, "key", key) for n in numbers])


def rows(client: Client) -> list[dict[str, str]]:
    return [text_fields(pairs) for _, pairs in client.execute("XRANGE", "out", "-", "+")]


def lists(client: Client) -> list[list[int]]:
    """The lists that were committed, in order, as `gather` writes them."""
    return [[int(n) for n in row["ns"].split()] for row in rows(client)]


def gather(events: list[Event], state: State) -> dict[str, Any]:
    """Write the numbers of a list, and how many messages the state has counted before it."""
    before = state.get("count", 0)
    state["count"] = before + len(events)
    numbers = [event.n for event in events]
    if 13 in numbers:
        raise ValueError("thirteen")
    if 77 in numbers:
        raise Reject("no seventy-seven")
    return {"ns": " ".join(map(str, numbers)), "key": events[0].key, "before": before}


def check(client: Client, expected: dict[str, list[int]]) -> None:
    """Check: each key has had these messages, in order, once, each list on the state of the one before."""
    found: dict[str, list[int]] = defaultdict(list)
    for row in rows(client):
        assert int(row["before"]) == len(found[row["key"]])
        found[row["key"]] += map(int, row["ns"].split())
    assert found == expected
    assert pending(client) == 0
    assert check_invariants(client, KEYS, "in") == []
    assert client.execute("EXISTS", KEYS.crashes) == 0


@KINDS
def test_a_burst_of_a_key_is_one_run_on_the_state_of_the_run_before(client: Client, kind: str) -> None:
    handler = make(either(gather, kind), key="key", batch_size=50)
    add(client, *range(200, 250))
    add(client, *range(250, 280), key="b")
    with working(client, handler):
        eventually(lambda: len(rows(client)) >= 2)
        add(client, *range(300, 360))
        eventually(lambda: sum(map(len, lists(client))) >= 140)
    assert sorted(lists(client)[:2]) == [list(range(200, 250)), list(range(250, 280))]
    assert max(map(len, lists(client))) == 50
    check(client, {"a": [*range(200, 250), *range(300, 360)], "b": list(range(250, 280))})


@KINDS
def test_workers_share_keys_and_the_lists_of_each_key_stay_in_order_with_its_state(client: Client, kind: str) -> None:
    handler = make(either(gather, kind), key="key", batch_size=7)
    with working(client, handler, "w1") as one, working(client, handler, "w2") as two:
        for first in range(1_000, 3_000, 500):
            client.pipeline([("XADD", "in", "*", "n", n, "key", f"k{n % 20}") for n in range(first, first + 500)])
        eventually(lambda: one.loop_metrics.committed + two.loop_metrics.committed >= 2_000)
    check(client, {f"k{key}": list(range(1_000 + key, 3_000, 20)) for key in range(20)})


@KINDS
def test_a_failing_message_is_split_off_and_keeps_its_place(client: Client, kind: str) -> None:
    add(client, *range(10, 20))
    add(client, 77, *range(30, 40), key="b")
    with working(client, make(either(gather, kind), key="key", batch_size=50)) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 21)
    assert [(one.reason, one.attempts, one.key) for one in dead(client)] in (
        [("rejected", 1, b"b"), ("failed", 3, b"a")],
        [("failed", 3, b"a"), ("rejected", 1, b"b")],
    )
    assert [14, 15, 16, 17, 18, 19] in lists(client), "after its dead letter the rest of the key is a list again"
    check(client, {"a": [10, 11, 12, *range(14, 20)], "b": list(range(30, 40))})


def test_the_first_failing_message_of_a_list_parks_its_key_and_the_later_ones_wait(client: Client) -> None:
    fixed = threading.Event()
    sizes: list[int] = []

    def handle(events: list[Event], state: State) -> Any:
        sizes.append(len(events))
        return gather([replace(one, n=0 if fixed.is_set() and one.n == 13 else one.n) for one in events], state)

    add(client, *range(10, 20))
    with working(client, make(handle, key="key", retry=Retry(attempts=2, delay_ms=1, then="park"))) as loop:
        eventually(lambda: client.execute("HLEN", KEYS.parked) == 1)
        assert lists(client) == [[10], [11], [12]]
        assert sizes == [10, 1, 1, 1, 1, 1], "the failed list, and its messages alone, the fourth of them twice"
        fixed.set()
        assert [queue.length for queue in list_queues(client, KEYS)] == [7]
        unpark(client, KEYS, b"ka")
        eventually(lambda: loop.loop_metrics.committed >= 10)
    check(client, {"a": [10, 11, 12, 0, *range(14, 20)]})


@KINDS
def test_undecodable_messages_become_dead_letters_of_their_own_in_order(client: Client, kind: str) -> None:
    add(client, 1, 2, "three", 4, "five", "six", 7)
    add(client, "eight", key="b")
    client.execute("XADD", "in", "*", "n", 9)
    client.execute("XADD", "in", "*", REDRIVE_FIELD, "app.other", "n", "6", "key", "a")
    client.execute("XADD", "in", "*", REDRIVE_FIELD, "app.handle", "n", "10", "key", "a")
    with working(client, make(either(gather, kind), key="key", batch_size=50)) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 10)
        eventually(lambda: pending(client) == 0)
    assert sorted(one.reason for one in dead(client)) == ["missing-key", *["undecodable"] * 4]
    assert [one.reason for one in dead(client) if one.key == b"a"] == ["undecodable"] * 3
    assert lists(client)[:2] == [[1, 2], [4]]
    assert [one for some in lists(client)[2:] for one in some] == [7, 10], (
        "an entry without a key is routed between them"
    )
    check(client, {"a": [1, 2, 4, 7, 10]})


def test_a_list_commits_its_outputs_its_state_and_its_messages_in_one_step(client: Client) -> None:
    seen: list[tuple[int, int, int]] = []
    running, release = threading.Event(), threading.Event()

    def handle(events: list[Event], messages: list[Message], state: State) -> list[dict[str, Any]]:
        running.set()
        release.wait(FAIL_SAFE_S)
        state["count"] = len(events)
        return [{"n": event.n, "id": message.id} for event, message in zip(events, messages, strict=True)]

    add(client, *range(40))
    look = [("XLEN", "out"), ("HLEN", KEYS.state), ("LLEN", KEYS.queue(b"ka"))]
    with working(client, make(handle, key="key", batch_size=40)):
        eventually(running.is_set)
        seen.append(tuple(client.pipeline(look)))  # type: ignore[arg-type]
        release.set()
        eventually(lambda: client.execute("XLEN", "out") > 0)
        seen.append(tuple(client.pipeline(look)))  # type: ignore[arg-type]
    assert seen == [(0, 0, 40), (40, 1, 0)]


def test_a_state_that_cannot_be_stored_splits_its_list(client: Client) -> None:
    def handle(events: list[Event], state: State) -> dict[str, Any]:
        if any(event.n == 3 for event in events):
            state["bad"] = object()
        return {"ns": " ".join(str(event.n) for event in events)}

    add(client, *range(6))
    with working(client, make(handle, key="key")) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 6)
    assert [(one.reason, one.attempts) for one in dead(client)] == [("bad-output", 1)]
    assert lists(client) == [[0], [1], [2], [4], [5]]


def test_the_time_limit_is_for_the_list_and_a_list_that_exceeds_it_is_split(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(events: list[Event], state: State) -> dict[str, Any]:
        if any(event.n == 3 for event in events):
            await asyncio.sleep(FAIL_SAFE_S)
        return gather(events, state)

    give_up_no_run(monkeypatch)
    add(client, *range(6))
    # Many attempts, for the others too: a slow machine may hold up a message for longer than the time limit.
    handler = make(handle, key="key", time_limit_ms=100, retry=Retry(attempts=10, delay_ms=1))
    with working(client, handler) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 6)
    assert [(one.reason, one.attempts) for one in dead(client)] == [("failed", 10)], "the list is no attempt"
    check(client, {"a": [0, 1, 2, 4, 5]})


def test_a_list_that_hangs_ends_the_process_and_then_each_message_runs_alone(client: Client) -> None:
    hangs, release = threading.Event(), threading.Event()
    hangs.set()

    def handle(events: list[Event], state: State) -> dict[str, Any]:
        if len(events) > 1 and hangs.is_set():
            release.wait(FAIL_SAFE_S)
        return gather(events, state)

    add(client, *range(6))
    clock = LeapClock()
    handler = make(handle, key="key", time_limit_ms=600_000)
    long = replace(QUICK, claim_ms=3_600_000)  # its time limit ends it, not the end of its lease
    with ending(HandlerStuck, client, handler, match="longer than its time limit", clock=clock, policy=long) as loop:
        eventually(lambda: len(loop._in_flight.runs) == 6)
        clock.leap(605_000)
    hangs.clear()
    release.set()
    with working(client, handler) as again:
        eventually(lambda: again.loop_metrics.committed >= 6)
    assert lists(client) == [[n] for n in range(6)]
    check(client, {"a": list(range(6))})


def test_a_list_that_is_cancelled_as_its_lease_is_about_to_expire_ends_no_worker(client: Client) -> None:
    hanging, cancelled = threading.Event(), threading.Event()

    async def handle(events: list[Event], state: State) -> dict[str, Any]:
        if len(events) > 1:
            hanging.set()
            try:
                await asyncio.sleep(FAIL_SAFE_S)
            finally:
                hanging.clear()
                cancelled.set()
        return gather(events, state)

    def all_are_committed() -> bool:
        """Let time pass while a list hangs: also another one, if this process was held up and lost the lease."""
        if hanging.is_set():
            clock.leap(1_000)
            time.sleep(0.2)  # a renewal may come between a leap and the watchdog
        return loop.loop_metrics.committed >= 6

    add(client, *range(6))
    clock = LeapClock()
    handler = make(handle, key="key", time_limit_ms=FAIL_SAFE_S * 1_000)
    with working(client, handler, clock=clock, policy=replace(QUICK, claim_ms=1_000)) as loop:
        eventually(all_are_committed, "the messages of the list, each by itself")
    assert cancelled.is_set()
    check(client, {"a": list(range(6))})


@KINDS
def test_entries_that_were_canceled_before_the_handler_took_lists_do_not_run(client: Client, kind: str) -> None:
    handler = make(either(gather, kind), key="key", batch_size=5)
    add(client, *range(8))
    last = client.execute("XREVRANGE", "in", "+", "-", "COUNT", 3)[-1][0]
    client.execute("HSET", KEYS.canceled, b"ka", b"1-0 " + last)
    with working(client, handler) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 8)
    assert [(one.reason, text_fields(one.pairs)["n"]) for one in dead(client)] == [
        ("canceled", str(n)) for n in range(6)
    ]
    check(client, {"a": [6, 7]})


@pytest.mark.parametrize(
    ("leased", "expected"),
    [(5, [[0], [1], [2], [3], [4], [5, 6, 7]]), (1, [[0], [1, 2, 3, 4, 5], [6, 7]])],
    ids=["each message of the list runs alone", "those behind one that was alone run as a list"],
)
def test_a_lost_lease_blames_the_first_message_and_has_those_of_its_list_run_alone(
    client: Client, leased: int, expected: list[list[int]]
) -> None:
    handler = make(gather, key="key", batch_size=5)
    queue_of = HandlerSteps(handler).queue_of
    stream = KeyedStream(
        client, "in", queue_of=partial(queue_of, "in"), app="app", handler="handle", consumer="dead", into="out"
    )
    stream.join()
    add(client, *range(8))
    stream.enqueue_new(count=10, max_pending=100)
    (lease,) = stream.lease_keys(queues=1, entries=10, run=leased, lease_ms=1, now_ms=0).leases
    assert len(lease.entries) == leased
    with working(client, handler) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 8)
    assert lists(client) == expected
    check(client, {"a": list(range(8))})


def test_a_stop_returns_the_keys_that_have_not_begun_and_the_running_list_commits(client: Client) -> None:
    running, release = threading.Event(), threading.Event()

    def handle(events: list[Event], state: State) -> dict[str, Any]:
        running.set()
        release.wait(FAIL_SAFE_S)
        return gather(events, state)

    add(client, *range(5))
    add(client, *range(5, 9), key="b")
    policy = replace(QUICK, threads=1)
    with working(client, make(handle, key="key", batch_size=5), policy=policy) as loop:
        eventually(running.is_set)
        loop.stop()
        eventually(lambda: client.execute("HLEN", KEYS.owners) == 1)
        release.set()
    assert lists(client) == [[0, 1, 2, 3, 4]]
    with working(client, make(gather, key="key", batch_size=5)):
        eventually(lambda: len(rows(client)) == 2)
    check(client, {"a": list(range(5)), "b": list(range(5, 9))})


def test_partitions_keep_the_lists_of_a_key_in_order(client: Client) -> None:
    handler = make(gather, key="key", batch_size=10, partitions=3)
    with working(client, handler) as loop:
        eventually(lambda: loop._ordering.streams)
        with PartitionedProducer(client, "in", key="key") as producer:
            for n in range(100, 400):
                producer.publish({"n": n, "key": f"k{n % 10}"})
        eventually(lambda: loop.loop_metrics.committed >= 300)
    found: dict[str, list[int]] = defaultdict(list)
    for row in rows(client):
        assert int(row["before"]) == len(found[row["key"]])
        found[row["key"]] += map(int, row["ns"].split())
    assert found == {f"k{key}": list(range(100 + key, 400, 10)) for key in range(10)}


def test_a_dry_run_runs_the_messages_of_a_key_one_by_one_on_their_states(client: Client) -> None:
    add(client, 1, 2, 13, 4)
    result = dry_run(client, make(gather, key="key", retry=Retry(attempts=1)), sample=10)
    assert (result.ok, result.outputs, result.failed) == (3, 3, 1)


def test_a_redriven_message_joins_the_end_of_its_key_on_the_state_by_then(client: Client) -> None:
    fixed = threading.Event()

    def handle(events: list[Event], state: State) -> Any:
        return gather([replace(one, n=0 if fixed.is_set() and one.n == 13 else one.n) for one in events], state)

    add(client, *range(10, 20))
    with working(client, make(handle, key="key", retry=Retry(attempts=1))) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 10)
        assert [one.reason for one in dead(client)] == ["failed"]
        fixed.set()
        letters = DeadLetterQueue(client)
        assert len(list(letters.redrive(letters.select(DeadLetterFilter(app="app"))))) == 1
        eventually(lambda: loop.loop_metrics.committed >= 11)
    assert dead(client) == []
    check(client, {"a": [10, 11, 12, *range(14, 20), 0]})


def test_the_example_of_the_page_answers_a_burst_of_a_session_at_once(client: Client) -> None:
    handler = run_python("docs/handlers.md", only=[3])["app"].handlers["answer"]
    for session, text in (("ann", "hi"), ("bob", "hello"), ("ann", "help")):
        client.execute("XADD", "chat", "*", "session", session, "text", text)
    with working(client, handler) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 3)
    found = {
        text_fields(pairs)["session"]: text_fields(pairs) for _, pairs in client.execute("XRANGE", "answers", "-", "+")
    }
    assert found == {
        "ann": {"session": "ann", "answers": "2", "so_far": "2", "last": "help"},
        "bob": {"session": "bob", "answers": "1", "so_far": "1", "last": "hello"},
    }
