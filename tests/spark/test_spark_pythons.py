"""The Python that is forked for sources and sinks ends as what Spark starts does: tests that kill Spark rely on it."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.spark_pythons import DAEMON, RUNNER, WORKERS, quick_spark_pythons
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.spark]


@pytest.fixture(autouse=True, scope="module")
def forked() -> Iterator[None]:
    with quick_spark_pythons():
        yield


def start(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """What Spark does, with the import path of the home that tests give it."""
    path = os.pathsep.join([f"{os.environ['SPARK_HOME']}/python/lib/pyspark.zip", os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_a_daemon_ends_with_its_stdin() -> None:
    with start(DAEMON, f"{WORKERS}lookup_data_sources") as daemon:
        assert daemon.stdout is not None
        assert daemon.stdin is not None
        assert daemon.stdout.read(4), "where it listens"
        daemon.stdin.close()
        daemon.wait(FAIL_SAFE_S)


def test_a_source_ends_with_the_process_that_spark_kills() -> None:
    with socket.create_server(("127.0.0.1", 0)) as java:
        java.settimeout(FAIL_SAFE_S)
        port = str(java.getsockname()[1])
        variables = {"PYTHON_WORKER_FACTORY_PORT": port, "PYTHON_WORKER_FACTORY_SECRET": "secret"}
        with start(RUNNER, **variables) as runner:
            connection, _ = java.accept()
            with connection:
                connection.settimeout(FAIL_SAFE_S)
                runner.kill()
                while connection.recv(1_000):  # the source waits for an answer
                    pass
