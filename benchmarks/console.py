"""Cost of `millstream console` with 100,000 streams, each with a handler and its consumer group, against its budgets.

The pages are read over HTTP as a browser without a login reads them. `viewers` viewers keep the overview open, and renew it
as its script does. Commands are those that the server counts, per second. `budgets` has each budget, what was measured, and
whether it holds; of other numbers of streams than 100,000 that says little.

The overview is read first of consoles that have just started, by HTTP and in a browser (Chromium), then of one that has read
all streams once. A key is parked on the last stream; the time until the overview names it includes what the console keeps.

The worker is that of `worker_noop`, on one more stream: the ratio compares it while the console runs, with
one viewer, with the worker while the console is stopped (SIGSTOP): the median of each over rounds, each round in the other
order.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from benchmarks.worker_noop import noop
from benchmarks.workers import (
    STREAM,
    commands_a_second,
    commands_so_far,
    handler_of,
    publish,
    server,
    wait_for,
    working,
)
from millstream.admin.figure_history import FigureHistory
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import send_all, server_time_ms
from tests.support.browser import Browser, Chromium
from tests.support.waiting import eventually

_RENEWAL = {"Millstream-Renewal": "1"}
_RENEW_S = 5.0
_VIEW_S = 20.0
_IDLE_S = 60.0
"""A sample of the history is in it."""
_STUCK_S = 120.0
"""After this long, no more is waited for a stuck key to be found."""
_HANDLER = "shop.pay"
_FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


@dataclass(frozen=True, kw_only=True)
class _Console:
    http: httpx.Client
    process: psutil.Process


def run(*, streams: int = 100_000, messages: int = 400_000, viewers: int = 50, rounds: int = 10) -> dict[str, Any]:
    """Measure with `streams` streams, and the worker over `messages` messages."""
    with server() as client:
        _fill(client, streams)
        with _console(client) as console:
            cold_ms = _read_ms(console, "/")
        paint_ms = _first_paint_ms(client)
        before = commands_so_far(client)
        with _console(client) as console:
            sweep_s = _first_sweep_s(client)
            swept = commands_so_far(client) - before
            idle = commands_a_second(client, _IDLE_S)
            first_ms = _read_ms(console, "/")
            pages = {path: _median_ms(console, path) for path in ("/", "/stuck", f"/handler?name={_HANDLER}")}
            lists = [_read_ms(console, f"/streams?prefix=s{number}") for number in range(100)]
            one = _with_viewers(client, console, 1)
            many = _with_viewers(client, console, viewers)
            stuck_ms = _stuck_found_ms(client, console, streams)
            pages["/streams"] = _median_ms(
                console, "/streams?order=entries"
            )  # the last: the ranking runs on for seconds
            memory_mb = console.process.memory_info().rss / 1e6
            ratio = _worker_ratio(client, console, messages, rounds)
    found = {
        "ratio": round(ratio, 3),
        "idle_commands_a_second": round(idle, 1),
        "first_sweep_s": round(sweep_s),
        "first_sweep_commands": swept,
        "cold_overview_ms": round(cold_ms),
        "first_paint_ms": round(paint_ms),
        "first_overview_ms": round(first_ms),
        "stuck_found_ms": round(stuck_ms),
        "list_p95_ms": round(statistics.quantiles(lists, n=20)[-1]),
        "one_viewer_commands_a_second": round(one, 1),
        "viewers_commands_a_second": round(many, 1),
        "memory_mb": round(memory_mb),
    }
    return {
        "name": "console",
        **found,
        "streams": streams,
        "viewers": viewers,
        "page_ms": {path.partition("?")[0]: round(took) for path, took in pages.items()},
        "budgets": budgets(found),
    }


def budgets(found: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Each budget of these figures, and whether it holds.

    More viewers may cost as much as one: a renewal more may be in the seconds in which commands were counted.
    """
    most = {
        "idle_commands_a_second": 10,
        "cold_overview_ms": 1_000,
        "first_paint_ms": 1_000,
        "first_overview_ms": 1_000,
        "stuck_found_ms": 60_000,
        "list_p95_ms": 200,
        "viewers_commands_a_second": round(found["one_viewer_commands_a_second"] * (1 + _RENEW_S / _VIEW_S), 1),
        "memory_mb": 200,
    }
    marks = {
        name: {"measured": found[name], "most": limit, "holds": found[name] <= limit} for name, limit in most.items()
    }
    least = 0.98
    return marks | {"ratio": {"measured": found["ratio"], "least": least, "holds": found["ratio"] >= least}}


def _fill(client: Client, streams: int) -> None:
    names = [f"s{number}" for number in range(streams)]
    for at in range(0, streams, 1_000):
        some = names[at : at + 1_000]
        send_all(client, [("XADD", name, "*", "a", "b") for name in some])
        places = [_place(name) for name in some]
        send_all(client, [("XGROUP", "CREATE", one.stream, one.group, "0") for one in places])
        send_all(client, [("HSET", one.meta, "committed_id", "1-0", "owner", "workers") for one in places])


def _place(stream: str) -> HandlerKeys:
    app, handler = _HANDLER.split(".")
    return HandlerKeys(app, handler, stream)


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


def _first_paint_ms(client: Client) -> float:
    """How long a browser takes until it shows something of the overview of a console that has just started."""
    with (
        TemporaryDirectory() as profile,
        Chromium(Path(profile)) as chromium,
        Browser("about:blank", chromium) as browser,
        _console(client) as console,
    ):
        browser.command("Page.navigate", url=str(console.http.base_url))
        return float(eventually(lambda: browser.run(_FIRST_PAINT), "the first paint of the overview"))


def _stuck_found_ms(client: Client, console: _Console, streams: int) -> float:
    """How long until the overview names a key that is parked on the last stream; `_STUCK_S` if it does not."""
    parked = _place(f"s{streams - 1}").parked
    client.execute("HSET", parked, "kann", f"{server_time_ms(client)} benchmark")
    began = time.perf_counter()
    while f"{_HANDLER}: 1 parked key" not in console.http.get("/").raise_for_status().text:
        if time.perf_counter() - began >= _STUCK_S:
            break
        time.sleep(0.1)
    took_ms = (time.perf_counter() - began) * 1_000
    client.execute("DEL", parked)
    return took_ms


def _first_sweep_s(client: Client) -> float:
    """How long the console takes until the history has its first sample, which has all streams."""
    began = time.perf_counter()
    while FigureHistory(client).newest() is None:
        time.sleep(1)
    return time.perf_counter() - began


def _read_ms(console: _Console, path: str, headers: dict[str, str] | None = None) -> float:
    began = time.perf_counter()
    console.http.get(path, headers=headers).raise_for_status()
    return (time.perf_counter() - began) * 1_000


def _median_ms(console: _Console, path: str) -> float:
    return statistics.median(_read_ms(console, path) for _ in range(5))


def _with_viewers(client: Client, console: _Console, count: int) -> float:
    with _viewing(console, count):
        return commands_a_second(client, _VIEW_S)


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
    conditions = {"with": partial(_viewing, console, 1), "without": partial(_stopped, console)}
    rates: dict[str, list[float]] = {name: [] for name in conditions}
    for number in range(rounds):
        for name in sorted(conditions, reverse=bool(number % 2)):  # the first of a round is slower, whichever it is
            with conditions[name]():
                rates[name].append(_rate(client, messages))
    return statistics.median(rates["with"]) / statistics.median(rates["without"])


@contextmanager
def _stopped(console: _Console) -> Iterator[None]:
    os.kill(console.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(console.process.pid, signal.SIGCONT)


def _rate(client: Client, messages: int) -> float:
    """Messages per second of a worker on one more stream, beside all others."""
    base = HandlerKeys("bench", "handle", STREAM).base
    client.execute("UNLINK", STREAM, *client.execute("KEYS", f"{base}:*"))
    publish(client, messages)
    began = time.perf_counter()
    with working(client, handler_of(noop)) as loop:
        wait_for(loop, messages)
        return messages / (time.perf_counter() - began)


if __name__ == "__main__":
    print(json.dumps(run()))
