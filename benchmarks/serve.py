"""`millstream serve` with many clients of server-sent events, without and with 1 % of stalled clients.

Latencies are from the publisher's clock to the client, in milliseconds. `ratio`: the p99 of the other clients with
stalled ones, divided by their p99 without. A stalled client reads nothing of a large and busy stream, so that all
buffers on its way are full within a second; it is connected for the whole run.
"""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import hiredis
import psutil

from benchmarks.following import Meter, Run, create, measure, names, server, server_address, until
from millstream.redis_client.embedded_server import EmbeddedServer

CLIENTS, RATE, SECONDS = 2_000, 1_000, 10.0
_HOT_BYTES, _HOT_EVERY_S = 8_192, 0.01
_pack: Any = hiredis.pack_command


def run() -> dict[str, Any]:
    """Measure with 2,000 clients; `python -m benchmarks.serve COUNT` finds the maximum of one process."""
    return {"name": "serve", **compare(CLIENTS, RATE, SECONDS)}


def compare(clients: int, rate: int, seconds: float) -> dict[str, Any]:
    """Measure the same clients twice, the second time with 1 % of stalled clients added."""
    calm = asyncio.run(follow(clients, rate, seconds, stalled=0))
    beside = asyncio.run(follow(clients, rate, seconds, stalled=max(1, clients // 100)))
    result = {"ratio": round(beside["p99_ms"] / calm["p99_ms"], 2), "clients": clients, "rate": rate}
    result |= {f"calm_{name}": value for name, value in calm.items()}
    return result | {f"beside_{name}": value for name, value in beside.items()}


async def follow(clients: int, rate: int, seconds: float, *, stalled: int, limit_s: float = 30.0) -> dict[str, Any]:
    """Run clients, each on its own stream, and `stalled` ones that read nothing of the busiest stream.

    Messages not received `limit_s` seconds after the last was published count as missing.
    """
    with server() as redis:
        create(redis.url, names(clients))
        with _serving(redis.url) as (process, url):
            before = process.memory_info().rss
            meter = Meter()
            following = [await _connect(url, f"entity:{n}", _Client(meter)) for n in range(clients)]
            lazy = [await _connect(url, "hot", _Client(meter, lazy=True)) for _ in range(stalled)]
            await until(lambda: all(one.started for one in following))
            held = process.memory_info().rss - before
            async with _busy(redis):
                cpu = process.cpu_times()
                done: Run = await measure(
                    redis, meter, command="XADD", count=clients, rate=rate, seconds=seconds, limit_s=limit_s
                )
                spent = process.cpu_times()
            connected = sum(one.connected for one in lazy)
            for one in (*following, *lazy):
                one.transport.abort()
            await asyncio.sleep(0)
            found = done.figures()
            return {
                **{name: found[name] for name in ("p50_ms", "p99_ms", "max_ms", "messages", "missing")},
                "serve_cpu_us": round((spent.user + spent.system - cpu.user - cpu.system) / found["messages"] * 1e6),
                "bytes_a_client": round(held / clients),
                "stalled": connected,
            }


class _Client(asyncio.Protocol):
    """A client that reads events, which have their creation time; a `lazy` one reads nothing."""

    def __init__(self, meter: Meter, *, lazy: bool = False) -> None:
        self.started = self.connected = False
        self.lazy = lazy
        self._meter = meter
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.connected = True
        if self.lazy:
            transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connected = False

    def data_received(self, data: bytes) -> None:
        self.started = (
            self.started or b"id: " in data
        )  # the first id shows that the subscription has its start position
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            _, found, text = event.partition(b'"t":"')
            if found:
                self._meter.seen(text.partition(b'"')[0])


async def _connect(url: str, stream: str, client: _Client) -> _Client:
    parts = urlsplit(url)
    opened = socket.socket()
    if client.lazy:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    opened.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(opened, (parts.hostname, parts.port))
    transport, _ = await loop.create_connection(lambda: client, sock=opened)
    transport.write(f"GET /streams/{stream} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    return client


@contextmanager
def _serving(url: str) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, "-m", "millstream.cli.main", "serve", "--url", url, "--port", "0", "--json"]
    command += ["--connections", "16000", "--stall", "120"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield psutil.Process(process.pid), json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


@asynccontextmanager
async def _busy(redis: EmbeddedServer) -> AsyncIterator[None]:
    """Write to the stream that stalled clients follow, even if there are none."""
    reader, writer = await asyncio.open_connection(*server_address(redis))
    command = _pack(("XADD", "hot", "MAXLEN", "~", "1000", "*", "pad", "x" * _HOT_BYTES))

    async def write() -> None:
        while True:
            writer.write(command)
            await reader.readuntil(b"\r\n")
            await asyncio.sleep(_HOT_EVERY_S)

    task = asyncio.create_task(write())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        writer.close()


if __name__ == "__main__":
    print(json.dumps(compare(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
