"""A query that shares a group under fire: its driver is killed at every step, a worker reads beside it, and no entry is
lost or doubled on the way through the sink.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.client import Client
from millstream.groups import Group
from millstream.server import EmbeddedServer
from tests.faults.test_sink_faults import SOAK, Copying, published

pytestmark = [pytest.mark.groups, pytest.mark.spark, pytest.mark.drivers, pytest.mark.faults]

ROWS = 100_000 if SOAK else 5_000
BATCH = ROWS // 5
SOURCE = ("drawn", "noted", "before-ack", "acknowledged")
DRIVERS = SOURCE if SOAK else ("noted",)
PROCESSES = (*SOURCE, "half-staged", "decided") if SOAK else SOURCE


@contextmanager
def worker(url: str) -> Iterator[list[int]]:
    """An ordinary worker of the group, slow enough to leave most to the query."""
    done: list[int] = []
    stopping = threading.Event()

    def work() -> None:
        with Client(url) as client:
            while not stopping.wait(1):
                read = ("XREADGROUP", "GROUP", "g", "plain", "COUNT", 5, "STREAMS", "in", ">")
                for _, entries in client.execute(*read) or ():
                    done.extend(int(pairs[1]) for _, pairs in entries)
                    client.execute("XACK", "in", "g", *(entry_id for entry_id, _ in entries))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        stopping.set()
        thread.join()


def test_kills_between_taking_noting_and_acknowledging_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    with EmbeddedServer() as server, Client(server.url) as client:
        for start in range(0, ROWS, 5_000):
            client.pipeline([("XADD", "in", "*", "n", n) for n in range(start, start + 5_000)])
        group = Group(client, "in", "g")
        group.create()
        copying = Copying(server.url, tmp_path, readAs="group", group="g")
        with worker(server.url) as done:
            for point in DRIVERS:
                copying.arm(point, "driver")
                with copying.running(BATCH) as process:
                    process.wait(240)
                assert point in copying.hits(), copying.said()
            for point in PROCESSES:
                copying.arm(point, "process")
            with copying.running(BATCH) as process:
                assert process.wait(400) == 0, copying.said()
            end = time.monotonic() + 60
            while group.pending.summary().count or (info := group.info()) is None or info.lag:
                assert time.monotonic() < end, "entries are left over"
                time.sleep(0.1)
        assert Counter(copying.hits()) == Counter((*DRIVERS, *PROCESSES)), copying.said()
        copied = [n for place in range(3) for n in published(client, f"out{place}")]
        assert sorted(copied + done) == list(range(ROWS))
        assert min(len(copied), len(done)) > 0
