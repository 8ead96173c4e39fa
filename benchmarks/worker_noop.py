"""A worker whose handler does nothing, one call a message, against a raw read-and-acknowledge loop.

One process, one stream, filled before. The worker's time is from the start of its loop to the commit of the last
message; the raw loop (redis-py, XREADGROUP and XACK, 1,000 at a time) reads the same stream in the same run and
does nothing else. Both are the best of several rounds, taken in turns.
"""

import json
import time
from typing import Any

from benchmarks.workers import fill, handler_of, raw_loop, server, wait_for, working
from millstream import Message
from millstream.worker.process.worker_process import tune_gc


def noop(message: Message) -> None:
    """Do nothing."""


async def noop_async(message: Message) -> None:
    """Do nothing, in an event loop."""


def run(*, messages: int = 100_000, rounds: int = 4) -> dict[str, Any]:
    """Measure over `messages`."""
    rates = {"raw": 0.0, "plain": 0.0, "async": 0.0}
    tune_gc()
    with server() as client:
        for _ in range(rounds):
            fill(client, messages)
            rates["raw"] = max(rates["raw"], raw_loop(client, messages))
            for name, function in (("plain", noop), ("async", noop_async)):
                fill(client, messages)
                began = time.perf_counter()
                with working(client, handler_of(function)) as loop:
                    wait_for(loop, messages)
                    rates[name] = max(rates[name], messages / (time.perf_counter() - began))
    return {
        "name": "worker_noop",
        "rate": round(rates["plain"]),
        "baseline_rate": round(rates["raw"]),
        "ratio": round(rates["plain"] / rates["raw"], 3),
        "async_rate": round(rates["async"]),
        "async_ratio": round(rates["async"] / rates["raw"], 3),
        "messages": messages,
    }


if __name__ == "__main__":
    print(json.dumps(run()))
