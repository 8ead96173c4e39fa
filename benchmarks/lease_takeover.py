"""Time from the expiry of a dead consumer's leases to their reassignment, compared with keyspace events.

A consumer process is killed with kill -9; the expiry of its leases is read from the server. The raw side waits for the
`expired` keyspace event of a key that is no longer renewed, on a server that sends these events.
"""

import statistics
import subprocess
import sys
import time
from typing import Any

import redis

from benchmarks.workers import server
from millstream.balancer import Balancer, BalancerPolicy, StreamAdded, announce
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import ServiceKeys

STREAMS = 100
LEASE_MS = 500
KEYS = ServiceKeys("bench")
_POLICY = BalancerPolicy(lease_ms=LEASE_MS, moves=1.0)

VICTIM = f"""
import sys
from millstream.balancer import Balancer, BalancerPolicy
with Balancer(sys.argv[1], "bench", consumer=sys.argv[2], policy=BalancerPolicy(lease_ms={LEASE_MS}, moves=1.0)) as one:
    for notice in one:
        pass
"""


def run(*, rounds: int = 30) -> dict[str, Any]:
    """Kill consumers, one after another."""
    with server() as client:
        raw = _event_delays(client, rounds)
        client.execute("FLUSHALL")
        for number in range(STREAMS):
            announce(client, "bench", f"stream:{number}")
        after_death, beyond = _delays(client, rounds)
    ours, base = sorted(beyond), sorted(raw)
    return {
        "name": "lease_takeover",
        "ratio": round(_p99(ours) / _p99(base), 3),
        "beyond_lease_p50_ms": round(statistics.median(ours), 1),
        "beyond_lease_p99_ms": round(_p99(ours), 1),
        "takeover_p50_ms": round(statistics.median(after_death)),
        "takeover_p99_ms": round(_p99(sorted(after_death))),
        "baseline_p50_ms": round(statistics.median(base), 1),
        "baseline_p99_ms": round(_p99(base), 1),
        "lease_ms": LEASE_MS,
        "streams": len(ours),
    }


def _p99(ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def _delays(client: Client, rounds: int) -> tuple[list[float], list[float]]:
    """Per reassigned stream: milliseconds since the death of its owner, and since the expiry of its lease."""
    after_death: list[float] = []
    beyond: list[float] = []
    with Balancer(client.url, "bench", consumer="heir", policy=_POLICY) as heir:
        for number in range(rounds):
            name = f"victim-{number}"
            victim = subprocess.Popen([sys.executable, "-c", VICTIM, client.url, name])
            while client.execute("SCARD", f"{KEYS.base}:of:{name}") < STREAMS // 2:
                _take(heir)
            while _take(heir):
                pass
            victim.kill()
            died_ms = time.time() * 1000
            victim.wait()
            ends_ms = float(client.execute("ZSCORE", KEYS.alive, name))
            for _ in range(STREAMS // 2):
                while not isinstance(heir.next(5), StreamAdded):
                    pass
                now_ms = time.time() * 1000
                after_death.append(now_ms - died_ms)
                beyond.append(now_ms - ends_ms)
    return after_death, beyond


def _take(heir: Balancer) -> bool:
    """Answer one notification, if one comes soon."""
    notice = heir.next(0.02)
    if notice is not None and not isinstance(notice, StreamAdded) and hasattr(notice, "stream"):
        heir.release(notice.stream)
    return notice is not None


def _event_delays(client: Client, rounds: int) -> list[float]:
    """Milliseconds from the expiry of each key to its event."""
    connection: Any = redis.Redis.from_url(client.url)
    before = connection.config_get("notify-keyspace-events")["notify-keyspace-events"]
    connection.config_set("notify-keyspace-events", "Ex")
    listener = connection.pubsub(ignore_subscribe_messages=True)
    listener.subscribe("__keyevent@0__:expired")
    delays: list[float] = []
    for number in range(rounds):
        ends_ms = time.time() * 1000 + LEASE_MS
        for stream in range(STREAMS // 2):
            connection.set(f"lease:{number}:{stream}", "x", pxat=int(ends_ms))
        left = STREAMS // 2
        while left:
            if listener.get_message(timeout=5) is not None:
                delays.append(time.time() * 1000 - int(ends_ms))
                left -= 1
    connection.config_set("notify-keyspace-events", before)
    connection.close()
    return delays
