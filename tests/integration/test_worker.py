"""The reading loop of a worker, in this process, on a real Redis."""

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from millstream import Message, Reject, Retry
from millstream.admin.handler_figures import read_figures
from millstream.clock import SYSTEM_CLOCK
from millstream.delivery.commit_store import CommitStore
from millstream.errors import ConfigError, HandlerStuck, StaleOwner
from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.producer.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import REDRIVE_FIELD
from millstream.worker import HandlerSteps, ReadingLoop
from tests.support.clocks import LeapClock
from tests.support.stream_reports import counted
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import (
    KEYS,
    LONG_AGO_MS,
    QUICK,
    dead,
    double,
    ending,
    fill,
    fill_at_maxmemory,
    give_up_no_run,
    make,
    now_ms,
    outputs,
    pending,
    working,
)

pytestmark = [pytest.mark.worker]


async def double_async(message: Message) -> dict[str, Any]:
    await asyncio.sleep(0)
    return double(message)


@pytest.mark.parametrize("function", [double, double_async])
def test_every_message_is_committed_once_with_its_output(client: Client, function: Callable[..., Any]) -> None:
    fill(client, 3_000)
    with working(client, make(function)) as loop:
        fill(client, 500, first=3_000)
        eventually(lambda: loop.loop_metrics.committed >= 3_500)
    assert sorted(outputs(client)) == list(range(3_500))
    assert pending(client) == 0
    assert loop.loop_metrics.refused == 0


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_failures_are_retried_and_rejects_and_undecodable_messages_become_dead_letters_at_once(
    client: Client, kind: str
) -> None:
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
        eventually(lambda: loop.loop_metrics.committed >= 101)
    assert sorted(outputs(client)) == [n for n in range(100) if n % 10 not in (2, 3)]
    letters = Counter((letter.reason, letter.attempts) for letter in dead(client))
    assert letters == {("failed", 3): 11, ("rejected", 1): 10}
    assert client.execute("EXISTS", KEYS.crashes) == 0


@pytest.mark.waits
def test_a_message_that_backs_off_delays_no_other(client: Client) -> None:
    def handle(message: Message) -> dict[str, Any]:
        if message.text("n") == "0" and message.attempt == 1:
            raise ValueError
        return double(message)

    fill(client, 50)
    clock = LeapClock()
    with working(
        client, make(handle, retry=Retry(attempts=2, delay_ms=600_000, max_delay_ms=600_000, jitter=0)), clock=clock
    ) as loop:
        eventually(lambda: (loop.loop_metrics.committed, loop.loop_metrics.retried) == (49, 1))
        clock.leap(601_000)
        fill(client, 1, first=50)  # makes the loop check its clock
        eventually(lambda: loop.loop_metrics.committed == 51)
    assert sorted(outputs(client)[:49]) == list(range(1, 50))
    assert sorted(outputs(client)[49:]) == [0, 50]


def test_entries_of_a_dead_worker_are_claimed_and_those_of_a_live_one_are_not(client: Client) -> None:
    released = threading.Event()

    def slow(message: Message) -> dict[str, Any]:
        released.wait(FAIL_SAFE_S)
        return double(message)

    def pending_of(consumer: str) -> list[Any]:
        """Id, consumer, idle time, deliveries."""
        return list(client.execute("XPENDING", "in", KEYS.group, "-", "+", 100, consumer))

    def has_been_idle(consumer: str, idle_ms: int) -> None:
        for entry_id, *_ in pending_of(consumer):
            client.execute("XCLAIM", "in", KEYS.group, consumer, 0, entry_id, "IDLE", idle_ms, "JUSTID")

    fill(client, 2)
    full = replace(QUICK, claim_ms=1_000, prefetch=2, threads=2)  # it renews often, and has no room for more
    with working(client, make(slow), "slow", policy=full) as holder:
        eventually(lambda: holder.loop_metrics.read == 2)
        fill(client, 5, first=2)
        client.execute("XREADGROUP", "GROUP", KEYS.group, "dead", "STREAMS", "in", ">")
        has_been_idle("dead", LONG_AGO_MS)
        has_been_idle("slow", QUICK.claim_ms * 3 // 4)
        with working(client, make(double), "other") as other:
            eventually(lambda: other.loop_metrics.committed == 5, "what the dead one held")
            eventually(lambda: all(one[2] < QUICK.claim_ms // 2 for one in pending_of("slow")), "the living one's word")
            assert len(pending_of("slow")) == 2
            assert sorted(outputs(client)) == [2, 3, 4, 5, 6]
        released.set()
        eventually(lambda: pending(client) == 0)
    assert sorted(outputs(client)) == list(range(7))
    assert (holder.loop_metrics.refused, other.loop_metrics.refused) == (0, 0)


def test_a_restarted_worker_continues_with_its_pending_entries(client: Client) -> None:
    fill(client, 5)
    with working(client, make(double)):
        eventually(lambda: len(outputs(client)) == 5)
    fill(client, 5, first=5)
    client.execute("XREADGROUP", "GROUP", KEYS.group, "w1", "STREAMS", "in", ">")
    with working(client, make(double), policy=replace(QUICK, claim_ms=LONG_AGO_MS)):
        eventually(lambda: len(outputs(client)) == 10)


def test_a_stop_returns_unstarted_messages_and_counts_no_attempt(client: Client) -> None:
    started: list[str | None] = []
    release = threading.Event()

    def slow(message: Message) -> dict[str, Any]:
        started.append(message.text("n"))
        release.wait(FAIL_SAFE_S)
        return double(message)

    fill(client, 50)
    long = replace(QUICK, claim_ms=LONG_AGO_MS, threads=2)
    with working(client, make(slow), "leaving", policy=long) as leaving:
        eventually(lambda: started and leaving.loop_metrics.read > 2)
        leaving.stop()
        eventually(lambda: leaving.loop_metrics.released > 0, "what waits, while others run")
        release.set()
    assert leaving.leftovers == []
    assert leaving.loop_metrics.released == leaving.loop_metrics.read - len(started)
    assert len(outputs(client)) == len(started)
    with working(client, make(double), "next", policy=long):
        eventually(lambda: len(outputs(client)) == 50)
    attempts = {pairs[3] for _, pairs in client.execute("XRANGE", "out", "-", "+")}
    assert attempts == {b"1"}


def test_a_message_that_outlasts_the_stop_is_logged_and_processed_by_another_worker(client: Client) -> None:
    started, release = threading.Event(), threading.Event()

    def handle(message: Message) -> dict[str, Any]:
        started.set()
        release.wait(FAIL_SAFE_S)
        return double(message)

    fill(client, 1)
    with working(client, make(handle), "leaving") as leaving:
        eventually(started.is_set)
        leaving.stop(deadline_ms=0)
    assert [one.id for one in leaving.leftovers] == [client.execute("XRANGE", "in", "-", "+")[0][0]]
    with working(client, make(double), "next"):
        eventually(lambda: outputs(client) == [0])
    release.set()


def test_a_plain_handler_beyond_its_time_limit_ends_the_loop_and_counts_its_attempt(client: Client) -> None:
    hangs, release, clock = threading.Event(), threading.Event(), LeapClock()

    def handle(message: Message) -> dict[str, Any]:
        if message.text("n") == "0":
            hangs.set()
            release.wait(FAIL_SAFE_S)
        return double(message)

    fill(client, 10)
    handler = make(handle, time_limit_ms=600_000, retry=Retry(attempts=2, delay_ms=1))
    for _ in range(2):
        hangs.clear()
        with ending(
            HandlerStuck, client, handler, match="longer than its time limit of 600,000 ms", clock=clock
        ) as stuck:
            eventually(lambda: hangs.is_set() and len(outputs(client)) == 9)
            assert not stuck.ended.is_set()
            clock.leap(602_000)
    with working(client, handler) as loop:
        eventually(lambda: pending(client) == 0 and len(outputs(client)) == 9)
    release.set()
    assert [(letter.reason, letter.attempts) for letter in dead(client)] == [("failed", 2)]
    assert loop.loop_metrics.refused == 0


@pytest.mark.parametrize("options", [{}, {"key": "n"}, {"order": "stream"}], ids=["no key", "key", "streams"])
def test_an_output_stream_whose_key_is_of_another_type_is_refused_before_anything_is_read(
    client: Client, options: dict[str, Any]
) -> None:
    fill(client, 3)
    client.execute("SET", "out", "text")
    with pytest.raises(ConfigError, match=r"app\.handle cannot write its outputs to 'out', which holds a string"):
        ReadingLoop(make(double, **options), client.url, consumer="w1").run()
    assert client.execute("XINFO", "GROUPS", "in") == []


@pytest.mark.parametrize("options", [{}, {"key": "n"}], ids=["no key", "key"])
def test_a_run_that_takes_a_minute_is_logged_and_again_at_twice_the_time(
    client: Client, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    hangs, release, clock = threading.Event(), threading.Event(), LeapClock()

    def handle(message: Message) -> None:
        hangs.set()
        release.wait(FAIL_SAFE_S)

    def warned() -> list[str]:
        return re.findall(
            r"app\.handle: message .+ of in(?:, key 0)? has been running for ([0-9]+) min \(1 message for over a minute\)",
            caplog.text,
        )

    fill(client, 1)
    with working(
        client, make(handle, time_limit_ms=3_600_000, **options), policy=replace(QUICK, claim_ms=3_600_000), clock=clock
    ):
        eventually(hangs.is_set)
        for minutes, logged in ((2, ["2"]), (3, ["2", "5"])):
            clock.leap(minutes * 60_000)
            eventually(lambda logged=logged: warned() == logged, log=lambda: caplog.text)  # type: ignore[misc]
        release.set()
        eventually(lambda: pending(client) == 0)
    assert warned() == ["2", "5"]


def test_an_async_handler_beyond_its_time_limit_has_failed_and_the_loop_continues(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(message: Message) -> dict[str, Any]:
        await asyncio.sleep(2 * FAIL_SAFE_S if message.text("n") == "0" else 0)
        return double(message)

    give_up_no_run(monkeypatch)
    fill(client, 10)
    # Many attempts, for the others too: a slow machine may hold up a message for longer than the time limit.
    with working(client, make(handle, time_limit_ms=100, retry=Retry(attempts=10, delay_ms=1))) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 10)
    assert [(letter.reason, letter.attempts) for letter in dead(client)] == [("failed", 10)]


@pytest.mark.waits
def test_a_suspect_that_may_have_killed_workers_runs_alone_and_becomes_a_dead_letter_in_the_end(client: Client) -> None:
    fill(client, 4)
    with working(client, make(double), "first"):
        eventually(lambda: len(outputs(client)) == 4)
    fill(client, 3, first=4)
    client.execute("XREADGROUP", "GROUP", KEYS.group, "dead", "STREAMS", "in", ">")
    found = client.execute("XPENDING", "in", KEYS.group, "-", "+", 10)
    ids = [entry[0] for entry in found]
    for entry_id in ids:
        client.execute("XCLAIM", "in", KEYS.group, "dead", 0, entry_id, "IDLE", LONG_AGO_MS, "RETRYCOUNT", 3)
    # Processes are known to have crashed on this message only: two of them.
    client.execute("HSET", KEYS.crashes, ids[1], 1, ids[1] + b"a", "vanished-1 w9")
    alone: list[int] = []
    running: list[int] = []

    def handle(message: Message) -> dict[str, Any]:
        running.append(1)
        time.sleep(0.05)  # others could run beside it meanwhile
        alone.append(len(running))
        running.pop()
        return double(message)

    with working(client, make(handle)):
        eventually(lambda: pending(client) == 0)
    assert sorted(outputs(client)) == [0, 1, 2, 3, 4, 6]
    assert [(letter.id, letter.reason, letter.attempts) for letter in dead(client)] == [(ids[1].decode(), "crashed", 3)]
    assert alone == [1, 1]


def test_redis_out_of_memory_delays_effects_counts_no_attempt_and_loses_nothing(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(message: Message) -> dict[str, Any] | None:
        return double(message) if int(message.fields["n"]) % 2 else None

    fill(client, 100)
    with working(client, make(handle)) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 100)
        client.execute("CONFIG", "SET", "maxmemory", "1")
        try:
            fill_at_maxmemory(client, 100, first=100)
            eventually(lambda: " postponed: " in caplog.text)
            eventually(lambda: pending(client) == 50, "what has no effects")
            assert len(outputs(client)) == 50
        finally:
            client.execute("CONFIG", "SET", "maxmemory", "0")
        eventually(lambda: loop.loop_metrics.committed >= 200)
        eventually(lambda: "app.handle resumes: Redis has stored its postponed commits after " in caplog.text)
    assert sorted(outputs(client)) == list(range(1, 200, 2))
    assert {pairs[3] for _, pairs in client.execute("XRANGE", "out", "-", "+")} == {b"1"}
    assert dead(client) == []


@pytest.mark.parametrize("harm", [("XGROUP", "DESTROY", "in", KEYS.group), ("DEL", "in"), ("FLUSHALL",)])
def test_a_lost_group_or_stream_is_created_again_and_the_worker_continues(
    client: Client, harm: tuple[str, ...]
) -> None:
    fill(client, 100)
    with working(client, make(double)) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 100)
        client.execute(*harm)
        fill(client, 100, first=100)
        eventually(lambda: {*range(100, 200)} <= {*outputs(client)})
    counts = Counter(outputs(client))
    assert max(counts.values()) == 1
    if harm[0] == "XGROUP":
        assert sorted(counts) == list(range(200))


def test_streams_of_a_pattern_are_found_while_the_worker_runs(client: Client) -> None:
    handler = make(double, pattern="in.*")
    with working(client, handler) as loop:
        fill(client, 10, stream="in.a")
        eventually(lambda: loop.loop_metrics.committed >= 10)
        fill(client, 10, stream="in.b", first=10)
        eventually(lambda: loop.loop_metrics.committed >= 20)
    assert sorted(outputs(client)) == list(range(20))


def test_a_redriven_entry_runs_in_its_own_handler_only(client: Client) -> None:
    client.execute("XADD", "in", "*", REDRIVE_FIELD, "app.handle", "n", "1")
    client.execute("XADD", "in", "*", REDRIVE_FIELD, "app.other", "n", "2")
    with working(client, make(double)) as loop:
        eventually(lambda: loop.loop_metrics.done >= 2)
    assert (loop.loop_metrics.processed, counted(client, "handle")) == (1, [(1, 1)])
    assert read_figures(client, [KEYS], SYSTEM_CLOCK).committed == 1
    assert outputs(client) == [1]


def test_workers_stop_when_spark_takes_over(client: Client) -> None:
    fill(client, 10)
    store = CommitStore(client, app="app", handler="handle")
    with ending(StaleOwner, client, make(double), match="taken over") as loop:
        eventually(lambda: loop.loop_metrics.committed == 10)
        store.with_token(store.new_token(["in"])).begin_run(["in"])
    fill(client, 10, first=10)
    assert len(outputs(client)) == 10


def test_the_steps_of_a_message_can_be_extended(client: Client) -> None:
    steps: list[str] = []

    class Traced(HandlerSteps):
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
    with working(client, make(handle, retry=Retry(attempts=2, delay_ms=1)), steps=Traced) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 1)
    assert steps == ["decode", "run", "retry", "decode", "run", "dead_letter"]
    steps.clear()
    fill(client, 1)
    with working(client, make(lambda message: None), steps=Traced) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 1)
    assert steps == ["decode", "run", "commit"], "a message without effects too is committed by its step"


def test_the_outcomes_of_a_worker_are_exported_as_metrics(client: Client) -> None:
    def handle(message: Message) -> dict[str, Any]:
        if message.text("n") == "1":
            raise Reject("no")
        if message.text("n") == "2" and message.attempt == 1:
            raise ValueError
        return double(message)

    recorder = Recorder()
    fill(client, 10)
    with working(client, make(handle), metrics=recorder) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 10)
    label = {"handler": "app.handle"}
    counted = [recorder.value(metric, **label) for metric in (m.READ, m.COMMITTED, m.RETRIED, m.REFUSED)]
    assert counted == [10, 10, 1, 0]
    assert recorder.value(m.DEAD_LETTERED, reason="rejected", **label) == 1
    assert recorder.value(m.HANDLER_SECONDS, **label) == 11
    assert recorder.value(m.AGE_SECONDS, **label) == 10


def test_delayed_messages_are_moved_to_the_stream_when_they_are_due(client: Client) -> None:
    with Producer(client.url) as producer, working(client, make(double)) as loop:
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
        began_ms = now_ms(client)
        producer.publish("in", {"n": 7}, delay_ms=300)
        eventually(lambda: loop.loop_metrics.committed >= 1)
    assert outputs(client) == [7]
    [(entry_id, _)] = client.execute("XRANGE", "in", "-", "+")
    assert int(entry_id.partition(b"-")[0]) - began_ms > 299  # ids are whole milliseconds of the server's clock


def test_entries_of_a_consumer_that_polls_without_progress_are_claimed(client: Client) -> None:
    handler = make(double, retry=Retry(attempts=1), time_limit_ms=600_000)
    with working(client, handler, "first"):
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    fill(client, 3)
    client.execute("XREADGROUP", "GROUP", KEYS.group, "poller", "STREAMS", "in", ">")
    clock = LeapClock()
    began_ms = clock.monotonic_ms()

    def claimed() -> bool:
        """Poll, and let some time pass, until it is claimed: a run has to end within its time limit."""
        client.execute("XREADGROUP", "GROUP", KEYS.group, "poller", "STREAMS", "in", "0")
        if client.execute("XPENDING", "in", KEYS.group, "-", "+", 10, "poller"):
            clock.leap(20_000)
            return False
        return True

    with working(client, handler, clock=clock):
        eventually(claimed, "the claim")
        eventually(lambda: pending(client) == 0, "the commits")
    assert sorted(outputs(client)) == [0, 1, 2]
    # Three times what all attempts and the grace take, and ten claim times.
    assert clock.monotonic_ms() - began_ms > 3 * 601_000 + 10 * QUICK.claim_ms
