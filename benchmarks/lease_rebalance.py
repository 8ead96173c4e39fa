"""Time until four joining consumers have their share of 2,000 streams, compared with the minimum.

The minimum is given by the limit of moves, 5 % of the streams per second.
"""

import threading
import time
from typing import Any

from benchmarks.workers import server
from millstream.balancer import Balancer, BalancerPolicy, StreamDisowned, announce

STREAMS = 2_000
CONSUMERS = 5
_POLICY = BalancerPolicy(lease_ms=2_000)


def run() -> dict[str, Any]:
    """One consumer has all streams; four join."""
    with server() as client:
        for number in range(STREAMS):
            announce(client, "bench", f"stream:{number}")
        balancers = [
            Balancer(client.url, "bench", consumer=f"c{number}", policy=_POLICY) for number in range(CONSUMERS)
        ]
        moved = [0] * CONSUMERS
        threads = [threading.Thread(target=_answer, args=(one, at, moved)) for at, one in enumerate(balancers)]
        balancers[0].start()
        threads[0].start()
        while len(balancers[0].leases) < STREAMS:
            time.sleep(0.01)
        began = time.monotonic()
        for one, thread in zip(balancers[1:], threads[1:], strict=True):
            one.start()
            thread.start()
        while any(len(one.leases) != STREAMS // CONSUMERS for one in balancers):
            time.sleep(0.01)
        took_s = time.monotonic() - began
        for one in balancers:
            one.close()
        for thread in threads:
            thread.join()
    must = STREAMS - STREAMS // CONSUMERS
    least_s = must / STREAMS / _POLICY.moves
    return {
        "name": "lease_rebalance",
        "ratio": round(took_s / least_s, 3),
        "seconds": round(took_s, 2),
        "baseline_seconds": least_s,
        "moved": sum(moved),
        "must_move": must,
    }


def _answer(balancer: Balancer, at: int, moved: list[int]) -> None:
    for notice in balancer:
        if isinstance(notice, StreamDisowned) and notice.why == "rebalanced":
            balancer.release(notice.stream)
            moved[at] += 1
