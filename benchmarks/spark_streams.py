"""10,000 streams drained by one streaming query in limited batches, against a pipelined raw XRANGE of each.

`python -m benchmarks.spark_streams STREAMS [ENTRIES_EACH]` measures another number of them.
`plan_seconds` is the longest that Spark waited for the source to plan a batch (the end of the batch, and who reads
what), as its own progress reports say. The session is warm; the raw loop asks for 100 streams in a round trip.
"""

import json
import sys
import tempfile
import time
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.common import FIELDS, cores, fill, laboratory
from millstream.client import Client

STREAMS_PER_TRIP = 100


def run(*, streams: int = 10_000, entries_each: int = 50, batches: int = 5, rounds: int = 2) -> dict[str, Any]:
    """Measure `streams` streams of `entries_each` entries, drained in about `batches` batches."""
    names = [f"stream:{n:06}" for n in range(streams)]
    total = streams * entries_each
    with laboratory("spark_streams") as (client, spark):
        entry_bytes = fill(client, names, entries_each)
        measured = [_drain(spark, client.url, total, total // batches) for _ in range(rounds + 1)][1:]
        baseline = max(_raw(client, names) for _ in range(rounds + 1))
    rate, plan_seconds = max(rate for rate, _ in measured), min(plan for _, plan in measured)
    return {
        "name": "spark_streams",
        "rate": round(rate),
        "baseline_rate": round(baseline),
        "ratio": round(rate / baseline, 3),
        "plan_seconds": round(plan_seconds, 3),
        "streams": streams,
        "entries": total,
        "max_per_batch": total // batches,
        "fields": len(FIELDS),
        "bytes_per_entry": round(entry_bytes, 1),
        "cores": cores(),
        "session": "warm",
    }


def _drain(spark: SparkSession, url: str, total: int, per_batch: int) -> tuple[float, float]:
    """Entries a second over all batches, and the longest planning of one, in seconds."""
    frame = (
        spark.readStream.format("redis-streams")
        .options(url=url, subscribePattern="stream:*", startingOffsets="earliest", maxOffsetsPerTrigger=per_batch)
        .load()
    )
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        progress = [one for one in query.recentProgress if one.numInputRows]
    if sum(one.numInputRows for one in progress) != total:
        raise AssertionError("not every entry was read; the figure would be worth nothing")
    planned = max(one.durationMs["latestOffset"] + one.durationMs["queryPlanning"] for one in progress)
    return total / sum(one.durationMs["triggerExecution"] / 1000 for one in progress), planned / 1000


def _raw(client: Client, names: list[str]) -> float:
    count = 0
    began = time.perf_counter()
    for at in range(0, len(names), STREAMS_PER_TRIP):
        replies = client.pipeline([("XRANGE", name, "-", "+") for name in names[at : at + STREAMS_PER_TRIP]])
        count += sum(map(len, replies))
    return count / (time.perf_counter() - began)


if __name__ == "__main__":
    sizes = dict(zip(("streams", "entries_each"), map(int, sys.argv[1:]), strict=False))
    print(json.dumps(run(**sizes)))
