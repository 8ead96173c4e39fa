"""The Yahoo Streaming Benchmark: ad events from a stream, campaigns from Redis, views per campaign and 10 s in Redis.

The application is that of S. Chintapalli et al., "Benchmarking Streaming Computation Engines" (2016): it keeps the view
events, looks up each ad's campaign, and counts views per campaign and window of event time. `rate`: a backlog, from the
start of its batch to its end, in a session that has run it before. The raw loop does the same with redis-py, XREADGROUP
and XACK, 1,000 at a time, and a dictionary. `p50_ms`, `p99_ms`: at a fixed rate, from when an event was in Redis to
when the counts with it were. Every count is compared with the published events.
"""

import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections import Counter
from datetime import datetime
from typing import Any

import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.common import RAW_COUNT, cores, laboratory
from millstream.redis_client.client import Client

EVENTS, ADS, COUNTS = "ad-events", "ad-campaigns", "views:"
CAMPAIGNS, ADS_EACH, WINDOW_MS = 100, 10, 10_000
KINDS = ("view", "click", "purchase")
PER_SECOND_OF_BACKLOG = 10_000
SETTLED_S = 8.0


def run(*, events: int = 500_000, rate: int = 10_000, seconds: float = 40.0, rounds: int = 3) -> dict[str, Any]:
    """Measure a backlog of `events` events, and `rate` events per second for `seconds`."""
    with laboratory("ysb") as (client, spark):
        reached = raw = 0.0
        for number in range(-1, rounds):
            expected = _backlog(client, events)
            took = _drain(spark, client)
            _check(client, expected)
            raw = max(raw, _raw(client, events, expected))
            reached = max(reached, events / took) if number >= 0 else 0.0
        latencies = _live(spark, client, rate, seconds)
    return {
        "name": "ysb",
        "rate": round(reached),
        "baseline_rate": round(raw),
        "ratio": round(reached / raw, 3),
        "events": events,
        "campaigns": CAMPAIGNS,
        "live_rate": rate,
        "live_events": len(latencies),
        "p50_ms": round(statistics.median(latencies)),
        "p99_ms": round(latencies[len(latencies) * 99 // 100]),
        "max_ms": round(latencies[-1]),
        "wrong_counts": 0,
        "cores": cores(),
        "session": "warm",
    }


# The pipeline


def views(spark: SparkSession, client: Client) -> DataFrame:
    """Views per campaign and window, as a stream."""
    events = (
        spark.readStream.format("redis-streams")
        .options(url=client.url, subscribe=EVENTS, group="views", startingOffsets="earliest")
        .schema("ad_id string, event_type string, event_time long")
        .load()
    )
    found = client.execute("HGETALL", ADS)
    pairs = [(found[at].decode(), found[at + 1].decode()) for at in range(0, len(found), 2)]
    ads = spark.createDataFrame(pairs, "ad_id string, campaign string")
    at = f.timestamp_millis("event_time")
    return (
        events.where("event_type = 'view'")
        .join(f.broadcast(ads), "ad_id")
        .withColumn("at", at)
        .withWatermark("at", "10 seconds")
        .groupBy("campaign", f.window("at", f"{WINDOW_MS} milliseconds"))
        .count()
        .select(f.concat_ws(":", "campaign", f.unix_millis("window.start")).alias("name"), "count")
    )


def _start(spark: SparkSession, client: Client, folder: str, *, all_now: bool) -> StreamingQuery:
    def write(counts: DataFrame, _: int) -> None:
        # A count only grows, so the greater of two is the newer one.
        upsert = counts.write.format("redis-streams").options(url=client.url, target="hash", guardColumn="count")
        upsert.options(keyColumn="name", keyPrefix=COUNTS).mode("append").save()

    # Spark has no update mode for Python sinks, except in foreachBatch.
    writer = views(spark, client).writeStream.outputMode("update").foreachBatch(write)
    writer = writer.option("checkpointLocation", folder)
    return (writer.trigger(availableNow=True) if all_now else writer.trigger(processingTime="0 seconds")).start()


# A backlog


def _backlog(client: Client, events: int) -> Counter[str]:
    """Fill an empty server; return the number of views by campaign and window start."""
    client.execute("FLUSHALL")
    pairs = [(f"ad-{n}", f"campaign-{n % CAMPAIGNS}") for n in range(CAMPAIGNS * ADS_EACH)]
    client.execute("HSET", ADS, *[part for pair in pairs for part in pair])
    chance = random.Random(events)
    began_ms = 1_700_000_000_000
    expected: Counter[str] = Counter()
    for start in range(0, events, RAW_COUNT):
        made = [
            _event(chance, began_ms + n * 1_000 // PER_SECOND_OF_BACKLOG, expected)
            for n in range(start, start + RAW_COUNT)
        ]
        client.pipeline([("XADD", EVENTS, "*", *items) for items in made])
    return expected


def _event(chance: random.Random, at_ms: int, expected: Counter[str]) -> list[Any]:
    ad, kind = chance.randrange(CAMPAIGNS * ADS_EACH), KINDS[chance.randrange(3)]
    if kind == "view":
        expected[f"campaign-{ad % CAMPAIGNS}:{at_ms // WINDOW_MS * WINDOW_MS}"] += 1
    return [
        "user_id",
        f"user-{chance.randrange(100_000)}",
        "page_id",
        f"page-{chance.randrange(1_000)}",
        "ad_id",
        f"ad-{ad}",
        "ad_type",
        "banner",
        "event_type",
        kind,
        "event_time",
        at_ms,
        "ip",
        "127.0.0.1",
    ]


def _drain(spark: SparkSession, client: Client) -> float:
    """The duration of the batch with all events, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        query = _start(spark, client, folder, all_now=True)
        query.awaitTermination()
        return sum(one.durationMs["triggerExecution"] for one in query.recentProgress if one.numInputRows) / 1000


def _check(client: Client, expected: Counter[str]) -> None:
    names = [name.decode() for name in client.execute("KEYS", f"{COUNTS}*")]
    counts = client.pipeline([("HGET", name, "count") for name in names])
    found = {name.removeprefix(COUNTS): int(count) for name, count in zip(names, counts, strict=True)}
    if found != expected:
        wrong = {name for name in found.keys() | expected.keys() if found.get(name) != expected[name]}
        raise AssertionError(f"{len(wrong)} counts are wrong; the figures would be worth nothing")


def _raw(client: Client, events: int, expected: Counter[str]) -> float:
    """Events per second of a single redis-py loop that does the same."""
    connection: Any = redis.Redis.from_url(client.url)
    connection.xgroup_create(EVENTS, "raw", id="0")
    campaigns = connection.hgetall(ADS)
    counts: Counter[str] = Counter()
    began = time.perf_counter()
    while found := connection.xreadgroup("raw", "raw", {EVENTS: ">"}, count=RAW_COUNT):
        fresh: Counter[str] = Counter()
        for _, event in found[0][1]:
            if event[b"event_type"] == b"view":
                window = int(event[b"event_time"]) // WINDOW_MS * WINDOW_MS
                fresh[f"{campaigns[event[b'ad_id']].decode()}:{window}"] += 1
        commands = connection.pipeline(transaction=False)
        for name, count in fresh.items():
            commands.hincrby(f"raw:{name}", "count", count)
        commands.xack(EVENTS, "raw", *[entry_id for entry_id, _ in found[0][1]])
        commands.execute()
        counts += fresh
    took = time.perf_counter() - began
    connection.close()
    if counts != expected:
        raise AssertionError("the raw loop counts otherwise; its rate would be worth nothing")
    return events / took


# At a fixed rate


def _live(spark: SparkSession, client: Client, rate: int, seconds: float) -> list[float]:
    """The latencies from an event in Redis to its count, in milliseconds, in ascending order."""
    _backlog(client, RAW_COUNT)  # for the ads
    client.execute("DEL", EVENTS)
    context = multiprocessing.get_context("spawn")
    sent = context.SimpleQueue()
    publisher = context.Process(target=_publish, args=(client.url, rate, seconds, sent))
    with tempfile.TemporaryDirectory() as folder:
        query = _start(spark, client, folder, all_now=False)
        publisher.start()
        expected: Counter[str] = sent.get()
        publisher.join()
        query.processAllAvailable()
        progress = [one for one in query.recentProgress if one.numInputRows]
        query.stop()
    _check(client, expected)
    came_ms = [int(entry_id.partition(b"-")[0]) for entry_id, _ in client.execute("XRANGE", EVENTS, "-", "+")]
    counted_ms = [ended_ms for one in progress for ended_ms in [_ended_ms(one)] * one.numInputRows]
    if len(came_ms) != len(counted_ms):
        raise AssertionError("not every batch has said how long it took; the figures would be worth nothing")
    settled_ms = came_ms[0] + SETTLED_S * 1000
    return sorted(done - came for came, done in zip(came_ms, counted_ms, strict=True) if came >= settled_ms)


def _ended_ms(progress: Any) -> float:
    began = datetime.fromisoformat(progress.timestamp.replace("Z", "+00:00"))
    return began.timestamp() * 1000 + float(progress.durationMs["triggerExecution"])


def _publish(url: str, rate: int, seconds: float, sent: Any) -> None:
    """Publish at an even rate, ten times in 100 ms."""
    expected: Counter[str] = Counter()
    chance, each = random.Random(rate), rate // 100
    with Client(url) as client:
        began = time.time()
        for number in range(int(seconds * 100)):
            time.sleep(max(0.0, began + number / 100 - time.time()))
            now_ms = time.time_ns() // 1_000_000
            client.pipeline([("XADD", EVENTS, "*", *_event(chance, now_ms, expected)) for _ in range(each)])
    sent.put(expected)


if __name__ == "__main__":
    print(json.dumps(run()))
