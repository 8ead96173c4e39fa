"""A stream of 1,000,000 entries read through Spark into `noop`, against a single raw XRANGE loop over the same.

The raw loop is the faster of two, a bare socket with hiredis and a raw connection of redis-py, 1,000 entries at a
time. Spark's side is everything from planning the query to its last row, all columns included, in a session that has
run it before. Both are the best of several rounds, taken in turns.
"""

import json
import time
from typing import Any

from benchmarks.common import FIELDS, cores, fill, laboratory, raw_redis_py_loop, raw_socket_loop

STREAM = "benchmark"


def run(*, entries: int = 1_000_000, rounds: int = 3, warm_ups: int = 4) -> dict[str, Any]:
    """Measure over a stream of `entries`."""
    with laboratory("spark_read") as (client, spark):
        entry_bytes = fill(client, [STREAM], entries)
        frame = spark.read.format("redis-streams").option("url", client.url).option("subscribe", STREAM).load()
        if frame.count() != entries:
            raise AssertionError("not every entry was read; the figure would be worth nothing")
        rate = baseline = 0.0
        for number in range(-warm_ups, rounds):
            began = time.perf_counter()
            frame.write.format("noop").mode("overwrite").save()
            took = time.perf_counter() - began
            if number >= 0:
                rate = max(rate, entries / took)
                loops = (raw_socket_loop, raw_redis_py_loop)
                baseline = max(baseline, *(loop(client.url, STREAM) for loop in loops))
    return {
        "name": "spark_read",
        "rate": round(rate),
        "baseline_rate": round(baseline),
        "ratio": round(rate / baseline, 3),
        "entries": entries,
        "fields": len(FIELDS),
        "bytes_per_entry": round(entry_bytes, 1),
        "cores": cores(),
        "session": "warm",
    }


if __name__ == "__main__":
    print(json.dumps(run()))
