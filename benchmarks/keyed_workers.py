"""Worker processes that share key queues, compared with a raw read-and-acknowledge loop.

`rate`: 50,000 messages over 1,000 keys, a handler that only records each message, 4 processes of `millstream worker`,
measured from when all of them process messages to the last commit; the order of each key is checked. The raw loop
(redis-py, XREADGROUP and XACK, 1,000 at a time) reads as many in the same run. `efficiency_*`: measured rate /
(messages at once / service time), for a handler that waits 1, 10 and 100 ms, in each of 4 processes over 1,000 keys.
The service time is the real duration of such a wait in event loops that do nothing else, as many at once in as many
processes, in the same run (`service_ms`): a timer of 1 ms takes 1.1 ms there. `nominal_*` uses the requested time
instead. `kilobytes_idle`: memory of the handler's keys in Redis when all messages are done.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

from benchmarks.workers import STREAM, fill, raw_loop, server
from millstream import App, Message
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.testing.history import Event, Fault, check

KEYS = 1_000
PROCESSES = 4
CONCURRENCY = {1: 2, 10: 25, 100: 25}
"""Messages at once in each process, by the milliseconds that each takes: as many as two cores can sustain."""

app = App("bench")
KEYS_OF = HandlerKeys("bench", "handle", STREAM)


@app.handler(STREAM, key="key", into="out", name="handle")
def handle(message: Message) -> dict[str, str | bytes]:
    """Record the key and number of the message."""
    return {"id": message.id, "key": message.key or b""}


def waiting(wait_ms: int) -> App:
    """An app whose handler waits."""
    made = App("bench")

    @made.handler(STREAM, key="key", name="handle", concurrency=CONCURRENCY[wait_ms])
    async def handle(_: Message) -> None:
        await asyncio.sleep(wait_ms / 1000)

    return made


in_1_ms, in_10_ms, in_100_ms = waiting(1), waiting(10), waiting(100)


def run(*, messages: int = 50_000, rounds: int = 2) -> dict[str, Any]:
    """Measure over `messages` messages."""
    rate = raw = 0.0
    with server() as client:
        for _ in range(rounds):
            fill(client, messages, keys=KEYS)
            raw = max(raw, raw_loop(client, messages))
            fill(client, messages, keys=KEYS)
            rate = max(rate, _work(client, "app", messages, PROCESSES))
            violations = _violations(client)
        idle = sum(
            int(client.execute("MEMORY", "USAGE", key) or 0) for key in client.execute("KEYS", f"{KEYS_OF.base}:*")
        )
        efficiency, service = {}, {}
        for wait_ms, at_once in CONCURRENCY.items():
            nominal = PROCESSES * at_once / wait_ms * 1_000
            count = int(round(4 * nominal, -3))
            service_ms = service[wait_ms] = _service_ms(wait_ms, at_once)
            fill(client, count, keys=KEYS)
            reached = _work(client, f"in_{wait_ms}_ms", count, PROCESSES) / nominal
            efficiency[f"efficiency_{wait_ms}_ms"] = round(reached * service_ms / wait_ms, 3)
            efficiency[f"nominal_{wait_ms}_ms"] = round(reached, 3)
    return {
        "name": "keyed_workers",
        "rate": round(rate),
        "baseline_rate": round(raw),
        "ratio": round(rate / raw, 3),
        "violations": violations,
        **efficiency,
        "service_ms": service,
        "kilobytes_idle": round(idle / 1024, 1),
        "messages": messages,
        "keys": KEYS,
        "processes": PROCESSES,
        "concurrency": CONCURRENCY,
    }


def _service_ms(wait_ms: int, at_once: int) -> float:
    """The duration of such a wait, in milliseconds, in otherwise idle event loops."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        took = pool.starmap(_only_wait, [(wait_ms, at_once)] * PROCESSES, chunksize=1)
    return round(sum(took) / len(took), 3)


def _only_wait(wait_ms: int, at_once: int) -> float:
    rounds = 3_000 // wait_ms

    async def wait() -> None:
        for _ in range(rounds):
            await asyncio.sleep(wait_ms / 1000)

    async def wait_together() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(wait() for _ in range(at_once)))
        return (time.perf_counter() - began) / rounds * 1000

    return asyncio.run(wait_together())


def _work(client: Client, name: str, messages: int, processes: int) -> float:
    """Messages per second, from when all workers have committed a message to the last commit.

    Each worker notices the start at its next refresh, so they start one after the other.
    """
    client.execute("HSET", KEYS_OF.meta, "paused", 1)
    command = [sys.executable, "-m", "millstream.cli.main", "worker", f"benchmarks.keyed_workers:{name}"]
    command += ["--url", client.url, "--processes", str(processes)]
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])  # workers look for modules nowhere else
    with subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            _wait(lambda: len(client.execute("KEYS", "millstream:worker:bench:*")) >= processes)
            time.sleep(2.0)
            client.execute("HDEL", KEYS_OF.meta, "paused")
            _wait(lambda: len(client.execute("KEYS", f"{KEYS_OF.base}:*:last")) >= processes)
            began, done = time.perf_counter(), _committed(client)
            _wait(lambda: _committed(client) >= messages)
            return (messages - done) / (time.perf_counter() - began)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _committed(client: Client) -> int:
    return int(client.execute("HGET", KEYS_OF.meta, "committed") or 0)


def _wait(holds: Any) -> None:
    while not holds():
        time.sleep(0.005)


def _violations(client: Client) -> int:
    events = [
        Event(kind="enqueued", stream=STREAM, id=entry_id.decode(), key=pairs[1])
        for entry_id, pairs in client.execute("XRANGE", STREAM, "-", "+")
    ]
    for at, (_, pairs) in enumerate(client.execute("XRANGE", "out", "-", "+")):
        events.append(
            Event(kind="committed", stream=STREAM, id=pairs[1].decode(), key=pairs[3], handler="handle", position=at)
        )
    report = check(events, handlers={STREAM: ["handle"]})
    return sum(len(report.findings(fault)) for fault in get_args(Fault))


if __name__ == "__main__":
    print(json.dumps(run()))
