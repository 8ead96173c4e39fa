"""`readAs=group` on Spark: a query that shares a consumer group with ordinary workers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from millstream.groups import Group
from tests.support.sources import Bench, CollectedRows
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.spark, pytest.mark.groups]

GROUP = "workers"
ROWS = 6_000
MOST_OF_WORKER = 2_000


@contextmanager
def worker(url: str) -> Iterator[list[int]]:
    """An ordinary worker of the group, which is no program of ours; what it has done: some entries, but not all."""
    done: list[int] = []
    stopping = threading.Event()

    def work() -> None:
        with redis.Redis.from_url(url) as client:
            while not stopping.is_set() and len(done) < MOST_OF_WORKER:
                for _, entries in client.xreadgroup(GROUP, "plain", {"s": ">"}, count=5, block=100):
                    for entry_id, fields in entries:
                        done.append(int(fields[b"n"]))
                        client.xack("s", GROUP, entry_id)
                stopping.wait(0.05)  # so that it is at work beside the query

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        stopping.set()
        thread.join()


def test_a_query_shares_a_group_with_a_worker_and_repeats_the_batch_that_failed(bench: Bench) -> None:
    group = Group(bench.client, "s", GROUP)
    bench.add("s", ROWS)
    group.create()
    frame = bench.stream("s", schema="n int, _id string", readAs="group", group=GROUP, maxOffsetsPerTrigger=1_500)
    foreign_counts: list[int] = []
    attempts: list[list[str]] = []

    class Failing(CollectedRows):
        """Fails once it has read the second batch."""

        def add_batch(self, frame: DataFrame, batch_id: int) -> None:
            rows = frame.collect()
            names = {one.name: one.pending for one in group.consumers() if one.name.startswith("spark:")}
            foreign_counts.append(sum(names.values()) - len(rows))
            if batch_id == 1:
                attempts.append(sorted(row["_id"] for row in rows))
                if len(attempts) == 1:
                    raise RuntimeError("as planned")
            self.batches.append(rows)

    collected = Failing("q")
    writer = frame.writeStream.foreachBatch(collected.add_batch).option("checkpointLocation", str(bench.folder / "c"))
    with worker(bench.url) as done:
        eventually(lambda: done, "the worker's first entries")
        with pytest.raises(StreamingQueryException, match="as planned"):
            writer.start().awaitTermination(int(FAIL_SAFE_S))
        bench.add("s", 500, start=ROWS)
        query = writer.start()
        bench.queries.append(query)
        eventually(lambda: len(collected.rows) + len(done) >= ROWS + 500, "all was read by one or the other")
        bench.add("s", 500, start=ROWS + 500)
        eventually(lambda: len(collected.rows) + len(done) >= ROWS + 1_000, "the rest was read by one or the other")
        eventually(lambda: group.pending.summary().count == 0, "all was acknowledged")
        query.stop()
    assert sorted([row["n"] for row in collected.rows] + done) == list(range(ROWS + 1_000))
    assert len(collected.rows) >= ROWS - MOST_OF_WORKER
    assert attempts[0] == attempts[1]
    assert len(attempts[0]) > 0
    assert set(foreign_counts) == {0}, "while it is processed, a batch is held by its portions, and nothing else is"
    info = group.info()
    assert info is not None
    assert info.lag == 0


def test_available_now_acknowledges_its_entries_and_claims_of_a_long_batch_are_renewed(
    bench: Bench,
) -> None:
    bench.add("s", 2_500)
    group = Group(bench.client, "s", GROUP)
    options = {"readAs": "group", "group": GROUP, "startingOffsets": "earliest", "claimAfter": "3s"}
    frame = bench.stream("s", maxOffsetsPerTrigger=1_000, **options)
    collected = bench.collect(frame)
    assert collected.numbers == list(range(2_500))
    assert collected.sizes == [1_000, 1_000, 500]
    assert group.pending.summary().count == 0
    bench.add("s", 3)
    waiting, ended = threading.Event(), threading.Event()

    def fail_later(frame: DataFrame, batch_id: int) -> None:
        waiting.set()
        ended.wait(FAIL_SAFE_S)
        raise RuntimeError("as planned")

    writer = frame.writeStream.foreachBatch(fail_later)
    query = writer.option("checkpointLocation", str(bench.folder / "checkpoint")).start()
    bench.queries.append(query)
    assert waiting.wait(FAIL_SAFE_S)
    idle_ms = 0

    def is_renewed() -> bool:
        nonlocal idle_ms
        before, idle_ms = idle_ms, max(entry.idle_ms for entry in group.pending.entries())
        return idle_ms < before

    for _ in range(3):
        eventually(is_renewed, "its being kept while the batch lasts")
    assert group.pending.summary().count == 3
    ended.set()
    with pytest.raises(StreamingQueryException, match="as planned"):
        query.awaitTermination(int(FAIL_SAFE_S))
    eventually(lambda: len(group.pending.entries(min_idle_ms=4_000)) == 3, "a driver that is gone keeps nothing")
