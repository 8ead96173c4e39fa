"""`readFrom=replica` through Spark: tasks ask the replica, and the primary for no entry."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millstream import App, Message
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.pipelines import Pipelines
from tests.support.replicas import FOLLOWS, asked_for, has_all, none_asked
from tests.support.sources import Bench, pairs
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]


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
            with none_asked(primary), asked_for(replica):
                rows = bench.read("s", **bounds).collect()
                assert [int(pairs(row)[b"n"]) for row in rows] == numbers
            with none_asked(primary), asked_for(replica):
                shared = bench.stream("s", readAs="group", group="g", **bounds)
                assert bench.collect(shared, "group").numbers == numbers
            app = App("app")

            @app.handler("s", into="out", name="copy")
            def copy(message: Message) -> dict[str, str | None]:
                return {"n": message.text("n")}

            with asked_for(replica):
                Pipelines(spark, primary.url, tmp_path, client).once(app, read_from="replica")
            found = sorted(int(entry[1][1]) for entry in client.execute("XRANGE", "out", "-", "+"))
            assert found == numbers  # in no order: it has no key
