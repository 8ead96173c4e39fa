"""Runs of a handler with a limit: what it costs a worker to ask for permits, and what the wait for one counts as."""

import asyncio
import threading

import pytest

from millstream import Limit, Message
from millstream.redis_client.client import Client
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, make, working

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
