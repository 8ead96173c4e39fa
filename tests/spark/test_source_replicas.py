"""`readFrom=replica` through Spark: tasks ask the replica, and the primary for no entry."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millstream import App, Message
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.pipelines import Pipelines
from tests.support.replicas import FOLLOWS, asked, has_all
from tests.support.sources import Bench, pairs
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]


def eventually_asks_replica_alone(
    read: Callable[[int], None], primary: EmbeddedServer, replica: EmbeddedServer
) -> None:
    """Read until the replica alone was asked for ranges: a replica that lags behind leaves them to its primary."""
    numbers = itertools.count()

    def asks_it_alone() -> bool:
        before = asked(primary), asked(replica)
        read(next(numbers))
        return asked(primary) == before[0] and asked(replica) > before[1]

    eventually(asks_it_alone, f"the replica alone to be asked: {read.__name__}")


def test_tasks_read_from_the_replica(spark: SparkSession, tmp_path: Path) -> None:
    with EmbeddedServer(extra=FOLLOWS) as primary, Client(primary.url) as client:
        follows = {**FOLLOWS, "replicaof": f"127.0.0.1 {primary.port}"}
        with EmbeddedServer(extra=follows) as replica:
            bench = Bench(client, spark, tmp_path)
            eventually(lambda: b"state=online" in primary.call("INFO", "replication"), "the replica")
            bench.add("s", 1_000)
            eventually(lambda: has_all(replica, primary), "the replica to have all entries")
            numbers = list(range(1_000))
            bounds: dict[str, Any] = {
                "startingOffsets": "earliest",
                "maxRecordsPerPartition": 400,
                "readFrom": "replica",
            }

            def read_log(_: int) -> None:
                rows = bench.read("s", **bounds).collect()
                assert [int(pairs(row)[b"n"]) for row in rows] == numbers

            def share_group(number: int) -> None:
                shared = bench.stream("s", readAs="group", group=f"g{number}", **bounds)
                assert bench.collect(shared, f"group{number}").numbers == numbers

            for read in (read_log, share_group):
                eventually_asks_replica_alone(read, primary, replica)
            app = App("app")

            @app.handler("s", into="out", name="copy")
            def copy(message: Message) -> dict[str, str | None]:
                return {"n": message.text("n")}

            def asks_replica() -> bool:
                before = asked(replica)
                Pipelines(spark, primary.url, tmp_path, client).once(app, read_from="replica")
                if asked(replica) > before:
                    return True
                bench.add("s", 100, start=len(numbers))
                numbers.extend(range(len(numbers), len(numbers) + 100))
                return False

            eventually(asks_replica, "a run that reads from the replica")
            found = sorted(int(entry[1][1]) for entry in client.execute("XRANGE", "out", "-", "+"))
            assert found == numbers  # in no order: it has no key
