"""Workers of a handler with a key that share the keys of many streams: the cost of idle streams, and the reports of ready ones."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from millstream import Message, State
from millstream.admin.key_queues import park, unpark
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.testing.invariants import check_invariants
from tests.support.fields import text_fields
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import QUICK, make, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]

CALM = replace(QUICK, sweep_ms=500, block_ms=1_000)
HOUR_MS = 3_600_000
NOTIFIED_ONLY = replace(QUICK, sweep_ms=HOUR_MS, claim_ms=3 * HOUR_MS, block_ms=1_000)
"""Polls nothing by itself: any work done shows that the worker was notified of it."""


def count(message: Message, state: State) -> dict[str, Any]:
    state["count"] = state.get("count", 0) + 1
    return {"stream": message.stream, "n": message.text("n"), "key": message.key or b"-", "count": state["count"]}


def publish(client: Client, streams: int, rounds: int = 1, first: int = 0) -> None:
    """Add an entry of each of two keys to each stream."""
    for n in range(first, first + rounds):
        client.pipeline([("XADD", f"in{s}", "*", "n", n, "key", f"k{key}") for s in range(streams) for key in range(2)])


def rows(client: Client) -> list[tuple[str, str, int, int]]:
    found = []
    for _, pairs in client.execute("XRANGE", "out", "-", "+"):
        row = text_fields(pairs)
        found.append((row["stream"], row["key"], int(row["n"]), int(row["count"])))
    return found


def check_all(client: Client, streams: int, rounds: int) -> None:
    """Check: each key of each stream in order, each message once, on the state of the one before; nothing is left."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for stream, key, n, counted in rows(client):
        found.setdefault((stream, key), []).append((n, counted))
    assert len(found) == 2 * streams
    assert all(some == [(n, n + 1) for n in range(rounds)] for some in found.values())
    for number in range(streams):
        assert check_invariants(client, HandlerKeys("app", "handle", f"in{number}"), f"in{number}") == []


def commands(client: Client) -> int:
    stats = client.execute("INFO", "stats").decode()
    return int(stats.partition("total_commands_processed:")[2].partition("\r\n")[0])


def commands_a_second(client: Client) -> float:
    """Measured over two seconds: as many polls as show whether they cost something."""
    began_s, before = time.monotonic(), commands(client)
    time.sleep(2.0)
    return (commands(client) - before) / (time.monotonic() - began_s)


def test_workers_share_the_keys_of_many_streams_and_each_key_stays_in_order(client: Client) -> None:
    publish(client, 60)
    handler = make(count, pattern="in*", key="key")
    with working(client, handler, "w1") as one, working(client, handler, "w2") as two:
        for n in range(1, 10):
            publish(client, 60, first=n)
        eventually(lambda: len(rows(client)) == 1_200)
        eventually(lambda: one.loop_metrics.committed + two.loop_metrics.committed == 1_200)
    check_all(client, 60, 10)


def test_a_worker_that_does_not_poll_is_notified_of_new_entries(client: Client) -> None:
    publish(client, 30)
    handler = make(count, pattern="in*", key="key")
    with working(client, handler, policy=NOTIFIED_ONLY):
        for n in range(1, 6):
            eventually(lambda: len(rows(client)) == 60 * n)  # noqa: B023 - it is over by then
            publish(client, 30, first=n)
        eventually(lambda: len(rows(client)) == 360)
    check_all(client, 30, 6)


def test_a_worker_that_is_not_the_key_router_is_notified_by_the_router(client: Client) -> None:
    publish(client, 20)
    release, blocked = threading.Event(), threading.Event()

    def work(message: Message, state: State) -> dict[str, Any]:
        if message.text("n") == "7":
            blocked.set()
            release.wait(FAIL_SAFE_S)
        return count(message, state)

    handler = make(work, pattern="in*", key="key", time_limit_ms=86_400_000)
    policy = replace(NOTIFIED_ONLY, threads=1, prefetch=1)
    with working(client, handler, "w1", policy=policy) as one:
        eventually(lambda: one.loop_metrics.committed == 40)
        client.execute("XADD", "in0", "*", "n", 7, "key", "busy")
        eventually(blocked.is_set)  # it routes, and is blocked
        with working(client, handler, "w2", policy=policy) as two:
            for n in range(1, 4):
                publish(client, 20, first=n)
                eventually(lambda: two.loop_metrics.committed == 40 * n)  # noqa: B023 - it is over by then
        release.set()
        eventually(lambda: one.loop_metrics.committed == 41)


def test_entries_of_an_unparked_key_are_found_without_a_notification(client: Client) -> None:
    publish(client, 20)
    handler = make(count, pattern="in*", key="key")
    keys = HandlerKeys("app", "handle", "in3")
    with working(client, handler, policy=CALM):
        eventually(lambda: len(rows(client)) == 40)
        park(client, keys, b"kk1", "by hand")
        publish(client, 20, first=1)
        eventually(lambda: len(rows(client)) == 79)
        unpark(client, keys, b"kk1")
        eventually(lambda: len(rows(client)) == 80)
    check_all(client, 20, 2)


def test_the_cost_of_idle_streams_does_not_grow_with_their_number(client: Client) -> None:
    """Polling 500 streams twice a second, with the ten commands of a lease, would be 10,000 commands a second."""
    streams = 500
    publish(client, streams)
    handler = make(count, pattern="in*", key="key")
    with working(client, handler, policy=replace(CALM, threads=4)):
        eventually(lambda: client.execute("XLEN", "out") == 2 * streams)
        publish(client, 1, first=1)
        eventually(lambda: commands_a_second(client) < 2_000, "few commands a second")
