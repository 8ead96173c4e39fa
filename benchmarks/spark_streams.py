"""Many streams drained by one streaming query in limited batches, compared with a pipelined raw XRANGE of each.

Figures without a number are for 10,000 streams; those that end in 1, 16 and 100000 for as many, with 500,000 entries in
total. `python -m benchmarks.spark_streams STREAMS [ENTRIES_EACH]` measures another number of them alone. `plan_seconds`
is the longest time that Spark waited for the source to plan a batch (its end offsets and partitions), from its own
progress reports; `first_plan_seconds` that of the first batch, which starts a process and reads the start of each
stream. The session is warm; the raw loop reads 100 streams per round trip. Without Spark, a planner alone measures a
refresh without changes (`idle_ms`), and planning a batch after an entry in every twentieth stream (`changed_ms`).
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pyspark.sql import SparkSession

from benchmarks.common import FIELDS, cores, fill, laboratory, raw_streams
from millstream.redis_client.client import Client
from millstream.spark.source.batch_limits import Advance
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.offsets import Offsets, dump
from millstream.spark.source.options import parse

T = TypeVar("T")

OTHERS = (1, 16, 100_000)
ENTRIES = 500_000
_LOOKS = 5
_CHANGED = 20


def run(*, streams: int = 10_000, entries_each: int | None = None, batches: int = 5, rounds: int = 2) -> dict[str, Any]:
    """Measure `streams` streams of `entries_each` entries in about `batches` batches; for 10,000 streams, OTHERS, too."""
    entries_each = entries_each or ENTRIES // streams
    with laboratory("spark_streams") as (client, spark):
        result = {"name": "spark_streams"} | _measure(client, spark, streams, entries_each, batches, rounds)
        for count in OTHERS if streams == 10_000 else ():
            found = _measure(client, spark, count, ENTRIES // count, batches, 1)
            shown = ("rate", "baseline_rate", "ratio", "first_plan_seconds", "plan_seconds", "idle_ms", "changed_ms")
            result |= {f"{name}_{count}": found[name] for name in shown}
    return result


def _measure(
    client: Client, spark: SparkSession, streams: int, entries_each: int, batches: int, rounds: int
) -> dict[str, Any]:
    client.execute("FLUSHALL")
    names = [f"stream:{n:06}" for n in range(streams)]
    total = streams * entries_each
    entry_bytes = fill(client, names, entries_each)
    measured = [_drain(spark, client.url, total, total // batches) for _ in range(rounds + 1)][1:]
    baseline = max(raw_streams(client, names) for _ in range(rounds + 1))
    rates, first, later = zip(*measured, strict=True)
    idle_ms, changed_ms = _looks(client, names)
    return {
        "rate": round(max(rates)),
        "baseline_rate": round(baseline),
        "ratio": round(max(rates) / baseline, 3),
        "first_plan_seconds": round(min(first), 3),
        "plan_seconds": round(min(later), 3),
        "idle_ms": round(idle_ms, 2),
        "changed_ms": round(changed_ms, 1),
        "streams": streams,
        "entries": total,
        "max_per_batch": total // batches,
        "fields": len(FIELDS),
        "bytes_per_entry": round(entry_bytes, 1),
        "cores": cores(),
        "session": "warm",
    }


def _drain(spark: SparkSession, url: str, total: int, per_batch: int) -> tuple[float, float, float]:
    """Entries per second over all batches, planning seconds of the first, and the longest of the others."""
    frame = (
        spark.readStream.format("redis-streams")
        .options(url=url, subscribePattern="stream:*", group="drain")
        .options(startingOffsets="earliest", maxOffsetsPerTrigger=per_batch)
        .load()
    )
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        progress = [one for one in query.recentProgress if one.numInputRows]
    if sum(one.numInputRows for one in progress) != total:
        raise AssertionError("not every entry was read; the figure would be worth nothing")
    first, *later = [(one.durationMs["latestOffset"] + one.durationMs["queryPlanning"]) / 1000 for one in progress]
    return total / sum(one.durationMs["triggerExecution"] / 1000 for one in progress), first, max(later, default=first)


def _looks(client: Client, names: list[str]) -> tuple[float, float]:
    """Milliseconds of a refresh of unchanged streams, and of planning a batch of changed ones; the best of several."""
    planner = BatchPlanner(client, parse({"url": client.url, "subscribePattern": "stream:*"}, {}), cores=cores())
    at = planner.starting_offsets("latest")
    idle_ms, changed_ms = [], []
    for _ in range(_LOOKS):
        planner.plan_next(at)
        idle_ms.append(_timed_ms(lambda: planner.plan_next(at))[0])  # noqa: B023
        fill(client, names[::_CHANGED], 1)
        took_ms, at = _timed_ms(lambda: _plan(planner, at))  # noqa: B023
        changed_ms.append(took_ms)
    return min(idle_ms), min(changed_ms)


def _plan(planner: BatchPlanner, at: Offsets) -> Offsets:
    planned = planner.plan_next(at)
    assert isinstance(planned, Advance)
    end = planned.end
    planner.plan_tasks(at.positions, end.positions)
    dump(end.positions)
    return end


def _timed_ms(action: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = action()
    return (time.perf_counter() - began) * 1000, result


if __name__ == "__main__":
    sizes = dict(zip(("streams", "entries_each"), map(int, sys.argv[1:]), strict=False))
    print(json.dumps(run(**sizes)))
