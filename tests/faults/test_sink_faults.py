"""The sink under fire: tasks, commits and drivers are killed at every step, and each row is published once."""

import os
from collections import Counter
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.copying import Copying
from tests.support.sink_fixtures import published

pytestmark = [pytest.mark.sink, pytest.mark.drivers, pytest.mark.faults, pytest.mark.spark]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
ROWS, BATCHES = (200_000, 10) if SOAK else (3_000, 3)
TASKS = ("before-staging", "half-staged", "staged")
COMMITS = ("before-commit", "asked", "closed", "decided", "half-published", "published")
DRIVERS = COMMITS if SOAK else ("half-published",)
PROCESSES = (*TASKS, *(COMMITS if SOAK else ("asked", "decided")))
"""Each that dies in a commit has the query begin again; `test_sink_publish` dies at every exchange with Redis, without Spark."""


def test_kills_at_every_step_of_tasks_commits_and_drivers_publish_each_row_once_and_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EmbeddedServer() as server, Client(server.url) as client:
        for start in range(0, ROWS, 1_000):
            client.pipeline([("XADD", "in", "*", "n", n) for n in range(start, start + 1_000)])
        copying = Copying(server.url, tmp_path)
        batch = ROWS // BATCHES
        for point in DRIVERS:
            copying.arm(point, "driver")
            copying.run(batch)
            assert point in copying.hits(), copying.output()
        for point in PROCESSES:
            copying.arm(point, "process")
        assert copying.run(batch) == 0, copying.output()
        assert Counter(copying.hits()) == Counter((*DRIVERS, *PROCESSES)), copying.output()
        with capsys.disabled():
            print(f"\nkills at: {', '.join(copying.hits())}")  # noqa: T201
        for place in range(3):
            found = published(client, f"out{place}")
            assert sorted(found) == [n for n in range(ROWS) if n % 3 == place]
            batches = [n // batch for n in found]
            assert batches == sorted(batches)
        left = client.execute("KEYS", "millstream:*:sink:*")
        assert all(client.execute("TTL", key) > 0 for key in left), "what dead tasks leave behind expires"
        (record,) = client.execute("KEYS", "millstream:{sink:*}:record")
        assert client.execute("HEXISTS", record, "state") == 0
