"""The CPU time of `spark_keyed` per message, by what spends it: Java, the Python workers, Redis and the driver.

The demo's handler processes its flights twice in one session, in batches as large as those of `spark_keyed`: the first
run compiles in Java what the second one uses. Only the second counts, from the end of its first batch to the end of its
last; the figures of the first are given, too. `ratio`: the part of all CPU time that is not Java's.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import laboratory
from benchmarks.spark_keyed import EXAMPLE, PER_BATCH, Bench
from millstream.app import load_app
from millstream.demo.flights import load_flights

Reading = dict[str, float]
"""Seconds of CPU time by part, and of time as `wall`."""


def run(*, flights: int | None = None, per_batch: int = PER_BATCH) -> dict[str, Any]:
    """Measure, over the first `flights` (default: all)."""
    app = load_app(f"{EXAMPLE}:app")
    rows = load_flights(flights)
    with laboratory("spark_cost", handlers_only=True) as (client, spark), tempfile.TemporaryDirectory() as folder:
        bench = Bench(app, spark, client, Path(folder), meter=read_cpu)
        cold, warm = (_us_per_message(bench.batches(rows, per_batch)) for _ in range(2))
    spent = sum(us for part, us in warm.items() if part != "wall")
    return {
        "name": "spark_cost",
        "ratio": round(1 - warm["java"] / spent, 3),
        **{f"{part}_us": us for part, us in warm.items()},
        "first_run_us": cold,
        "messages": len(rows),
        "max_per_batch": per_batch,
    }


def read_cpu() -> Reading:
    """Return the CPU time of this process and of its descendants so far, the ended ones among them."""
    this = psutil.Process()
    reading = dict.fromkeys(("java", "python_workers", "redis", "driver"), 0.0) | {"wall": time.perf_counter()}
    for process in [this, *this.children(recursive=True)]:
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.NoSuchProcess:
            continue
        part = "driver" if process.pid == os.getpid() else _PARTS.get(name, "python_workers")
        reading[part] += times.user + times.system
        if part == "python_workers":  # Spark's daemon waits for its workers
            reading[part] += times.children_user + times.children_system
    return reading


_PARTS = {"java": "java", "redis-server": "redis", "valkey-server": "redis"}


def _us_per_message(batches: list[tuple[Reading, int]]) -> Reading:
    (first, _), (last, _) = batches[0], batches[-1]
    count = sum(messages for _, messages in batches[1:])
    return {part: round((last[part] - first[part]) / count * 1e6, 1) for part in first}


if __name__ == "__main__":
    print(json.dumps(run()))
