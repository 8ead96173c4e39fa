"""A worker whose handler has a key: order, state, failures, stops, and the end of a lease."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from millstream import Message, Reject, Retry, State
from millstream.admin.key_queues import list_queues, park, unpark
from millstream.delivery.keyed_stream import KeyedStream, lease_of, queue_of_key
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import HandlerStuck
from millstream.observability import metrics as m
from millstream.redis_client.client import Client
from millstream.redis_client.scripts import Script
from millstream.testing.invariants import check_invariants
from millstream.testing.proxy import Proxy
from millstream.worker.completion_queue import FinishedRun
from millstream.worker.running.poison_isolation import ProcessIsolation
from tests.support.clocks import LeapClock
from tests.support.fields import text_fields
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, QUICK, dead, double, ending, figure, make, pending, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]


def count(message: Message, state: State) -> dict[str, Any]:
    state["count"] = state.get("count", 0) + 1
    return {"n": message.text("n"), "key": message.key or b"-", "count": state["count"], "attempt": message.attempt}


async def count_async(message: Message, state: State) -> dict[str, Any]:
    await asyncio.sleep(0.001 * (int(message.fields["n"]) % 3))
    return count(message, state)


def fill(client: Client, total: int, keys: int, first: int = 0) -> None:
    client.pipeline([("XADD", "in", "*", "n", n, "key", f"k{n % keys}") for n in range(first, first + total)])


def rows(client: Client) -> list[dict[str, str]]:
    return [text_fields(pairs) for _, pairs in client.execute("XRANGE", "out", "-", "+")]


def check_order(client: Client, total: int) -> None:
    """Check: each message once, each key in order, on the state of the message before; nothing is left."""
    found = rows(client)
    assert len(found) == total
    by_key: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in found:
        by_key[row["key"]].append(row)
    for some in by_key.values():
        assert [int(row["n"]) for row in some] == sorted({int(row["n"]) for row in some})
        assert [int(row["count"]) for row in some] == list(range(1, len(some) + 1))
    assert pending(client) == 0
    assert check_invariants(client, KEYS, "in") == []


def test_a_joining_worker_does_not_get_entries_that_another_read_while_messages_were_short(client: Client) -> None:
    hold = threading.Event()

    def work(message: Message) -> dict[str, Any]:
        if b"slow" in message.pairs:
            hold.wait(0.2)
        return {"n": message.text("n"), "key": message.key or b"", "count": 1}

    policy = replace(QUICK, threads=2)
    with working(client, make(work, key="key"), "w1", policy=policy) as one:
        fill(client, 2_000, 2_000)
        eventually(lambda: len(rows(client)) == 2_000)
        client.pipeline([("XADD", "in", "*", "n", n, "key", f"k{n}", "slow", 1) for n in range(2_000, 3_000)])
        # How many it takes follows how quick it was; at five a second and thread it would take ten.
        eventually(lambda: len(client.execute("HKEYS", KEYS.owners)) > 20 or one.loop_metrics.released > 0)
        with working(client, make(work, key="key"), "w2", policy=policy) as two:
            eventually(lambda: two.loop_metrics.committed > 10 and one.loop_metrics.released > 0)
            hold.set()
            eventually(lambda: len(rows(client)) == 3_000)
    check_order(client, 3_000)


@pytest.mark.parametrize("function", [count, count_async])
def test_workers_share_keys_and_each_key_stays_in_order_with_its_state(
    client: Client, function: Callable[..., Any]
) -> None:
    handler = make(function, key="key")
    with working(client, handler, "w1") as one, working(client, handler, "w2") as two:
        for first in range(0, 2_000, 500):
            fill(client, 500, 40, first)
        eventually(lambda: len(rows(client)) >= 2_000)
    assert one.loop_metrics.committed + two.loop_metrics.committed == 2_000
    check_order(client, 2_000)


def test_a_key_can_be_a_function_and_a_message_without_one_is_a_dead_letter_or_unordered(client: Client) -> None:
    handler = make(count, key=lambda message: message.fields.get("key", b"").upper(), missing_key="unordered")
    fill(client, 4, 2)
    client.execute("XADD", "in", "*", "n", 9)
    with working(client, handler):
        eventually(lambda: len(rows(client)) >= 5)
    assert sorted((row["key"], row["count"]) for row in rows(client)) == [
        ("-", "1"),
        ("K0", "1"),
        ("K0", "2"),
        ("K1", "1"),
        ("K1", "2"),
    ]


def back_offs_end(client: Client) -> None:
    """Make messages that back off due at once."""
    for queue in client.execute("ZRANGE", KEYS.backoff, 0, -1):
        client.execute("ZADD", KEYS.backoff, "XX", 0, queue)


def leased_until(client: Client) -> float:
    """Return when the first lease expires, by the server's clock; infinite if there is none."""
    return min(
        (float(score) for score in client.execute("ZRANGE", KEYS.leases, 0, -1, "WITHSCORES")[1::2]), default=inf
    )


def keeps_leases(client: Client, clock: LeapClock) -> None:
    """Let more time pass than a lease lasts, for a worker that has to renew its leases meanwhile."""
    for _ in range(3):
        before = leased_until(client)
        assert before < inf
        clock.leap(QUICK.claim_ms / 2)
        eventually(lambda: leased_until(client) > before, "longer leases")  # noqa: B023 - it is over by then


def failing(key: str, times: int) -> Callable[..., Any]:
    """Like `count`, but the first message of one key fails so many times."""

    def handle(message: Message, state: State) -> dict[str, Any]:
        if message.key == key.encode() and message.fields["n"] == b"0" and message.attempt <= times:
            raise RuntimeError("not yet")
        return count(message, state)

    return handle


def test_a_failing_message_keeps_its_place_while_other_keys_go_on(client: Client) -> None:
    fill(client, 12, 3)
    handler = make(failing("k0", 2), key="key", retry=Retry(attempts=3, delay_ms=600_000, max_delay_ms=600_000))
    with working(client, handler) as loop:
        eventually(lambda: len(rows(client)) >= 8)
        for failed in (1, 2):
            eventually(lambda: loop.loop_metrics.retried == failed)  # noqa: B023 - it is over by then
            assert {row["key"] for row in rows(client)} == {"k1", "k2"}
            eventually(lambda: client.execute("ZCARD", KEYS.backoff) == 1)
            back_offs_end(client)
        eventually(lambda: len(rows(client)) >= 12)
    check_order(client, 12)
    assert [row["attempt"] for row in rows(client) if row["key"] == "k0"] == ["3", "1", "1", "1"]


def test_a_key_is_parked_after_its_last_attempt_and_goes_on_where_it_stopped(client: Client) -> None:
    fill(client, 12, 3)
    handler = make(failing("k0", 3), key="key", retry=Retry(attempts=3, delay_ms=10, then="park"))
    with working(client, handler) as loop:
        eventually(lambda: loop.loop_metrics.parked == 1 and len(rows(client)) >= 8)
        fill(client, 3, 3, first=12)
        eventually(lambda: len(rows(client)) >= 10)
        (queue,) = list_queues(client, KEYS)
        assert (queue.state, queue.key, queue.length, queue.failed_attempts) == ("parked", b"k0", 5, 3)
        assert queue.parked_reason == "failed: RuntimeError: not yet"
        assert unpark(client, KEYS, queue.name)
        eventually(lambda: loop.loop_metrics.parked == 2)
    assert dead(client) == []
    mended = make(count, key="key")
    unpark(client, KEYS, queue.name)
    with working(client, mended):
        eventually(lambda: len(rows(client)) >= 15)
    check_order(client, 15)


def test_a_key_that_blocks_is_retried_for_ever_and_no_other_waits(client: Client) -> None:
    others_are_done = threading.Event()

    def handle(message: Message, state: State) -> dict[str, Any]:
        if message.fields["n"] == b"0" and (message.attempt < 9 or not others_are_done.is_set()):
            raise RuntimeError("not yet")
        return count(message, state)

    fill(client, 6, 2)
    retry = Retry(attempts=2, delay_ms=5, max_delay_ms=10, then="block")
    with working(client, make(handle, key="key", retry=retry)):
        eventually(lambda: len(rows(client)) >= 3)
        others_are_done.set()
        eventually(lambda: len(rows(client)) >= 6)
    check_order(client, 6)
    assert int(rows(client)[3]["attempt"]) >= 9
    assert dead(client) == []


def test_a_rejected_message_is_a_dead_letter_at_once_and_its_key_goes_on(client: Client) -> None:
    def handle(message: Message, state: State) -> dict[str, Any]:
        if message.fields["n"] == b"2":
            raise Reject("not this one")
        return count(message, state)

    fill(client, 6, 2)
    with working(client, make(handle, key="key", retry=Retry(attempts=3, then="park"))):
        eventually(lambda: len(rows(client)) >= 5)
    (letter,) = dead(client)
    assert (letter.reason, letter.key) == ("rejected", b"k0")
    assert [row["count"] for row in rows(client) if row["key"] == "k0"] == ["1", "2"]


def test_a_stop_returns_unstarted_keys_and_counts_no_attempt(client: Client) -> None:
    release = threading.Event()

    def slowly(message: Message, state: State) -> dict[str, Any]:
        if int(message.fields["n"]) >= 12:
            release.wait(FAIL_SAFE_S)
        return count(message, state)

    fill(client, 60, 6)
    two_keys_wait = replace(QUICK, threads=4)
    with working(client, make(slowly, key="key"), policy=two_keys_wait) as loop:
        eventually(lambda: len(rows(client)) >= 3)
        loop.stop()
        eventually(lambda: loop.loop_metrics.released > 0)
        release.set()
    assert len(rows(client)) < 60
    assert check_invariants(client, KEYS, "in") == []
    assert {queue.state for queue in list_queues(client, KEYS)} == {"ready"}
    with working(client, make(count, key="key"), "w2"):
        eventually(lambda: len(rows(client)) >= 60)
    check_order(client, 60)
    assert {row["attempt"] for row in rows(client)} == {"1"}


def test_a_stop_between_two_messages_of_a_key_leaves_no_lease_behind(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    between, released = threading.Event(), threading.Event()
    for_long = replace(QUICK, claim_ms=int(1_000 * FAIL_SAFE_S), stop_ms=int(1_000 * FAIL_SAFE_S))
    with working(client, make(count, key="key"), policy=for_long) as loop:
        in_flight, ordering, committer = loop._in_flight, loop._ordering, loop._ordering.committer
        start, release, settle = in_flight.start, ordering.release, committer.settle

        def start_the_second_after_the_release(delivery: Delivery, now_ms: float, **options: Any) -> bool | None:
            if delivery is lease_of(delivery).entries[1]:
                between.set()
                released.wait(FAIL_SAFE_S)
            return start(delivery, now_ms, **options)

        def settle_after_the_release(finished: Sequence[FinishedRun]) -> None:
            released.wait(FAIL_SAFE_S)
            settle(finished)

        def release_and_say_so(deliveries: Sequence[Delivery]) -> None:
            release(deliveries)
            released.set()

        monkeypatch.setattr(in_flight, "start", start_the_second_after_the_release)
        monkeypatch.setattr(committer, "settle", settle_after_the_release)
        monkeypatch.setattr(ordering, "release", release_and_say_so)
        entries = [("XADD", "in", "*", "n", n, "key", "k0") for n in range(4)]
        client.pipeline([("MULTI",), *entries, ("EXEC",)])  # all at once, so that one lease has them
        eventually(between.is_set, "the end of the first run")
    assert (len(rows(client)), in_flight.leases) == (1, set())
    assert {queue.state for queue in list_queues(client, KEYS)} == {"ready"}


def test_redis_out_of_memory_delays_effects_counts_no_attempt_and_keeps_the_order(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    clock, begun, full = LeapClock(), threading.Event(), threading.Event()

    def handle(message: Message, state: State) -> dict[str, Any]:
        if int(message.fields["n"]) >= 200:
            begun.set()
            full.wait(FAIL_SAFE_S)
        return count(message, state)

    with working(client, make(handle, key="key"), clock=clock):
        fill(client, 200, 10)
        eventually(lambda: len(rows(client)) >= 200)
        fill(client, 2_000, 10, first=200)
        eventually(begun.is_set)
        client.execute("CONFIG", "SET", "maxmemory", "1")
        full.set()
        try:
            eventually(lambda: " postponed: " in caplog.text)
            keeps_leases(client, clock)
        finally:
            client.execute("CONFIG", "SET", "maxmemory", "0")
        eventually(lambda: len(rows(client)) >= 2_200)
        eventually(lambda: "app.handle resumes: Redis has stored its postponed commits after " in caplog.text)
    check_order(client, 2_200)
    assert {row["attempt"] for row in rows(client)} == {"1"}
    assert dead(client) == []


@pytest.fixture
def proxy(client: Client) -> Iterator[Proxy]:
    with Proxy(int(client.url.rpartition(":")[2].partition("/")[0])) as opened:
        yield opened


AT_ONCE = replace(QUICK, stop_ms=0)
NEARLY_MS = QUICK.claim_ms - 5_000
"""A worker gives up a tenth of a lease before it expires."""
FETCHING = {f"millstream-{name}" for name in ("fetcher", "delayed-mover", "router")}
"""The threads that a stop ends before the runs have ended."""


def test_an_async_handler_is_cancelled_before_its_lease_ends(client: Client, proxy: Proxy) -> None:
    begun, ended, clock = threading.Event(), threading.Event(), LeapClock()

    async def hang(_: Message) -> None:
        begun.set()
        try:
            await asyncio.sleep(2 * FAIL_SAFE_S)
        finally:
            ended.set()

    fill(client, 1, 1)
    handler = make(hang, key="key", into=None, time_limit_ms=600_000)
    with Client(proxy.url) as through, working(through, handler, policy=AT_ONCE, clock=clock):
        eventually(begun.is_set)
        proxy.freeze()
        clock.leap(QUICK.claim_ms / 2)
        assert not ended.wait(0.3)
        clock.leap(NEARLY_MS - QUICK.claim_ms / 2)
        eventually(ended.is_set)
        proxy.resume()
    assert [queue.length for queue in list_queues(client, KEYS)] == [1]


@pytest.mark.waits
def test_an_async_suspect_is_cancelled_before_its_lease_ends_and_its_process_is_not_blamed_later(
    client: Client, proxy: Proxy
) -> None:
    begun, ended, clock = threading.Event(), threading.Event(), LeapClock()

    async def hang_once(message: Message) -> dict[str, Any]:
        if not begun.is_set():
            begun.set()
            try:
                await asyncio.sleep(2 * FAIL_SAFE_S)
            finally:
                ended.set()
        return {"n": message.text("n")}

    fill(client, 1, 1)
    ((entry_id, _),) = client.execute("XRANGE", "in", "-", "+")
    client.execute("HSET", KEYS.crashes, entry_id + b"l", 1)
    handler = make(hang_once, key="key", time_limit_ms=600_000, retry=Retry(attempts=2))
    with Client(proxy.url) as through, working(through, handler, policy=AT_ONCE, clock=clock):
        eventually(begun.is_set)
        assert client.execute("HEXISTS", KEYS.crashes, entry_id + b"a") == 1, "it runs in isolation"
        proxy.cut_before("HGET", containing=KEYS.crashes, times=2)  # so that the mark cannot be removed at once
        proxy.freeze()
        clock.leap(NEARLY_MS)
        eventually(ended.is_set)
        park(client, KEYS, b"kk0", "so that it is not run again")
        proxy.resume()
        eventually(lambda: client.execute("HEXISTS", KEYS.crashes, entry_id + b"a") == 0, "the removal of the mark")
        assert unpark(client, KEYS, b"kk0")
        eventually(lambda: len(rows(client)) == 1, "its next run, in the same process")
    assert client.execute("EXISTS", KEYS.crashes) == 0


def test_a_plain_handler_that_outlasts_its_lease_ends_the_process(
    client: Client, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    begun, over, clock = threading.Event(), threading.Event(), LeapClock()

    def hang(_: Message) -> None:
        begun.set()
        over.wait(FAIL_SAFE_S)

    fill(client, 1, 1)
    handler = make(hang, key="key", into=None, time_limit_ms=600_000)
    stuck: dict[str, Any] = {"match": "though its lease is about to expire", "policy": AT_ONCE, "clock": clock}
    with Client(proxy.url) as through, ending(HandlerStuck, through, handler, **stuck):
        eventually(begun.is_set)
        proxy.freeze()
        clock.leap(NEARLY_MS)
        eventually(lambda: "leases on 1 messages of in expire" in caplog.text)
        proxy.resume()
    over.set()
    assert [queue.length for queue in list_queues(client, KEYS)] == [1]


def test_a_plain_handler_that_outlasts_its_lease_during_a_stop_ends_the_process_while_redis_is_away(
    client: Client, proxy: Proxy
) -> None:
    begun, over, clock = threading.Event(), threading.Event(), LeapClock()
    told: list[HandlerStuck] = []

    def hang(_: Message) -> None:
        begun.set()
        over.wait(FAIL_SAFE_S)

    fill(client, 1, 1)
    handler = make(hang, key="key", into=None, time_limit_ms=600_000)
    before = set(threading.enumerate())
    stuck: dict[str, Any] = {"match": "though its lease is about to expire", "clock": clock}
    stuck |= {"policy": replace(QUICK, stop_ms=600_000), "isolation": ProcessIsolation("", told.append)}
    with Client(proxy.url) as through, ending(HandlerStuck, through, handler, **stuck) as loop:
        eventually(begun.is_set)
        fetching = {one for one in set(threading.enumerate()) - before if one.name in FETCHING}
        assert len(fetching) == len(FETCHING)
        loop.stop()
        eventually(lambda: not any(one.is_alive() for one in fetching), "a stop that waits for the run alone")
        proxy.freeze()
        clock.leap(NEARLY_MS)
        eventually(lambda: told, "the end of the process")
        proxy.resume()
    over.set()


def test_a_key_that_fails_does_not_use_up_the_rate_of_the_others(client: Client) -> None:
    def handle(message: Message, state: State) -> dict[str, Any]:
        if message.key == b"k0":
            raise RuntimeError("never")
        return count(message, state)

    client.pipeline([("XADD", "in", "*", "n", n, "key", "k0") for n in range(40)])
    client.pipeline([("XADD", "in", "*", "n", n, "key", f"k{n}") for n in range(1, 101)])
    handler = make(handle, key="key", rate=200, retry=Retry(attempts=1_000, delay_ms=20, factor=1, then="block"))
    with working(client, handler) as loop:
        eventually(lambda: len(rows(client)) >= 100)
        assert loop.loop_metrics.read <= 140


def test_a_run_that_outlasts_a_stop_keeps_its_lease(client: Client) -> None:
    begun: list[str] = []
    release, clock = threading.Event(), LeapClock()

    def slowly(message: Message, state: State) -> dict[str, Any]:
        begun.append(threading.current_thread().name)
        release.wait(FAIL_SAFE_S)
        return count(message, state)

    handler = make(slowly, key="key", time_limit_ms=600_000)
    patient = replace(QUICK, stop_ms=600_000)
    with working(client, handler, "w1", policy=patient, clock=clock) as first:
        fill(client, 1, 1)
        eventually(lambda: len(begun) == 1)
        with working(client, handler, "w2"):
            first.stop()
            keeps_leases(client, clock)
            release.set()
            eventually(lambda: len(rows(client)) == 1)
    assert len(begun) == 1
    check_order(client, 1)


def test_a_stream_whose_first_joins_fail_is_enqueued_after_all(client: Client, proxy: Proxy) -> None:
    fill(client, 20, 4)
    client.execute("SCRIPT", "LOAD", Script("commit/join_workers").text)
    proxy.cut_before("EVALSHA", containing=Script("commit/join_workers").sha, times=1)
    proxy.cut_after("EVALSHA", containing=Script("commit/join_workers").sha, times=1)
    with Client(proxy.url) as through, working(through, make(count, key="key")):
        eventually(lambda: len(rows(client)) >= 20)
    check_order(client, 20)
    assert proxy.cuts.total() == 2


def test_the_lag_counts_messages_in_key_queues(client: Client) -> None:
    def hang(message: Message) -> None:
        over.wait(FAIL_SAFE_S)

    over = threading.Event()
    fill(client, 500, 100)
    with working(client, make(hang, key="key", into=None)):
        eventually(lambda: pending(client) == 500, "all messages in key queues")
        assert figure(client, m.LAG) == 500
        over.set()


def test_a_worker_warns_before_one_key_fills_the_look_ahead(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    def work(message: Message) -> None:
        if message.key == b"k0":
            raise RuntimeError("not yet")

    handler = make(
        work, key="key", into=None, retry=Retry(attempts=2, delay_ms=3_600_000, max_delay_ms=3_600_000, then="block")
    )
    with working(client, handler, policy=replace(QUICK, look_ahead=50)):
        fill(client, 30, 1)
        eventually(lambda: pending(client) == 30)
        fill(client, 10, 1)
        eventually(lambda: figure(client, m.LOOK_AHEAD_USED) == 0.8)
        eventually(lambda: caplog.text.count("raise --look-ahead") == 1)
        assert "app.handle: key queues of in are nearly full" in caplog.text
        assert "`millstream key list app.handle`" in caplog.text
        assert "routing is paused" not in caplog.text
        fill(client, 20, 1)
        eventually(lambda: figure(client, m.LOOK_AHEAD_USED) == 1)
        eventually(lambda: caplog.text.count("routing is paused") == 1)


def test_a_stream_of_a_pattern_that_cannot_be_processed_is_retried_without_a_restart(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.execute("XADD", "in", "*", "key", "k0", "n", 0)
    parking = make(failing("k0", 1), pattern="in*", key="key", retry=Retry(attempts=1, then="park"))
    with working(client, parking) as loop:
        eventually(lambda: loop.loop_metrics.parked == 1)
    (queue,) = list_queues(client, KEYS)
    clock = LeapClock()
    with working(client, make(double, pattern="in*"), clock=clock):  # without a key it cannot go on with parked keys
        client.execute("XADD", "in2", "*", "key", "k1", "n", 0)
        eventually(lambda: rows(client) and "has parked keys" in caplog.text, "the other stream, and a warning")
        assert unpark(client, KEYS, queue.name)
        clock.leap(60_000)
        eventually(lambda: len(rows(client)) == 2, "the message of the key that was parked")
    assert caplog.text.count("skipping it, and trying again every 60 s") == 1


def test_messages_that_earlier_code_queued_without_a_key_are_processed_in_the_order_of_their_key(
    client: Client,
) -> None:
    fill(client, 40, 4)
    earlier = KeyedStream(
        client,
        "in",
        queue_of=lambda entry_id, _: queue_of_key(None, entry_id),
        app="app",
        handler="handle",
        consumer="w0",
    )
    earlier.join()
    assert earlier.enqueue_new(count=25, max_pending=1_000)
    with working(client, make(count, key="key")):
        eventually(lambda: len(rows(client)) + len(dead(client)) == 40, "all messages")
        eventually(lambda: pending(client) == 0, "their commits")
    assert dead(client) == []
    check_order(client, 40)
