"""The reading loop of a worker, in this process, on a real Redis."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millstream import App, Message, Reject, Retry
from millstream import metrics as m
from millstream.client import Client
from millstream.deadletters import DeadLetter
from millstream.errors import HandlerStuck, StaleOwner
from millstream.handlers import Handler
from millstream.ledger import Ledger
from millstream.metrics import Recorder
from millstream.naming import REDRIVE_FIELD, HandlerKeys
from millstream.producer import Producer
from millstream.worker import Pipeline, ReadingLoop, WorkerPolicy
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker]

KEYS = HandlerKeys("app", "handle", "in")
QUICK = WorkerPolicy(block_ms=100, claim_ms=1_000, sweep_ms=50, stop_ms=5_000)


def make(function: Callable[..., Any], **options: Any) -> Handler:
    app = App("app")
    streams = () if {"pattern", "announced"} & options.keys() else ("in",)
    app.handler(*streams, **{"name": "handle", "into": "out", "retry": Retry(attempts=3, delay_ms=10), **options})(
        function
    )
    return app.handlers["handle"]


def double(message: Message) -> dict[str, Any]:
    return {"n": message.text("n"), "attempt": message.attempt}


@contextmanager
def working(client: Client, handler: Handler, name: str = "w1", **options: Any) -> Iterator[ReadingLoop]:
    """A loop that works meanwhile; whatever ended it is raised."""
    loop = ReadingLoop(handler, client.url, consumer=name, **{"policy": QUICK, **options})
    failures: list[BaseException] = []

    def run() -> None:
        try:
            loop.leftovers = loop.run()  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join(30)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def fill(client: Client, count: int, stream: str = "in", first: int = 0) -> None:
    client.pipeline([("XADD", stream, "*", "n", n) for n in range(first, first + count)])


def outputs(client: Client) -> list[int]:
    return [int(pairs[1]) for _, pairs in client.execute("XRANGE", "out", "-", "+")]


def dead(client: Client) -> list[DeadLetter]:
    return [DeadLetter.parse(*entry) for entry in client.execute("XRANGE", KEYS.dead, "-", "+")]


def pending(client: Client) -> int:
    return int(client.execute("XPENDING", "in", KEYS.group)[0])


async def double_async(message: Message) -> dict[str, Any]:
    await asyncio.sleep(0)
    return double(message)


@pytest.mark.parametrize("function", [double, double_async])
def test_every_message_is_committed_once_with_its_output(client: Client, function: Callable[..., Any]) -> None:
    fill(client, 3_000)
    with working(client, make(function)) as loop:
        fill(client, 500, first=3_000)
        eventually(lambda: loop.report.committed >= 3_500)
    assert sorted(outputs(client)) == list(range(3_500))
    assert pending(client) == 0
    assert loop.report.refused == 0


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_failures_are_retried_then_dead_and_rejects_and_garbage_are_dead_at_once(client: Client, kind: str) -> None:
    def handle(message: Message) -> dict[str, Any]:
        n = int(message.fields["n"])
        if n % 10 == 1 and message.attempt < 3:
            raise ValueError(f"attempt {message.attempt}")
        if n % 10 == 2:
            raise ValueError(f"attempt {message.attempt}")
        if n % 10 == 3:
            raise Reject("no threes")
        return double(message)

    async def coroutine(message: Message) -> dict[str, Any]:
        return handle(message)

    fill(client, 100)
    client.execute("XADD", "in", "*", "n", "x")
    with working(client, make(handle if kind == "plain" else coroutine)) as loop:
        eventually(lambda: loop.report.committed >= 101)
    assert sorted(outputs(client)) == [n for n in range(100) if n % 10 not in (2, 3)]
    letters = Counter((letter.reason, letter.attempts) for letter in dead(client))
    assert letters == {("failed", 3): 11, ("rejected", 1): 10}
    assert client.execute("EXISTS", KEYS.strikes) == 0


def test_a_message_that_backs_off_holds_up_no_other(client: Client) -> None:
    def handle(message: Message) -> dict[str, Any]:
        if message.text("n") == "0" and message.attempt == 1:
            raise ValueError
        return double(message)

    fill(client, 50)
    with working(client, make(handle, retry=Retry(attempts=2, delay_ms=500))) as loop:
        eventually(lambda: loop.report.committed >= 50)
    assert outputs(client)[-1] == 0


def test_what_a_dead_worker_held_is_adopted_and_what_a_living_one_holds_is_not(client: Client) -> None:
    fill(client, 20)
    with working(client, make(double), "first"):
        pass
    client.execute("XREADGROUP", "GROUP", KEYS.group, "dead", "COUNT", 5, "STREAMS", "in", ">")
    released = threading.Event()

    def slow(message: Message) -> dict[str, Any]:
        released.wait(20)
        return double(message)

    before = len(outputs(client))
    fill(client, 2, first=100)
    with working(client, make(slow), "slow") as holder:
        eventually(lambda: holder.report.read >= 2)
        with working(client, make(double), "other") as other:
            time.sleep(2.5)  # more than twice the claim time
            assert other.report.refused == 0
            held = client.execute("XPENDING", "in", KEYS.group, "-", "+", 100, "slow")
            assert len(held) >= 2 or before + other.report.committed >= 22
        released.set()
        eventually(lambda: pending(client) == 0)
    assert sorted(outputs(client)) == [*range(20), 100, 101]


def test_a_restarted_worker_goes_on_with_what_it_held(client: Client) -> None:
    fill(client, 5)
    with working(client, make(double)):
        eventually(lambda: len(outputs(client)) == 5)
    fill(client, 5, first=5)
    client.execute("XREADGROUP", "GROUP", KEYS.group, "w1", "STREAMS", "in", ">")
    patient = WorkerPolicy(block_ms=100, claim_ms=600_000)
    with working(client, make(double), policy=patient):
        eventually(lambda: len(outputs(client)) == 10)


def test_a_stop_hands_back_what_waits_and_counts_no_attempt(client: Client) -> None:
    started = threading.Event()

    def slow(message: Message) -> dict[str, Any]:
        started.set()
        time.sleep(0.3)
        return double(message)

    fill(client, 50)
    long = WorkerPolicy(block_ms=100, claim_ms=600_000, sweep_ms=50, threads=2)
    with working(client, make(slow), "leaving", policy=long) as leaving:
        started.wait(10)
        time.sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert leaving.leftovers == []  # type: ignore[attr-defined]
    assert leaving.report.handed_back > 0
    with working(client, make(double), "next", policy=long):
        eventually(lambda: len(outputs(client)) == 50)
    attempts = {pairs[3] for _, pairs in client.execute("XRANGE", "out", "-", "+")}
    assert attempts == {b"1"}


def test_a_message_that_outlasts_the_stop_is_named_and_done_by_another(client: Client) -> None:
    release = threading.Event()

    def handle(message: Message) -> dict[str, Any]:
        release.wait(20)
        return double(message)

    fill(client, 1)
    with working(client, make(handle), "leaving") as leaving:
        eventually(lambda: leaving.report.read == 1)
        time.sleep(0.2)
        leaving.stop(deadline_ms=0)
    assert [one.id for one in leaving.leftovers] == [client.execute("XRANGE", "in", "-", "+")[0][0]]  # type: ignore[attr-defined]
    with working(client, make(double), "next"):
        eventually(lambda: outputs(client) == [0])
    release.set()


def test_a_plain_handler_beyond_its_time_limit_ends_the_loop_and_counts_its_attempt(client: Client) -> None:
    def handle(message: Message) -> dict[str, Any]:
        time.sleep(3 if message.text("n") == "0" else 0)
        return double(message)

    fill(client, 10)
    handler = make(handle, time_limit_ms=200, retry=Retry(attempts=2, delay_ms=1))
    for _ in range(2):
        with pytest.raises(HandlerStuck, match="longer than its time limit of 200 ms"), working(client, handler):
            time.sleep(3)
    with working(client, handler) as loop:
        eventually(lambda: pending(client) == 0 and len(outputs(client)) == 9)
    assert [(letter.reason, letter.attempts) for letter in dead(client)] == [("failed", 2)]
    assert loop.report.refused == 0


def test_an_async_handler_beyond_its_time_limit_has_failed_and_the_loop_goes_on(client: Client) -> None:
    async def handle(message: Message) -> dict[str, Any]:
        await asyncio.sleep(30 if message.text("n") == "0" else 0)
        return double(message)

    fill(client, 10)
    with working(client, make(handle, time_limit_ms=100, retry=Retry(attempts=2, delay_ms=1))) as loop:
        eventually(lambda: loop.report.committed >= 10)
    assert [(letter.reason, letter.attempts) for letter in dead(client)] == [("failed", 2)]


def test_what_may_have_killed_others_is_run_alone_and_dies_in_the_end(client: Client) -> None:
    fill(client, 4)
    with working(client, make(double), "first"):
        eventually(lambda: len(outputs(client)) == 4)
    fill(client, 3, first=4)
    client.execute("XREADGROUP", "GROUP", KEYS.group, "dead", "STREAMS", "in", ">")
    found = client.execute("XPENDING", "in", KEYS.group, "-", "+", 10)
    ids = [entry[0] for entry in found]
    for entry_id in ids:
        client.execute("XCLAIM", "in", KEYS.group, "dead", 0, entry_id, "IDLE", 9_999, "RETRYCOUNT", 3)
    client.execute("HSET", KEYS.strikes, ids[1], 1)  # attempts=3: the first two runs were not struck
    alone: list[int] = []
    running: list[int] = []

    def handle(message: Message) -> dict[str, Any]:
        running.append(1)
        time.sleep(0.05)
        alone.append(len(running))
        running.pop()
        return double(message)

    with working(client, make(handle)):
        eventually(lambda: pending(client) == 0)
    assert sorted(outputs(client)) == [0, 1, 2, 3, 4, 6]
    assert [(letter.id, letter.reason, letter.attempts) for letter in dead(client)] == [(ids[1].decode(), "crashed", 3)]
    assert alone == [1, 1]


def test_redis_out_of_memory_delays_effects_counts_no_attempt_and_loses_nothing(client: Client) -> None:
    def handle(message: Message) -> dict[str, Any] | None:
        return double(message) if int(message.fields["n"]) % 2 else None

    fill(client, 100)
    with working(client, make(handle)) as loop:
        eventually(lambda: loop.report.committed >= 100)
        fill(client, 100, first=100)
        client.execute("CONFIG", "SET", "maxmemory", "1")
        try:
            time.sleep(1.0)
        finally:
            client.execute("CONFIG", "SET", "maxmemory", "0")
        eventually(lambda: loop.report.committed >= 200)
    assert sorted(outputs(client)) == list(range(1, 200, 2))
    assert dead(client) == []


@pytest.mark.parametrize("harm", [("XGROUP", "DESTROY", "in", KEYS.group), ("DEL", "in"), ("FLUSHALL",)])
def test_a_group_or_stream_that_is_lost_is_made_again_and_work_goes_on(client: Client, harm: tuple[str, ...]) -> None:
    fill(client, 100)
    with working(client, make(double)) as loop:
        eventually(lambda: loop.report.committed >= 100)
        client.execute(*harm)
        fill(client, 100, first=100)
        eventually(lambda: {*range(100, 200)} <= {*outputs(client)})
    counts = Counter(outputs(client))
    assert max(counts.values()) == 1
    if harm[0] == "XGROUP":
        assert sorted(counts) == list(range(200))


def test_streams_of_a_pattern_are_found_while_it_runs(client: Client) -> None:
    handler = make(double, pattern="in.*")
    with working(client, handler) as loop:
        fill(client, 10, stream="in.a")
        eventually(lambda: loop.report.committed >= 10)
        fill(client, 10, stream="in.b", first=10)
        eventually(lambda: loop.report.committed >= 20)
    assert sorted(outputs(client)) == list(range(20))


def test_a_redriven_entry_is_run_by_the_handler_it_is_meant_for_only(client: Client) -> None:
    client.execute("XADD", "in", "*", REDRIVE_FIELD, "app.handle", "n", "1")
    client.execute("XADD", "in", "*", REDRIVE_FIELD, "app.other", "n", "2")
    with working(client, make(double)) as loop:
        eventually(lambda: loop.report.committed >= 2)
    assert outputs(client) == [1]


def test_workers_stop_when_spark_takes_over(client: Client) -> None:
    fill(client, 10)
    ledger = Ledger(client, app="app", handler="handle")
    loop = ReadingLoop(make(double), client.url, consumer="w1", policy=QUICK)
    taking_over = threading.Timer(0.5, lambda: ledger.renewed(ledger.new_token(["in"])).begin(["in"]))
    taking_over.start()
    with pytest.raises(StaleOwner, match="taken over"):
        loop.run()
    fill(client, 10, first=10)
    assert len(outputs(client)) == 10


def test_the_steps_of_a_message_can_be_extended(client: Client) -> None:
    steps: list[str] = []

    class Traced(Pipeline):
        def decode(self, delivery: Any) -> Message | None:
            steps.append("decode")
            return super().decode(delivery)

        def run(self, message: Message, state: bytes = b"") -> Any:
            steps.append("run")
            return super().run(message, state)

        def commit(self, delivery: Any, done: Any) -> Any:
            steps.append("commit")
            return super().commit(delivery, done)

        def retry(self, delivery: Any, again: Any) -> float:
            steps.append("retry")
            return super().retry(delivery, again)

        def dead_letter(self, delivery: Any, letter: Any) -> Any:
            steps.append("dead_letter")
            return super().dead_letter(delivery, letter)

    def handle(message: Message) -> None:
        raise ValueError

    fill(client, 1)
    with working(client, make(handle, retry=Retry(attempts=2, delay_ms=1)), pipeline=Traced) as loop:
        eventually(lambda: loop.report.committed >= 1)
    assert steps == ["decode", "run", "retry", "decode", "run", "dead_letter"]


def test_what_it_does_shows_in_the_metrics(client: Client) -> None:
    def handle(message: Message) -> dict[str, Any]:
        if message.text("n") == "1":
            raise Reject("no")
        if message.text("n") == "2" and message.attempt == 1:
            raise ValueError
        return double(message)

    recorder = Recorder()
    fill(client, 10)
    with working(client, make(handle), metrics=recorder) as loop:
        eventually(lambda: loop.report.committed >= 10)
    label = {"handler": "app.handle"}
    counted = [recorder.value(metric, **label) for metric in (m.READ, m.COMMITTED, m.RETRIED, m.REFUSED)]
    assert counted == [10, 10, 1, 0]
    assert recorder.value(m.DEAD, reason="rejected", **label) == 1
    assert recorder.value(m.HANDLER_SECONDS, **label) == 11
    assert recorder.value(m.AGE_SECONDS, **label) == 10


def test_delayed_messages_are_moved_to_the_stream_when_they_are_due(client: Client) -> None:
    with Producer(client.url) as producer, working(client, make(double)) as loop:
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
        began = time.monotonic()
        producer.publish("in", {"n": 7}, delay_ms=700)
        eventually(lambda: loop.report.committed >= 1)
    assert 0.6 < time.monotonic() - began < 5
    assert outputs(client) == [7]


def test_entries_of_a_consumer_that_polls_but_makes_no_progress_are_adopted(client: Client) -> None:
    handler = make(double, retry=Retry(attempts=1), time_limit_ms=100)
    with working(client, handler, "first"):
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    fill(client, 3)
    client.execute("XREADGROUP", "GROUP", KEYS.group, "poller", "STREAMS", "in", ">")
    with working(client, handler, policy=WorkerPolicy(block_ms=100, claim_ms=200, sweep_ms=50)):
        began = time.monotonic()
        while pending(client) and time.monotonic() - began < 20:
            client.execute("XREADGROUP", "GROUP", KEYS.group, "poller", "STREAMS", "in", "0")
            time.sleep(0.02)
    assert sorted(outputs(client)) == [0, 1, 2]
    assert time.monotonic() - began > 5  # three times what all attempts and the grace take, and ten claim times
