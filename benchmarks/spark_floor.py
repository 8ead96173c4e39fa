"""Minimum cost of a micro-batch: millstream's source compared with Spark's own `rate-micro-batch`, both into `noop`.

`ratio`: the median time of a batch of Spark's own source, which generates rows in the JVM, divided by that of
millstream's source, which finds about as many new entries each time. Batches follow each other without a pause; the
first ones, which load everything, do not count.
"""

import json
import statistics
import tempfile
import threading
from typing import Any

from pyspark.sql import DataFrame

from benchmarks.common import cores, fill, laboratory
from millstream.redis_client.client import Client

STREAM = "benchmark"
ROWS = 1_000
WARM_UPS = 10


def run(*, batches: int = 60) -> dict[str, Any]:
    """Measure `batches` batches of each."""
    with laboratory("spark_floor") as (client, spark):
        fill(client, [STREAM], ROWS)
        own = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=ROWS, numPartitions=1).load()
        baseline = _batches(own, batches)
        ours = spark.readStream.format("redis-streams").options(url=client.url, subscribe=STREAM, group="floor").load()
        over = threading.Event()
        publisher = threading.Thread(target=_publish, args=(client.url, over))
        publisher.start()
        try:
            taken = _batches(ours, batches)
        finally:
            over.set()
            publisher.join()
    return {
        "name": "spark_floor",
        "ratio": round(statistics.median(baseline) / statistics.median(taken), 3),
        "batch_ms": statistics.median(taken),
        "batch_p99_ms": taken[len(taken) * 99 // 100],
        "baseline_batch_ms": statistics.median(baseline),
        "baseline_batch_p99_ms": baseline[len(baseline) * 99 // 100],
        "batches": batches,
        "cores": cores(),
        "session": "warm",
    }


def _batches(frame: DataFrame, count: int) -> list[int]:
    """The durations of the batches with rows, in milliseconds, in ascending order."""
    with tempfile.TemporaryDirectory() as folder:
        writer = frame.writeStream.format("noop").option("checkpointLocation", folder)
        query = writer.trigger(processingTime="0 seconds").start()
        try:
            while True:
                query.awaitTermination(1)
                took = [one.durationMs["triggerExecution"] for one in query.recentProgress if one.numInputRows]
                if len(took) >= WARM_UPS + count:
                    return sorted(took[WARM_UPS : WARM_UPS + count])
        finally:
            query.stop()


def _publish(url: str, over: threading.Event) -> None:
    with Client(url) as client:
        while not over.wait(0.05):
            fill(client, [STREAM], ROWS // 5)


if __name__ == "__main__":
    print(json.dumps(run()))
