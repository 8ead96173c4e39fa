"""What the features of keys cost a handler that uses them, beside one that uses none, and that one beside a raw loop.

The handler counts the messages of each of 1,000 keys in its state, in one process. `plain` is that handler without any
option. The others are the same with one: `limit` (that refuses nothing), `state_ttl_ms`, and a timer that each message
sets and cancels. `again` is `plain` once more: how far it is from 1 is the noise of the machine. Every round measures
all of them, each round in another order, and the raw loop (redis-py, XREADGROUP and XACK, 1,000 at a time).
`relative_*` is the median, over the rounds, of the rate of one to that of `plain` in the same round.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.workers import fill, handler_of, raw_loop, server, wait_for, working
from millstream import After, Cancel, Limit, Message, State
from millstream.redis_client.client import Client
from millstream.worker.process.worker_process import tune_gc

KEYS = 1_000
_RAW, _PLAIN = "raw", "plain"


def count(_: Message, state: State) -> None:
    """Count the messages of the key."""
    state["count"] = state.get("count", 0) + 1


def count_with_timer(message: Message, state: State) -> list[After | Cancel]:
    """Count the messages of the key; set a timer, and cancel it."""
    count(message, state)
    return [After("1h", {"again": "yes"}, name="again"), Cancel(name="again")]


VARIANTS: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    _PLAIN: (count, {}),
    "again": (count, {}),
    "limit": (count, {"limit": Limit(at_once=1_000)}),
    "state_ttl_ms": (count, {"state_ttl_ms": 3_600_000}),
    "timer": (count_with_timer, {}),
}


def run(*, messages: int = 20_000, rounds: int = 5) -> dict[str, Any]:
    """Measure over `messages` messages."""
    found: dict[str, list[float]] = {name: [] for name in (_RAW, *VARIANTS)}
    tune_gc()
    with server() as client:
        for number in range(rounds):
            names = list(found)
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                fill(client, messages, keys=KEYS)
                found[name].append(raw_loop(client, messages) if name == _RAW else _rate(client, name, messages))
    plain = found[_PLAIN]
    relative = {
        f"relative_{name}": round(statistics.median(one / base for one, base in zip(rates, plain, strict=True)), 3)
        for name, rates in found.items()
        if name not in (_RAW, _PLAIN)
    }
    return {
        "name": "unused_features",
        "rate": round(max(plain)),
        "baseline_rate": round(max(found[_RAW])),
        "ratio": round(max(plain) / max(found[_RAW]), 3),
        **relative,
        "messages": messages,
        "keys": KEYS,
        "rounds": rounds,
    }


def _rate(client: Client, name: str, messages: int) -> float:
    """Messages per second, from the start of the loop to the commit of the last one."""
    function, options = VARIANTS[name]
    began = time.perf_counter()
    with working(client, handler_of(function, key="key", **options)) as loop:
        wait_for(loop, messages)
        return messages / (time.perf_counter() - began)


if __name__ == "__main__":
    print(json.dumps(run()))
