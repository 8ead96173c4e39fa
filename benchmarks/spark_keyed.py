"""The demo's handler over its flights, with committed effects, compared with a raw read-and-acknowledge loop.

A flight is read, decoded and handled in the order of its aircraft, and its output entry, state and key offset are
committed in one atomic step; the raw loop (redis-py, XREADGROUP and XACK, 1,000 at a time) only reads and acknowledges
the same stream in the same run. The streams are filled first. The session is warm: each run is timed from the end of
its first batch to the end of its last. All figures are the best of several interleaved rounds.

Two more pairs of runs show the cost per message with a backlog, and with a number of keys, ten times as large. In the
second pair the batches grow with the keys, so that each has as many messages per key as before.
"""

import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.common import cores, laboratory
from millstream.app import App, load_app
from millstream.demo.audit import KEYS, OUTPUT
from millstream.demo.flights import Flights, load_flights
from millstream.producer.bulk import Publisher
from millstream.redis_client.client import Client
from millstream.redis_client.raw_loop import read_and_acknowledge
from millstream.spark.run.supervisor import RunSettings, Supervisor

EXAMPLE = Path(__file__).parents[1] / "examples" / "airline.py"
PER_BATCH = 100_000
BACKLOG_PER_BATCH = 10_000
KEYED_BATCHES = 4
MESSAGES_PER_KEY = 10


def run(*, flights: int | None = None, few_keys: int = 1_000, rounds: int = 2) -> dict[str, Any]:
    """Measure, over the first `flights` (default: all), and with `few_keys` and ten times as many keys."""
    app = load_app(f"{EXAMPLE}:app")  # before the session, whose Python workers must find its module
    rows = load_flights(flights)
    small = Flights(rows.columns, rows.rows[: len(rows) // 10])
    with laboratory("spark_keyed", handlers_only=True) as (client, spark), tempfile.TemporaryDirectory() as folder:
        bench = Bench(app, spark, client, Path(folder))
        bench.cost(small, BACKLOG_PER_BATCH)  # the warm-up
        costs = [_one_round(bench, rows, small, few_keys) for _ in range(rounds)]
    best = {name: min(round_costs[name] for round_costs in costs) for name in costs[0]}
    return {
        "name": "spark_keyed",
        "rate": round(1 / best["flights"]),
        "baseline_rate": round(1 / best["raw"]),
        "ratio": round(best["raw"] / best["flights"], 3),
        "cost_at_10x_backlog": round(best["large backlog"] / best["small backlog"], 3),
        "cost_at_10x_keys": round(best["many keys"] / best["few keys"], 3),
        "messages": len(rows),
        "fields": len(rows.columns) + 1,
        "keys": [few_keys, few_keys * 10],
        "max_per_batch": PER_BATCH,
        "cores": cores(),
        "session": "warm",
    }


def _one_round(bench: "Bench", rows: Flights, small: Flights, few_keys: int) -> dict[str, float]:
    """Seconds per message of every kind of run."""
    costs = {
        "small backlog": bench.cost(small, BACKLOG_PER_BATCH),
        "large backlog": bench.cost(rows, BACKLOG_PER_BATCH),
    }
    for name, keys in (("few keys", few_keys), ("many keys", few_keys * 10)):
        batch = keys * MESSAGES_PER_KEY
        costs[name] = bench.cost(_spread(rows, keys, batch * KEYED_BATCHES), batch)
    costs["flights"] = bench.cost(rows, PER_BATCH)
    costs["raw"] = bench.raw_cost()
    return costs


def _spread(flights: Flights, keys: int, messages: int) -> Iterator[dict[str, str]]:
    """Flights assigned to `keys` aircraft, round robin."""
    endless = itertools.cycle(list(itertools.islice(flights, 5_000)))
    for number in range(messages):
        yield next(endless) | {"tailnum": f"K{number % keys}", "row": str(number)}


class Bench:
    """Runs the app, or the raw loop, over a stream filled before."""

    def __init__(
        self,
        app: App,
        spark: SparkSession,
        client: Client,
        folder: Path,
        *,
        meter: Callable[[], Any] = time.perf_counter,
    ) -> None:
        self._app = app
        self._spark = spark
        self._client = client
        self._meter = meter
        self._checkpoints = (folder / str(number) for number in itertools.count())

    def cost(self, messages: Iterable[Mapping[str, str]], max_per_batch: int) -> float:
        """Seconds per message of all batches except the first; `messages` must be enough for at least two."""
        batches = self.batches(messages, max_per_batch)
        took_s: float = batches[-1][0] - batches[0][0]
        return took_s / sum(messages for _, messages in batches[1:])

    def batches(self, messages: Iterable[Mapping[str, str]], max_per_batch: int) -> list[tuple[Any, int]]:
        """What the meter showed at the end of each batch, and how many messages the batch had."""
        self._client.execute("FLUSHALL")
        with Publisher(self._client, KEYS.stream) as publisher:
            count = publisher.send(messages)
        batches: list[tuple[Any, int]] = []

        def on_event(event: Mapping[str, Any]) -> None:
            if event["event"] == "batch":
                batches.append((self._meter(), event["messages"]))

        settings = RunSettings(
            url=self._client.url,
            checkpoint=str(next(self._checkpoints)),
            max_per_batch=max_per_batch,
            once=True,
        )
        Supervisor(self._app, self._spark, settings, on_event=on_event).run()
        done = self._client.execute("XLEN", OUTPUT) + self._client.execute("XLEN", KEYS.dead_letters)
        if done != count:
            raise AssertionError(f"{done} of {count} messages are committed; the figure would be worth nothing")
        return batches

    def raw_cost(self) -> float:
        """Seconds per message of a loop that only reads and acknowledges the messages of the last run."""
        count, took = read_and_acknowledge(self._client.url, KEYS.stream, most_s=math.inf, give_up=lambda: False)
        return took / count


if __name__ == "__main__":
    print(json.dumps(run()))
