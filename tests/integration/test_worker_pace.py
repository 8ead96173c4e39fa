"""How fast workers read: a handler's rate, shared by all its workers, and pause and resume."""

import logging
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from millstream import Message, Retry
from millstream.delivery.commit_store import CommitStore, reservation_size
from millstream.handlers.handler import Handler
from millstream.observability.health import Health
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.worker.in_flight import InFlight
from tests.support.clocks import LeapClock
from tests.support.commandline import call
from tests.support.reservations import count_reservations
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import (
    KEYS,
    READ_WITHIN_MS,
    deliver_to,
    double,
    fill,
    make,
    now_ms,
    outputs,
    pause,
    pending,
    resume,
    wait_for_reads,
    working,
)

pytestmark = [pytest.mark.worker]

# The rate


def came_no_faster(entries: list[Any], rate: float, began_ms: float) -> None:
    """Check that outputs came no faster than at this rate, except one reservation."""
    for number, (entry_id, _) in enumerate(entries, 1):
        came_ms = int(entry_id.partition(b"-")[0]) + 1 - began_ms
        assert number <= rate * came_ms / 1000 + reservation_size(rate), f"message {number} came after {came_ms} ms"


@pytest.mark.parametrize(("rate", "workers", "count"), [(200, 3, 200), (200, 1, 200), (12.5, 3, 12)])
def test_all_workers_together_keep_the_rate_and_reserve_no_more_than_they_use(
    client: Client, monkeypatch: pytest.MonkeyPatch, rate: float, workers: int, count: int
) -> None:
    fill(client, 1_000)
    reserved = count_reservations(monkeypatch)
    began_ms = now_ms(client)
    with ExitStack() as stack:
        loops = [
            stack.enter_context(working(client, make(double, rate=rate), f"w{number}")) for number in range(workers)
        ]
        eventually(lambda: client.execute("XLEN", "out") >= count)
    came_no_faster(client.execute("XRANGE", "out", "-", "+"), rate, began_ms)
    released = sum(loop.loop_metrics.released for loop in loops)  # read, and not begun when the stop came
    assert reserved["in"] <= client.execute("XLEN", "out") + released + workers * reservation_size(rate)


def test_nothing_is_reserved_without_a_rate(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(client, 500)
    reserved = count_reservations(monkeypatch)
    with working(client, make(double), "w1"), working(client, make(double), "w2"):
        eventually(lambda: client.execute("XLEN", "out") == 500)
    assert not reserved
    assert not client.execute("HEXISTS", KEYS.meta, "rate_at")


def test_each_stream_has_the_rate_for_itself(client: Client) -> None:
    fill(client, 1_000, stream="in.a")
    fill(client, 1_000, stream="in.b", first=1_000)
    began_ms = now_ms(client)
    with working(client, make(double, pattern="in.*", rate=100)):
        eventually(lambda: min(len([n for n in outputs(client) if n < 1_000]), len(outputs(client)) // 3) >= 20)
    entries = client.execute("XRANGE", "out", "-", "+")
    for some in (range(1_000), range(1_000, 2_000)):
        came_no_faster([entry for entry in entries if int(entry[1][1]) in some], 100, began_ms)
    store = CommitStore(client, app="app", handler="other")
    assert [store.reserve_rate(name, 0.001, 1) for name in ("in.a", "in.b")] == [0, 0]


def test_a_handler_that_was_idle_reads_a_message_at_once(client: Client) -> None:
    with ExitStack() as stack:
        slow = make(double, rate=1 / 3_600)  # without a reservation left over it would wait for an hour
        loops = [stack.enter_context(working(client, slow, f"w{number}")) for number in range(2)]
        eventually(lambda: client.execute("HEXISTS", KEYS.meta, "rate_at"))
        fill(client, 1)
        eventually(lambda: sum(loop.loop_metrics.committed for loop in loops) == 1)


def reserve(client: Client, rate: float, count: int) -> float:
    wait_ms = CommitStore(client, app="app", handler="handle").reserve_rate("in", rate, count)
    assert wait_ms is not None
    return wait_ms


def test_reservations_of_all_workers_follow_each_other(client: Client) -> None:
    began_ms = now_ms(client)
    waits = [reserve(client, 0.01, 2) for _ in range(4)]
    took_ms = now_ms(client) - began_ms
    assert waits[0] == 0
    for wait, due in zip(waits, (0, 200_000, 400_000, 600_000), strict=True):
        assert due - took_ms <= wait <= due
    client.execute("HSET", KEYS.meta, "rate_at", int(now_ms(client) * 1_000) - 1)  # all of them are over
    assert reserve(client, 0.01, 2) == 0


def test_a_clock_that_went_back_does_not_delay_the_handler(client: Client) -> None:
    began_ms = now_ms(client)
    client.execute("HSET", KEYS.meta, "rate_at", int(began_ms + 365 * 86_400_000) * 1_000)
    assert reserve(client, 0.01, 2) == 0
    wait_ms = reserve(client, 0.01, 2)
    assert 200_000 - (now_ms(client) - began_ms) <= wait_ms <= 200_000


@pytest.fixture
def clock() -> LeapClock:
    return LeapClock()


@pytest.fixture
def health(clock: LeapClock) -> Health:
    return Health(read_within_ms=READ_WITHIN_MS, clock=clock)


def test_a_loop_that_waits_for_its_rate_is_healthy(client: Client, clock: LeapClock, health: Health) -> None:
    fill(client, 5)
    with working(client, make(double, rate=1 / 3_600), health=health) as loop:
        eventually(lambda: loop.loop_metrics.committed == 1)
        wait_for_reads(health, clock)
        assert loop.loop_metrics.committed == 1


# Pause and resume


def test_a_paused_handler_reads_nothing_stays_healthy_and_continues_when_resumed(
    client: Client, clock: LeapClock, health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "millstream")
    fill(client, 10)
    with working(client, make(double), health=health) as loop:
        eventually(lambda: loop.loop_metrics.committed == 10)
        pause(client, loop)
        fill(client, 10, first=10)
        wait_for_reads(health, clock)
        assert (loop.loop_metrics.committed, loop.loop_metrics.read, health.readiness_failures()) == (10, 10, [])
        resume(client)
        eventually(lambda: loop.loop_metrics.committed == 20)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [one.partition(" is ")[2] for one in messages if " is paused" in one or " is resumed" in one] == [
        "paused by an operator on in",
        "resumed on in",
    ]
    assert sorted(outputs(client)) == list(range(20))


def test_a_worker_that_starts_while_paused_logs_it_and_reads_not_even_its_pending_entries(
    client: Client, clock: LeapClock, health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "millstream")
    with working(client, make(double)):
        pass
    fill(client, 5)
    client.execute("XREADGROUP", "GROUP", KEYS.group, "w1", "COUNT", 3, "STREAMS", "in", ">")
    pause(client)
    with working(client, make(double), health=health) as loop:
        wait_for_reads(health, clock)
        assert (loop.loop_metrics.read, loop.loop_metrics.claimed, outputs(client)) == (0, 0, [])
        assert caplog.text.count("is paused by an operator on in") == 1
        resume(client)
        eventually(lambda: loop.loop_metrics.committed == 5)
    assert pending(client) == 0


def test_a_paused_worker_finishes_its_entries_in_flight_and_claims_none(
    client: Client, clock: LeapClock, health: Health
) -> None:
    going_on = threading.Event()

    def handle(message: Message) -> dict[str, object]:
        going_on.wait(FAIL_SAFE_S)
        return double(message)

    fill(client, 1)
    with working(client, make(handle), health=health) as loop:
        eventually(lambda: loop.loop_metrics.read == 1)
        pause(client, loop)
        fill(client, 2, first=1)
        deliver_to(client, "dead", times=1)
        going_on.set()
        eventually(lambda: outputs(client) == [0])
        wait_for_reads(health, clock)
        assert (outputs(client), pending(client)) == ([0], 2)
        resume(client)
        eventually(lambda: pending(client) == 0)


def ran(client: Client, app: str, handler: str, *streams: str) -> None:
    for stream in streams:
        client.execute("XADD", stream, "*", "n", "1")
        client.execute("HSET", HandlerKeys(app, handler, stream).meta, "committed_id", "0-0", "owner", "workers")


def paused(client: Client, app: str, handler: str, *streams: str) -> list[bool]:
    store = CommitStore(client, app=app, handler=handler, token=1)
    return [store.check(stream)[0] is not None for stream in streams]


def test_the_commands_pause_and_resume_a_handler_on_its_streams_and_info_shows_it(client: Client) -> None:
    ran(client, "shop", "bill", "a", "b")
    ran(client, "shop", "ship", "a")
    done = call("pause", "shop.bill", "--json", url=client.url)
    assert done.json() == {"app": "shop", "handler": "bill", "streams": ["a", "b"], "paused": True}
    assert paused(client, "shop", "bill", "a", "b") == [True, True]
    assert paused(client, "shop", "ship", "a") == [False]
    assert "paused" in call("info", url=client.url).out
    assert "shop.bill is resumed on a" in call("resume", "shop.bill", "--stream", "a", url=client.url).out
    assert paused(client, "shop", "bill", "a", "b") == [False, True]
    shown = call("info", "--json", url=client.url).json()["handlers"]
    assert {(one["handler"], one["stream"]): one["paused"] for one in shown} == {
        ("bill", "a"): False,
        ("bill", "b"): True,
        ("ship", "a"): False,
    }
    output = call("info", "--wide", url=client.url).out
    assert (output.count("1 stream paused"), output.count("workers (0), paused")) == (1, 1), (
        "of the handler, and of its stream"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("bill",), 2, "'bill' is not APP.HANDLER: write bank.bill or shop.bill"),
        (("shop",), 2, "'shop' is not APP.HANDLER: write shop.bill"),
        (("shop.bill", "--stream", "z"), 1, "no handler 'shop.bill' has run on 'z'"),
        (("shop.nobody",), 1, "no handler 'shop.nobody' has run on this Redis"),
        (("a b.c",), 2, "must be 1 to 100 letters"),
    ],
)
def test_an_ambiguous_handler_is_one_line_of_error_and_nothing_is_paused(
    client: Client, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ran(client, "shop", "bill", "a")
    ran(client, "bank", "bill", "a")
    done = call("pause", *arguments, url=client.url)
    assert done.code == code
    assert message in done.err
    assert paused(client, "shop", "bill", "a") + paused(client, "bank", "bill", "a") == [False, False]


@pytest.mark.parametrize("slice_length", [1, 5])
def test_messages_behind_one_that_failed_count_once_as_read_and_in_the_rate(
    client: Client, monkeypatch: pytest.MonkeyPatch, slice_length: int
) -> None:
    """Those of its key go back to the key's queue before they have begun, and are leased again."""
    monkeypatch.setattr(InFlight, "slice_length", slice_length)
    client.pipeline([("XADD", "in", "*", "n", n, "k", n % 10) for n in range(1, 201)])
    reserved = count_reservations(monkeypatch)

    def fail_twice(message: Message) -> dict[str, bytes]:
        if int(message.fields["n"]) % 7 == 0 and message.attempt <= 2:
            raise RuntimeError
        return {"n": message.fields["n"]}

    handler = make(fail_twice, key="k", rate=1_000, retry=Retry(attempts=3, delay_ms=1))
    with working(client, handler) as loop:
        eventually(lambda: client.execute("XLEN", "out") == 200)
    assert loop.loop_metrics.read == 200
    assert reserved["in"] < 200 + 2 * reservation_size(1_000)


def returning(client: Client, count: int, hold: threading.Event) -> Handler:
    """A handler whose first message of each key fails once it is let go; so many messages go back behind each."""
    client.pipeline([("XADD", "in.b", "*", "n", n, "k", n % 2) for n in range(2 * (count + 1))])

    def fail_first(message: Message) -> dict[str, bytes]:
        if int(message.fields["n"]) < 2 and message.attempt == 1:
            assert hold.wait(FAIL_SAFE_S)
            raise RuntimeError
        return {"n": message.fields["n"]}

    return make(fail_first, pattern="in.*", key="k", retry=Retry(attempts=3, delay_ms=1))


def test_messages_that_went_back_are_no_reservation_at_a_rate_that_was_set_since(client: Client) -> None:
    """They were read without a rate; then an operator sets one of an hour for each message."""
    hold = threading.Event()
    store = CommitStore(client, app="app", handler="handle")
    with working(client, returning(client, 7, hold)) as loop:
        eventually(lambda: len(loop._in_flight) == 16)
        store.set_rate(["in.b"], 1 / 3_600)
        eventually(lambda: loop._ordering.streams["in.b"].rate_override is not None)
        hold.set()
        eventually(lambda: loop.loop_metrics.retried == 2)
        eventually(lambda: loop._ordering.fetcher._rate_limiter.is_waiting)
        eventually(lambda: not len(loop._in_flight))
        assert client.execute("XLEN", "out") <= 2 + reservation_size(1 / 3_600), (
            "the two that failed, and a reservation"
        )
        store.set_rate(["in.b"], None)
        eventually(lambda: client.execute("XLEN", "out") == 16)


def test_messages_that_go_back_on_a_stream_without_a_rate_end_no_worker(client: Client) -> None:
    """The rate of another stream was set while they were in flight, and this stream was paused."""
    hold = threading.Event()
    store = CommitStore(client, app="app", handler="handle")
    with working(client, returning(client, 7, hold)) as loop:
        client.execute("XADD", "in.a", "*", "n", 1_000, "k", "a")
        eventually(lambda: client.execute("XLEN", "out") == 1 and len(loop._in_flight) == 16)
        store.set_paused(["in.b"], paused=True)
        store.set_rate(["in.a"], 1_000)
        streams = loop._ordering.streams
        eventually(lambda: streams["in.b"].pause is not None and streams["in.a"].rate_override is not None)
        hold.set()
        client.execute("XADD", "in.a", "*", "n", 1_001, "k", "a")
        eventually(lambda: client.execute("XLEN", "out") == 2)
        store.set_paused(["in.b"], paused=False)
        eventually(lambda: client.execute("XLEN", "out") == 18)
