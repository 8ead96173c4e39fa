"""Streams with 1,000,000 entries in total, read through Spark into `noop`, compared with a raw XRANGE loop.

Figures without a number are for one stream; those that end in 16, 10000 and 100000 for as many streams, with 500,000
entries in total. The raw loop over one stream is the faster of two, a bare socket with hiredis and a raw redis-py
connection, 1,000 entries at a time; over many it reads 100 streams per round trip. Spark's time is that
of writing a DataFrame, with all columns, in a session that has written it before: its first action has planned the
read, which `benchmarks.spark_streams` measures. Both are the best of several interleaved rounds.
`python -m benchmarks.spark_read STREAMS [ENTRIES]` measures another number of streams alone.
"""

import json
import sys
import time
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.common import (
    FIELDS,
    cores,
    fill,
    laboratory,
    raw_redis_py_loop,
    raw_socket_loop,
    raw_streams,
)
from millstream.redis_client.client import Client

STREAM = "benchmark"
OTHERS = (16, 10_000, 100_000)
MANY_ENTRIES = 500_000


def run(*, streams: int = 1, entries: int = 1_000_000, rounds: int = 3, warm_ups: int = 4) -> dict[str, Any]:
    """Measure over `entries` in `streams` streams, and, if that is one, over other numbers of streams."""
    with laboratory("spark_read") as (client, spark):
        rate, baseline, entry_bytes = _measure(client, spark, streams, entries, rounds=rounds, warm_ups=warm_ups)
        result = {
            "name": "spark_read",
            "rate": round(rate),
            "baseline_rate": round(baseline),
            "ratio": round(rate / baseline, 3),
            "entries": entries,
            "streams": streams,
            "fields": len(FIELDS),
            "bytes_per_entry": round(entry_bytes, 1),
            "cores": cores(),
            "session": "warm",
        }
        for count in OTHERS if streams == 1 else ():
            rate, baseline, _ = _measure(client, spark, count, MANY_ENTRIES, rounds=2, warm_ups=1)
            result |= {f"rate_{count}": round(rate), f"baseline_rate_{count}": round(baseline)}
            result[f"ratio_{count}"] = round(rate / baseline, 3)
    return result


def _measure(
    client: Client, spark: SparkSession, streams: int, entries: int, *, rounds: int, warm_ups: int
) -> tuple[float, float, float]:
    """Entries per second through Spark and by a raw loop, and the bytes of an entry."""
    client.execute("FLUSHALL")
    names = [f"{STREAM}:{n:06}" for n in range(streams)]
    entry_bytes = fill(client, names, entries // streams)
    total = entries // streams * streams
    frame = spark.read.format("redis-streams").options(url=client.url, subscribePattern=f"{STREAM}:*").load()
    if frame.count() != total:
        raise AssertionError("not every entry was read; the figure would be worth nothing")
    rate = baseline = 0.0
    for number in range(-warm_ups, rounds):
        began = time.perf_counter()
        frame.write.format("noop").mode("overwrite").save()
        took = time.perf_counter() - began
        if number >= 0:
            rate = max(rate, total / took)
            baseline = max(baseline, *_raw(client, names))
    return rate, baseline, entry_bytes


def _raw(client: Client, names: list[str]) -> list[float]:
    if len(names) == 1:
        return [loop(client.url, names[0]) for loop in (raw_socket_loop, raw_redis_py_loop)]
    return [0.0, raw_streams(client, names)]


if __name__ == "__main__":
    print(json.dumps(run(**dict(zip(("streams", "entries"), map(int, sys.argv[1:]), strict=False)))))
