"""Source and sink under fire: tasks, commits and drivers are killed, and each row is published once.

The query reads one stream by offsets, and shares the group of another with a worker that reads beside it.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.copying import Copying
from tests.support.sink_fixtures import published
from tests.support.waiting import eventually

pytestmark = [pytest.mark.sink, pytest.mark.groups, pytest.mark.drivers, pytest.mark.faults, pytest.mark.spark]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
ROWS, BATCHES = (200_000, 10) if SOAK else (3_000, 3)
BATCH = ROWS // BATCHES
FOR_WORKER = ROWS // 10
TASKS = ("before-staging", "half-staged", "staged")
COMMITS = ("before-commit", "asked", "closed", "decided", "half-published", "published")
GROUP = ("drawn", "noted", "before-ack", "acknowledged")
DRIVERS = (*COMMITS, *GROUP) if SOAK else ("half-published",)
PROCESSES = (*TASKS, *COMMITS, *GROUP) if SOAK else (*TASKS, "noted", "before-ack", "acknowledged")
"""Each that dies in the group's source or in a commit has the query begin again.

Without Spark, `test_sink_publish` dies at every exchange with Redis, and `test_group_batches` draws entries that it does not
note, as their reply is lost.
"""


@contextmanager
def worker(url: str, query_ended: threading.Event) -> Iterator[list[int]]:
    """An ordinary worker of the group: reads a few entries a second, and leaves most to the query until that has ended."""
    done: list[int] = []
    stopping = threading.Event()

    def work() -> None:
        with Client(url) as client:
            while True:
                read = ("XREADGROUP", "GROUP", "g", "plain", "COUNT", 5, "STREAMS", "shared", ">")
                may_read = len(done) < FOR_WORKER or query_ended.is_set()
                for _, entries in (may_read and client.execute(*read)) or ():
                    done.extend(int(pairs[1]) for _, pairs in entries)
                    client.execute("XACK", "shared", "g", *(entry_id for entry_id, _ in entries))
                if stopping.wait(1):
                    return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        stopping.set()
        thread.join()


def is_over(group: Group) -> bool:
    info = group.info()
    return info is not None and not info.lag and not group.pending.summary().count


def test_kills_of_sources_tasks_commits_and_drivers_publish_each_row_once_and_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EmbeddedServer() as server, Client(server.url) as client:
        for start in range(0, ROWS, 1_000):
            for stream in ("in", "shared"):
                client.pipeline([("XADD", stream, "*", "n", n) for n in range(start, start + 1_000)])
        group = Group(client, "shared", "g")
        group.create()
        copying = Copying(server.url, tmp_path)
        query_ended = threading.Event()
        with worker(server.url, query_ended) as done:
            eventually(lambda: done, "the worker's first entries")
            for point in DRIVERS:
                copying.arm(point, "driver")
                copying.run(BATCH)
                assert point in copying.hits(), copying.output()
            for point in PROCESSES:
                copying.arm(point, "process")
            assert copying.run(BATCH) == 0, copying.output()
            query_ended.set()
            eventually(lambda: is_over(group), "the end of what the worker and the query have left")
        assert Counter(copying.hits()) == Counter((*DRIVERS, *PROCESSES)), copying.output()
        with capsys.disabled():
            print(f"\nkills at: {', '.join(copying.hits())}")  # noqa: T201
        shared = []
        for place in range(3):
            found = published(client, f"in:{place}")
            assert sorted(found) == [n for n in range(ROWS) if n % 3 == place]
            batches = [n // BATCH for n in found]
            assert batches == sorted(batches)
            shared += published(client, f"shared:{place}")
        assert shared
        assert sorted(shared + done) == list(range(ROWS))
        left = client.execute("KEYS", "millstream:*:sink:*")
        assert all(client.execute("TTL", key) > 0 for key in left), "what dead tasks leave behind expires"
        (record,) = client.execute("KEYS", "millstream:{sink:*}:record")
        assert client.execute("HEXISTS", record, "state") == 0
