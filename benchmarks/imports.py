"""Start-up cost of millstream's processes, compared with the libraries that they import.

CPU time of Python processes that import a module, minus that of one that imports nothing; medians of interleaved
rounds. The baselines are `import redis` for modules that use Redis, with typer for commands, `import pyspark.sql` for
the data source (which Spark also looks up in processes without Redis), and pyarrow with redis for a task.

`worker_s` is the CPU time of `millstream worker`, its supervisor and one worker process, up to the worker's first read.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.workers import server
from millstream.redis_client.client import Client

NOTHING = "pass"
AGAINST = {
    "root": ("import millstream", "import redis"),
    "client": ("import millstream.redis_client.client", "import redis"),
    "help": ("from millstream.cli.main import main; main(['--help'], standalone_mode=False)", "import typer"),
    "worker": ("import millstream.cli.main, millstream.cli.worker", "import redis, typer"),
    "source": ("import millstream.spark.source.provider", "import pyspark.sql"),
    "task": ("import millstream.spark.engine.task", "import redis, pyarrow"),
}
"""The measured imports, and the baseline of each."""

APP = """
from millstream import App, Message
app = App("bench")

@app.handler("in", into="out")
def handle(message: Message) -> None: ...
"""


def run(*, rounds: int = 11) -> dict[str, Any]:
    """Measure `rounds` times; `ratio` is that of the worker."""
    codes = [NOTHING, *dict.fromkeys(code for pair in AGAINST.values() for code in pair)]
    for code in codes:
        _cpu_s(code)  # warm-up: compiles all modules
    taken: dict[str, list[float]] = {code: [] for code in codes}
    for _ in range(rounds):
        for code in codes:
            taken[code].append(_cpu_s(code))
    cost = {code: statistics.median(times) - statistics.median(taken[NOTHING]) for code, times in taken.items()}
    figures: dict[str, Any] = {"name": "imports", "python_ms": round(1000 * statistics.median(taken[NOTHING]))}
    for name, (ours, base) in AGAINST.items():
        figures[f"{name}_ms"] = round(1000 * cost[ours])
        figures[f"{name}_base_ms"] = round(1000 * cost[base])
        figures[f"{name}_ratio"] = round(cost[ours] / cost[base], 2)
    with server() as client, tempfile.TemporaryDirectory() as folder:
        figures["worker_s"] = round(statistics.median(_first_read_s(client, Path(folder)) for _ in range(3)), 2)
    return {**figures, "ratio": figures["worker_ratio"]}


def _environment() -> dict[str, str]:
    # Without a bytecode cache, compiling would be most of the measured time.
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _cpu_s(code: str) -> float:
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=_environment(), stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{code!r} has failed")
    return usage.ru_utime + usage.ru_stime


def _first_read_s(client: Client, folder: Path) -> float:
    client.execute("FLUSHALL")
    app = folder / "bench_app.py"
    app.write_text(APP)
    command = [sys.executable, "-m", "millstream.cli.main", "worker", f"{app}:app", "--url", client.url]
    with subprocess.Popen(command, env=_environment(), stderr=subprocess.DEVNULL) as process:
        while not _reads(client):
            time.sleep(0.002)
        whole = psutil.Process(process.pid)
        times = [one.cpu_times() for one in (whole, *whole.children(recursive=True))]
        process.terminate()
    return sum(one.user + one.system for one in times)


def _reads(client: Client) -> bool:
    """Whether a worker is reading from the handler's group."""
    return b"cmd=xreadgroup" in client.execute("CLIENT", "LIST")


if __name__ == "__main__":
    print(json.dumps(run()))
