"""`minOffsetsPerTrigger` and `maxTriggerDelay`: small batches wait for more, and not too long."""

import time
from types import SimpleNamespace

import pytest

from millstream.redis_client.client import Client
from millstream.spark.source import provider as source
from millstream.spark.source.batch_limits import BatchLimits, NoAdvance
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.offsets import Offsets
from millstream.spark.source.options import parse
from millstream.spark.source.provider import RedisStreamReader
from millstream.spark.source.reader_base import DELAY_POLL_S
from millstream.spark.source.schema import default_schema
from millstream.spark.versions import ReadAllAvailable, ReadMaxRows, ReadMinRows
from tests.support.clocks import ManualClock
from tests.support.planning import planned_end
from tests.support.sources import Bench, Streams
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]

MINUTE_MS = 60_000.0
LOOK = "client|tracking"
"""What each look at the streams asks Redis for."""


class Query:
    """A planner and where its query stands."""

    def __init__(self, client: Client, clock: ManualClock, **options: str) -> None:
        given = {"url": client.url, "subscribe": "s,t", "startingOffsets": "earliest", **options}
        self.planner = BatchPlanner(client, parse(given, {}), cores=1, clock=clock)
        self.at = self.planner.starting_offsets("latest")

    def trigger(self, *, limit: int | None = None, target: Offsets | None = None, may_delay: bool = True) -> int:
        """How many entries the next batch takes."""
        ends = planned_end(self.planner, self.at, limit=limit, target=target, may_delay=may_delay)
        collected = sum((end.entries_added or 0) - (self.at[name].entries_added or 0) for name, end in ends.items())
        self.at = ends
        return collected


def add(client: Client, stream: str, count: int) -> None:
    client.pipeline([("XADD", stream, "*", "a", "1") for _ in range(count)])


def test_a_small_batch_waits_for_more_entries_over_all_streams_or_for_its_time(client: Client) -> None:
    clock = ManualClock()
    add(client, "s", 3)
    query = Query(client, clock, minOffsetsPerTrigger="10", maxTriggerDelay="5m")
    assert query.trigger() == 3, "the first batch is never held back"
    add(client, "s", 4)
    add(client, "t", 5)
    assert query.trigger() == 0
    add(client, "t", 1)
    assert query.trigger() == 10
    clock.now_ms += 4 * MINUTE_MS
    add(client, "s", 1)
    assert query.trigger() == 0
    clock.now_ms += MINUTE_MS
    assert query.trigger() == 1
    clock.now_ms += 9 * MINUTE_MS
    assert query.trigger() == 0, "nothing is there"
    add(client, "s", 2)
    assert query.trigger() == 2, "the last batch is long ago"
    add(client, "s", 2)
    assert query.trigger() == 0


def test_waiting_entries_are_delayed_for_the_rest_of_the_trigger_delay(client: Client) -> None:
    clock = ManualClock()
    add(client, "s", 1)
    query = Query(client, clock, minOffsetsPerTrigger="10")
    query.trigger()
    add(client, "s", 1)
    clock.now_ms += MINUTE_MS
    assert query.planner.plan_next(query.at, BatchLimits(may_delay=True)) == NoAdvance(14 * MINUTE_MS)
    assert query.trigger(may_delay=False) == 1
    idle = query.planner.plan_next(query.at, BatchLimits(may_delay=True))
    assert idle == NoAdvance(0), "nothing is held back, so it is looked at as often as ever"


def test_a_limited_batch_waits_too_and_one_with_a_fixed_end_does_not(client: Client) -> None:
    clock = ManualClock()
    add(client, "s", 1)
    query = Query(client, clock, minOffsetsPerTrigger="10", maxOffsetsPerTrigger="15")
    query.trigger(limit=15)
    add(client, "s", 30)
    assert [query.trigger(limit=15) for _ in range(3)] == [15, 15, 0]
    add(client, "s", 9)
    assert query.trigger(limit=15) == 0


def reader_of(streams: Streams, **options: str) -> RedisStreamReader:
    given = parse(
        {"url": streams.url, "subscribe": "s", "group": "progress", "startingOffsets": "earliest", **options}, {}
    )
    return RedisStreamReader(given, default_schema(given.columns))


def test_available_now_and_once_read_the_small_batch_at_once(streams: Streams) -> None:
    add(streams.client, "s", 1)
    reader = reader_of(streams, minOffsetsPerTrigger="10")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(10)
    at = reader.latestOffset(reader.initialOffset(), limit)
    add(streams.client, "s", 1)
    assert reader.latestOffset(at, limit) is at
    assert reader.latestOffset(at, ReadAllAvailable())["s"][1] == 2
    add(streams.client, "s", 1)
    reader.prepareForTriggerAvailableNow()
    assert reader.latestOffset(at, limit)["s"][1] == 3
    both = reader_of(streams, minOffsetsPerTrigger="10", maxOffsetsPerTrigger="10")
    assert both.getDefaultReadLimit() == ReadMaxRows(10)


def test_a_query_waits_until_there_are_enough_entries_or_its_delay_is_over(bench: Bench) -> None:
    bench.add("s", 1)
    frame = bench.stream("s", startingOffsets="earliest", minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    collected = bench.start(frame)
    eventually(lambda: len(collected.rows) == 1, "the first batch, which is not held back")
    bench.add("s", 9)
    before = bench.calls(LOOK)
    eventually(lambda: bench.calls(LOOK) >= before + 2, "a look at them")
    assert len(collected.rows) == 1
    bench.add("s", 1)
    eventually(lambda: len(collected.rows) == 11, "enough is there")
    collected.query.stop()
    assert collected.sizes == [1, 10]
    frame = bench.stream("s", startingOffsets="earliest", minOffsetsPerTrigger=10, maxTriggerDelay="1s")
    brief = bench.start(frame, "brief")
    eventually(lambda: len(brief.rows) == 11, "its first batch")
    bench.add("s", 3)
    eventually(lambda: len(brief.rows) == 14, "the end of its delay")


def test_a_query_that_waits_for_entries_polls_seldom(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waits.append))
    streams.add("s", 1)
    reader = reader_of(streams, minOffsetsPerTrigger="10")
    at = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    streams.add("s", 1)
    for _ in range(3):
        assert reader.latestOffset(at, reader.getDefaultReadLimit()) is at
    assert waits == [DELAY_POLL_S] * 3 == [0.5] * 3, "twice a second, as it says"
