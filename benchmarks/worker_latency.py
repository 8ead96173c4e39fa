"""Latency from publication to the handler, at 500 messages per second, compared with a raw loop.

Another process publishes at an even rate; both sides record when they receive a message, by the machine's shared clock.
The raw loop (redis-py, XREADGROUP with BLOCK, then XACK) does nothing else. Each figure is the median of interleaved
rounds.
"""

import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import redis

from benchmarks.workers import RAW_COUNT, STREAM, handler_of, server, wait_for, working
from millstream import Message
from millstream.redis_client.client import Client
from millstream.worker.process.worker_process import tune_gc

RATE = 500
_WARM_UP = 200

PUBLISH = """
import sys, time
from millstream.redis_client.client import Client
url, stream, rate, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with Client(url) as client:
    due = time.monotonic()
    for _ in range(count):
        due += 1 / rate
        time.sleep(max(0.0, due - time.monotonic()))
        client.execute("XADD", stream, "*", "at", time.monotonic_ns())
"""


def run(*, seconds: float = 6.0, rounds: int = 3) -> dict[str, Any]:
    """Measure for `seconds` per round."""
    count = int(RATE * seconds) + _WARM_UP
    ours: list[list[float]] = []
    raw: list[list[float]] = []
    tune_gc()
    with server() as client:
        for _ in range(rounds):
            raw.append(_figures(_raw_latencies(client, count)))
            ours.append(_figures(_our_latencies(client, count)))
    best, base = (list(map(statistics.median, zip(*figures, strict=True))) for figures in (ours, raw))
    return {
        "name": "worker_latency",
        "p50_ms": round(best[0], 3),
        "p99_ms": round(best[1], 3),
        "max_ms": round(best[2], 3),
        "baseline_p50_ms": round(base[0], 3),
        "baseline_p99_ms": round(base[1], 3),
        "ratio": round(best[1] / base[1], 3),
        "p99_ratio": round(best[1] / base[1], 3),
        "rate": RATE,
    }


def _figures(latencies_ms: list[float]) -> list[float]:
    steady = sorted(latencies_ms[_WARM_UP:])
    return [steady[len(steady) // 2], steady[int(len(steady) * 0.99)], steady[-1]]


def _publish(client: Client, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PUBLISH, client.url, STREAM, str(RATE), str(count)])


def _our_latencies(client: Client, count: int) -> list[float]:
    client.execute("FLUSHALL")
    found: list[float] = []

    def handle(message: Message) -> None:
        found.append((time.monotonic_ns() - int(message.fields["at"])) / 1e6)

    with working(client, handler_of(handle)) as loop:
        publisher = _publish(client, count)
        publisher.wait()  # without a look at the loop meanwhile, which would compete with it
        wait_for(loop, count)
    return found


def _raw_latencies(client: Client, count: int) -> list[float]:
    client.execute("FLUSHALL")
    client.execute("XGROUP", "CREATE", STREAM, "raw", "0", "MKSTREAM")
    found: list[float] = []

    def read() -> None:
        connection: Any = redis.Redis.from_url(client.url)  # its annotations lack raw replies
        while len(found) < count:
            for _, entries in connection.xreadgroup("raw", "raw", {STREAM: ">"}, count=RAW_COUNT, block=1000):
                for _, fields in entries:
                    found.append((time.monotonic_ns() - int(fields[b"at"])) / 1e6)
                connection.xack(STREAM, "raw", *(entry_id for entry_id, _ in entries))
        connection.close()

    reader = threading.Thread(target=read)
    reader.start()
    publisher = _publish(client, count)
    reader.join()
    publisher.wait()
    return found


if __name__ == "__main__":
    print(json.dumps(run()))
