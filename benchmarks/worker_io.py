"""An async handler that waits 5 ms per message, 100 at once, compared with the ideal rate.

The ideal is messages x 5 ms / 100. The time is from the first message's start to the last one's commit. The
baseline is a bare asyncio program that waits as often, with as many tasks and nothing to read or to commit.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.workers import fill, handler_of, server, wait_for, working
from millstream import Message

WAIT_S = 0.005
CONCURRENCY = 100


def run(*, messages: int = 20_000, rounds: int = 3) -> dict[str, Any]:
    """Measure over `messages` messages."""
    ideal_s = messages * WAIT_S / CONCURRENCY
    took_s = baseline_s = float("inf")
    with server() as client:
        for _ in range(rounds):
            fill(client, messages)
            began: list[float] = []
            with working(client, handler_of(_waiting(began), concurrency=CONCURRENCY)) as loop:
                wait_for(loop, messages)
                took_s = min(took_s, time.perf_counter() - began[0])
            baseline_s = min(baseline_s, asyncio.run(_bare(messages)))
    return {
        "name": "worker_io",
        "rate": round(messages / took_s),
        "baseline_rate": round(messages / baseline_s),
        "ratio": round(baseline_s / took_s, 3),
        "efficiency": round(ideal_s / took_s, 3),
        "bare_efficiency": round(ideal_s / baseline_s, 3),
        "messages": messages,
        "wait_ms": WAIT_S * 1000,
        "concurrency": CONCURRENCY,
    }


def _waiting(began: list[float]) -> Callable[[Message], Awaitable[None]]:
    """A handler that records the start of the first message."""

    async def handle(message: Message) -> None:
        if message.attempt and not began:
            began.append(time.perf_counter())
        await asyncio.sleep(WAIT_S)

    return handle


async def _bare(messages: int) -> float:
    left = iter(range(messages))

    async def work() -> None:
        for _ in left:
            await asyncio.sleep(WAIT_S)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(run()))
