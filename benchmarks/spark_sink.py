"""1,000,000 rows written to a stream by Spark, exactly once, against a single raw loop of pipelined XADD.

Spark's side is everything from planning the write to its last published row: made by Spark, staged by tasks, sealed, decided
and published, as a batch of a query is (`txnAppId`), in a session that has run it before. The raw loop is a bare
socket with hiredis, 1,000 XADD at a time, of rows that were made beforehand; replies are parsed and thrown away. Both are the
best of several rounds, taken in turns.
"""

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import hiredis

from benchmarks.common import FIELDS, RAW_COUNT, cores, laboratory

STREAM, RAW = "benchmark", "raw"
_ROWS = (
    "concat('N', lpad(id % 4043, 5, '0')) tailnum",
    "'JFK' origin",
    "repeat('x', cast(70 + id % 25 as int)) payload",
)


def run(*, rows: int = 1_000_000, rounds: int = 3, warm_ups: int = 2) -> dict[str, Any]:
    """Measure with so many rows."""
    made = [[item for name, make in FIELDS for item in (name, make(n))] for n in range(RAW_COUNT)]
    with laboratory("spark_sink") as (client, spark):
        frame = spark.range(rows).selectExpr(*_ROWS)
        rate = baseline = 0.0
        for number in range(-warm_ups, rounds):
            client.execute("FLUSHALL")
            options: dict[str, str | int] = {
                "url": client.url,
                "stream": STREAM,
                "txnAppId": "benchmark",
                "txnVersion": number + warm_ups,
            }
            began = time.perf_counter()
            frame.write.format("redis-streams").options(**options).mode("append").save()
            took = time.perf_counter() - began
            if client.execute("XLEN", STREAM) != rows:
                raise AssertionError("not every row was written once; the figure would be worth nothing")
            client.execute("FLUSHALL")
            raw = raw_loop(client.url, made, rows)
            if number >= 0:
                rate, baseline = max(rate, rows / took), max(baseline, raw)
    return {
        "name": "spark_sink",
        "rate": round(rate),
        "baseline_rate": round(baseline),
        "ratio": round(rate / baseline, 3),
        "rows": rows,
        "fields": len(FIELDS),
        "guarantee": "exactly-once",
        "cores": cores(),
        "session": "warm",
    }


def raw_loop(url: str, made: list[list[bytes]], rows: int) -> float:
    """Entries a second of XADD, a thousand in one write, over a bare socket."""
    parts = urlsplit(url)
    reader = hiredis.Reader()
    began = time.perf_counter()
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        for _ in range(0, rows, len(made)):
            commands: list[Any] = [("XADD", RAW, "*", *items) for items in made]
            connection.sendall(b"".join(map(hiredis.pack_command, commands)))
            replies = 0
            while replies < len(made):
                if reader.gets() is False:
                    reader.feed(connection.recv(1 << 16))
                else:
                    replies += 1
    return rows / (time.perf_counter() - began)


if __name__ == "__main__":
    print(json.dumps(run()))
