"""What tests of the source, the engine and the runner work with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from millstream.redis_client.client import Client
from millstream.spark.versions import HAS_FILTERS
from tests.support.pipelines import Pipelines
from tests.support.sessions import await_no_tasks
from tests.support.sources import Bench, Streams
from tests.support.waiting import FAIL_SAFE_S

collect_ignore = [] if HAS_FILTERS else ["test_source_filters.py"]


@pytest.fixture(autouse=True)
def quiet_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a failed run behind ends when its tasks have."""
    yield
    if "spark" in request.fixturenames:
        await_no_tasks(request.getfixturevalue("spark"))


@pytest.fixture
def streams(client: Client) -> Streams:
    """An empty Redis, for tests of what needs no session."""
    return Streams(client)


@pytest.fixture
def bench(spark: SparkSession, client: Client, tmp_path: Path) -> Iterator[Bench]:
    """An empty Redis, the session, and a folder; queries that a test leaves running are stopped."""
    bench = Bench(client, spark, tmp_path)
    yield bench
    for query in bench.queries:
        query.stop()


@pytest.fixture
def pipelines(spark: SparkSession, millstream_url: str, tmp_path: Path) -> Iterator[Pipelines]:
    """An empty Redis, the session, and a folder, for runs of apps."""
    with Client(millstream_url, timeout_ms=round(FAIL_SAFE_S * 1_000)) as patient:
        yield Pipelines(spark, millstream_url, tmp_path, patient)
