"""Keyed handler on many streams, shared by two worker processes: commands to Redis while idle, and latency.

The baseline is a handler with `order="stream"` on the same streams and messages: `ratio` is p99 over p99 at the
greatest number of streams. Latencies are from an entry's id to that of its output, both the server's clock.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.following import Publishing, create, names, server, until
from benchmarks.workers import commands_a_second
from millstream import App, Message
from millstream.redis_client.client import Client
from millstream.worker import ReadingLoop

STREAMS, RATE, SECONDS = (20, 200, 2_000), 200, 10.0
PROCESSES = 2
_IDLE_S = 10.0
_SETTLE_S = 5.0


def run() -> dict[str, Any]:
    """Measure each number of streams."""
    found = {(kind, count): follow(kind, count, RATE, SECONDS) for count in STREAMS for kind in ("keyed", "stream")}
    most = max(STREAMS)
    return {
        "name": "keyed_streams",
        "ratio": round(found["keyed", most]["p99_ms"] / max(1.0, found["stream", most]["p99_ms"]), 2),
        **{f"{kind}_{count}_{name}": value for (kind, count), one in found.items() for name, value in one.items()},
    }


def follow(kind: str, streams: int, rate: int, seconds: float) -> dict[str, float]:
    """Commands per second while idle, and latencies."""
    with server() as redis, Client(redis.url) as client:
        create(redis.url, names(streams))
        with _working(redis.url, kind):
            asyncio.run(until(lambda: client.execute("XLEN", "out") >= streams))
            time.sleep(_SETTLE_S)
            idle = commands_a_second(client, _IDLE_S)
            publishing = Publishing(redis.url, "XADD", streams, rate, seconds)
            asyncio.run(until(lambda: publishing.ended() is not None))
            done = streams + (publishing.ended() or 0)
            asyncio.run(until(lambda: client.execute("XLEN", "out") >= done))
            found = sorted(_latencies(client, streams))
    at = {name: found[int(len(found) * share)] for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99))}
    return {"idle_commands_s": round(idle), **at, "max_ms": found[-1]}


def _latencies(client: Client, skipped: int) -> Iterator[int]:
    for entry_id, (_, source) in client.execute("XRANGE", "out", "-", "+")[skipped:]:
        yield int(entry_id.partition(b"-")[0]) - int(source.partition(b"-")[0])


@contextmanager
def _working(url: str, kind: str) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.keyed_streams", "work", url, kind]
    workers = [subprocess.Popen([*command, f"w{number}"]) for number in range(PROCESSES)]
    try:
        yield
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


def _work(url: str, kind: str, name: str) -> None:
    app = App("bench")
    how: dict[str, Any] = {"order": "stream"} if kind == "stream" else {"key": "t"}

    @app.handler(pattern="entity:*", into="out", **how)
    def pass_on(message: Message) -> dict[str, str]:
        return {"id": message.id}

    ReadingLoop(app.handlers["pass_on"], url, consumer=name).run()


if __name__ == "__main__":
    if sys.argv[1] == "work":
        _work(*sys.argv[2:])
    else:
        print(follow(sys.argv[1], int(sys.argv[2]), RATE, SECONDS))
