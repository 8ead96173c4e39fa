"""The daemon that forks Spark's Python workers: it imports what tasks need, and forks only if no thread runs."""

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from millstream.spark.python_daemon import without_delays

pytestmark = pytest.mark.spark

IN_CHILDREN = """
import os, sys
from millstream.spark import python_daemon
python_daemon.preload()
assert not os.environ.keys() & {"OPENBLAS_NUM_THREADS", "JE_ARROW_MALLOC_CONF"}, "handlers see them"
import numpy
for _ in range(2):
    if os.fork() == 0:
        os.write(1, f"{numpy.random.rand()} {python_daemon.thread_count()} {len(sys.modules)}\\n".encode())
        import millstream.spark.engine.entry_points, pandas, pyspark.worker
        os.write(1, f"{len(sys.modules)}\\n".encode())
        os._exit(0)
    os.wait()
"""


def test_workers_have_their_imports_one_thread_and_random_numbers_of_their_own() -> None:
    done = subprocess.run([sys.executable, "-c", IN_CHILDREN], capture_output=True, text=True, check=True)
    (first, threads, before), (after,), (second, *_), _ = map(str.split, done.stdout.splitlines())
    assert threads == "1"
    assert before == after
    assert first != second


@pytest.mark.parametrize(
    ("environment", "program"),
    [
        ({}, b"millstream.spark.python_daemon"),
        ({"JE_ARROW_MALLOC_CONF": "background_thread:true"}, b"pyspark.daemon"),
    ],
    ids=["no thread", "a thread"],
)
def test_the_daemon_forks_only_without_threads_and_otherwise_continues_as_sparks_own_daemon(
    environment: Mapping[str, str], program: bytes
) -> None:
    command = [sys.executable, "-m", "millstream.spark.python_daemon", "pyspark.worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
    ) as daemon:
        assert daemon.stdout is not None
        assert struct.unpack("!i", daemon.stdout.read(4))[0] > 0, "its port"
        assert Path(f"/proc/{daemon.pid}/cmdline").read_bytes().split(b"\0")[2] == program
        daemon.communicate()  # it ends as its input does


def test_tasks_run_in_workers_that_the_daemon_has_forked(spark: SparkSession) -> None:
    def command(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"words": [Path("/proc/self/cmdline").read_text().split("\0")]})

    (row,) = spark.range(1, numPartitions=1).mapInArrow(command, "words array<string>").collect()
    assert row.words[2:4] == ["millstream.spark.python_daemon", "pyspark.worker"]


DELAYS = (socket.TCP_NODELAY, socket.TCP_QUICKACK)


def test_nothing_waits_for_an_acknowledgement_on_the_connection_of_a_task_to_java(spark: SparkSession) -> None:
    def read_options(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        connections = [int(one.name) for one in Path("/proc/self/fd").iterdir() if one.is_socket()]
        with socket.socket(fileno=os.dup(min(connections))) as java:
            yield pa.record_batch({"options": [[java.getsockopt(socket.IPPROTO_TCP, one) for one in DELAYS]]})

    (row,) = spark.range(1, numPartitions=1).mapInArrow(read_options, "options array<long>").collect()
    assert row.options == [1, 1]


def test_it_acknowledges_at_once_in_each_task_of_a_worker() -> None:
    seen = []

    def run_task(connection: socket.socket, _: bool) -> int:
        seen.append([connection.getsockopt(socket.IPPROTO_TCP, one) for one in DELAYS])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)  # as an answer does
        return 0

    run = without_delays(run_task)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert [run(connection, False), run(connection, True)] == [0, 0]
    assert seen == [[1, 1], [1, 1]]


def test_a_task_runs_on_a_connection_that_is_not_tcp() -> None:
    ours, javas = socket.socketpair()
    with ours, javas:
        assert without_delays(lambda connection, _: connection.fileno())(ours, True) == ours.fileno()
