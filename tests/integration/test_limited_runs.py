"""Runs of a handler with a limit: what it costs a worker to ask for permits, and what the wait for one counts as."""

import asyncio
import threading
import time
from typing import Any

import pytest

from millstream import Limit, Message, Retry
from millstream.delivery.keyed_stream import KeyedStream
from millstream.redis_client.client import Client
from millstream.worker.policy import TIME_LIMIT_GRACE_MS
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, KINDS, QUICK, dead, either, make, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]


def publish(client: Client, count: int, tenant: str, *, keys: int = 4, first: int = 0) -> None:
    numbers = range(first, first + count)
    client.pipeline([("XADD", "in", "*", "n", n, "key", f"{tenant}{n % keys}", "tenant", tenant) for n in numbers])


def copy_of(message: Message) -> dict[str, str | None]:
    return {"n": message.text("n"), "key": message.text("key")}


def test_handlers_that_use_all_threads_of_their_loop_do_not_keep_permits_from_being_taken_and_returned(
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
@pytest.mark.parametrize("call", ["take_permit", "return_permit"])
def test_a_call_about_a_permit_that_takes_longer_than_the_time_limit_of_the_handler_is_no_part_of_the_run(
    client: Client, monkeypatch: pytest.MonkeyPatch, call: str, kind: str
) -> None:
    asked = threading.Event()
    time_limit_ms = 200
    attempts: list[int] = []
    real_call = getattr(KeyedStream, call)

    def slow_call(*args: Any) -> Any:
        if not asked.is_set():
            asked.set()
            time.sleep((time_limit_ms + TIME_LIMIT_GRACE_MS + 10 * QUICK.sweep_ms) / 1000)
        return real_call(*args)

    def handle(message: Message) -> dict[str, str | None]:
        attempts.append(message.attempt)
        return copy_of(message)

    monkeypatch.setattr(KeyedStream, call, slow_call)
    limit = Limit(per="tenant", at_once=1)
    handler = make(either(handle, kind), key="key", limit=limit, time_limit_ms=time_limit_ms, retry=Retry(attempts=1))
    publish(client, 1, "a")
    with working(client, handler, "w1"):
        eventually(lambda: client.execute("XLEN", "out") == 1, "the output")
    assert asked.is_set()
    assert attempts == [1]
    assert dead(client) == []
