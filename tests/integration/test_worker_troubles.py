"""A worker when Redis refuses commands, with suspected poison pills, and at a stop with entries in flight."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from millstream import Breaker, Message, Reject, Retry
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.effects import Effects
from millstream.errors import HandlerStuck, Unfinished
from millstream.observability import metrics as m
from millstream.observability.health import Health
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.worker.running import losses
from tests.support.clocks import LeapClock
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import (
    KEYS,
    QUICK,
    READ_WITHIN_MS,
    RecordingLoop,
    configured,
    dead,
    deliver_to,
    double,
    ending,
    entries,
    fill,
    fill_at_maxmemory,
    make,
    outputs,
    pause,
    pending,
    resume,
    wait_for_reads,
    working,
)

pytestmark = [pytest.mark.worker]

DAY_MS = 86_400_000


def nothing(message: Message) -> None:
    """A handler without effects."""


# Redis refuses


def test_a_worker_reads_seldom_while_writes_are_refused_and_then_continues(client: Client) -> None:
    recorder = Recorder()

    def refused() -> float:
        """Return how many reads there were."""
        return recorder.value(m.REDIS_ERRORS, error="Unavailable")

    with working(client, make(double), metrics=recorder) as loop:
        fill(client, 10)
        eventually(lambda: loop.loop_metrics.committed == 10)
        with configured(client, "min-replicas-to-write", "1"):
            began_s, before = time.monotonic(), refused()
            eventually(lambda: refused() - before >= 5)
            times, took_s = refused() - before, time.monotonic() - began_s
        fill(client, 10, first=10)
        eventually(lambda: loop.loop_metrics.committed == 20)
    assert took_s >= 0.9 * sum(min(0.05 * 2**time, 1.0) for time in range(int(times) - 1))  # it waits longer each time


def test_a_run_that_has_ended_at_maxmemory_does_not_count_as_hanging(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    clock = LeapClock()
    health = Health(read_within_ms=READ_WITHIN_MS, clock=clock)
    fill(client, 5)
    with working(client, make(double, time_limit_ms=READ_WITHIN_MS), clock=clock, health=health) as loop:
        eventually(lambda: loop.loop_metrics.committed == 5)
        with configured(client, "maxmemory", "1"):
            fill_at_maxmemory(client, 5, first=5)
            eventually(lambda: loop.loop_metrics.read == 10 and " postponed: " in caplog.text)
            eventually(lambda: all(one.finished for one in loop._in_flight.deliveries), "the end of all five runs")
            wait_for_reads(health, clock, 5)  # beyond the time limit and the grace, each time
            assert (loop.loop_metrics.read, loop.ended.is_set()) == (10, False)
        eventually(lambda: loop.loop_metrics.committed == 10)
    assert (sorted(outputs(client)), loop.loop_metrics.retried, dead(client)) == (list(range(10)), 0, [])


def test_a_worker_that_cannot_lease_keys_at_maxmemory_warns_and_reports_when_it_continues(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    handler = make(lambda message: gate.wait(FAIL_SAFE_S) and None, key="n", into=None)
    with working(client, handler, policy=replace(QUICK, prefetch=1, threads=1)) as loop:
        fill(client, 5)
        eventually(lambda: client.execute("LLEN", KEYS.ready) == 4, "four keys that are ready, and one that is leased")
        with configured(client, "maxmemory", "1"):
            gate.set()  # without outputs it is committed all the same
            eventually(lambda: "app.handle cannot fetch messages: " in caplog.text)
        eventually(lambda: loop.loop_metrics.committed == 5)
        eventually(lambda: "app.handle resumes: Redis answers its fetches again after " in caplog.text)
    assert caplog.text.count("cannot fetch messages") == 1


@contextmanager
def dead_letters_of_keys_at_maxmemory(client: Client, recorder: Recorder) -> Iterator[RecordingLoop]:
    """Let five messages of as many keys fail for good while Redis has no memory for their dead letters."""
    full = threading.Event()

    def fails(message: Message) -> None:
        full.wait(FAIL_SAFE_S)
        raise ValueError("no such order")

    handler = make(fails, key="n", retry=Retry(attempts=1), breaker=Breaker(first=6))
    fill(client, 5)
    with working(client, handler, metrics=recorder) as loop:
        eventually(lambda: len(loop._in_flight.runs) == 5, "the runs of all five")
        with configured(client, "maxmemory", "1"):
            full.set()
            eventually(lambda: len(loop._ordering.committer._postponed_runs) == 5, "their postponement")  # type: ignore[attr-defined]
            yield loop


def test_dead_letters_that_wait_for_memory_are_counted_once_by_the_breaker(client: Client) -> None:
    recorder = Recorder()
    with dead_letters_of_keys_at_maxmemory(client, recorder) as loop:
        breaker = loop._ordering.committer._breaker

        def refused() -> float:
            return recorder.value(m.REDIS_ERRORS, error="OutOfMemory")

        before = refused()
        eventually(lambda: breaker.is_open() or refused() > before + 3, "more trials to store them")
        assert not breaker.is_open()
        client.execute("CONFIG", "SET", "maxmemory", "0")
        eventually(lambda: len(dead(client)) == 5, "the dead letters")
    assert not CommitStore(client, app="app", handler="handle").paused_streams(["in"])


def test_a_worker_does_not_report_as_stored_what_it_has_lost_while_it_waited_for_memory(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with dead_letters_of_keys_at_maxmemory(client, Recorder()) as loop:
        for lease in loop._in_flight.leases.copy():
            lease.expired = True
        eventually(lambda: loop._ordering.committer._postponed_since_ms is None, "the end of the wait")
    assert "Redis has stored its postponed commits" not in caplog.text


def test_a_run_that_hangs_at_maxmemory_is_given_up_once_there_is_memory_and_keeps_its_claims(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    release, clock = threading.Event(), LeapClock()

    def handle(message: Message) -> dict[str, Any]:
        if message.text("n") == "0":
            release.wait(FAIL_SAFE_S)
        return double(message)

    fill(client, 3)
    handler = make(handle, time_limit_ms=600_000, retry=Retry(attempts=1))
    with ending(HandlerStuck, client, handler, clock=clock) as loop:
        eventually(lambda: loop.loop_metrics.committed == 2)
        with configured(client, "maxmemory", "1"):
            clock.leap(602_000)
            eventually(lambda: "cannot give up a run that hangs" in caplog.text)
            for _ in range(3):
                (one,) = entries(client)
                client.execute("XCLAIM", "in", KEYS.group, "w1", 0, one[0], "IDLE", QUICK.claim_ms * 3 // 4, "JUSTID")
                clock.leap(QUICK.claim_ms)
                eventually(lambda: entries(client)[0][2] < QUICK.claim_ms // 2, "its word that it has the entry")
            assert not loop.ended.is_set()
        eventually(lambda: pending(client) == 0)
    release.set()
    assert [letter.reason for letter in dead(client)] == ["failed"]


def test_a_suspect_at_maxmemory_delays_no_other_message(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "millstream.worker.running.poison_isolation")
    with working(client, make(nothing)) as loop:
        fill(client, 1)
        eventually(lambda: loop.loop_metrics.committed == 1)
        pause(client, loop)
        fill(client, 1)
        deliver_to(client, "dead", times=3)
        with configured(client, "maxmemory", "1"):
            client.execute("HDEL", KEYS.meta, "paused")
            eventually(lambda: "cannot run a poison-pill suspect" in caplog.text)
            fill_at_maxmemory(client, 20)
            eventually(lambda: loop.loop_metrics.committed == 21)
            assert len(entries(client)) == 1
        eventually(lambda: loop.loop_metrics.committed == 22)


@pytest.mark.parametrize("key", [None, "n"])
def test_effects_that_take_too_long_to_send_in_one_call_are_committed_in_several(
    client: Client, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    args_of, block = CommitStore._commit_args, b"x" * 20_000
    sent: list[int] = []
    ran: list[str | None] = []

    def run(message: Message) -> dict[str, Any]:
        ran.append(message.text("n"))
        return {"n": message.text("n"), "block": block}

    def late(store: CommitStore, units: list[Effects], call_number: str) -> Any:
        eventually(lambda: len(ran) >= 600, "the handler, which gets ahead")
        sent.append(sum(unit.size for unit in units))
        return args_of(store, units, call_number)

    monkeypatch.setattr(CommitStore, CommitStore._commit_args.__name__, late)
    fill(client, 1_000)
    with working(client, make(run, key=key)) as loop:
        eventually(lambda: loop.loop_metrics.committed == 1_000)
    assert sorted(outputs(client)) == list(range(1_000))
    assert loop.loop_metrics.refused == 0
    assert 4_000_000 < max(sent) <= 8 << 20


# Streams


@pytest.mark.parametrize("key", [None, "n"])
def test_a_stream_whose_name_is_not_text_is_processed_like_the_others(client: Client, key: str | None) -> None:
    for name in (b"odd\xff\xfe", b"odd"):
        client.execute("XADD", name, "*", "n", "1")
    ran: list[str] = []
    handler = make(lambda message: ran.append(message.stream), pattern="odd*", key=key, into=None)
    with working(client, handler) as loop:
        eventually(lambda: loop.loop_metrics.committed == 2)
    assert sorted(ran) == ["odd", "odd\udcff\udcfe"]


def test_no_more_entries_of_many_streams_are_fetched_than_the_prefetch_allows(client: Client) -> None:
    release = threading.Event()

    def handle(message: Message) -> None:
        release.wait(FAIL_SAFE_S)

    for number in range(20):
        fill(client, 20, stream=f"in.{number}")
    clock = LeapClock()
    health = Health(read_within_ms=READ_WITHIN_MS, clock=clock)
    policy = replace(QUICK, prefetch=10, threads=1)
    handler = make(handle, pattern="in.*", into=None, time_limit_ms=100 * READ_WITHIN_MS)
    with working(client, handler, policy=policy, health=health) as loop:
        eventually(lambda: loop.loop_metrics.read >= 2)
        wait_for_reads(health, clock, 5)
        assert loop.loop_metrics.read <= 10
        release.set()
        eventually(lambda: loop.loop_metrics.committed == 400)


def test_a_stream_of_a_pattern_that_cannot_be_read_is_left_out_and_logged_once(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with working(client, make(double, pattern="in.*")) as loop:
        fill(client, 5, stream="in.a}b")
        fill(client, 5, stream="in.c")
        eventually(lambda: loop.loop_metrics.committed == 5)
        for number in range(2):  # it has discovered streams since
            fill(client, 5, stream=f"in.d{number}")
            eventually(lambda: loop.loop_metrics.committed == 10 + 5 * number)  # noqa: B023 - it is over by then
    assert caplog.text.count("handler app.handle cannot process a stream that matches its pattern") == 1


def test_slow_scans_for_streams_are_repeated_less_often_and_delay_no_message(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LeapClock()
    scans: list[Client] = []
    release = threading.Event()
    scan = Client.scan_streams

    def slow(self: Client, pattern: str = "*") -> list[str]:
        scans.append(self)
        if len(scans) == 2:
            with self._lock:
                clock.leap(600_000)
                release.wait(FAIL_SAFE_S)
        return scan(self, pattern)

    monkeypatch.setattr(Client, Client.scan_streams.__name__, slow)
    fill(client, 1, stream="in.a")
    # No message that runs while the clock leaps has run for too long.
    with working(client, make(double, pattern="in.*", time_limit_ms=3_600_000), clock=clock) as loop:
        eventually(lambda: len(scans) == 2)
        for number in range(20):  # during the scan
            fill(client, 1, stream="in.a", first=number)
            eventually(lambda: loop.loop_metrics.committed == number + 2)  # noqa: B023 - it is over by then
        release.set()
        for number in range(20):  # afterwards
            fill(client, 1, stream="in.a", first=20 + number)
            eventually(lambda: loop.loop_metrics.committed == number + 22)  # noqa: B023 - it is over by then
            time.sleep(QUICK.sweep_ms / 4_000)
    assert len(scans) == 2, "the next is due in hours"


# Handlers that misbehave


@pytest.mark.parametrize("key", [None, "n"])
def test_a_handlers_change_of_its_message_affects_neither_the_next_attempt_nor_the_dead_letter(
    client: Client, key: str | None
) -> None:
    seen: list[str | None] = []

    def handle(message: Message) -> None:
        seen.append(message.text("n"))
        message.pairs.clear()  # type: ignore[attr-defined]
        raise Reject("no") if message.attempt == 2 else ValueError

    fill(client, 1)
    with working(client, make(handle, key=key)) as loop:
        eventually(lambda: loop.loop_metrics.committed == 1)
    assert seen == ["0", "0"]
    assert [letter.pairs for letter in dead(client)] == [[b"n", b"0"]]


def test_a_handler_that_cancels_all_tasks_of_the_loop_ends_the_worker_with_an_error(client: Client) -> None:
    ran = threading.Event()

    async def handle(message: Message) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        ran.set()

    fill(client, 1)
    with ending(Unfinished, client, make(handle), match="cancel only tasks that the handler has made"):
        eventually(ran.is_set)


def test_an_async_handler_that_raises_generator_exit_fails_its_own_message_only(client: Client) -> None:
    async def handle(message: Message) -> dict[str, Any]:
        if message.text("n") == "0":
            raise GeneratorExit
        return double(message)

    fill(client, 3)
    with working(client, make(handle, concurrency=2)) as loop:
        eventually(lambda: loop.loop_metrics.committed == 3)
    assert [(letter.reason, letter.attempts) for letter in dead(client)] == [("failed", 3)]


def test_the_counts_that_keyed_workers_stored_for_an_entry_are_removed_with_it(client: Client) -> None:
    with working(client, make(double)):
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    fill(client, 1)
    deliver_to(client, "gone", times=1)
    client.execute("HSET", KEYS.crashes, entries(client)[0][0] + b"l", 1)
    with working(client, make(double)) as loop:
        eventually(lambda: loop.loop_metrics.committed == 1)
    assert client.execute("EXISTS", KEYS.crashes) == 0


# Suspects


def deliver_before(client: Client, consumer: str, *, times: int = 1) -> None:
    """Add a message that a process under this name was given so many times, and not again since."""
    with working(client, make(double)):
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    fill(client, 1)
    deliver_to(client, consumer, times=times)


@pytest.mark.parametrize("consumer", ["w1", "dead"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_message_that_a_process_may_have_died_of_backs_off_while_others_run(
    client: Client, monkeypatch: pytest.MonkeyPatch, consumer: str, times: int
) -> None:
    deliver_before(client, consumer, times=times)
    retry = Retry(attempts=4, delay_ms=DAY_MS, max_delay_ms=DAY_MS)
    with monkeypatch.context() as patch:
        patch.setattr(losses, "_MAX_LOSS_DELAY_MS", DAY_MS)
        with working(client, make(double, retry=retry)) as loop:
            eventually(lambda: len(loop._in_flight) == 1, "the message in flight")
            for n in range(1, 6):
                fill(client, 1, first=n)
                eventually(lambda: outputs(client) == list(range(1, n + 1)))  # noqa: B023 - at once
    with working(client, make(double, retry=retry)):
        eventually(lambda: outputs(client) == [1, 2, 3, 4, 5, 0], "it, after a second at most")


def test_a_message_in_a_lost_reply_has_not_begun_and_does_not_back_off(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_MAX_LOSS_DELAY_MS", DAY_MS)
    with working(client, make(double, retry=Retry(delay_ms=DAY_MS, max_delay_ms=DAY_MS))) as loop:
        fill(client, 1)
        eventually(lambda: outputs(client) == [0], "a read, so what an earlier process had is recovered")
        pause(client, loop)  # so that the worker does not read the next one itself
        fill(client, 1, first=1)
        client.execute("XREADGROUP", "GROUP", KEYS.group, "w1", "STREAMS", "in", ">")
        resume(client)
        eventually(lambda: outputs(client) == [0, 1], "the message in the lost reply")


def test_orderly_stops_do_not_make_a_message_a_suspect(client: Client) -> None:
    release = threading.Event()

    def handle(message: Message) -> None:
        release.wait(FAIL_SAFE_S)

    fill(client, 4)
    for number in range(3):
        with working(client, make(handle, into=None), f"w{number}") as loop:
            # A stop without any time does not wait for a read that is on its way: the first worker has read them all.
            eventually(lambda: loop.loop_metrics.read == 4 or loop.loop_metrics.claimed >= 2)
            loop.stop(deadline_ms=0)
    assert {entry[3] for entry in entries(client)} == {0}
    release.set()


def test_a_message_that_waits_for_a_retry_is_released_with_the_rest_of_its_back_off(client: Client) -> None:
    def fail(message: Message) -> None:
        raise ValueError

    fill(client, 2)
    policy = replace(QUICK, claim_ms=600_000)
    retry = Retry(attempts=3, delay_ms=480_000, max_delay_ms=480_000, jitter=0)
    with working(client, make(fail, retry=retry), policy=policy) as loop:
        eventually(lambda: loop.loop_metrics.retried == 2)
    assert loop.loop_metrics.released == 2
    for _, _, idle_ms, _ in entries(client):
        assert 110_000 < idle_ms < 590_000  # claimable after 600,000


def test_entries_trimmed_while_pending_are_counted(client: Client) -> None:
    with working(client, make(double)):
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    fill(client, 3)
    deliver_to(client, "dead", times=1)
    client.execute("XTRIM", "in", "MAXLEN", "1")
    recorder = Recorder()
    with working(client, make(double), metrics=recorder) as loop:
        eventually(lambda: loop.loop_metrics.committed == 1 and loop.loop_metrics.trimmed == 2)
    assert (pending(client), recorder.value(m.TRIMMED, handler="app.handle")) == (0, 2)
