"""`targetBatchDuration`: the first batches are small, and each is as large as the one before was quick."""

import json
import time
from typing import Any

import pytest
from pyspark.errors import AnalysisException

from millstream import App, Message
from millstream.groups import Group
from millstream.spark.source.options import parse
from millstream.spark.source.provider import RedisStreamReader
from millstream.spark.source.schema import default_schema
from millstream.spark.versions import HAS_LIMITS, ReadAllAvailable, ReadMaxRows
from tests.support.pipelines import Pipelines
from tests.support.sources import Bench, Streams

pytestmark = [pytest.mark.spark]

LONG = "1h"
"""So long that each batch is four times as large as the one before."""
TO_END: dict[str, Any] = {} if HAS_LIMITS else {"availableNow": True}


def test_a_query_begins_with_a_small_batch_and_ends_with_all_entries(bench: Bench) -> None:
    bench.add("s", 7_000)
    frame = bench.stream(
        "s",
        startingOffsets="earliest",
        maxOffsetsPerTrigger=50_000,
        targetBatchDuration=LONG,
        **TO_END,
    )
    collected = bench.collect(frame)
    assert collected.sizes == [1_000, 4_000, 2_000]
    assert collected.numbers == list(range(7_000))


def test_batches_grow_also_from_a_start_before_which_the_number_of_entries_is_unknown(bench: Bench) -> None:
    """As from what workers have committed: until its end the query cannot tell how many entries it has still to read."""
    ids = bench.add("s", 7_500)
    frame = bench.stream(
        "s",
        startingOffsets=json.dumps({"s": ids[499]}),
        maxOffsetsPerTrigger=50_000,
        targetBatchDuration=LONG,
        **TO_END,
    )
    assert bench.collect(frame).sizes == [1_000, 4_000, 2_000]


def test_a_query_that_shares_a_group_does_so_too(bench: Bench) -> None:
    bench.add("s", 3_000)
    Group(bench.client, "s", "workers").create()
    frame = bench.stream("s", readAs="group", group="workers", targetBatchDuration=LONG, **TO_END)
    collected = bench.collect(frame)
    assert collected.sizes == [1_000, 2_000]
    assert collected.numbers == list(range(3_000))


def test_trigger_once_reads_all_that_is_there(streams: Streams) -> None:
    streams.add("s", 5_000)
    options = {"maxOffsetsPerTrigger": "50000", "targetBatchDuration": "2s", "startingOffsets": "earliest"}
    given = parse({"url": streams.url, "subscribe": "s", "group": "progress", **options}, {})
    reader = RedisStreamReader(given, default_schema(given.columns))
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(50_000)
    start = reader.initialOffset()
    assert reader.latestOffset(start, limit)["s"][1] == 1_000
    assert reader.latestOffset(start, ReadAllAvailable())["s"][1] == 5_000


@pytest.mark.skipif(HAS_LIMITS, reason="Trigger.AvailableNow has several batches since 4.2")
def test_where_available_now_ends_after_one_batch_the_query_must_say_whether_it_ends(bench: Bench) -> None:
    with pytest.raises(AnalysisException, match="set option availableNow"):
        bench.start(bench.stream("s", maxOffsetsPerTrigger=9, targetBatchDuration="2s"))


def test_a_run_sizes_the_batches_of_a_slow_handler_and_leaves_those_with_an_interval_alone(
    pipelines: Pipelines,
) -> None:
    app = App("app")

    @app.handler("in")
    def wait(message: Message) -> None:
        time.sleep(0.002)

    pipelines.add("in", *({"n": n} for n in range(1_600)))
    pipelines.once(app, batch_target_ms=100)
    sizes = [batch["messages"] for batch in pipelines.events_named("batch")]
    assert (sizes[:2], sum(sizes)) == ([1_000, 250], 1_600)
    pipelines.events.clear()
    pipelines.once(app, checkpoint="other", start="reprocess", batch_target_ms=100, interval_ms=1)
    assert [batch["messages"] for batch in pipelines.events_named("batch")] == [1_600]
