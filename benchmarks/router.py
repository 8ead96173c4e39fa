"""The router over a grid of stream counts and rates, compared with the article's pool and a plain pub/sub listener.

`ratio`: the pub/sub listener's p99 at 100,000 streams and 2,000 messages per second, divided by the router's. `cells`
has the results of each way; `python -m benchmarks.router` prints them as they are measured.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.following import by_article, by_pubsub, by_router, create, names, server
from millstream.redis_client.embedded_server import EmbeddedServer

STREAMS = (20_000, 100_000)
RATES = (50, 2_000, 20_000)
SECONDS = 6.0

Way = Callable[..., Awaitable[dict[str, float]]]
WAYS: dict[str, tuple[Way, dict[str, Any]]] = {
    "router": (by_router, {}),
    "router in a thread": (by_router, {"threaded": True}),
    "article, block 100 ms": (by_article, {"block_ms": 100}),
    "article, block 1000 ms": (by_article, {"block_ms": 1000}),
    "pub/sub": (by_pubsub, {}),
}


def run(say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure every cell; latencies in milliseconds, CPU in microseconds per message."""
    cells: dict[str, dict[str, float]] = {}
    for count in STREAMS:
        for rate in RATES:
            for way, (follow, options) in WAYS.items():
                name = f"{way}, {count:,} streams, {rate:,}/s"
                with server() as started:
                    cells[name] = asyncio.run(_cell(started, follow, options, count, rate))
                say(f"{name}: {json.dumps(cells[name])}")
    ours, theirs = (cells[f"{way}, 100,000 streams, 2,000/s"]["p99_ms"] for way in ("router", "pub/sub"))
    return {"name": "router", "ratio": round(theirs / ours, 3), "cells": cells}


async def _cell(
    started: EmbeddedServer, follow: Way, options: dict[str, Any], count: int, rate: int
) -> dict[str, float]:
    create(started.url, names(count))
    return await follow(started, count=count, rate=rate, seconds=SECONDS, **options)


if __name__ == "__main__":
    run(lambda line: print(line, flush=True))
