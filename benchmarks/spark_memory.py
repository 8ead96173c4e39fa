"""Memory of the driver, the JVM and the Python workers while a long backlog drains through a handler with state.

The figures are resident megabytes: the maxima of the first and the last third of the run, to detect growth. `ratio`
is the last over the first, summed over all processes: about 1 means bounded.
"""

import os
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import cores, fill, laboratory
from millstream.app import load_app
from millstream.spark.run.supervisor import RunSettings, Supervisor

APP = """
from dataclasses import dataclass
from millstream import App, State

app = App("memory")

@dataclass
class Row:
    tailnum: str
    payload: str

@app.handler("backlog", key="tailnum", into="sizes", into_maxlen=1000)
def size(row: Row, state: State) -> dict[str, int]:
    state["n"] = state.get("n", 0) + 1
    return {"size": len(row.payload), "n": state["n"]}
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Resident megabytes by role, at a number of committed messages."""

    committed: int
    megabytes: dict[str, float]


def run(*, entries: int = 1_000_000) -> dict[str, Any]:
    """Drain `entries` entries in batches as large as `millstream run` allows and watch the processes."""
    samples: list[Sample] = []
    committed = 0

    def on_event(event: Any) -> None:
        nonlocal committed
        if event["event"] == "batch":
            committed += event["committed"]

    def watch() -> None:
        while not done.wait(0.5):
            samples.append(Sample(committed=committed, megabytes=_megabytes()))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory_app_of_the_benchmark.py"
        path.write_text(APP)
        app = load_app(f"{path}:app")  # before the session, whose Python workers inherit the import path
        with laboratory("spark_memory", handlers_only=True) as (client, spark):
            fill(client, ["backlog"], entries)
            settings = RunSettings(url=client.url, checkpoint=f"{folder}/checkpoint", once=True)
            done, watcher = threading.Event(), threading.Thread(target=watch)
            watcher.start()
            try:
                Supervisor(app, spark, settings, on_event=on_event).run()
            finally:
                done.set()
                watcher.join()
    if committed != entries:
        raise AssertionError(f"{committed} of {entries} messages are committed; the figure would be worth nothing")
    first = _peak([s for s in samples if s.committed < entries / 3])
    last = _peak([s for s in samples if s.committed > entries * 2 / 3])
    return {
        "name": "spark_memory",
        "ratio": round(sum(last.values()) / sum(first.values()), 3),
        "first_third_mb": first,
        "last_third_mb": last,
        "entries": entries,
        "max_per_batch": settings.max_per_batch,
        "cores": cores(),
    }


def _peak(samples: list[Sample]) -> dict[str, int]:
    return {role: round(max(s.megabytes.get(role, 0.0) for s in samples)) for role in ("driver", "jvm", "workers")}


def _megabytes() -> dict[str, float]:
    driver = psutil.Process(os.getpid())
    found: dict[str, float] = defaultdict(float)
    found["driver"] = driver.memory_info().rss / 1e6
    for process in driver.children(recursive=True):
        try:
            name = process.name()
            role = "jvm" if name == "java" else "workers" if name.startswith("python") else "redis"
            found[role] += process.memory_info().rss / 1e6
        except psutil.NoSuchProcess:
            continue
    return found
