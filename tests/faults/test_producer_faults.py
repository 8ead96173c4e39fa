"""The producer and delayed messages while connections break, movers are killed and Redis dies."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from millstream.delivery.delayed_messages import DelayedMessages
from millstream.producer.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.testing.proxy import Proxy
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
MESSAGES = 100_000 if SOAK else 4_000
REDIS_KILLS = 50 if SOAK else 3
KILLS = 200 if SOAK else 5
KEYS = 8

MOVER = """
import sys, time
from millstream.redis_client.client import Client
from millstream.delivery.delayed_messages import DelayedMessages
with Client(sys.argv[1]) as client:
    delayed = DelayedMessages(client)
    print("ready", flush=True)
    while True:
        if client.retry_while_unavailable(lambda: delayed.move_due(["s"]), what="mover").next_ms is None:
            time.sleep(0.001)
"""


class Hasty:
    """A clock that waits a hundredth of what it is asked to, since a hundred lost replies are waited for."""

    def monotonic_ms(self) -> float:
        return time.monotonic() * 1000.0

    def sleep_ms(self, duration_ms: float) -> None:
        time.sleep(duration_ms / 100_000.0)


def by_key(client: Client) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for _, pairs in client.execute("XRANGE", "s", "-", "+"):
        found.setdefault(int(pairs[1]), []).append(int(pairs[3]))
    return found


def in_order() -> dict[int, list[int]]:
    return {key: list(range(MESSAGES // KEYS)) for key in range(KEYS)}


def publish_keys(producer: Producer, delay_ms: float = 0.0, ids: list[str] | None = None) -> list[str]:
    """Publish every key's messages from a thread of its own, singly and in small batches; all ids, as they come."""
    ids = [] if ids is None else ids

    def publish(key: int) -> None:
        n, batch = 0, 0
        while n < MESSAGES // KEYS:
            batch = (batch + key) % 7
            some = [{"key": key, "n": m} for m in range(n, min(n + batch + 1, MESSAGES // KEYS))]
            if len(some) == 1:
                ids.append(producer.publish("s", some[0], delay_ms=delay_ms))
            else:
                ids.extend(producer.publish_many("s", some, delay_ms=delay_ms))
            n += len(some)

    run_together([threading.Thread(target=publish, args=(key,)) for key in range(KEYS)])
    return ids


def run_together(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_replies_that_are_lost_repeatedly_neither_lose_nor_double_nor_reorder_a_message(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client
) -> None:
    with (
        Proxy(millstream_fresh_server.port) as proxy,
        Client(proxy.url, clock=Hasty()) as fragile,
        Producer(fragile) as producer,
    ):
        proxy.cut_at_random("EVALSHA", before=0.01, after=0.02, seed=5)
        ids = publish_keys(producer)
    assert proxy.cuts["after", "EVALSHA"] >= MESSAGES / 1_000
    assert proxy.cuts["before", "EVALSHA"] >= MESSAGES / 2_000
    assert by_key(fresh_client) == in_order()
    assert sorted(ids) == sorted(entry_id.decode() for entry_id, _ in fresh_client.execute("XRANGE", "s", "-", "+"))


def test_ten_thousand_single_publishes_with_lost_replies_are_in_the_stream_once_and_in_order(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client
) -> None:
    with (
        Proxy(millstream_fresh_server.port) as proxy,
        Client(proxy.url, clock=Hasty()) as fragile,
        Producer(fragile) as producer,
    ):
        proxy.cut_at_random("EVALSHA", after=0.02, seed=6)
        ids = [producer.publish("s", {"key": n % KEYS, "n": n // KEYS}) for n in range(MESSAGES)]
    assert proxy.cuts["after", "EVALSHA"] >= MESSAGES / 100
    assert [entry_id.decode() for entry_id, _ in fresh_client.execute("XRANGE", "s", "-", "+")] == ids
    assert by_key(fresh_client) == in_order()


def test_a_redis_that_is_killed_repeatedly_loses_and_doubles_no_message(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client
) -> None:
    ids: list[str] = []

    def kill_and_restart() -> None:
        for number in range(REDIS_KILLS):
            goal = number * MESSAGES // (REDIS_KILLS + 1)
            eventually(lambda: len(ids) > goal, "some messages between two kills")  # noqa: B023
            millstream_fresh_server.kill()
            time.sleep(0.05)
            millstream_fresh_server.start()

    trouble = threading.Thread(target=kill_and_restart)
    trouble.start()
    try:
        with Producer(millstream_fresh_server.url) as producer:
            publish_keys(producer, ids=ids)
    finally:
        trouble.join()
    assert fresh_client.retry_while_unavailable(lambda: by_key(fresh_client), what="test") == in_order()


def test_movers_that_are_killed_at_any_point_neither_lose_nor_double_a_delayed_message(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client
) -> None:
    movers = [start_mover(millstream_fresh_server.url) for _ in range(2)]
    portion = MESSAGES // KILLS
    try:
        with Producer(fresh_client) as producer:
            for round_number in range(KILLS):
                some = range(round_number * portion, (round_number + 1) * portion)
                producer.publish_many("s", [{"key": n % KEYS, "n": n // KEYS} for n in some], delay_ms=5)
                time.sleep(0.002 * (round_number % 6))  # so that some die before, some during and some after the move
                victim = movers.pop(0)
                victim.send_signal(signal.SIGKILL)
                victim.communicate(timeout=FAIL_SAFE_S)
                movers.append(start_mover(millstream_fresh_server.url))
        delayed = DelayedMessages(fresh_client)
        eventually(lambda: not delayed.count("s"), "the last to be moved")
    finally:
        for mover in movers:
            mover.kill()
            mover.communicate(timeout=FAIL_SAFE_S)
    assert by_key(fresh_client) == in_order()


def start_mover(url: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", MOVER, url], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_delayed_messages_survive_a_redis_that_is_killed_and_broken_connections_of_movers(
    millstream_fresh_server: EmbeddedServer, fresh_client: Client
) -> None:
    with Producer(fresh_client) as producer:
        publish_keys(producer, delay_ms=200.0)
    millstream_fresh_server.kill()
    millstream_fresh_server.start()
    with Proxy(millstream_fresh_server.port) as proxy, Client(proxy.url, clock=Hasty()) as fragile:
        proxy.cut_at_random("EVALSHA", before=0.2, after=0.3, seed=8)
        delayed = DelayedMessages(fragile)
        while fragile.retry_while_unavailable(lambda: delayed.move_due(["s"]), what="test").next_ms is not None:
            pass
        assert proxy.cuts.total() >= 5
    assert fresh_client.retry_while_unavailable(lambda: by_key(fresh_client), what="test") == in_order()
