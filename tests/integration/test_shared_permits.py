"""Permits that cost less than two round trips a message: kept for the next message of a key, and asked for together."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from millstream import Limit, Message
from millstream.delivery.keyed_stream import KeyedStream, lease_of
from millstream.delivery.permits import Permits
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import AccessDenied, Unavailable
from millstream.handlers.limits import Share
from millstream.redis_client.client import Client
from millstream.worker.running.async_runner import AsyncRunner
from millstream.worker.running.run_permits import KEPT_MS, RunPermit, RunPermits
from tests.support.clocks import LeapClock
from tests.support.threads import threads_named
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, KINDS, dead, either, ending, make, now_ms, outputs, pending, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]

Shares = Sequence[tuple[Delivery, Share]]


@dataclass
class Exchange:
    """A round trip about permits: the messages whose permits it returned, those that asked, and what they were told."""

    returned: list[bytes] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)
    leases: list[bytes] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """All round trips about permits, in order."""
    found: list[Exchange] = []
    real_exchange = KeyedStream.exchange_permits

    def exchange_permits(self: KeyedStream, permits: Permits, returned: Shares, asked: Shares) -> list[float]:
        one = Exchange(
            [holder.id for holder, _ in returned],
            [delivery.id for delivery, _ in asked],
            [lease_of(delivery).token for delivery, _ in asked],
        )
        one.waits = real_exchange(self, permits, returned, asked)
        found.append(one)
        return one.waits

    monkeypatch.setattr(KeyedStream, "exchange_permits", exchange_permits)
    return found


@pytest.fixture
def kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permits are kept for all messages of a lease that have the same value."""
    monkeypatch.setattr("millstream.worker.running.run_permits.KEPT_MS", inf)


def publish(client: Client, *keys: str, tenants: str = "", stream_id: str = "*") -> list[bytes]:
    """Add a message of each of these keys, each with the tenant of the same place, or else the tenant `a`."""
    commands = [
        ("XADD", "in", stream_id, "n", n, "key", key, "tenant", tenants[n : n + 1] or "a") for n, key in enumerate(keys)
    ]
    return client.pipeline(commands)


def copy_of(message: Message) -> dict[str, str | None]:
    return {"n": message.text("n"), "key": message.text("key")}


def permits_of(client: Client, tenant: str) -> int:
    """How many messages of a tenant hold a permit."""
    return int(client.execute("HLEN", KEYS.permits(tenant.encode())))


def answers_in(exchanges: Sequence[Exchange]) -> list[tuple[bytes, float]]:
    """The messages that asked, each with how long it had to wait: 0 if it got its permit."""
    return [answer for one in exchanges for answer in zip(one.asked, one.waits, strict=True)]


def granted_in(exchanges: Sequence[Exchange]) -> list[bytes]:
    return [entry_id for entry_id, wait_ms in answers_in(exchanges) if wait_ms == 0]


@KINDS
@pytest.mark.usefixtures("kept_for_ever")
def test_messages_of_a_key_that_follow_each_other_run_under_one_permit(
    client: Client, exchanges: list[Exchange], kind: str
) -> None:
    held: list[int] = []

    def handle(message: Message) -> dict[str, str | None]:
        held.append(permits_of(client, "a"))
        return copy_of(message)

    publish(client, *"k" * 8)
    with working(client, make(either(handle, kind), key="key", limit=Limit(per="tenant", at_once=1))):
        eventually(lambda: client.execute("XLEN", "out") == 8, "all outputs")
        eventually(lambda: permits_of(client, "a") == 0, "the return, while the worker is idle")
    assert outputs(client) == list(range(8))
    assert held == [1] * 8
    leases = [token for one in exchanges for token in one.leases]
    assert len(leases) == len(set(leases)) < 8


@KINDS
def test_a_permit_is_kept_for_the_next_message_of_its_key_for_some_milliseconds_only(
    client: Client, exchanges: list[Exchange], kind: str
) -> None:
    clock = LeapClock()

    def handle(message: Message) -> dict[str, str | None]:
        clock.leap(KEPT_MS)
        return copy_of(message)

    ids = publish(client, *"k" * 4)
    with working(client, make(either(handle, kind), key="key", limit=Limit(per="tenant", at_once=1)), clock=clock):
        eventually(lambda: client.execute("XLEN", "out") == 4, "all outputs")
        eventually(lambda: permits_of(client, "a") == 0, "the return of the last permit")
    assert granted_in(exchanges) == ids
    assert list(dict.fromkeys(entry_id for one in exchanges for entry_id in one.returned)) == ids


@KINDS
@pytest.mark.usefixtures("kept_for_ever")
def test_the_next_message_of_a_key_asks_if_it_is_of_another_value(
    client: Client, exchanges: list[Exchange], kind: str
) -> None:
    held: list[tuple[int, int]] = []

    def handle(message: Message) -> dict[str, str | None]:
        held.append((permits_of(client, "a"), permits_of(client, "b")))
        return copy_of(message)

    ids = publish(client, *"kkk", tenants="aba")
    with working(client, make(either(handle, kind), key="key", limit=Limit(per="tenant", at_once=1))):
        eventually(lambda: client.execute("XLEN", "out") == 3, "all outputs")
    assert held == [(1, 0), (0, 1), (1, 0)]
    assert granted_in(exchanges) == ids


@KINDS
@pytest.mark.usefixtures("kept_for_ever")
def test_with_a_rate_each_message_of_a_key_takes_of_it(client: Client, exchanges: list[Exchange], kind: str) -> None:
    ids = publish(client, *"k" * 4)
    limit = Limit(per="tenant", at_once=1, rate="1000/s")
    with working(client, make(either(copy_of, kind), key="key", limit=limit)):
        eventually(lambda: client.execute("XLEN", "out") == 4, "all outputs")
    assert granted_in(exchanges) == ids
    assert permits_of(client, "a") == 0


def test_a_key_with_more_messages_leaves_the_permit_to_a_key_that_waits(
    client: Client, exchanges: list[Exchange]
) -> None:
    clock, first = LeapClock(), threading.Event()

    def handle(message: Message) -> dict[str, str | None]:
        if not first.is_set():
            first.set()
            eventually(lambda: client.execute("ZSCORE", KEYS.backoff, "kB"), "the wait of the other key")
            due_ms = round(now_ms(client)) + 3_600_000
            for times in (KEYS.limited(b"a"), KEYS.backoff):  # for an hour, unless it is woken
                client.execute("ZADD", times, "XX", due_ms, "kB")
            clock.leap(KEPT_MS)
        return copy_of(message)

    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=1))
    ids = publish(client, *"AA")
    with working(client, handler, "w1", clock=clock), working(client, handler, "w2", clock=clock):
        eventually(first.is_set, "the first run")
        publish(client, "B")
        eventually(lambda: client.execute("XLEN", "out") == 3, "all outputs")
        eventually(lambda: pending(client) == 0, "the last commit")
    wait_ms = next(wait_ms for entry_id, wait_ms in answers_in(exchanges) if entry_id == ids[1])
    assert wait_ms > 0, "the key that waits comes first"
    assert dead(client) == []


@KINDS
@pytest.mark.usefixtures("kept_for_ever")
def test_a_message_that_waits_for_a_suspect_keeps_no_permit(client: Client, kind: str) -> None:
    gate, begun = threading.Event(), threading.Event()
    ran: list[str | None] = []

    def handle(message: Message) -> dict[str, str | None]:
        tenant = message.text("tenant")
        if tenant == "s":
            eventually(lambda: permits_of(client, "a") == 0, "the permit of the others")
        elif not begun.is_set():
            begun.set()
            gate.wait(FAIL_SAFE_S)
        ran.append(tenant)
        return copy_of(message)

    handler = make(either(handle, kind), key="key", limit=Limit(per="tenant", at_once=1))
    publish(client, *"kk")
    with working(client, handler, "w1") as loop:
        eventually(begun.is_set, "the first run")
        client.execute("HSET", KEYS.crashes, "9999999999999-0l", 5)  # so many workers have lost it
        publish(client, "suspect", tenants="s", stream_id="9999999999999-0")
        eventually(lambda: not loop._in_flight.gate.is_set(), "the wait of the suspect")
        gate.set()
        eventually(lambda: client.execute("XLEN", "out") == 3, "all outputs")
        eventually(lambda: pending(client) == 0, "the last commit")
    assert ran == ["a", "s", "a"]


def test_async_messages_that_ask_during_a_round_trip_share_the_next_one(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 20
    asked: list[int] = []
    real_exchange = KeyedStream.exchange_permits

    def exchange_permits(self: KeyedStream, permits: Permits, returned: Shares, some: Shares) -> list[float]:
        if some:
            asked.append(len(some))
            if len(asked) == 1:
                runner: Any = loop._runner
                eventually(lambda: runner._questions.qsize() == count - len(some), "the other questions")
        return real_exchange(self, permits, returned, some)

    async def handle(message: Message) -> dict[str, str | None]:
        return copy_of(message)

    monkeypatch.setattr(KeyedStream, "exchange_permits", exchange_permits)
    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=count), concurrency=count)
    with working(client, handler, "w1") as loop:
        publish(client, *[f"k{n}" for n in range(count)])
        eventually(lambda: client.execute("XLEN", "out") == count, "all outputs")
        eventually(lambda: permits_of(client, "a") == 0, "the return of all permits")
    assert sum(asked) == count
    assert len(asked) <= 2


@KINDS
def test_a_worker_that_has_stopped_has_returned_the_permits_of_its_last_runs(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    before = threads_named("millstream-permits")
    real_exchange = KeyedStream.exchange_permits

    def exchange_permits(self: KeyedStream, permits: Permits, returned: Shares, asked: Shares) -> list[float]:
        if returned:
            eventually(lambda: threads_named("millstream-permits") - before, "the last calls of the stop")
        return real_exchange(self, permits, returned, asked)

    monkeypatch.setattr(KeyedStream, "exchange_permits", exchange_permits)
    publish(client, "k")
    with working(client, make(either(copy_of, kind), key="key", limit=Limit(per="tenant", at_once=1))):
        eventually(lambda: client.execute("XLEN", "out") == 1, "the output")
        assert permits_of(client, "a") == 1
    assert permits_of(client, "a") == 0


@KINDS
def test_a_permit_that_cannot_be_returned_for_a_reason_that_lasts_ends_the_worker(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    real_exchange = KeyedStream.exchange_permits

    def exchange_permits(self: KeyedStream, permits: Permits, returned: Shares, asked: Shares) -> list[float]:
        if returned:
            raise AccessDenied("the user may not return permits")
        return real_exchange(self, permits, returned, asked)

    monkeypatch.setattr(KeyedStream, "exchange_permits", exchange_permits)
    handler = make(either(copy_of, kind), key="key", limit=Limit(per="tenant", at_once=1))
    publish(client, "k")
    with ending(AccessDenied, client, handler, match="may not return"):
        pass


def test_a_permit_that_cannot_be_asked_for_ends_an_async_worker_once_for_all_that_ask(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()

    def exchange_permits(self: KeyedStream, permits: Permits, returned: Shares, asked: Shares) -> list[float]:
        if not refused.is_set():
            runner: Any = loop._runner
            eventually(lambda: runner._questions.qsize() + len(asked) >= 3, "the other questions")
            refused.set()
        raise AccessDenied("the user may not take permits")

    async def handle(message: Message) -> dict[str, str | None]:
        return copy_of(message)

    monkeypatch.setattr(KeyedStream, "exchange_permits", exchange_permits)
    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=3), concurrency=3)
    with ending(AccessDenied, client, handler, match="may not take") as loop:
        publish(client, *"abcdef")


def test_the_error_of_a_return_ends_an_async_worker_whose_event_loop_is_at_its_end_at_that_moment(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_exchange, real_call_soon = KeyedStream.exchange_permits, AsyncRunner._call_soon

    def exchange_permits(self: KeyedStream, permits: Permits, returned: Shares, asked: Shares) -> list[float]:
        if returned:
            raise AccessDenied("the user may not return permits")
        return real_exchange(self, permits, returned, asked)

    def call_soon(self: AsyncRunner, callback: Callable[[], object]) -> None:
        if self._main_task is None or callback != self._main_task.cancel:  # the cancellation comes too late
            real_call_soon(self, callback)

    def run(self: AsyncRunner) -> None:
        try:
            real_run(self)
        finally:
            time.sleep(0.1)  # the rest of the stop goes on meanwhile

    real_run = AsyncRunner.run
    monkeypatch.setattr(AsyncRunner, "run", run)
    monkeypatch.setattr(KeyedStream, "exchange_permits", exchange_permits)
    monkeypatch.setattr(AsyncRunner, "_call_soon", call_soon)
    publish(client, "k")
    handler = make(either(copy_of, "async"), key="key", limit=Limit(per="tenant", at_once=1))
    with pytest.raises(AccessDenied, match="may not return"), working(client, handler) as loop:
        eventually(lambda: vars(loop._runner)["_failure"], "the error of the return")


@KINDS
def test_keys_that_wait_go_on_after_a_return_that_redis_did_not_answer(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lost = threading.Event()
    real_exchange = KeyedStream.exchange_permits

    def exchange_permits(self: KeyedStream, permits: Permits, returned: Shares, asked: Shares) -> list[float]:
        if returned and not lost.is_set():
            lost.set()
            raise Unavailable("no answer")
        return real_exchange(self, permits, returned, asked)

    monkeypatch.setattr(KeyedStream, "exchange_permits", exchange_permits)
    handler = make(either(copy_of, kind), key="key", limit=Limit(per="tenant", at_once=1))
    publish(client, "A")
    with working(client, handler, "w1"):
        eventually(lost.is_set, "the return that is lost")
        publish(client, "B")
        eventually(lambda: client.execute("XLEN", "out") == 2, "the message of the other key")
        eventually(lambda: permits_of(client, "a") == 0, "the end of both permits")
    assert dead(client) == []


@KINDS
def test_a_return_that_redis_did_not_answer_is_repeated_though_its_key_goes_on(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lost = threading.Event()
    held: list[tuple[int, int]] = []
    real_exchange, real_continued = KeyedStream.exchange_permits, RunPermits.continued

    def exchange_permits(self: KeyedStream, permits: Permits, returned: Shares, asked: Shares) -> list[float]:
        if returned and not lost.is_set():
            lost.set()
            raise Unavailable("no answer")
        return real_exchange(self, permits, returned, asked)

    def continued(self: RunPermits, delivery: Delivery, message: Message) -> RunPermit | None:
        permit = real_continued(self, delivery, message)
        self.give_back_all()  # as another thread may at this moment, so that the next question is not lost with it
        return permit

    def handle(message: Message) -> dict[str, str | None]:
        held.append((permits_of(client, "a"), permits_of(client, "b")))
        return copy_of(message)

    monkeypatch.setattr(KeyedStream, "exchange_permits", exchange_permits)
    monkeypatch.setattr(RunPermits, "continued", continued)
    publish(client, *"kk", tenants="ab")
    with working(client, make(either(handle, kind), key="key", limit=Limit(per="tenant", at_once=1))):
        eventually(lambda: client.execute("XLEN", "out") == 2, "all outputs")
    assert lost.is_set()
    assert held == [(1, 0), (0, 1)]
