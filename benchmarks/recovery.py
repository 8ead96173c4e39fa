"""Takeover time of a lost worker's messages, compared with the lease time or claim time.

Two `millstream worker` processes, each with its own supervisor, share a backlog. One is killed with kill -9 together
with its supervisor, so that no process reuses its name: its messages are taken over when its leases have expired.
`ratio`: from the death to the first commit on each key queue that it had leased, p99, over the lease time;
`streams_ratio`: the same for whole streams (`order="stream"`); `entries_ratio`: to the first commit of an unkeyed entry
that it had in flight, over the claim time. `handed_on_ms`: from SIGTERM until another worker has started all messages
that were in flight and not started. `joined_ms`: a worker joins a busy one with keys; from the first message published
then to its first commit.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.workers import server
from millstream import App, Message
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import HandlerKeys

LEASE_MS = 2_000
KEYS = 40
STREAM = "in"
_ROOT = Path(__file__).parents[1]

keyed, streamed, plain = App("keyed"), App("streamed"), App("plain")


def work(message: Message) -> dict[str, Any]:
    """Wait as long as the message says; record the message and the worker."""
    began_ms = time.time() * 1000
    time.sleep(int(message.fields.get("ms", 0)) / 1000)
    return {"id": message.id, "line": message.key or message.stream, "pid": os.getpid(), "began_ms": round(began_ms)}


keyed.handler(STREAM, name="work", into="out", key="key")(work)
streamed.handler(pattern="call:*", name="work", into="out", order="stream")(work)
plain.handler(STREAM, name="work", into="out")(work)


def run(*, rounds: int = 3) -> dict[str, Any]:
    """Kill workers of each kind."""
    keys = [wait for _ in range(rounds) for wait in _of_killed("keyed", _keys_of)]
    streams = [wait for _ in range(rounds) for wait in _of_killed("streamed", _streams_of)]
    entries = [min(_of_killed("plain", _entries_of)) for _ in range(rounds)]
    handed_on = [_handed_on() for _ in range(rounds)]
    joined = [_joined() for _ in range(rounds)]
    return {
        "name": "recovery",
        "ratio": round(_p99(keys) / LEASE_MS, 3),
        "streams_ratio": round(_p99(streams) / LEASE_MS, 3),
        "entries_ratio": round(max(entries) / LEASE_MS, 3),
        "keys_p50_ms": round(statistics.median(keys)),
        "keys_p99_ms": round(_p99(keys)),
        "streams_p50_ms": round(statistics.median(streams)),
        "streams_p99_ms": round(_p99(streams)),
        "handed_on_ms": round(statistics.median(handed_on)),
        "joined_ms": round(statistics.median(joined)),
        "lease_ms": LEASE_MS,
        "lines": len(keys),
        "streams": len(streams),
        "rounds": rounds,
    }


def _p99(found: list[float]) -> float:
    return sorted(found)[min(len(found) - 1, int(len(found) * 0.99))]


@contextmanager
def _worker(client: Client, app: str, name: str, *options: str) -> Iterator[tuple[psutil.Process, int]]:
    """A supervisor and the process id of its worker, which is ready."""
    command = [sys.executable, "-m", "millstream.cli.main", "worker", f"{__file__}:{app}", "--url", client.url]
    command += ["--name", name, "--claim", str(LEASE_MS / 1000), "--json", *options]
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])  # workers look for modules nowhere else
    with subprocess.Popen(
        command,
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if b'"figures"' in line:
                    break
            supervisor = psutil.Process(process.pid)
            yield supervisor, supervisor.children()[0].pid
        finally:
            children = psutil.Process(process.pid).children() if process.poll() is None else []
            process.kill()
            for child in children:
                child.kill()


def _of_killed(app: str, held_by: Callable[[Client, str], set[bytes]]) -> list[float]:
    """Kill a worker; milliseconds from its death until the other has taken over each key, stream or entry."""
    with server() as client, _worker(client, app, "heir") as (_, heir), _worker(client, app, "dying") as (boss, pid):
        names = [f"call:{n}" for n in range(KEYS)] if app == "streamed" else [STREAM]
        client.pipeline(
            [("XADD", names[n % len(names)], "*", "key", f"k{n % KEYS}", "ms", 10) for n in range(50 * KEYS)]
        )
        _wait(lambda: len(held_by(client, "dying")) >= (1 if app == "plain" else 5) and _pids(client) >= {heir, pid})
        boss.kill()
        psutil.Process(pid).kill()
        died_ms, done = _server_ms(client), int(client.execute("XLEN", "out"))
        held = held_by(client, "dying")
        _wait(lambda: held <= _lines(client, done, pid).keys())
        again = _lines(client, done, pid)
        return [again[line] - died_ms for line in held]


def _keys_of(client: Client, worker: str) -> set[bytes]:
    keys = HandlerKeys("keyed", "work", STREAM)
    found = client.execute("HGETALL", keys.owners)
    return {line[1:] for line, token in zip(found[::2], found[1::2], strict=True) if worker.encode() in token}


def _streams_of(client: Client, worker: str) -> set[bytes]:
    names = [f"call:{n}" for n in range(KEYS)]
    commands = [("HVALS", HandlerKeys("streamed", "work", name).owners) for name in names]
    replies = map(raise_if_error, client.pipeline(commands))
    return {
        name.encode()
        for name, tokens in zip(names, replies, strict=True)
        if any(worker.encode() in token for token in tokens)
    }


def _entries_of(client: Client, worker: str) -> set[bytes]:
    found = client.execute("XPENDING", STREAM, HandlerKeys("plain", "work", STREAM).group, "-", "+", 10_000)
    return {entry_id for entry_id, consumer, *_ in found if consumer.startswith(worker.encode())}


def _rows(client: Client, after: int = 0) -> list[tuple[int, dict[bytes, bytes]]]:
    return [
        (int(stamp.partition(b"-")[0]), dict(zip(pairs[::2], pairs[1::2], strict=True)))
        for stamp, pairs in client.execute("XRANGE", "out", "-", "+")[after:]
    ]


def _pids(client: Client) -> set[int]:
    return {int(row[b"pid"]) for _, row in _rows(client)}


def _lines(client: Client, after: int, dead: int) -> dict[bytes, int]:
    """The time of the first commit by the live worker of each key queue and entry, by the server's clock."""
    times: dict[bytes, int] = {}
    for stamp, row in _rows(client, after):
        if int(row[b"pid"]) != dead:
            times.setdefault(row[b"line"], stamp)
            times.setdefault(row[b"id"], stamp)
    return times


def _handed_on() -> float:
    """Milliseconds from SIGTERM until another worker has started all in-flight messages that this one had not."""
    one = ("--threads", "1", "--claim", "600")
    with server() as client, _worker(client, "plain", "leaving", *one) as (boss, pid):
        client.pipeline(
            [("XADD", STREAM, "*", "ms", 0) for _ in range(2_000)]
        )  # short messages, so that it prefetches hundreds
        _wait(lambda: int(client.execute("XLEN", "out")) == 2_000)
        client.pipeline([("XADD", STREAM, "*", "ms", 20_000), *(("XADD", STREAM, "*", "ms", 1) for _ in range(100))])
        _wait(lambda: len(_entries_of(client, "leaving")) > 20)
        with _worker(client, "plain", "heir", *one):
            held = sorted(_entries_of(client, "leaving"), key=lambda one: tuple(map(int, one.split(b"-"))))[1:]
            began_ms = time.time() * 1000
            boss.send_signal(signal.SIGTERM)
            _wait(lambda: set(held) <= {row[b"id"] for _, row in _rows(client, 2_000) if int(row[b"pid"]) != pid})
            began = {row[b"id"]: int(row[b"began_ms"]) for _, row in _rows(client, 2_000)}
            return max(began[one] for one in held) - began_ms


def _joined() -> float:
    """Milliseconds until a worker that has joined a busy one commits its first newly published message."""
    with server() as client, _worker(client, "keyed", "first"):
        client.pipeline([("XADD", STREAM, "*", "key", f"k{n % KEYS}", "ms", 5) for n in range(2_000)])
        with _worker(client, "keyed", "second") as (_, pid):
            given = client.pipeline([("XADD", STREAM, "*", "key", f"k{n % KEYS}", "ms", 5) for n in range(2_000)])
            first_ms = int(given[0].partition(b"-")[0])
            _wait(lambda: pid in _pids(client))
            stamps = [stamp for stamp, row in _rows(client) if int(row[b"pid"]) == pid]
            return max(0, stamps[0] - first_ms)


def _server_ms(client: Client) -> float:
    seconds, micros = client.execute("TIME")
    return int(seconds) * 1000 + int(micros) / 1000


def _wait(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)
