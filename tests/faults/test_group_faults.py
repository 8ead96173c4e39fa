"""A query that shares a group under fire: its driver is killed at every step, a worker reads beside it, and no entry is
lost or doubled on the way through the sink.
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

pytestmark = [pytest.mark.groups, pytest.mark.spark, pytest.mark.drivers, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
ROWS, BATCHES = (100_000, 5) if SOAK else (3_000, 3)
BATCH = ROWS // BATCHES
SOURCE = ("drawn", "noted", "before-ack", "acknowledged")
DRIVERS = SOURCE if SOAK else ("noted",)
PROCESSES = (*SOURCE, "half-staged", "decided") if SOAK else tuple(point for point in SOURCE if point not in DRIVERS)


@contextmanager
def worker(url: str) -> Iterator[list[int]]:
    """An ordinary worker of the group, slow enough to leave most to the query."""
    done: list[int] = []
    stopping = threading.Event()

    def work() -> None:
        with Client(url) as client:
            while True:
                read = ("XREADGROUP", "GROUP", "g", "plain", "COUNT", 5, "STREAMS", "in", ">")
                for _, entries in client.execute(*read) or ():
                    done.extend(int(pairs[1]) for _, pairs in entries)
                    client.execute("XACK", "in", "g", *(entry_id for entry_id, _ in entries))
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


def test_kills_between_reading_recording_and_acknowledging_lose_and_double_nothing(tmp_path: Path) -> None:
    with EmbeddedServer() as server, Client(server.url) as client:
        for start in range(0, ROWS, 1_000):
            client.pipeline([("XADD", "in", "*", "n", n) for n in range(start, start + 1_000)])
        group = Group(client, "in", "g")
        group.create()
        copying = Copying(server.url, tmp_path, readAs="group", group="g")
        with worker(server.url) as done:
            eventually(lambda: done, "the worker's first entries")
            for point in DRIVERS:
                copying.arm(point, "driver")
                copying.run(BATCH)
                assert point in copying.hits(), copying.output()
            for point in PROCESSES:
                copying.arm(point, "process")
            assert copying.run(BATCH) == 0, copying.output()
            eventually(lambda: is_over(group), "the end of what the worker and the query have left")
        assert Counter(copying.hits()) == Counter((*DRIVERS, *PROCESSES)), copying.output()
        copied = [n for place in range(3) for n in published(client, f"out{place}")]
        assert sorted(copied + done) == list(range(ROWS))
        assert copied
