"""CPU cost of holding 10,000 leases, compared with one key per lease, renewed as often in pipelines.

Both sides renew three times per lease time and do nothing else. The cost is CPU time of the client and of Redis.
"""

import time
from collections.abc import Sequence
from typing import Any

import redis

from benchmarks.workers import server
from millstream.balancer import Balancer, BalancerPolicy, announce
from millstream.redis_client.client import Client

LEASES = 10_000
LEASE_MS = 5_000
_AT_ONCE = 1_000


def run(*, seconds: float = 10.0) -> dict[str, Any]:
    """Hold the leases for `seconds` seconds on each side."""
    with server() as client:
        for number in range(LEASES):
            announce(client, "bench", f"stream:{number}")
        policy = BalancerPolicy(lease_ms=LEASE_MS, max_waiting=LEASES)
        with Balancer(client.url, "bench", consumer="holder", policy=policy) as balancer:
            while len(balancer.leases) < LEASES:
                balancer.next(0.1)
            ours = _cost(client, lambda: time.sleep(seconds), seconds)
        keys = [f"lease:{number}" for number in range(LEASES)]
        client.pipeline([("SET", key, "holder", "PX", 10 * LEASE_MS) for key in keys])
        raw = _cost(client, lambda: _renew_keys(client, keys, seconds), seconds)
    mine, base = ours["client_cpu"] + ours["server_cpu"], raw["client_cpu"] + raw["server_cpu"]
    return {
        "name": "lease_holding",
        "ratio": round(mine / base, 4),
        "commands_per_s": round(ours["commands"], 1),
        "client_cpu_ms_per_s": round(1000 * ours["client_cpu"], 2),
        "server_cpu_ms_per_s": round(1000 * ours["server_cpu"], 2),
        "baseline_commands_per_s": round(raw["commands"]),
        "baseline_client_cpu_ms_per_s": round(1000 * raw["client_cpu"], 2),
        "baseline_server_cpu_ms_per_s": round(1000 * raw["server_cpu"], 2),
        "leases": LEASES,
        "lease_ms": LEASE_MS,
    }


def _cost(client: Client, work: Any, seconds: float) -> dict[str, float]:
    before = _spent(client)
    work()
    after = _spent(client)
    return {name: (after[name] - before[name]) / seconds for name in before}


def _spent(client: Client) -> dict[str, float]:
    connection: Any = redis.Redis.from_url(client.url)
    facts = connection.info()
    connection.close()
    return {
        "commands": float(facts["total_commands_processed"]),
        "server_cpu": facts["used_cpu_user"] + facts["used_cpu_sys"],
        "client_cpu": time.process_time(),
    }


def _renew_keys(client: Client, keys: Sequence[str], seconds: float) -> None:
    connection: Any = redis.Redis.from_url(client.url)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        due = time.monotonic() + LEASE_MS / 3000
        for at in range(0, LEASES, _AT_ONCE):
            with connection.pipeline(transaction=False) as pipeline:
                for key in keys[at : at + _AT_ONCE]:
                    pipeline.pexpire(key, LEASE_MS)
                pipeline.execute()
        time.sleep(max(0.0, min(due, end) - time.monotonic()))
    connection.close()
