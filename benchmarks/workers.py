"""Shared code of the worker benchmarks: a server, a filled stream, and a reading loop in this process."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from millstream import App
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.raw_loop import read_and_acknowledge
from millstream.worker import ReadingLoop

STREAM = "benchmark"
RAW_COUNT = 1000
PAYLOAD = b"x" * 100


@contextmanager
def server() -> Iterator[Client]:
    """An embedded server with nothing written to disk."""
    with EmbeddedServer(extra={"appendonly": "no", "save": '""'}) as embedded, Client(embedded.url) as client:
        yield client


def handler_of(function: Callable[..., Any], **options: Any) -> Handler:
    """`function` as the handler of the stream."""
    app = App("bench")
    app.handler(STREAM, name="handle", **options)(function)
    return app.handlers["handle"]


def fill(client: Client, messages: int, *, keys: int | None = None) -> None:
    """Empty the server and publish `messages` entries of 100 bytes and a number, or one of `keys` in no order."""
    client.execute("FLUSHALL")
    publish(client, messages, keys=keys)


def publish(client: Client, messages: int, *, keys: int | None = None) -> None:
    """Publish as `fill` does, beside what there is."""
    for at in range(0, messages, RAW_COUNT):
        firsts = [("n", n) if keys is None else ("key", n * 7919 % keys) for n in range(at, at + RAW_COUNT)]
        client.pipeline([("XADD", STREAM, "*", *first, "payload", PAYLOAD) for first in firsts])


@contextmanager
def working(client: Client, handler: Handler) -> Iterator[ReadingLoop]:
    """A reading loop that runs within the block."""
    loop = ReadingLoop(handler, client.url, consumer="worker")
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join()


def wait_for(loop: ReadingLoop, messages: int) -> None:
    """Wait until `messages` messages are committed."""
    while loop.loop_metrics.committed < messages:
        time.sleep(0.002)


def raw_loop(client: Client, messages: int) -> float:
    """Messages per second of redis-py's XREADGROUP and XACK, 1,000 at a time, in its own group."""
    count, took = read_and_acknowledge(client.url, STREAM, most_s=math.inf, give_up=lambda: False)
    if count != messages:
        raise AssertionError(f"the raw loop read {count} of {messages} messages")
    return messages / took


def commands_a_second(client: Client, seconds: float) -> float:
    """Commands that the server executes a second, within scripts as well, in the next `seconds` seconds."""
    before, began = commands_so_far(client), time.perf_counter()
    time.sleep(seconds)
    return (commands_so_far(client) - before - 1) / (time.perf_counter() - began)


def commands_so_far(client: Client) -> int:
    """Commands that the server has executed, within scripts as well."""
    stats = client.execute("INFO", "stats").decode()
    return int(stats.partition("total_commands_processed:")[2].partition("\r\n")[0])
