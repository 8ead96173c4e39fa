"""Entries in flight on a worker: one thread starts them, another removes them."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from math import inf
from queue import SimpleQueue
from typing import Any

import pytest

from millstream import Message, Retry
from millstream.clock import SYSTEM_CLOCK
from millstream.delivery.keyed_stream import KeyLease
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.handlers.attempt import NO_EFFECTS
from millstream.redis_client.client import Client
from millstream.worker import WorkerPolicy
from millstream.worker.in_flight import DELAY_THREAD, InFlight
from millstream.worker.running.async_runner import AsyncRunner
from millstream.worker.running.batch_runners import AsyncBatchRunner, ThreadBatchRunner
from millstream.worker.running.runner import Runner
from millstream.worker.running.thread_runner import LoadSample, ThreadRunner
from millstream.worker.settling.committer import Committer
from tests.support.runners import delivery, runner_of, running
from tests.support.threads import threads_named
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import make, make_context

pytestmark = [pytest.mark.worker]


def test_an_entry_delivered_again_is_not_removed_with_its_former_delivery(
    stream: ReliableStream, in_flight: InFlight
) -> None:
    first, again = delivery(stream), delivery(stream)
    in_flight.add([first], 0)
    in_flight.add([again], 0)
    in_flight.remove([first])
    assert (again in in_flight, first in in_flight, len(in_flight)) == (True, False, 1)


def test_an_entry_of_a_key_queue_is_not_started_after_its_lease_expired(
    stream: ReliableStream, in_flight: InFlight
) -> None:
    lease = KeyLease(stream=stream, queue=b"kA", token=b"1 a w", state=b"", expires_ms=100.0)  # type: ignore[arg-type]
    lease.entries = [delivery(stream), delivery(stream, 2)]
    for one in lease.entries:
        one.lease = lease
    lease.queued.extend(lease.entries)
    in_flight.add_leases([lease], 0)
    first, second = lease.entries
    assert (in_flight.start(first, 99), in_flight.start(second, 100)) == (True, False)
    assert (first.running, second.running, lease.expired) == (True, False, True)


def test_a_removed_entry_is_not_started_and_a_started_entry_is_not_removed(
    stream: ReliableStream, in_flight: InFlight
) -> None:
    entries = [delivery(stream, number) for number in range(20_000)]
    in_flight.add(entries, 0)
    begun: list[Delivery] = []
    started = threading.Event()

    def begin() -> None:
        for number, one in enumerate(entries):
            if number == 100:
                started.set()
            if in_flight.start(one, 0):
                begun.append(one)

    thread = threading.Thread(target=begin)
    thread.start()
    eventually(started.is_set)
    given_up = in_flight.remove_waiting()
    thread.join()
    assert len(given_up) + len(begun) == len(entries)
    assert not {one.id for one in given_up} & {one.id for one in begun}
    assert in_flight.buffer.empty()


def after_a_wait(in_flight: InFlight, one: Delivery) -> None:
    in_flight.add_later([one], 1, SYSTEM_CLOCK)
    eventually(lambda: one not in in_flight.deliveries)


def for_its_next_attempt(in_flight: InFlight, one: Delivery) -> None:
    in_flight.add([one], 0)
    in_flight.buffer.get()
    with Client("redis://127.0.0.1:1") as nowhere:
        committer = Committer(make_context(nowhere, make(plain), in_flight=in_flight), release=lambda released: None)
        committer._retries.put(one, 0)
        committer._requeue_retries()


def with_the_rest_of_its_batch(in_flight: InFlight, one: Delivery) -> None:
    in_flight.add([one], 0)
    in_flight.buffer.get()
    one.running = one.finished = True
    lost = delivery(one.stream, 2)
    with Client("redis://127.0.0.1:1") as nowhere:
        committer = Committer(make_context(nowhere, make(plain), in_flight=in_flight), release=lambda released: None)
        committer.settle([([one, lost], NO_EFFECTS)])


@pytest.mark.parametrize("come_back", [after_a_wait, for_its_next_attempt, with_the_rest_of_its_batch])
def test_an_entry_that_is_removed_while_it_comes_back_stays_removed(
    stream: ReliableStream,
    in_flight: InFlight,
    come_back: Callable[[InFlight, Delivery], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed: list[Delivery] = []
    removals: list[threading.Thread] = []

    def contains_and_is_then_removed(self: InFlight, delivery: Delivery) -> bool:
        found = contains(self, delivery)
        if found and not removals:
            removals.append(threading.Thread(target=lambda: removed.extend(in_flight.remove_unstarted())))
            removals[0].start()
            removals[0].join(0.1)  # it has to wait, or has removed the entry by now
        return found

    contains = InFlight.__contains__
    monkeypatch.setattr(InFlight, "__contains__", contains_and_is_then_removed)
    one = delivery(stream)
    come_back(in_flight, one)
    removals[0].join(FAIL_SAFE_S)
    assert (removed, in_flight.deliveries) == ([one], [])


def test_a_stop_leaves_no_thread_that_waits_for_a_delay(stream: ReliableStream, in_flight: InFlight) -> None:
    before = threads_named(DELAY_THREAD)
    in_flight.add_later([delivery(stream)], 10_000_000, SYSTEM_CLOCK)
    in_flight.add_later([delivery(stream, 2)], 1, SYSTEM_CLOCK)
    eventually(lambda: not in_flight.buffer.empty())
    assert threads_named(DELAY_THREAD) - before
    in_flight.stop_fetching()
    eventually(lambda: threads_named(DELAY_THREAD) <= before)
    in_flight.add_later([delivery(stream, 3)], 10_000_000, SYSTEM_CLOCK)
    assert threads_named(DELAY_THREAD) <= before
    assert [one.id for one in in_flight.remove_waiting()] == [b"1-0", b"2-0", b"3-0"]


def test_the_reading_loop_is_notified_once_enough_slots_are_free(stream: ReliableStream) -> None:
    in_flight = InFlight(WorkerPolicy(prefetch=4), 2)
    entries = [delivery(stream, number) for number in range(4)]
    in_flight.add(entries, 0)
    in_flight.remove(entries[:1])
    assert (in_flight.room_freed.is_set(), in_flight.free_slots()) == (False, 0)
    in_flight.remove(entries[1:2])
    assert (in_flight.room_freed.is_set(), in_flight.free_slots()) == (True, 2)


def sized(stream: ReliableStream, number: int, size: int) -> Delivery:
    return Delivery(stream, b"%d-0" % number, [b"n", b"x" * (size - 1)])


def test_the_room_of_a_suspect_that_waits_is_for_other_entries(stream: ReliableStream) -> None:
    in_flight = InFlight(WorkerPolicy(prefetch=2, prefetch_bytes=10), 1)
    suspect, other = sized(stream, 1, 10), sized(stream, 2, 4)
    in_flight.add_suspect(suspect)
    assert (in_flight.is_empty, in_flight.at_budget, in_flight.free_slots()) == (False, True, 0)
    in_flight.room_freed.clear()
    in_flight.set_suspect_waiting(suspect, waits=True)
    assert in_flight.room_freed.is_set()
    assert (in_flight.is_empty, in_flight.at_budget, in_flight.free_slots()) == (True, False, 2)
    assert (in_flight.bytes, in_flight.free_bytes) == (10, 10)
    in_flight.add([other], 0)
    assert (in_flight.is_empty, in_flight.free_bytes) == (False, 6)
    in_flight.set_suspect_waiting(suspect, waits=False)
    assert (in_flight.bytes, in_flight.free_bytes, in_flight.at_budget) == (14, 0, True)
    in_flight.set_suspect_waiting(suspect, waits=True)
    in_flight.remove([suspect])
    assert (in_flight.bytes, in_flight.free_bytes, len(in_flight)) == (4, 6, 1)


def test_suspects_that_wait_have_no_more_room_than_all_other_entries(stream: ReliableStream) -> None:
    in_flight = InFlight(WorkerPolicy(prefetch_bytes=10), 1)
    for number in range(1, 5):
        suspect = sized(stream, number, 4)
        in_flight.add_suspect(suspect)
        in_flight.set_suspect_waiting(suspect, waits=True)
    assert (in_flight.bytes, in_flight.free_bytes) == (16, 4)


def test_a_suspect_that_waits_and_is_delivered_again_waits_no_more(stream: ReliableStream) -> None:
    in_flight = InFlight(WorkerPolicy(prefetch_bytes=10), 1)
    suspect = sized(stream, 1, 4)
    in_flight.add_suspect(suspect)
    in_flight.set_suspect_waiting(suspect, waits=True)
    in_flight.add([sized(stream, 1, 4)], 0)
    in_flight.set_suspect_waiting(suspect, waits=True)
    assert (in_flight.bytes, in_flight.free_bytes, in_flight.is_empty) == (4, 6, False)


# Runners


async def coroutine(message: Message) -> None: ...


async def coroutine_batch(messages: list[Message]) -> None: ...


def plain(message: Message) -> None: ...


def plain_batch(messages: list[Message]) -> None: ...


RUNNERS: dict[Callable[..., Any], type[Any]] = {
    plain: ThreadRunner,
    plain_batch: ThreadBatchRunner,
    coroutine: AsyncRunner,
    coroutine_batch: AsyncBatchRunner,
}
ALL = pytest.mark.parametrize("function", RUNNERS, ids=lambda function: function.__name__)


@ALL
def test_an_attempt_that_has_ended_is_distinguished_from_one_that_hangs(
    stream: ReliableStream, in_flight: InFlight, function: Callable[..., Any]
) -> None:
    one = delivery(stream)
    in_flight.add([one], 0)
    with running(runner_of(function, RUNNERS[function], in_flight), in_flight):
        (ran,), _ = in_flight.completions.collect(FAIL_SAFE_S)
    assert ran[0] == (one,)
    assert (one.running, one.finished) == (True, True)


# Threads


def nudged_while_it_runs(runner: Runner, in_flight: InFlight, entries: int) -> int:
    """Notify it as a reading loop does until so many have run; return how many threads there were besides the first."""
    assert isinstance(runner, ThreadRunner)

    def have_run() -> bool:
        runner.notify()
        return len(in_flight.completions) >= entries

    with running(runner, in_flight):
        eventually(have_run)
        return len(runner._threads)


def test_messages_that_queue_behind_waiting_runs_get_more_threads(stream: ReliableStream, in_flight: InFlight) -> None:
    def waits(message: Message) -> None:
        time.sleep(0.02)

    in_flight.add([delivery(stream, number) for number in range(100)], 0)
    assert nudged_while_it_runs(runner_of(waits, ThreadRunner, in_flight, 4), in_flight, 100) > 0


def test_lists_that_queue_behind_short_waiting_runs_get_more_threads(
    stream: ReliableStream, in_flight: InFlight
) -> None:
    def waits(messages: list[Message]) -> None:
        time.sleep(0.003)  # one ends between any two samples

    in_flight.add([delivery(stream, number) for number in range(400)], 0)
    assert nudged_while_it_runs(runner_of(waits, ThreadBatchRunner, in_flight, 4, batch_size=1), in_flight, 400) > 0


def test_a_runner_goes_on_with_its_threads_where_the_system_refuses_one_more(
    stream: ReliableStream, in_flight: InFlight, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def waits(message: Message) -> None:
        time.sleep(0.02)

    start, refusals = threading.Thread.start, threading.Semaphore(0)

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "millstream-handler":
            refusals.release()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    in_flight.add([delivery(stream, number) for number in range(100)], 0)
    assert nudged_while_it_runs(runner_of(waits, ThreadRunner, in_flight, 4), in_flight, 100) == 0
    assert refusals.acquire(blocking=False)
    assert caplog.text.count("cannot start one more thread: can't start new thread") == 1


BEFORE = LoadSample(starved=0, finished=0, took_ms=0.0, at_ms=0.0, cpu_ms=0.0, stalled_since_ms=0.0)


@pytest.mark.parametrize(
    ("ended", "took_ms", "cpu_ms", "since_ms", "asks"),
    [
        pytest.param(2, 8.0, 1.0, 10.0, True, id="runs that wait in a process that is idle"),
        pytest.param(0, 0.0, 1.0, 0.0, True, id="a run that waits since it began"),
        pytest.param(2, 8.0, 9.0, 10.0, False, id="runs that compute"),
        pytest.param(500, 8.0, 1.0, 10.0, False, id="quick runs, though other processes keep this one from computing"),
        pytest.param(0, 0.0, 9.0, -60.0, True, id="a run that computes for long"),
    ],
)
def test_a_runner_adds_a_thread_only_where_one_is_of_use(
    ended: int, took_ms: float, cpu_ms: float, since_ms: float, asks: bool
) -> None:
    now = LoadSample(starved=0, finished=ended, took_ms=took_ms, at_ms=10.0, cpu_ms=cpu_ms, stalled_since_ms=since_ms)
    assert now.needs_thread(BEFORE) == asks


def test_each_message_of_a_leased_key_is_one_run_of_the_sample(stream: ReliableStream, in_flight: InFlight) -> None:
    """Else quick runs of many messages of a key would look like few long ones, and threads would be added for them."""
    lease = KeyLease(stream=stream, queue=b"kA", token=b"1 a w", state=b"", expires_ms=inf)  # type: ignore[arg-type]
    lease.entries = [delivery(stream, number) for number in range(16)]
    for one in lease.entries:
        one.lease = lease
    lease.queued.extend(lease.entries)
    in_flight.add_leases([lease], 0)
    runner = runner_of(plain, ThreadRunner, in_flight, key="n")
    assert isinstance(runner, ThreadRunner)
    with running(runner, in_flight):
        eventually(lambda: len(in_flight.completions) == 16)
    assert runner._sample(0, 0).finished == 16


def test_an_idle_runner_adds_no_thread_for_the_next_message(stream: ReliableStream, in_flight: InFlight) -> None:
    runner = runner_of(plain, ThreadRunner, in_flight, 4)
    assert isinstance(runner, ThreadRunner)
    in_flight.on_buffered = runner.notify
    with running(runner, in_flight):
        for number in range(20):
            eventually(lambda: runner._idle_threads)
            runner.notify()
            time.sleep(0.01)  # long enough to sample the load
            in_flight.add([delivery(stream, number)], 0)
            eventually(lambda: len(in_flight.completions) == number + 1)  # noqa: B023 - it is over by then
        assert not runner._threads


@ALL
def test_a_suspect_that_is_no_longer_in_flight_is_not_run(
    stream: ReliableStream, in_flight: InFlight, function: Callable[..., Any]
) -> None:
    runner = runner_of(function, RUNNERS[function], in_flight)
    with running(runner, in_flight):
        assert runner.run_isolated(delivery(stream)) is None


setting: ContextVar[str] = ContextVar("setting", default="none")


def test_what_a_message_sets_in_its_context_does_not_reach_the_next_message(
    stream: ReliableStream, in_flight: InFlight
) -> None:
    seen: list[str] = []

    async def sets(message: Message) -> None:
        seen.append(setting.get())
        setting.set(message.id)

    in_flight.add([delivery(stream, number) for number in range(3)], 0)
    with running(runner_of(sets, AsyncRunner, in_flight, concurrency=1), in_flight):
        eventually(lambda: len(seen) == 3)
    assert seen == ["none"] * 3


@pytest.mark.parametrize("kind", ["too slow", "cancels itself"])
def test_a_cancelled_message_does_not_cancel_the_next_one_of_its_key(
    stream: ReliableStream, in_flight: InFlight, kind: str
) -> None:
    cancelling: list[int] = []

    async def first_is_cancelled(message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        cancelling.append(task.cancelling())
        if len(cancelling) == 1:
            if kind == "cancels itself":
                task.cancel()
            await asyncio.sleep(2 * FAIL_SAFE_S)

    lease = KeyLease(stream=stream, queue=b"kA", token=b"1 a w", state=b"", expires_ms=inf)  # type: ignore[arg-type]
    lease.entries = [delivery(stream), delivery(stream, 2)]
    for one in lease.entries:
        one.lease = lease
    lease.queued.extend(lease.entries)
    in_flight.add_leases([lease], 0)
    options: dict[str, Any] = {"key": "n", "time_limit_ms": 50, "retry": Retry(attempts=1)}
    with running(runner_of(first_is_cancelled, AsyncRunner, in_flight, **options), in_flight):
        eventually(lambda: len(in_flight.completions) == 2)
    assert cancelling == [0, 0]


def test_an_isolated_run_waits_for_the_event_loop_and_ends_with_it(stream: ReliableStream, in_flight: InFlight) -> None:
    started = threading.Event()

    async def endless(message: Message) -> None:
        started.set()
        await asyncio.sleep(2 * FAIL_SAFE_S)

    runner = runner_of(endless, AsyncRunner, in_flight)
    in_flight.add_suspect(one := delivery(stream))
    outcomes: list[object] = []
    waiting = threading.Thread(target=lambda: outcomes.append(runner.run_isolated(one)))
    waiting.start()
    with running(runner, in_flight):
        eventually(started.is_set)
        runner.cancel_all()
    waiting.join(FAIL_SAFE_S)
    assert len(outcomes) == 1


class Buffer(SimpleQueue[Any]):
    """A buffer that calls `before_get` just before an entry is taken from it."""

    def __init__(self) -> None:
        self.before_get: Callable[[], object] = lambda: None

    def get_nowait(self) -> Any:
        self.before_get()
        return super().get_nowait()


def hanging(kind: type[Any], started: threading.Event, over: threading.Event) -> Callable[..., Any]:
    """A handler of messages, or of lists for AsyncBatchRunner, whose run goes on until `over`."""

    async def run() -> None:
        started.set()
        while not over.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.001)

    async def one(message: Message) -> None:
        await run()

    async def some(messages: list[Message]) -> None:
        await run()

    return some if kind is AsyncBatchRunner else one


ASYNC = pytest.mark.parametrize(("kind", "options"), [(AsyncRunner, {}), (AsyncBatchRunner, {"batch_wait_ms": 0})])


@ASYNC
def test_a_stop_that_empties_the_buffer_at_that_moment_ends_no_run(
    stream: ReliableStream, in_flight: InFlight, kind: type[Any], options: dict[str, Any]
) -> None:
    in_flight.buffer = buffer = Buffer()
    started, over = threading.Event(), threading.Event()
    runner = runner_of(hanging(kind, started, over), kind, in_flight, **options)
    in_flight.on_buffered = runner.notify
    one, other = delivery(stream), delivery(stream, 2)
    removed: list[Delivery] = []
    with running(runner, in_flight):
        in_flight.add([one], 0)
        eventually(started.is_set)

        def remove() -> None:
            if other not in in_flight:  # the runner looks once more after it has begun the first
                return
            buffer.before_get = lambda: None
            removed.extend(in_flight.remove_waiting())

        buffer.before_get = remove
        in_flight.add([other], 0)
        eventually(lambda: removed)
        over.set()
        (ran,), _ = in_flight.completions.collect(FAIL_SAFE_S)
    assert (removed, ran) == ([other], ((one,), NO_EFFECTS))


@pytest.mark.parametrize("where", ["as it takes a message", "as it decodes one"])
@ASYNC
def test_a_run_that_the_runner_cancels_as_it_fails_itself_has_no_outcome(
    stream: ReliableStream,
    in_flight: InFlight,
    kind: type[Any],
    options: dict[str, Any],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_flight.buffer = buffer = Buffer()
    started = threading.Event()
    failures: list[BaseException] = []
    runner: Any = runner_of(
        hanging(kind, started, threading.Event()), kind, in_flight, retry=Retry(attempts=1), concurrency=2, **options
    )
    in_flight.on_buffered = runner.notify

    def run() -> None:
        try:
            runner.run()
        except ExceptionGroup as error:
            failures.extend(error.exceptions)

    def fail(*_: Delivery) -> None:
        raise MemoryError("no room for a task")

    thread = threading.Thread(target=run)
    thread.start()
    in_flight.add([delivery(stream)], 0)
    eventually(started.is_set)
    if where == "as it decodes one":
        monkeypatch.setattr(runner._steps, "decode", fail)
    else:
        buffer.before_get = fail
    in_flight.add([delivery(stream, 2)], 0)
    thread.join(FAIL_SAFE_S)
    assert [type(one) for one in failures] == [MemoryError]
    assert len(in_flight.completions) == 0


def test_a_stop_leaves_no_room_for_entries_however_many_it_releases() -> None:
    in_flight = InFlight(WorkerPolicy(), 1)
    assert in_flight.free_slots() > 0
    in_flight.stop_fetching()
    assert in_flight.room_freed.is_set()
    assert in_flight.free_slots() == 0


def test_the_less_time_its_messages_take_the_more_of_a_key_a_worker_leases_at_once() -> None:
    in_flight = InFlight(WorkerPolicy(), 1)
    lengths = [in_flight.slice_length]
    for run_ms in (0.01, 0.5, 1.0, 2.0, 10.0, 1_000.0):
        for _ in range(200):
            in_flight.on_run_time(run_ms)
        lengths.append(in_flight.slice_length)
    assert lengths == [16, 64, 32, 16, 16, 5, 1]
