"""Entries that are together greater than the memory of Spark's Java process pass a few at a time."""

from collections.abc import Iterator

import pytest
from pyspark.sql import functions as F

from millstream import App, Message
from millstream.redis_client.client import Client
from tests.support.pipelines import Pipelines
from tests.support.sources import Bench
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.spark]
MEGABYTE = 1 << 20


FILL = """
local blob = string.rep('x', ARGV[2])
for n = 0, ARGV[1] - 1 do redis.call('XADD', KEYS[1], '*', 'n', n, 'blob', blob) end
"""


@pytest.fixture(autouse=True)
def not_written(client: Client) -> Iterator[None]:
    """Redis keeps these entries in memory only."""
    (_, was) = client.execute("CONFIG", "GET", "appendonly")
    client.execute("CONFIG", "SET", "appendonly", "no")
    yield
    client.execute("UNLINK", "big")
    client.execute("CONFIG", "SET", "appendonly", was)


def fill(client: Client, count: int, size: int) -> None:
    with Client(client.url, timeout_ms=round(FAIL_SAFE_S * 1_000)) as patient:
        patient.execute("EVAL", FILL, 1, "big", count, size)


def test_entries_of_thirty_megabytes_are_read(bench: Bench) -> None:
    fill(bench.client, 34, 30 * MEGABYTE)
    sizes = bench.read("big").select(F.length(F.col("fields")[1]["value"]).alias("size"))
    assert [row["size"] for row in sizes.collect()] == [30 * MEGABYTE] * 34


def test_entries_of_sixteen_megabytes_are_processed(pipelines: Pipelines) -> None:
    app = App("app")

    @app.handler("big", key="n", into="out")
    def weigh(message: Message) -> dict[str, object]:
        return {"n": message.text("n"), "size": len(message.fields["blob"])}

    fill(pipelines.client, 34, 16 * MEGABYTE)
    pipelines.once(app)
    found = sorted((int(fields["n"]), int(fields["size"])) for _, fields in pipelines.entries("out"))
    assert found == [(n, 16 * MEGABYTE) for n in range(34)]
