"""A worker with leases on thousands of streams (`order="stream"`): its cost while idle, and its latency.

Latencies are from an entry's id to that of its output, both by the server's clock in milliseconds, with `RATE` messages
per second over all streams. CPU is in percent of a core while idle, and in microseconds per message under load.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from benchmarks.following import Publishing, create, names, server, until
from millstream import App, Message
from millstream.redis_client.client import Client
from millstream.worker import ReadingLoop

STREAMS, RATE, SECONDS = 2_000, 2_000, 20.0
_IDLE_S = 20.0
_SETTLE_S = 5.0


def run() -> dict[str, Any]:
    """Measure with 2,000 streams; `python -m benchmarks.worker_streams COUNT RATE` measures other numbers."""
    return {"name": "worker_streams", **follow(STREAMS, RATE, SECONDS)}


def follow(streams: int, rate: int, seconds: float) -> dict[str, Any]:
    """Measure one worker on `streams` streams."""
    with server() as redis, Client(redis.url) as client:
        create(redis.url, names(streams))
        with _working(redis.url) as worker:
            asyncio.run(until(lambda: client.execute("XLEN", "out") == streams))
            time.sleep(_SETTLE_S)
            processes = worker, psutil.Process(redis.pid)
            idle = [took / _IDLE_S * 100 for took in _spent(processes, lambda: time.sleep(_IDLE_S))]
            busy = _spent(processes, lambda: _publish(client, redis.url, streams, rate, seconds))
            found = sorted(_latencies(client, streams))
    at = {name: found[int(len(found) * share)] for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))}
    return {
        "ratio": round(idle[0] / 100, 3),
        "streams": streams,
        "rate": rate,
        "messages": len(found),
        **{f"{name}_ms": value for name, value in at.items()},
        "max_ms": found[-1],
        "idle_worker_percent": round(idle[0], 1),
        "idle_server_percent": round(idle[1], 1),
        "worker_cpu_us": round(busy[0] / len(found) * 1e6),
        "server_cpu_us": round(busy[1] / len(found) * 1e6),
    }


def _publish(client: Client, url: str, streams: int, rate: int, seconds: float) -> None:
    """Publish, and wait until each message has an output."""
    publishing = Publishing(url, "XADD", streams, rate, seconds)
    asyncio.run(until(lambda: publishing.ended() is not None))
    done = streams + (publishing.ended() or 0)
    asyncio.run(until(lambda: client.execute("XLEN", "out") >= done))


def _spent(processes: Sequence[psutil.Process], meanwhile: Callable[[], object]) -> list[float]:
    """Seconds of CPU that each process uses within the block."""
    before = [_cpu(one) for one in processes]
    meanwhile()
    return [_cpu(one) - then for one, then in zip(processes, before, strict=True)]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _latencies(client: Client, skipped: int) -> Iterator[int]:
    """Milliseconds from each entry to its output."""
    for entry_id, (_, source) in client.execute("XRANGE", "out", "-", "+")[skipped:]:
        yield int(entry_id.partition(b"-")[0]) - int(source.partition(b"-")[0])


@contextmanager
def _working(url: str) -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-m", "benchmarks.worker_streams", "work", url]) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()


def _work(url: str) -> None:
    app = App("bench")

    @app.handler(pattern="entity:*", order="stream", into="out")
    def pass_on(message: Message) -> dict[str, str]:
        return {"id": message.id}

    ReadingLoop(app.handlers["pass_on"], url, consumer="worker").run()


if __name__ == "__main__":
    if sys.argv[1] == "work":
        _work(sys.argv[2])
    else:
        print(follow(int(sys.argv[1]), int(sys.argv[2]), SECONDS))
