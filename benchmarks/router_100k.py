"""100,000 streams followed in one process: the router compared with the article's pool of blocking reads.

`ratio`: the article's p99 at its better block time, divided by the router's.
"""

import asyncio
from typing import Any

from benchmarks.following import by_article, by_router, create, names, server

STREAMS, RATE, SECONDS = 100_000, 2_000, 10.0


def run() -> dict[str, Any]:
    """Measure; latencies in milliseconds from the publisher's clock to the subscriber's task."""
    sizes = {"count": STREAMS, "rate": RATE, "seconds": SECONDS}
    with server() as ours:
        create(ours.url, names(STREAMS))
        result: dict[str, Any] = asyncio.run(by_router(ours, **sizes))  # type: ignore[arg-type]
    for block_ms in (100, 1000):
        with server() as theirs:
            create(theirs.url, names(STREAMS))
            article = asyncio.run(by_article(theirs, block_ms=block_ms, **sizes))  # type: ignore[arg-type]
        result |= {f"article_{block_ms}_{name}": article[name] for name in ("p50_ms", "p99_ms", "max_ms")}
    best = min(result["article_100_p99_ms"], result["article_1000_p99_ms"])
    return {"name": "router_100k", "ratio": round(best / result["p99_ms"], 1), **result}
