"""Shared code of the Spark source benchmarks: streams to read, and raw loops as baselines."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import hiredis
import redis
from pyspark.sql import SparkSession

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.spark.run.session import open_session

RAW_COUNT = 1000
STREAMS_PER_TRIP = 100
_COMMANDS_PER_TRIP = 5000

FIELDS: list[tuple[bytes, Callable[[int], bytes]]] = [
    (b"tailnum", lambda n: b"N%05d" % (n % 4043)),
    (b"origin", lambda n: b"JFK"),
    (b"payload", lambda n: b"x" * (70 + n % 25)),
]
"""Three fields, about 110 bytes per entry, names included."""


@contextmanager
def laboratory(name: str, *, handlers_only: bool = False) -> Iterator[tuple[Client, SparkSession]]:
    """An embedded server with nothing written to disk, and a session on all cores, as `millstream run` opens it."""
    with EmbeddedServer(extra={"appendonly": "no", "save": '""'}) as server, Client(server.url) as client:
        conf = {"spark.sql.streaming.numRecentProgressUpdates": "1000", "spark.sql.shuffle.partitions": str(cores())}
        spark = open_session(name, master="local[*]", conf=conf, handlers_only=handlers_only)
        try:
            yield client, spark
        finally:
            spark.stop()


def fill(client: Client, streams: Sequence[str], entries: int) -> float:
    """Add `entries` entries to each stream, round robin; return the bytes of an entry's names and values."""
    total_bytes = 0
    for start in range(0, entries * len(streams), _COMMANDS_PER_TRIP):
        commands: list[tuple[str | bytes, ...]] = []
        for n in range(start, min(start + _COMMANDS_PER_TRIP, entries * len(streams))):
            items = [item for name, make in FIELDS for item in (name, make(n))]
            total_bytes += sum(map(len, items))
            commands.append(("XADD", streams[n % len(streams)], "*", *items))
        client.pipeline(commands)
    return total_bytes / (entries * len(streams))


def raw_socket_loop(url: str, stream: str) -> float:
    """Entries per second of XRANGE over a bare socket, parsed by hiredis and discarded."""
    parts = urlsplit(url)
    reader = hiredis.Reader()
    with socket.create_connection((parts.hostname, parts.port)) as connection:

        def ask(after: bytes) -> Any:
            command: Any = ("XRANGE", stream, after, "+", "COUNT", str(RAW_COUNT))
            connection.sendall(hiredis.pack_command(command))
            while (reply := reader.gets()) is False:
                reader.feed(connection.recv(1 << 16))
            return reply

        return _walk(ask)


def raw_redis_py_loop(url: str, stream: str) -> float:
    """Entries per second of XRANGE over a redis-py connection, parsed by hiredis and discarded."""
    pool = redis.ConnectionPool.from_url(url, protocol=2)
    connection: Any = pool.get_connection()

    def ask(after: bytes) -> Any:
        connection.send_command("XRANGE", stream, after, "+", "COUNT", RAW_COUNT)
        return connection.read_response(disable_decoding=True)

    try:
        return _walk(ask)
    finally:
        connection.disconnect()
        pool.release(connection)


def raw_streams(client: Client, streams: Sequence[str]) -> float:
    """Entries per second of pipelined XRANGEs of whole streams, 100 per round trip, discarded; few streams singly."""
    count = 0
    began = time.perf_counter()
    if len(streams) < STREAMS_PER_TRIP:
        rates = [raw_socket_loop(client.url, stream) for stream in streams]
        return len(rates) / sum(1 / rate for rate in rates)  # harmonic mean: all streams have the same size
    for at in range(0, len(streams), STREAMS_PER_TRIP):
        replies = client.pipeline([("XRANGE", name, "-", "+") for name in streams[at : at + STREAMS_PER_TRIP]])
        count += sum(map(len, replies))
    return count / (time.perf_counter() - began)


def _walk(ask: Callable[[bytes], Any]) -> float:
    count, after = 0, b"-"
    began = time.perf_counter()
    while entries := ask(after):
        count += len(entries)
        after = b"(" + entries[-1][0]
    return count / (time.perf_counter() - began)


def cores() -> int:
    """Number of cores of this machine; Redis, Spark and its Python workers share them."""
    return os.cpu_count() or 1
