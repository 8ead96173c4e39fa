"""One Spark session for the whole folder, and what tests of the source work with."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millstream.client import Client
from millstream.spark.session import open_session
from tests.support.sources import Bench


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two cores, tasks that may fail three times, two shuffle partitions, no web page and a quiet log."""
    session = open_session("tests", master="local[2,4]", conf={"spark.sql.shuffle.partitions": "2"})
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def quiet_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a failed run behind ends when its tasks have: what they still commit is not for the next one."""
    yield
    if "spark" in request.fixturenames:
        tracker = request.getfixturevalue("spark").sparkContext._jsc.sc().statusTracker()
        end = time.monotonic() + 60
        while any(executor.numRunningTasks() for executor in tracker.getExecutorInfos()):
            assert time.monotonic() < end, "tasks still run a minute after the test"
            time.sleep(0.05)


@pytest.fixture
def bench(spark: SparkSession, millstream_url: str, tmp_path: Path) -> Iterator[Bench]:
    """An empty Redis, the session, and a folder; queries that a test leaves running are stopped."""
    with Client(millstream_url) as client:
        bench = Bench(spark, millstream_url, tmp_path, client)
        yield bench
        for query in bench.queries:
            query.stop()
