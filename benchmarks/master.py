"""A master with consumers that only read and acknowledge, compared with the same loop without a master.

The consumers are a second process: each reads its assigned messages (XREADGROUP 0) and acknowledges with an HTTP call
to a `millstream master` process. The cost is the total CPU time of the master's process: HTTP, health checks,
delegation loop. The raw loop is as many consumers on bare connections with XREADGROUP and XACK, also one message at a
time, without an order per ticket; both are measured in the same run. `batch`: consumers with ten messages at once,
acknowledged in one call.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import hiredis
import psutil

from benchmarks.workers import server
from millstream.redis_client.client import Client

STREAM, GROUP, TOKEN = "tickets", "workers", "a-token-of-the-benchmark"
CONSUMERS, TICKETS, BATCH = 16, 2_000, 10
_pack: Any = hiredis.pack_command


def run(*, messages: int = 20_000) -> dict[str, Any]:
    """Measure over `messages` messages, one by one and ten at a time."""
    with server() as client:
        client.execute("XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM")
        raw = _measured(client, messages, raw_consumer)
        one, one_cpu = _with_master(client, messages, 1)
        ten, ten_cpu = _with_master(client, messages, BATCH)
    return {
        "name": "master",
        "ratio": round(one / raw, 3),
        "rate": round(one),
        "master_cpu_us": round(one_cpu),
        "batch_rate": round(ten),
        "batch_master_cpu_us": round(ten_cpu),
        "baseline_rate": round(raw),
        "messages": messages,
    }


def _with_master(client: Client, messages: int, at_once: int) -> tuple[float, float]:
    """Messages per second, and the master's CPU time per message in microseconds."""
    client.execute("FLUSHALL")
    with _master(client.url, at_once) as (process, url):

        async def consume(number: int, goal: "Goal") -> None:
            await consumer(client.url, url, f"c{number}", at_once, goal)

        spent = process.cpu_times()
        rate = _measured(client, messages, consume)
        used = process.cpu_times()
    return rate, (used.user + used.system - spent.user - spent.system) / messages * 1e6


class Goal:
    """The number of all messages, and of done ones."""

    def __init__(self, url: str, messages: int) -> None:
        self.url = url
        self.left = messages


def _measured(client: Client, messages: int, consume: Callable[[int, Goal], Awaitable[None]]) -> float:
    """Messages per second of all consumers together, from a stream filled before."""
    for at in range(0, messages, 1_000):
        client.pipeline(
            [
                ("XADD", STREAM, "*", "ticket_id", f"T{n * 7919 % TICKETS}", "payload", b"x" * 100)
                for n in range(at, min(at + 1_000, messages))
            ]
        )

    async def work() -> float:
        goal = Goal(client.url, messages)
        began = time.perf_counter()
        await asyncio.gather(*(consume(number, goal) for number in range(CONSUMERS)))
        return messages / (time.perf_counter() - began)

    return asyncio.run(work())


async def raw_consumer(number: int, goal: Goal) -> None:
    """Read and acknowledge messages until there are no more."""
    async with _redis(goal.url) as ask:
        while found := await ask("XREADGROUP", "GROUP", GROUP, f"c{number}", "COUNT", "1", "STREAMS", STREAM, ">"):
            await ask("XACK", STREAM, GROUP, found[0][1][0][0])


async def consumer(redis_url: str, master_url: str, name: str, at_once: int, goal: Goal) -> None:
    """Register, then read and acknowledge messages until the consumers have done all of them."""
    async with _redis(redis_url) as ask, _http(master_url) as post:
        await post("consumers/register", {"consumer": name, "max_tickets": at_once})
        while goal.left > 0:
            found = await ask("XREADGROUP", "GROUP", GROUP, name, "COUNT", str(at_once), "STREAMS", STREAM, "0")
            ids = [one.decode() for one, _ in found[0][1]] if found else []
            if not ids:
                await asyncio.sleep(0.005)
                continue
            what = {"message_id": ids[0]} if len(ids) == 1 else {"message_ids": ids}
            answer = await post("messages/acknowledge", {"consumer": name, **what})
            if answer["known"] or answer.get("refused"):
                raise AssertionError(f"a message was not acknowledged: {answer}")
            goal.left -= len(ids)


@asynccontextmanager
async def _redis(url: str) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    parts = urlsplit(url)
    incoming, outgoing = await asyncio.open_connection(parts.hostname, parts.port)
    reader = hiredis.Reader()

    async def ask(*command: str | bytes) -> Any:
        outgoing.write(_pack(command))
        while (reply := reader.gets()) is False:
            reader.feed(await incoming.read(1 << 16))
        if isinstance(reply, Exception):
            raise reply
        return reply

    try:
        yield ask
    finally:
        outgoing.close()


@asynccontextmanager
async def _http(url: str) -> AsyncIterator[Callable[[str, dict[str, Any]], Awaitable[Any]]]:
    parts = urlsplit(url)
    incoming, outgoing = await asyncio.open_connection(parts.hostname, parts.port)

    async def post(path: str, body: dict[str, Any]) -> Any:
        text = json.dumps(body).encode()
        outgoing.write(
            b"POST /api/%s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (path.encode(), parts.netloc.encode(), TOKEN.encode(), len(text), text)
        )
        head = (await incoming.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        found = json.loads(await incoming.readexactly(length))
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise AssertionError(f"the master refused {path}: {found}")
        return found

    try:
        yield post
    finally:
        outgoing.close()


@contextmanager
def _master(url: str, at_once: int) -> Iterator[tuple[psutil.Process, str]]:
    """A `millstream master` process, and its address."""
    names = ("--ticket-stream", STREAM, "--concurrency-stream-group", GROUP, "--max-tickets", str(at_once))
    program = (
        sys.executable,
        "-m",
        "millstream.cli.main",
        "master",
        *names,
        "--url",
        url,
        "--token",
        TOKEN,
        "--port",
        "0",
    )
    # The consumers send no heartbeats: the benchmark ends before they count as dead.
    with subprocess.Popen([*program, "--json", "--ping-failures", "1000000"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield psutil.Process(process.pid), json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


if __name__ == "__main__":
    print(json.dumps(run()))
