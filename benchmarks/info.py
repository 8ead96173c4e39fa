"""Duration of `millstream info` on 10,000 streams with a handler and a group each, compared with a raw loop.

The raw loop sends XINFO STREAM for each stream, 1,000 per round trip, and reads the replies. Each figure is the best of
several interleaved rounds.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks.workers import server
from millstream.admin.inspection import inspect
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import send_all


def run(*, streams: int = 10_000, rounds: int = 5) -> dict[str, Any]:
    """Measure with `streams` streams."""
    names = [f"s{number}" for number in range(streams)]
    with server() as client:
        _fill(client, names)
        ours = base = float("inf")
        for _ in range(rounds):
            base = min(base, _seconds(lambda: send_all(client, [("XINFO", "STREAM", name) for name in names])))
            ours = min(ours, _seconds(lambda: inspect(client)))
    return {
        "name": "info",
        "seconds": round(ours, 3),
        "baseline_seconds": round(base, 3),
        "ratio": round(ours / base, 2),
        "streams": streams,
    }


def _fill(client: Client, names: list[str]) -> None:
    client.execute("FLUSHALL")
    for entry in ("1-0", "2-0"):
        send_all(client, [("XADD", name, entry, "a", "b") for name in names])
    send_all(client, [("HSET", HandlerKeys("a", "h", name).meta, "committed_id", "1-0") for name in names])
    send_all(client, [("XGROUP", "CREATE", name, "billing", "1-0") for name in names])


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(run()))
