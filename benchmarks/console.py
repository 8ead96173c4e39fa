"""Cost of `millstream console` with 100,000 streams, each with a handler: its pages, its commands, its memory, its viewers.

The pages are read over HTTP as a browser without a login reads them. `viewers` viewers keep the overview open, and renew it
as its script does. Commands are those that the server counts, per second.

The raw loop is that of `worker_noop`, on a stream of its own: the ratio compares the worker while the console runs, with
its viewers, with the worker while the console is stopped (SIGSTOP), in interleaved rounds, the best of each.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from benchmarks.worker_noop import noop
from benchmarks.workers import commands_a_second, fill, handler_of, server, wait_for, working
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import send_all

_RENEWAL = {"Millstream-Renewal": "1"}


@dataclass(frozen=True, kw_only=True)
class _Console:
    http: httpx.Client
    process: psutil.Process


def run(*, streams: int = 100_000, messages: int = 40_000, viewers: int = 50, rounds: int = 3) -> dict[str, Any]:
    """Measure with `streams` streams, and the worker over `messages` messages."""
    with server() as client:
        _fill(client, streams)
        with _console(client) as console:
            idle = commands_a_second(client, 15)
            first_ms = _read_ms(console, "/")
            overview = [_read_ms(console, "/") for _ in range(5)]
            pages = [_read_ms(console, f"/streams?prefix=s{number}") for number in range(100)]
            one = _with_viewers(client, console, 1)
            many = _with_viewers(client, console, viewers)
            memory_mb = console.process.memory_info().rss / 1e6
    with server() as client, _console(client) as console:
        ratio = _worker_ratio(client, console, messages, rounds)
    return {
        "name": "console",
        "ratio": round(ratio, 3),
        "streams": streams,
        "idle_commands_a_second": round(idle, 1),
        "first_overview_ms": round(first_ms),
        "overview_ms": round(statistics.median(overview)),
        "list_p95_ms": round(statistics.quantiles(pages, n=20)[-1]),
        "one_viewer_commands_a_second": round(one, 1),
        f"{viewers}_viewers_commands_a_second": round(many, 1),
        "memory_mb": round(memory_mb),
    }


def _fill(client: Client, streams: int) -> None:
    names = [f"s{number}" for number in range(streams)]
    for at in range(0, streams, 1_000):
        some = names[at : at + 1_000]
        send_all(client, [("XADD", name, "*", "a", "b") for name in some])
        send_all(client, [("HSET", HandlerKeys("a", "h", name).meta, "committed_id", "1-0") for name in some])


@contextmanager
def _console(client: Client) -> Iterator[_Console]:
    command = [sys.executable, "-m", "millstream.cli.main", "console", "--port", "0", "--json", "--url", client.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            with httpx.Client(base_url=url, timeout=120) as http:
                yield _Console(http=http, process=psutil.Process(process.pid))
        finally:
            process.terminate()


def _read_ms(console: _Console, path: str, headers: dict[str, str] | None = None) -> float:
    began = time.perf_counter()
    console.http.get(path, headers=headers).raise_for_status()
    return (time.perf_counter() - began) * 1_000


def _with_viewers(client: Client, console: _Console, count: int) -> float:
    with _viewing(console, count):
        return commands_a_second(client, 20)


@contextmanager
def _viewing(console: _Console, count: int) -> Iterator[None]:
    ended = threading.Event()

    def view() -> None:
        while not ended.is_set():
            answer = console.http.get("/", headers=_RENEWAL)
            ended.wait((float(answer.headers["Millstream-Renew-After-Ms"]) + 50) / 1_000)

    threads = [threading.Thread(target=view) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _worker_ratio(client: Client, console: _Console, messages: int, rounds: int) -> float:
    rates = {"with": 0.0, "without": 0.0}
    for _ in range(rounds):
        fill(client, messages)
        with _viewing(console, 1):
            rates["with"] = max(rates["with"], _rate(client, messages))
        os.kill(console.process.pid, signal.SIGSTOP)
        try:
            fill(client, messages)
            rates["without"] = max(rates["without"], _rate(client, messages))
        finally:
            os.kill(console.process.pid, signal.SIGCONT)
    return rates["with"] / rates["without"]


def _rate(client: Client, messages: int) -> float:
    began = time.perf_counter()
    with working(client, handler_of(noop)) as loop:
        wait_for(loop, messages)
        return messages / (time.perf_counter() - began)


if __name__ == "__main__":
    print(json.dumps(run()))
