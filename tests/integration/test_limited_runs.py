"""Runs of a handler with a limit: what it costs a worker to ask for permits, and what the wait for one counts as."""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from millstream import Limit, Message, Retry
from millstream.delivery.keyed_stream import KeyedStream, lease_of
from millstream.delivery.permits import Permits
from millstream.delivery.reliable_stream import Delivery
from millstream.redis_client.client import Client
from millstream.spark.engine.rate_limit import RateLimit
from millstream.testing.proxy import Proxy
from millstream.worker.fetching.rate_limiter import RateLimiter
from millstream.worker.in_flight import InFlight
from millstream.worker.policy import TIME_LIMIT_GRACE_MS
from millstream.worker.settling.hang_detector import HangDetector
from tests.support.clocks import LeapClock
from tests.support.task_fixtures import Row, TaskFixture
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import (
    KEYS,
    KINDS,
    QUICK,
    RecordingLoop,
    dead,
    either,
    make,
    now_ms,
    pending,
    working,
)

pytestmark = [pytest.mark.worker, pytest.mark.keys]


def publish(client: Client, count: int, tenant: str, *, keys: int = 4, first: int = 0) -> None:
    numbers = range(first, first + count)
    client.pipeline([("XADD", "in", "*", "n", n, "key", f"{tenant}{n % keys}", "tenant", tenant) for n in numbers])


def copy_of(message: Message) -> dict[str, str | None]:
    return {"n": message.text("n"), "key": message.text("key")}


def test_handlers_that_use_all_threads_of_their_loop_hold_up_no_other_tenant(
    client: Client,
) -> None:
    blocked = threading.Event()
    threads = 64  # more than the loop has

    async def handle(message: Message) -> dict[str, str | None]:
        if message.text("tenant") == "blocking":
            await asyncio.to_thread(blocked.wait, FAIL_SAFE_S)
        return copy_of(message)

    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=threads), concurrency=2 * threads)
    publish(client, threads, "blocking", keys=threads)
    with working(client, handler, "w1"):
        eventually(lambda: client.execute("HLEN", KEYS.permits(b"blocking")) == threads, "all permits")
        publish(client, 20, "other")
        eventually(lambda: client.execute("XLEN", "out") == 20, "the other tenant")
        blocked.set()
        eventually(lambda: client.execute("XLEN", "out") == 20 + threads, "all outputs")


@KINDS
@pytest.mark.parametrize("call", ["take", "return"])
def test_a_call_about_a_permit_that_takes_longer_than_the_time_limit_of_the_handler_is_no_part_of_the_run(
    client: Client, monkeypatch: pytest.MonkeyPatch, call: str, kind: str
) -> None:
    called, clock = threading.Event(), LeapClock()
    time_limit_ms = 60_000
    attempts: list[int] = []
    checked_ms: list[float] = []
    real_exchange, real_check = KeyedStream.exchange_permits, HangDetector.check

    def check(self: HangDetector, runs: Any, now_ms: float) -> None:
        checked_ms.append(now_ms)
        real_check(self, runs, now_ms)

    def slow_exchange(self: KeyedStream, permits: Permits, returned: Any, asked: Any) -> list[float]:
        if not called.is_set() and (asked if call == "take" else returned):
            called.set()
            clock.leap(time_limit_ms + TIME_LIMIT_GRACE_MS + 1)
            before = len(checked_ms)  # one may be under way, and the time limits are checked after it
            eventually(lambda: len(checked_ms) >= before + 3, "a check of the time limits")
        return real_exchange(self, permits, returned, asked)

    def handle(message: Message) -> dict[str, str | None]:
        attempts.append(message.attempt)
        return copy_of(message)

    monkeypatch.setattr(KeyedStream, "exchange_permits", slow_exchange)
    monkeypatch.setattr(HangDetector, "check", check)
    limit = Limit(per="tenant", at_once=1)
    handler = make(either(handle, kind), key="key", limit=limit, time_limit_ms=time_limit_ms, retry=Retry(attempts=1))
    publish(client, 1, "a")
    with working(client, handler, "w1", policy=replace(QUICK, claim_ms=60 * time_limit_ms), clock=clock):
        eventually(lambda: client.execute("XLEN", "out") == 1, "the output")
        eventually(lambda: client.execute("HLEN", KEYS.permits(b"a")) == 0, "the return of its permit")
    assert called.is_set()
    assert attempts == [1]
    assert dead(client) == []


@KINDS
def test_a_message_that_asks_for_a_permit_until_its_lease_expires_does_not_begin(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    returned, clock = threading.Event(), LeapClock()
    attempts: list[int] = []
    real_exchange = KeyedStream.exchange_permits

    def slow_exchange(self: KeyedStream, permits: Permits, ended: Any, asked: Any) -> list[float]:
        if not asked:
            return real_exchange(self, permits, ended, asked)
        proxy.freeze()  # so that no lease is renewed
        clock.leap(0.95 * QUICK.claim_ms)
        eventually(lambda: "leases on 1 messages of in expire" in caplog.text, "the end of the lease")
        proxy.resume()
        waits = real_exchange(self, permits, ended, asked)
        assert waits == [0]
        returned.set()
        return waits

    def handle(message: Message) -> dict[str, str | None]:
        attempts.append(message.attempt)
        return copy_of(message)

    monkeypatch.setattr(KeyedStream, "exchange_permits", slow_exchange)
    monkeypatch.setattr(KeyedStream, "recover_leases", lambda *_: (0, 0))  # else it may get a second lease on the key
    handler = make(either(handle, kind), key="key", limit=Limit(per="tenant", at_once=1), time_limit_ms=600_000)
    publish(client, 1, "a")
    port = int(client.url.rpartition(":")[2].partition("/")[0])
    with Proxy(port) as proxy, Client(proxy.url) as through, working(through, handler, "w1", clock=clock):
        eventually(returned.is_set, "the permit")
        eventually(lambda: client.execute("HLEN", KEYS.permits(b"a")) == 0, "its return")
    assert attempts == []
    assert pending(client) == 1


def test_a_message_that_its_limit_refuses_takes_of_the_rate_of_its_handler_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real_consume = RateLimiter.consume

    def consume(self: RateLimiter, stream: str, count: int) -> None:
        read.append(count)
        real_consume(self, stream, count)

    def handle(message: Message) -> dict[str, str | None]:
        time.sleep(0.005)
        return copy_of(message)

    monkeypatch.setattr(RateLimiter, "consume", consume)
    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=1), rate=10_000)
    publish(client, 40, "a", keys=8)
    with working(client, handler, "w1"), working(client, handler, "w2"):
        eventually(lambda: client.execute("XLEN", "out") == 40, "all outputs")
        eventually(lambda: pending(client) == 0, "the last commit")
    assert sum(read) == 40
    assert client.execute("HLEN", KEYS.crashes) == 0, "a commit removes what the wait has left"


def test_a_refused_message_counts_as_no_run(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    took_ms: list[float] = []
    real_on_run_time = InFlight.on_run_time

    def on_run_time(self: InFlight, run_ms: float) -> None:
        took_ms.append(run_ms)
        real_on_run_time(self, run_ms)

    def handle(message: Message) -> dict[str, str | None]:
        time.sleep(0.02)
        return copy_of(message)

    monkeypatch.setattr(InFlight, "on_run_time", on_run_time)
    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=1))
    publish(client, 16, "a", keys=8)
    with working(client, handler, "w1"), working(client, handler, "w2"):
        eventually(lambda: client.execute("XLEN", "out") == 16, "all outputs")
    assert min(took_ms) >= 20


def test_a_suspect_that_waits_for_its_limit_keeps_no_other_message_from_beginning(client: Client) -> None:
    gate, begun = threading.Event(), threading.Event()
    waited: list[bool] = []

    def handle(message: Message) -> dict[str, str | None]:
        if message.text("tenant") == "long":
            begun.set()
            waited.append(gate.wait(FAIL_SAFE_S))
        return copy_of(message)

    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=1))
    holder = "another run 1-0"
    client.execute("HSET", KEYS.permits(b"a"), holder, f"t{now_ms(client) + 3_600_000:.0f}")
    publish(client, 1, "long")
    with working(client, handler, "w1"):
        eventually(begun.is_set, "the long run")
        client.execute("HSET", KEYS.crashes, "9999999999999-0l", 5)  # so many workers have lost it
        client.execute("XADD", "in", "9999999999999-0", "n", 0, "key", "a0", "tenant", "a")
        eventually(lambda: client.execute("ZCARD", KEYS.limited(b"a")) == 1, "the refusal")
        fields = ("n", 1, "key", "b0", "tenant", "b")
        client.execute("XADD", "in", "*", *fields)
        eventually(lambda: client.execute("XLEN", "out") == 1, "the other message")
        gate.set()
        client.execute("HDEL", KEYS.permits(b"a"), holder)
        eventually(lambda: client.execute("XLEN", "out") == 3, "the suspect")
        eventually(lambda: pending(client) == 0, "the last commit")
    assert waited == [True], "the others did not wait for the long run"
    assert client.execute("HLEN", KEYS.permits(b"a")) == 0
    assert client.execute("HLEN", KEYS.crashes) == 0
    assert dead(client) == []


class Suspect:
    """A worker with a run of the tenant `long`, for which a suspect of the tenant `a` waits, until `gate` is set."""

    def __init__(self, client: Client, limit: Limit) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.ran: list[str | None] = []
        self.handler = make(self._handle, key="key", limit=limit)
        self._client = client

    def _handle(self, message: Message) -> dict[str, str | None]:
        if message.text("tenant") == "long":
            self.begun.set()
            self.gate.wait(FAIL_SAFE_S)
        self.ran.append(message.text("tenant"))
        return copy_of(message)

    def wait_for_the_others(self, loop: RecordingLoop) -> None:
        """Let the long run begin, and the suspect take its permit and wait for the end of that run."""
        publish(self._client, 1, "long")
        eventually(self.begun.is_set, "the long run")
        self._client.execute("HSET", KEYS.crashes, "9999999999999-0l", 5)  # so many workers have lost it
        self._client.execute("XADD", "in", "9999999999999-0", "n", 1, "key", "a0", "tenant", "a")
        eventually(lambda: not loop._in_flight.gate.is_set(), "the wait of the suspect")


def test_a_suspect_whose_permit_has_ended_while_it_waited_for_the_other_runs_asks_again(client: Client) -> None:
    one, holder = Suspect(client, Limit(per="tenant", at_once=1)), "another run 1-0"
    with working(client, one.handler, "w1") as loop:
        one.wait_for_the_others(loop)
        client.execute("DEL", KEYS.permits(b"a"))
        client.execute("HSET", KEYS.permits(b"a"), holder, f"t{now_ms(client) + 3_600_000:.0f}")
        one.gate.set()
        eventually(lambda: client.execute("ZCARD", KEYS.limited(b"a")) or "a" in one.ran, "the question")
        assert one.ran == ["long"]
        client.execute("HDEL", KEYS.permits(b"a"), holder)
        eventually(lambda: client.execute("XLEN", "out") == 2, "the suspect")
        eventually(lambda: pending(client) == 0, "the last commit")
    assert client.execute("HLEN", KEYS.permits(b"a")) == 0
    assert client.execute("HLEN", KEYS.crashes) == 0
    assert dead(client) == []


def test_a_suspect_that_waited_for_the_other_runs_takes_of_a_rate_once(client: Client) -> None:
    one = Suspect(client, Limit(per="tenant", rate="1/d"))
    with working(client, one.handler, "w1") as loop:
        one.wait_for_the_others(loop)
        one.gate.set()
        eventually(lambda: client.execute("XLEN", "out") == 2, "the suspect")
    assert one.ran == ["long", "a"]


def test_an_async_run_that_is_cancelled_while_it_asks_for_its_permit_keeps_neither_permit_nor_slot(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking: list[Delivery] = []
    answer = threading.Event()
    real_exchange = KeyedStream.exchange_permits

    def exchange_permits(self: KeyedStream, permits: Permits, returned: Any, asked: Any) -> list[float]:
        waits = real_exchange(self, permits, returned, asked)
        asking.extend(delivery for delivery, _ in asked)
        if len(asking) == 1:
            answer.wait(FAIL_SAFE_S)
        return waits

    async def handle(message: Message) -> dict[str, str | None]:
        return copy_of(message)

    monkeypatch.setattr(KeyedStream, "exchange_permits", exchange_permits)
    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=1), concurrency=1)
    publish(client, 1, "a")
    with working(client, handler, "w1") as loop:
        first = eventually(lambda: asking[:1], "the question")[0]
        loop._in_flight.remove_lease(lease_of(first))  # as the lease watchdog does shortly before the end of the lease
        lease_of(first).expired = True
        loop._runner.cancel_run(first)
        eventually(lambda: first.finished, "the end of the run")
        answer.set()
        eventually(lambda: client.execute("HLEN", KEYS.permits(b"a")) == 0, "the permit")
        publish(client, 1, "a", first=1)
        eventually(lambda: client.execute("XLEN", "out") == 1, "another message in the one slot")
    assert client.execute("HKEYS", KEYS.permits(b"a")) == []


# --- Spark ---


def batch_of(fixture: TaskFixture, count: int) -> pa.RecordBatch:
    """Messages of one tenant, each of a key of its own."""
    rows: list[Row] = []
    for n in range(1, count + 1):
        fields: dict[Any, Any] = {"n": n, "key": f"a{n}", "tenant": "a"}
        fixture.client.execute("XADD", "in", f"{n}-0", *[part for item in fields.items() for part in item])
        rows.append((n, f"a{n}".encode(), fields))
    return fixture.rows(*rows)


def test_an_async_message_on_spark_holds_a_permit_only_while_it_runs(client: Client) -> None:
    fixture, held = TaskFixture(client), []

    async def handle(message: Message) -> dict[str, str | None]:
        if message.attempt == 1:
            raise RuntimeError("again")
        await asyncio.sleep(0.05)  # the back-off of the others ends meanwhile
        held.append(client.execute("HLEN", KEYS.permits(b"a")))
        return copy_of(message)

    retry = Retry(attempts=2, delay_ms=1)
    limit = Limit(per="tenant", at_once=9)
    fixture.process(make(handle, key="key", limit=limit, concurrency=1, retry=retry), batch_of(fixture, 5))
    assert sorted(fixture.outputs()) == [1, 2, 3, 4, 5]
    assert held == [1] * 5
    assert client.execute("HLEN", KEYS.permits(b"a")) == 0


def test_a_message_that_its_limit_refuses_on_spark_takes_of_the_rate_of_its_handler_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture, admitted = TaskFixture(client), []
    real_acquire = RateLimit.acquire

    async def acquire(self: RateLimit, stream: str, count: int = 1) -> None:
        admitted.append(count)
        await real_acquire(self, stream, count)

    monkeypatch.setattr(RateLimit, "acquire", acquire)
    handler = make(copy_of, key="key", limit=Limit(per="tenant", rate="10/s"))
    fixture.process(handler, batch_of(fixture, 4))
    assert sorted(fixture.outputs()) == [1, 2, 3, 4]
    assert admitted == [1] * 4
