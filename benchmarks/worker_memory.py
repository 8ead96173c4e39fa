"""Resident memory of a `millstream worker` process that processes 100 messages of 10 MB, for each kind of handler.

`ratio` is the greatest of the peaks over the maximum bytes in flight of a worker (`prefetch_bytes`, 64 MB).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.workers import server
from millstream.redis_client.client import Client
from millstream.worker import WorkerPolicy

MESSAGES, MEGABYTES = 100, 10
KINDS = {"plain": '"big"', "keyed": '"big", key="key"', "stream": 'pattern="big*", order="stream"'}
_LIMIT_S = 300.0
_APP = """
from millstream import App, Message

app = App("memory")

@app.handler({options}, into="out")
def measure(message: Message):
    return {{"size": len(message.fields["payload"])}}
"""


def run() -> dict[str, Any]:
    """Measure each kind."""
    found = {kind: _measure(kind) for kind in KINDS}
    most = max(peak for peak, _, _ in found.values())
    return {
        "name": "worker_memory",
        "ratio": round(most * 2**20 / WorkerPolicy().prefetch_bytes, 2),
        **{f"{kind}_peak_mb": round(peak) for kind, (peak, _, _) in found.items()},
        **{f"{kind}_first_s": round(first, 1) for kind, (_, first, _) in found.items()},
        **{f"{kind}_all_s": round(all_, 1) for kind, (_, _, all_) in found.items()},
    }


def _measure(kind: str) -> tuple[float, float, float]:
    """The worker's peak memory in megabytes; seconds to the first commit, and to the last."""
    with tempfile.TemporaryDirectory() as folder, server() as client:
        path = Path(folder) / "memory_app.py"
        path.write_text(_APP.format(options=KINDS[kind]))
        payload = os.urandom(MEGABYTES * 2**20)
        for number in range(MESSAGES):
            client.execute(
                "XADD", f"big{number % 10}" if kind == "stream" else "big", "*", "key", number % 20, "payload", payload
            )
        command = [
            sys.executable,
            "-m",
            "millstream.cli.main",
            "worker",
            f"{path}:app",
            "--url",
            client.url,
            "--json",
        ]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as worker:
            try:
                return _watched(worker.pid, client, began)
            finally:
                worker.send_signal(signal.SIGTERM)


def _watched(pid: int, client: Client, began: float) -> tuple[float, float, float]:
    peak, first = 0.0, 0.0
    while (done := int(client.execute("XLEN", "out"))) < MESSAGES:
        if time.perf_counter() - began > _LIMIT_S:
            raise AssertionError(f"{done} of {MESSAGES} messages done in {_LIMIT_S:.0f} s")
        for child in psutil.Process(pid).children():
            peak = max(peak, child.memory_info().rss / 2**20)
        first = first or (time.perf_counter() - began if done else 0.0)
        time.sleep(0.02)
    return peak, first, time.perf_counter() - began
