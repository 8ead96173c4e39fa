"""Runs that go on beyond their time limit: their worker gives them up, and no other one runs their key beside them."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import pytest

from millstream import App, Message, Retry
from millstream.admin.key_queues import KeyQueue, list_queues, skip, unpark
from millstream.delivery.keyed_stream import RELEASE_LEASES, KeyLease, lease_of, queue_of_key
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import HandlerStuck, OutOfMemory, Unavailable
from millstream.handlers.attempt import NO_EFFECTS, DeadLettered
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.scripts import Script
from millstream.testing.proxy import Proxy
from millstream.worker import EmbeddedWorker, ReadingLoop
from millstream.worker.ordering.by_key import ByKey
from millstream.worker.process.worker_process import WorkerProcess, WorkerSettings
from millstream.worker.running.poison_isolation import ProcessIsolation
from millstream.worker.settling.claim_renewal import ClaimRenewer
from millstream.worker.settling.committer import Committer
from millstream.worker.settling.key_committer import KeyCommitter
from millstream.worker.settling.key_lease_renewal import KeyLeaseRenewer
from millstream.worker.settling.lease_watchdog import LeaseWatchdog
from millstream.worker.settling.timed_out_attempts import TimedOutAttempts
from tests.support.clocks import LeapClock, ManualClock
from tests.support.keyed_fixtures import MANY, keyed, lease_one
from tests.support.keyed_fixtures import publish as publish_key
from tests.support.waiting import FAIL_SAFE_S, eventually, eventually_async
from tests.support.workers import KEYS, QUICK, configured, dead, double, ending, make, make_context, outputs, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]

LIMIT_MS, HOUR_MS = 600_000, 3_600_000
LONG = replace(QUICK, claim_ms=HOUR_MS, stop_ms=100 * HOUR_MS)
"""A lease lasts for an hour and is renewed every twenty minutes; a stop may last longer still."""
MARGIN_MS = HOUR_MS / 10
"""So long before the end of a lease its process ends."""
STOP_BY_MS = HOUR_MS - 2 * MARGIN_MS
"""For so long after its lease was renewed last, a worker that has given up a run waits for others, at most."""
BY_KEY: dict[str, Any] = {"key": "n"}
BY_STREAM: dict[str, Any] = {"pattern": "in*", "order": "stream"}
ORDERS = pytest.mark.parametrize("options", [BY_KEY, BY_STREAM], ids=["key", "stream"])


class Runs:
    """A plain handler whose runs all go on until `release` is set; `begun` has the number of each."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.release = threading.Event()

    def __call__(self, message: Message) -> None:
        self.begun.append(message.text("n", ""))
        self.release.wait(FAIL_SAFE_S)

    def handler(self, **options: Any) -> Handler:
        """The handler `app.handle`, which is given up after ten minutes."""
        return make(self.__call__, into=None, time_limit_ms=LIMIT_MS, **options)


@pytest.fixture
def runs() -> Iterator[Runs]:
    made = Runs()
    yield made
    made.release.set()


@pytest.fixture
def proxy(client: Client) -> Iterator[Proxy]:
    with Proxy(int(client.url.rpartition(":")[2].partition("/")[0])) as opened:
        yield opened


def publish(client: Client, count: int, options: dict[str, Any]) -> None:
    """Add so many messages, each of a key of its own: a value of `n`, or a stream."""
    for n in range(count):
        client.execute("XADD", f"in{n}" if "pattern" in options else "in", f"1-{n}", "n", n)


def run_of(loop: ReadingLoop, number: int) -> Delivery:
    """The run of this message, which must have begun."""
    return next(one for one in loop._in_flight.runs if one.pairs[1] == b"%d" % number)


def exceed_time_limit(delivery: Delivery) -> None:
    """Let a run have begun so long ago that it is given up."""
    delivery.state_since_ms -= LIMIT_MS + 2_000


def queue_of(client: Client, number: int, options: dict[str, Any]) -> KeyQueue:
    """The key queue of a message that `publish` has added."""
    if "pattern" in options:
        (found,) = list_queues(client, HandlerKeys("app", "handle", f"in{number}"))
        return found
    return next(one for one in list_queues(client, KEYS) if one.key == b"%d" % number)


# --- The lease of a run that was given up ---


@ORDERS
def test_a_stop_after_a_run_was_given_up_is_over_before_its_lease_ends_and_else_the_process_is_ended(
    client: Client, runs: Runs, options: dict[str, Any]
) -> None:
    clock, told = LeapClock(), list[HandlerStuck]()
    stuck: dict[str, Any] = {"policy": LONG, "clock": clock, "isolation": ProcessIsolation("", told.append)}
    publish(client, 2, options)
    with ending(HandlerStuck, client, runs.handler(**options), match="longer than its time limit", **stuck) as loop:
        eventually(lambda: len(runs.begun) == 2, "both runs")
        hangs, healthy = run_of(loop, 0), lease_of(run_of(loop, 1))
        exceed_time_limit(hangs)
        eventually(lambda: loop.deadline_ms < inf, "the begin of the stop")
        before = queue_of(client, 0, options)
        assert loop._in_flight.given_up == {lease_of(hangs)}
        assert loop.deadline_ms == lease_of(hangs).expires_ms - 2 * MARGIN_MS
        loop.stop(loop.deadline_ms + HOUR_MS)
        assert loop.deadline_ms == lease_of(hangs).expires_ms - 2 * MARGIN_MS, "it may only be brought forward"
        renewed_ms = healthy.expires_ms
        clock.leap(HOUR_MS / 2)
        eventually(lambda: healthy.expires_ms > renewed_ms, "the renewal of the lease of the other run")
        assert not loop.ended.is_set()
        clock.leap(STOP_BY_MS - HOUR_MS / 2)
    assert not told, "the stop was over in time"
    after = queue_of(client, 0, options)
    assert (after.state, after.until_ms) == ("leased", before.until_ms), "neither renewed nor released"
    assert queue_of(client, 1, options).state == "ready", "what ran on is for other workers"
    clock.leap(HOUR_MS - STOP_BY_MS - MARGIN_MS / 2)
    eventually(lambda: told, "the end of the process, which went on though its loop had ended")
    assert "app.handle still runs on message 1-0 of in" in str(told[0])


def test_a_worker_whose_only_run_is_given_up_ends_without_a_wait(client: Client, runs: Runs) -> None:
    publish(client, 1, BY_KEY)
    with ending(HandlerStuck, client, runs.handler(**BY_KEY), policy=LONG) as loop:
        eventually(lambda: runs.begun)
        exceed_time_limit(run_of(loop, 0))


def test_all_loops_of_a_process_stop_by_one_deadline_once_a_run_of_one_is_given_up(client: Client, runs: Runs) -> None:
    clock, told, failures = LeapClock(), list[HandlerStuck](), list[BaseException]()
    app = App("app")
    for name in ("first", "second"):
        app.handler(name, name=name, key="n", time_limit_ms=LIMIT_MS)(runs.__call__)
        for n in range(2):
            client.execute("XADD", name, f"1-{n}", "n", n)
    settings = WorkerSettings(url=client.url, consumer="w1", policy=LONG)
    process = WorkerProcess(app, settings, end_process=told.append, clock=clock)

    def work() -> None:
        try:
            process.run(threading.Event())
        except HandlerStuck as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    eventually(lambda: len(runs.begun) == 4, "all runs")
    first, second = process._loops.values()
    hangs = lease_of(run_of(first, 0))
    exceed_time_limit(run_of(first, 0))
    eventually(lambda: second.deadline_ms < inf, "the stop of the other loop, while the first one waits for its run")
    assert first.deadline_ms == second.deadline_ms == hangs.expires_ms - 2 * MARGIN_MS
    clock.leap(STOP_BY_MS)
    thread.join(FAIL_SAFE_S)
    assert ["longer than its time limit" in str(one) for one in failures] == [True]
    assert not told, "the stop was over in time"
    clock.leap(HOUR_MS - STOP_BY_MS - MARGIN_MS / 2)
    eventually(lambda: told, "the end of the process, should anything have kept it")


def test_a_program_with_a_worker_inside_is_ended_soon_after_a_run_was_given_up_whatever_else_runs(
    client: Client, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, app = LeapClock(), App("app")
    monkeypatch.setattr("millstream.worker.process.embedded_worker.WorkerProcess", partial(WorkerProcess, clock=clock))
    app.handler("hanging", name="hangs", key="n", time_limit_ms=LIMIT_MS)(runs.__call__)
    app.handler("others", name="goes-on", time_limit_ms=100 * HOUR_MS)(runs.__call__)
    for stream in ("hanging", "others"):
        client.execute("XADD", stream, "*", "n", 1)

    async def main() -> None:
        async with EmbeddedWorker(app, client.url, policy=LONG) as worker:
            await eventually_async(lambda: len(runs.begun) == 2, "both runs, which go on to the end of the test")
            loops = worker._process._loops
            exceed_time_limit(run_of(loops["hangs"], 1))
            await eventually_async(lambda: loops["goes-on"].deadline_ms < inf, "the stop of the other loop")
            clock.leap(STOP_BY_MS)
            await asyncio.Event().wait()

    with pytest.raises(HandlerStuck, match="longer than its time limit"):
        asyncio.run(main())


class GivenUp:
    """A worker that has begun the first of two messages of a key, and given up that run."""

    def __init__(self, client: Client, *, gives_up: bool = True) -> None:
        self.clock = ManualClock()
        self.context = make_context(client, make(double, key="k"), clock=self.clock)
        self.in_flight = self.context.in_flight
        publish_key(client, "AA")
        self.stream = keyed(client, "w")
        self.stream.enqueue_new(count=10, max_pending=MANY)
        self.lease: KeyLease = lease_one(self.stream)
        self.in_flight.add_leases([self.lease], 0.0)
        self.run = self.lease.entries[0]
        assert self.in_flight.start(self.run, 0.0)
        if gives_up:
            self.in_flight.give_up(self.lease)
        self.watchdog = LeaseWatchdog(self.context)
        self.margin_ms = self.context.policy.claim_ms / 10


def watch_for_a_moment(watch: Callable[[threading.Event], None]) -> None:
    """Watch until it has looked at all leases twice at least."""
    over = threading.Event()
    timer = threading.Timer(0.3, over.set)
    timer.start()
    watch(over)
    timer.join()


def test_the_watchdog_ends_the_process_before_the_lease_of_a_run_that_was_given_up_ends(client: Client) -> None:
    worker = GivenUp(client)
    assert worker.watchdog.stop_by_ms == worker.lease.expires_ms - 2 * worker.margin_ms
    worker.clock.now_ms = worker.lease.expires_ms - worker.margin_ms - 1
    watch_for_a_moment(worker.watchdog.run)
    worker.clock.now_ms += 2
    with pytest.raises(HandlerStuck, match="though its lease is about to expire"):
        worker.watchdog.run(threading.Event())
    worker.run.finished = True
    watch_for_a_moment(worker.watchdog.run)
    worker.watchdog.run_on()


@pytest.fixture
def worker(client: Client) -> GivenUp:
    return GivenUp(client)


def is_leased(client: Client) -> bool:
    """Whether the only key queue is leased."""
    return [one.state for one in list_queues(client, KEYS)] == ["leased"]


def test_the_lease_of_a_run_that_was_given_up_stays_known_though_a_commit_under_it_is_refused(worker: GivenUp) -> None:
    worker.in_flight.remove_lease(worker.lease)  # as the committer does with the late outcome of an earlier message
    assert worker.in_flight.given_up == {worker.lease}
    assert worker.watchdog.stop_by_ms < inf


def test_a_stop_does_not_return_the_key_of_a_run_that_was_given_up(client: Client, worker: GivenUp) -> None:
    ordering = ByKey(worker.context)
    ordering.release(worker.lease.entries[1:])  # which another thread has dropped from flight just before
    ordering.close()
    assert is_leased(client)


def test_a_recovery_leaves_the_lease_of_a_run_that_was_given_up(client: Client, worker: GivenUp) -> None:
    KeyLeaseRenewer(worker.context).recover(worker.stream)
    assert is_leased(client)


@pytest.mark.parametrize("joined", ["once", "again since"])
def test_a_recovery_leaves_the_lease_of_a_run_that_goes_on_though_it_was_dropped(client: Client, joined: str) -> None:
    worker = GivenUp(client, gives_up=False)
    worker.in_flight.remove_lease(worker.lease)  # as the watchdog does shortly before the lease ends
    stream = worker.stream if joined == "once" else keyed(client, "w")
    KeyLeaseRenewer(worker.context).recover(stream)
    assert is_leased(client)
    worker.run.finished = True
    KeyLeaseRenewer(worker.context).recover(stream)
    assert not is_leased(client)


@pytest.mark.parametrize("stops", [True, False])
def test_a_step_that_waits_for_redis_is_not_repeated_once_the_stop_has_begun(client: Client, stops: bool) -> None:
    calls = 0

    class StoppingClock(ManualClock):
        def sleep_ms(self, duration_ms: float) -> None:
            if stops:
                loop.stop()

    def step() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise Unavailable("no reply")

    loop = ReadingLoop(make(double), client.url, consumer="w1", clock=StoppingClock())
    loop._retry_while_unavailable(step)
    assert calls == (1 if stops else 2)


def test_a_key_that_is_parked_as_its_run_is_given_up_stays_leased_though_an_operator_unparks_it(
    client: Client, runs: Runs
) -> None:
    publish(client, 2, BY_KEY)
    handler = runs.handler(retry=Retry(attempts=1, then="park"), **BY_KEY)
    with ending(HandlerStuck, client, handler, policy=LONG) as loop:
        eventually(lambda: len(runs.begun) == 2, "both runs")
        exceed_time_limit(run_of(loop, 0))
        eventually(lambda: loop.deadline_ms < inf, "the begin of the stop")
        found = queue_of(client, 0, BY_KEY)
        assert (found.state, found.failed_attempts) == ("leased", 1)
        assert found.parked_reason == "failed: it took longer than its time limit of 600,000 ms"
        assert unpark(client, KEYS, queue_of_key(b"0", b""))
        assert queue_of(client, 0, BY_KEY).state == "leased"
        assert loop.loop_metrics.parked == 1
        runs.release.set()
    with working(client, make(double, key="n"), "w1"):  # the next process of that name
        eventually(lambda: outputs(client) == [0], "the unparked key")


# --- An outage ---


def count_give_ups(loop: ReadingLoop, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns how often the loop has tried to give up a run from now on."""
    renewer: Any = loop._ordering.maintenance._renewer
    tried: list[Delivery] = []
    give_up = renewer.give_up

    def count(delivery: Delivery) -> None:
        tried.append(delivery)
        give_up(delivery)

    monkeypatch.setattr(renewer, "give_up", count)
    return lambda: len(tried)


@ORDERS
def test_a_run_that_cannot_be_given_up_as_redis_is_away_ends_the_process_before_its_lease_ends(
    client: Client,
    proxy: Proxy,
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
) -> None:
    clock, told = LeapClock(), list[HandlerStuck]()
    stuck: dict[str, Any] = {"policy": LONG, "clock": clock, "isolation": ProcessIsolation("", told.append)}
    publish(client, 1, options)
    with (
        Client(proxy.url) as through,
        ending(HandlerStuck, through, runs.handler(**options), **stuck) as loop,
    ):
        eventually(lambda: runs.begun)
        tried = count_give_ups(loop, monkeypatch)
        exceed_time_limit(run_of(loop, 0))
        proxy.cut_at_random(before=1.0)
        proxy.cut_all()
        eventually(lambda: tried() >= 2, "two attempts to give it up")
        assert not told
        clock.leap(HOUR_MS - MARGIN_MS / 2)
        eventually(lambda: told, "the end of the process")
    assert "lease is about to expire" in str(told[0])
    assert loop.deadline_ms < clock.monotonic_ms(), "where the process can go on, its loop ends at once"
    assert "took longer than its time limit" not in caplog.text, "nothing is logged that was not recorded"
    assert loop.loop_metrics.retried == 0


@pytest.mark.parametrize("options", [{}, BY_KEY], ids=["no key", "key"])
def test_an_attempt_that_is_recorded_only_after_an_outage_is_logged_and_counted_once(
    client: Client, proxy: Proxy, runs: Runs, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    publish(client, 1, options)
    with Client(proxy.url) as through, ending(HandlerStuck, through, runs.handler(**options), policy=LONG) as loop:
        eventually(lambda: runs.begun)
        proxy.cut_before("HSET", containing=KEYS.crashes, times=3)
        exceed_time_limit(run_of(loop, 0))
    assert proxy.cuts["before", "HSET"] == 3
    assert caplog.text.count("attempt 1 of 3 failed on message 1-0 of in") == 1
    assert loop.loop_metrics.retried == 1
    assert client.execute("HGET", KEYS.crashes, "1-0f") == b"1"


@pytest.mark.parametrize("options", [{}, BY_KEY], ids=["no key", "key"])
def test_a_dead_letter_of_a_run_that_is_given_up_is_logged_and_counted_once_though_its_reply_is_lost(
    client: Client, proxy: Proxy, runs: Runs, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    commit = Script("commit/commit")
    client.execute("SCRIPT", "LOAD", commit.text)
    publish(client, 1, options)
    handler = runs.handler(retry=Retry(attempts=1), **options)
    with Client(proxy.url) as through, ending(HandlerStuck, through, handler, policy=LONG) as loop:
        eventually(lambda: runs.begun)
        proxy.cut_after("EVALSHA", containing=commit.sha)
        exceed_time_limit(run_of(loop, 0))
    assert proxy.cuts["after", "EVALSHA"] == 1
    assert [one.reason for one in dead(client)] == ["failed"]
    assert caplog.text.count("took longer than its time limit") == 1
    assert (loop.loop_metrics.committed, loop.loop_metrics.dead) == (1, 1)


def test_a_dead_letter_that_redis_had_no_memory_for_is_not_counted_if_the_lease_is_lost_meanwhile(
    client: Client,
) -> None:
    worker = GivenUp(client, gives_up=False)
    attempts, run = TimedOutAttempts(worker.context), worker.run
    outcome = DeadLettered("failed", "it hangs")
    effects = worker.context.steps.commit_key(worker.lease, [(run, outcome)])
    with configured(client, "maxmemory", "1"), pytest.raises(OutOfMemory):
        attempts.write_dead_letter(run, effects)
    assert skip(client, KEYS, worker.lease.queue, error="by an operator")
    attempts.write_dead_letter(run, effects)
    assert [one.reason for one in dead(client)] == ["skipped"]
    assert worker.context.loop_metrics.dead == 0


def begun_run(client: Client, handler: Handler) -> tuple[Delivery, ClaimRenewer | KeyLeaseRenewer, Committer]:
    """The run of a worker's only message, which has begun; and what gives it up, or commits it."""
    context = make_context(client, handler)
    publish_key(client, "A")
    made: tuple[ClaimRenewer | KeyLeaseRenewer, Committer]
    if handler.key is None:
        stream = ReliableStream(client, "in", app="app", handler="handle", consumer="w")
        stream.join()
        (run,) = stream.fetch(count=1)
        context.in_flight.add([run], 0.0)
        made = ClaimRenewer(context, {"in": stream}, release=lambda _: None), Committer(context, release=lambda _: None)
    else:
        keys = keyed(client, "w")
        keys.enqueue_new(count=10, max_pending=MANY)
        lease = lease_one(keys)
        (run,) = lease.entries
        lease.last_run = run
        context.in_flight.add_leases([lease], 0.0)
        committer = KeyCommitter(context, release=lambda _: None, on_lease_end=lambda _: None)
        made = KeyLeaseRenewer(context), committer
    assert context.in_flight.start(run, 0.0)
    return run, *made


@pytest.mark.parametrize(
    "options", [{}, {"key": "k"}, {"key": "k", "retry": Retry(attempts=1, then="park")}], ids=["no key", "key", "park"]
)
def test_a_run_that_ends_well_while_it_cannot_be_given_up_leaves_no_count_of_a_failed_attempt(
    client: Client, proxy: Proxy, options: dict[str, Any]
) -> None:
    with Client(proxy.url) as through:
        run, renewer, committer = begun_run(through, make(double, **options))
        name, argument = ("EVALSHA", "hold") if "retry" in options else ("HSET", KEYS.crashes)
        client.execute("SCRIPT", "LOAD", RELEASE_LEASES.text)
        proxy.cut_after(name, containing=argument)
        with pytest.raises(Unavailable):
            renewer.give_up(run)
        assert client.execute("HGET", KEYS.crashes, "1-0f") == b"1"
        run.finished = True
        committer.settle([((run,), NO_EFFECTS)])
        committer.finish()
    assert client.execute("HGET", KEYS.meta, "committed") == b"1"
    assert client.execute("HGETALL", KEYS.crashes) == []
