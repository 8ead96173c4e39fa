"""Shared code of the router benchmarks: a publisher process, and three ways to follow many streams.

The article's way is a faithful port: a fixed number of threads, each with its own connection, take batches of streams
from one queue, wait in XREAD BLOCK, deliver the entries, and put the batch back.
"""

import asyncio
import gc
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import hiredis
import psutil

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.router import Router

_BATCH = 5000
_TICK_S = 0.002
_pack: Any = hiredis.pack_command


@dataclass
class Run:
    """The result of one run: latencies in milliseconds, from the publisher's clock to the subscriber's callback."""

    latencies: list[float] = field(default_factory=list)
    client_cpu_us: float = 0.0
    server_cpu_us: float = 0.0
    missing: int = 0

    def figures(self) -> dict[str, float]:
        """p50, p99 and max, in milliseconds; CPU time per message, in microseconds."""
        found = sorted(self.latencies)
        return {
            "p50_ms": round(found[len(found) // 2], 2),
            "p99_ms": round(found[int(len(found) * 0.99)], 2),
            "max_ms": round(found[-1], 2),
            "messages": len(found),
            "missing": self.missing,
            "client_cpu_us": round(self.client_cpu_us, 1),
            "server_cpu_us": round(self.server_cpu_us, 1),
        }


def names(count: int) -> list[str]:
    """Names of `count` streams."""
    return [f"entity:{n}" for n in range(count)]


@contextmanager
def server() -> Iterator[EmbeddedServer]:
    """A redis-server with nothing written to disk."""
    with EmbeddedServer(extra={"appendonly": "no"}) as started:
        yield started


def create(url: str, streams: Sequence[str]) -> None:
    """Add one entry to each stream."""
    with Client(url) as client:
        for at in range(0, len(streams), _BATCH):
            client.pipeline([("XADD", name, "*", "t", "0") for name in streams[at : at + _BATCH]])


# --- Publishing -------------------------------------------------------------------------------------------------


def publish(url: str, command: str, count: int, rate: int, seconds: float) -> None:
    """Send `rate` messages per second to random streams (XADD) or channels (PUBLISH), each with its creation time."""
    parts = urlsplit(url)
    stamp_ns, chance = time.perf_counter_ns, random.Random(1)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=_discard, args=(connection,), daemon=True).start()
    began, sent = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        due = min(int(passed * rate), int(seconds * rate)) - sent
        if due > 0:
            parts_out = []
            for _ in range(due):
                name, now = f"entity:{chance.randrange(count)}", str(stamp_ns())
                parts_out.append(_pack(("XADD", name, "*", "t", now) if command == "XADD" else ("PUBLISH", name, now)))
            connection.sendall(b"".join(parts_out))
            sent += due
        time.sleep(_TICK_S)
    print(sent, flush=True)
    time.sleep(0.5)


def _discard(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


class Publishing:
    """The publisher process. A context manager."""

    def __init__(self, url: str, command: str, count: int, rate: int, seconds: float) -> None:
        arguments = [url, command, str(count), str(rate), str(seconds)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.following", *arguments], stdout=subprocess.PIPE
        )
        self._sent: int | None = None

    def ended(self) -> int | None:
        """The number of sent messages; None while it is still sending."""
        if self._sent is None and self._process.poll() is not None:
            assert self._process.stdout is not None
            with self._process.stdout as output:
                self._sent = int(output.read())
        return self._sent


# --- Measuring --------------------------------------------------------------------------------------------------


class Meter:
    """Collects the latencies of a run; call `seen` with the creation time of a message, in ns."""

    def __init__(self) -> None:
        self.latencies: list[float] = []

    def seen(self, stamp: bytes) -> None:
        """A subscriber has received a message."""
        made = int(stamp)
        if made:
            self.latencies.append((time.perf_counter_ns() - made) / 1e6)


async def measure(
    server: EmbeddedServer, meter: Meter, *, command: str, count: int, rate: int, seconds: float, limit_s: float = 90
) -> Run:
    """Publish, and wait until all messages are received, or at most `limit_s` seconds longer."""
    gc.collect()
    gc.freeze()
    server_process, own = psutil.Process(server.pid), psutil.Process()
    cpu, own_cpu = _cpu(server_process), _cpu(own)
    publishing = Publishing(server.url, command, count, rate, seconds)
    await until(lambda: publishing.ended() is not None)
    sent, limit = publishing.ended() or 0, time.perf_counter() + limit_s
    await until(lambda: len(meter.latencies) >= sent or time.perf_counter() > limit)
    run = Run(
        latencies=list(meter.latencies),
        missing=sent - len(meter.latencies),
        client_cpu_us=(_cpu(own) - own_cpu) / sent * 1e6,
        server_cpu_us=(_cpu(server_process) - cpu) / sent * 1e6,
    )
    gc.unfreeze()
    return run


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition with little load on the event loop."""
    while not condition():  # noqa: ASYNC110 - another process or thread makes it true
        await asyncio.sleep(0.2)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def memory_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


# --- Ways to follow ---------------------------------------------------------------------------------------------


async def by_router(
    server: EmbeddedServer, *, count: int, rate: int, seconds: float, reader: Any = "auto", threaded: bool = False
) -> dict[str, float]:
    """millstream's router, with a task per subscription."""
    meter, ready = Meter(), 0
    streams = names(count)

    async def follow(subscription: Any) -> None:
        nonlocal ready
        ready += 1 if (await anext(subscription)) else 0
        async for message in subscription:
            meter.seen(message.pairs[1])

    router = Router(server.url, reader=reader)
    async with AsyncExitStack() as stack:
        if threaded:
            stack.enter_context(router)
        else:
            await stack.enter_async_context(router)
        gc.collect()
        before = memory_bytes()
        subscriptions = [router.subscribe(name) for name in streams]
        await until(lambda: all(one.buffered for one in subscriptions))
        subscribed = memory_bytes() - before
        tasks = [asyncio.create_task(follow(one)) for one in subscriptions]
        await until(lambda: ready == count)
        run = await measure(server, meter, command="XADD", count=count, rate=rate, seconds=seconds)
        connections = router.figures().connections
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {**run.figures(), "bytes_a_subscription": round(subscribed / count), "connections": connections}


async def by_article(
    server: EmbeddedServer, *, count: int, rate: int, seconds: float, block_ms: int, workers: int = 8
) -> dict[str, float]:
    """The article's pool of blocking reads, 100 streams each, with a callback per subscription."""
    meter = Meter()
    got = threading.Event()
    firsts = 0

    def receive(stamp: bytes) -> None:
        nonlocal firsts
        if stamp == b"0":
            firsts += 1
            if firsts == count:
                got.set()
        meter.seen(stamp)

    pending: queue.SimpleQueue[tuple[str, bytes, Callable[[bytes], None]]] = queue.SimpleQueue()
    for name in names(count):
        pending.put((name, b"0-0", receive))
    stopped = threading.Event()
    threads = [
        threading.Thread(target=_event_loop, args=(server.url, pending, stopped, block_ms)) for _ in range(workers)
    ]
    for thread in threads:
        thread.start()
    await until(got.is_set)
    run = await measure(server, meter, command="XADD", count=count, rate=rate, seconds=seconds)
    stopped.set()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    return {**run.figures(), "connections": workers}


def _event_loop(url: str, pending: Any, stopped: threading.Event, block_ms: int, streams: int = 100) -> None:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0))
    reader = hiredis.Reader()
    while not stopped.is_set():
        batch = {}
        try:
            name, last, send = pending.get(timeout=0.1)
            batch[name] = (last, send)
            while len(batch) < streams:
                name, last, send = pending.get_nowait()
                batch[name] = (last, send)
        except queue.Empty:
            if not batch:
                continue
        places = [last for last, _ in batch.values()]
        connection.sendall(_pack(("XREAD", "BLOCK", str(block_ms), "STREAMS", *batch, *places)))
        while (reply := reader.gets()) is False:
            reader.feed(connection.recv(1 << 16))
        for key, entries in reply or ():
            send = batch[key.decode()][1]
            for _, pairs in entries:
                send(pairs[1])
            batch[key.decode()] = (entries[-1][0], send)
        for name, (last, send) in batch.items():
            pending.put((name, last, send))
    connection.close()


async def by_pubsub(server: EmbeddedServer, *, count: int, rate: int, seconds: float) -> dict[str, float]:
    """A plain pub/sub listener on as many channels: no history, no recovery after a broken connection."""
    meter = Meter()
    reader, writer = await asyncio.open_connection(*server_address(server))
    parser = hiredis.Reader()
    for at in range(0, count, _BATCH):
        writer.write(_pack(("SUBSCRIBE", *names(count)[at : at + _BATCH])))
    await writer.drain()
    subscribed = asyncio.Event()

    async def listen() -> None:
        confirmed = 0
        while data := await reader.read(1 << 16):
            parser.feed(data)
            while (message := parser.gets()) is not False:
                if message[0] == b"message":
                    meter.seen(message[2])
                else:
                    confirmed += 1
                    if confirmed == count:
                        subscribed.set()

    task = asyncio.create_task(listen())
    await subscribed.wait()
    run = await measure(server, meter, command="PUBLISH", count=count, rate=rate, seconds=seconds)
    task.cancel()
    writer.close()
    return {**run.figures(), "connections": 1}


def server_address(server: EmbeddedServer) -> tuple[str, int]:
    """Host and port of a server."""
    return "127.0.0.1", server.port


if __name__ == "__main__":
    publish(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
