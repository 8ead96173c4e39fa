"""Readers on Spark 4.0 and 4.1, called as its MicroBatchExecution calls them: batches follow each other all the same."""

import logging
from typing import Any

import pytest

from millstream.clock import SYSTEM_CLOCK
from millstream.errors import ConfigError
from millstream.spark.run.redis_lag import RedisLag, entries_behind_group
from millstream.spark.source import provider
from millstream.spark.source.group_reader import RedisGroupReader
from millstream.spark.source.options import parse
from millstream.spark.source.provider import RedisStreamReader, RedisStreamsSource
from millstream.spark.source.schema import default_schema
from millstream.spark.source.tracking_reader import TrackingReader
from tests.support.sources import Streams

pytestmark = [pytest.mark.spark]

LOG: dict[str, str] = {"startingOffsets": "earliest", "group": "progress"}
GROUP: dict[str, str] = {"startingOffsets": "earliest", "readAs": "group", "group": "g"}


def reader(streams: Streams, subscribe: str = "s", **options: str) -> TrackingReader:
    """What a query that starts or restarts creates."""
    parsed = parse({"url": streams.url, "subscribe": subscribe, **options})
    kind = RedisStreamReader if parsed.sharing is None else RedisGroupReader
    return TrackingReader(kind(parsed, default_schema(parsed.columns)), parsed.available_now)


def count(one: TrackingReader, start: dict[str, Any], end: dict[str, Any]) -> int:
    """How many entries the tasks of a batch read."""
    return sum(sum(batch.num_rows for batch in one.read(task)) for task in one.partitions(start, end))


def batches(one: TrackingReader, at: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """The sizes of the batches after the offset `at`, until nothing is new, and the last end."""
    sizes = []
    while (end := one.latestOffset()) != at:
        sizes.append(count(one, at, end))
        at = end
    return sizes, at


@pytest.mark.parametrize("options", [LOG, GROUP], ids=["log", "group"])
def test_each_batch_begins_where_the_last_one_ended_even_after_a_restart(
    streams: Streams, options: dict[str, str]
) -> None:
    streams.add("s", 100)
    first = reader(streams, maxOffsetsPerTrigger="30", **options)
    start = first.initialOffset()
    sizes, end = batches(first, start)
    assert sizes == [30, 30, 30, 10]
    first.stop()
    streams.add("s", 20)
    second = reader(streams, maxOffsetsPerTrigger="30", **options)
    assert second.partitions(end, end) == []  # so Spark calls it
    assert batches(second, end)[0] == [20]
    second.stop()


@pytest.mark.parametrize("options", [LOG, GROUP], ids=["log", "group"])
def test_a_batch_that_was_logged_and_not_committed_is_the_same_after_a_restart(
    streams: Streams, options: dict[str, str]
) -> None:
    streams.add("s", 50)
    first = reader(streams, maxOffsetsPerTrigger="30", **options)
    start, end = first.initialOffset(), first.latestOffset()
    first.stop()
    streams.add("s", 10)
    second = reader(streams, maxOffsetsPerTrigger="30", **options)
    assert second.partitions(end, end) == []
    assert count(second, start, end) == 30
    assert batches(second, end)[0] == [30]
    second.stop()


def test_reading_an_earlier_batch_again_changes_no_later_one(streams: Streams) -> None:
    streams.add("s", 90)
    one = reader(streams, maxOffsetsPerTrigger="30", **LOG)
    start, first = one.initialOffset(), one.latestOffset()
    assert count(one, start, first) == 30
    second = one.latestOffset()
    assert count(one, first, second) == count(one, start, first) == 30  # a program has kept the frame of the first
    assert count(one, second, one.latestOffset()) == 30


def test_a_call_for_metrics_before_the_first_batch_acknowledges_nothing(streams: Streams) -> None:
    streams.add("s", 50)
    one = reader(streams, maxOffsetsPerTrigger="30", **GROUP)
    end = one.latestOffset()
    assert one.latestOffset() == end
    assert streams.groups("s")["g"]["pending"] == 30
    assert count(one, one.initialOffset(), end) == 30
    one.latestOffset()
    assert streams.groups("s")["g"]["pending"] == 20  # the first batch is acknowledged, the second one is planned
    one.stop()


def test_a_batch_that_the_sink_does_not_read_does_not_stop_the_next(streams: Streams) -> None:
    streams.add("s", 50)
    one = reader(streams, maxOffsetsPerTrigger="30", **LOG)
    end = one.latestOffset()
    one.initialOffset()
    assert one.latestOffset() == end  # nothing new; Spark asks again
    assert one.latestOffset()["s"][1] == 50


def test_the_reader_refuses_to_plan_before_it_knows_the_position_of_the_query(streams: Streams) -> None:
    streams.add("s", 50)
    old = reader(streams, maxOffsetsPerTrigger="30", **LOG)
    seen = old.latestOffset()
    streams.add("s", 50)
    one = reader(streams, **LOG)
    one.latestOffset()  # AvailableNowDataStreamWrapper
    with pytest.raises(ConfigError, match="triggerAvailableNowWrapper"):
        one.partitions(seen, seen)


@pytest.mark.parametrize("options", [LOG, GROUP], ids=["log", "group"])
def test_limited_batches_end_at_the_entries_of_the_start_with_available_now(
    streams: Streams, options: dict[str, str]
) -> None:
    streams.add("s", 60)
    one = reader(streams, maxOffsetsPerTrigger="30", availableNow="true", **options)
    start, end = one.initialOffset(), one.latestOffset()
    streams.add("s", 30)
    assert count(one, start, end) == 30
    sizes, at = batches(one, end)
    assert sizes == [30]
    assert one.latestOffset() == at
    one.stop()


@pytest.mark.parametrize("options", [LOG, GROUP], ids=["log", "group"])
def test_a_trigger_that_may_end_too_early_is_warned_of_unless_the_option_is_set(
    streams: Streams, options: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for available_now, expected in (({}, 1), ({"availableNow": "false"}, 0), ({"availableNow": "true"}, 0)):
        streams.client.execute("FLUSHALL")
        streams.add("s", 60)
        with caplog.at_level(logging.WARNING):
            one = reader(streams, maxOffsetsPerTrigger="20", **options, **available_now)
            batches(one, one.initialOffset())
            one.stop()
        assert caplog.text.count("Trigger.AvailableNow and Trigger.Once end after this batch") == expected
        caplog.clear()


def test_options_that_a_version_of_spark_does_not_support_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"url": "redis://localhost", "subscribe": "s"}
    monkeypatch.setattr(provider, "HAS_FILTERS", False)
    with pytest.raises(ConfigError, match=r"pushDownPredicate needs Spark 4\.1 or later"):
        RedisStreamsSource({**given, "pushDownPredicate": "true"})
    monkeypatch.setattr(provider, "HAS_LIMITS", True)
    with pytest.raises(ConfigError, match=r"set the trigger, \.trigger\(availableNow=True\)"):
        RedisStreamsSource({**given, "availableNow": "true"})
    monkeypatch.setattr(provider, "HAS_LIMITS", False)
    parsed = parse({**given, "availableNow": "true"})
    one = RedisStreamsSource({**given, "availableNow": "true"}).streamReader(default_schema(parsed.columns))
    assert isinstance(one, TrackingReader)


def test_the_task_of_an_empty_batch_reads_nothing(streams: Streams) -> None:
    for options in (LOG, GROUP):
        assert list(reader(streams, **options).read(None)) == []  # type: ignore[arg-type] # as Spark 4.0 has it


def test_the_lag_of_queries_is_the_number_of_entries_that_their_groups_have_not_read(streams: Streams) -> None:
    streams.add("a", 30)
    streams.add("b", 20)
    one = reader(streams, "a,b", maxOffsetsPerTrigger="10", **LOG)
    lag = RedisLag(streams.client, SYSTEM_CLOCK)
    assert lag.total([("progress", ["a", "b"])]) is None  # the query has not begun
    at = one.initialOffset()
    for _ in range(3):
        end = one.latestOffset()
        count(one, at, end)
        at = end
    behind = entries_behind_group(streams.client, "progress", ["a", "b", "none"])
    assert sum(count or 0 for count in behind.values()) == 30
    assert RedisLag(streams.client, SYSTEM_CLOCK).total([("progress", ["a", "b"])]) == 30
