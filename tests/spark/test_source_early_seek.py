"""How the source finds the end of the next batch while Spark processes this one; on real Redis, without Spark."""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.spark.source.batch_limits import Advance, BatchLimits
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.early_seek import Distance, EarlySeek
from millstream.spark.source.offset_seek import Seek, seek
from millstream.spark.source.offsets import BEGINNING, Offsets, Position
from millstream.spark.source.options import parse
from millstream.spark.source.stream_info import fetch
from tests.support.command_stats import commands_run
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.spark]

LENGTH = 60_000
START = Offsets({"s": BEGINNING})


@pytest.fixture
def filled(fresh_client: Client) -> Client:
    fill(fresh_client)
    return fresh_client


@pytest.fixture(scope="module")
def unchanging() -> Iterator[Client]:
    """A client of a server of this module, for tests that only read the stream."""
    with EmbeddedServer() as server, Client(server.url) as client:
        fill(client)
        yield client


def fill(client: Client) -> None:
    for at in range(1, LENGTH, 5_000):
        client.pipeline([("XADD", "s", f"{n}-0", "a", "1") for n in range(at, at + 5_000)])


def planner(client: Client, **options: str) -> BatchPlanner:
    return BatchPlanner(client, parse({"url": client.url, "subscribe": "s", **options}, {}), cores=2)


def plan(planned_by: BatchPlanner, start: Offsets, limit: int) -> Offsets:
    """Plan a batch and its tasks, and let the seek behind it end."""
    planned = planned_by.plan_next(start, BatchLimits(max_entries=limit))
    assert isinstance(planned, Advance)
    planned_by.plan_tasks(start, planned.end)
    await_seek()
    return planned.end


def await_seek() -> None:
    for thread in threading.enumerate():
        if thread.name == "millstream-early-seek":
            thread.join(FAIL_SAFE_S)
            assert not thread.is_alive()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 25_000), min_size=2, max_size=5))
def test_batches_end_where_they_would_end_without_the_early_seek(unchanging: Client, limits: list[int]) -> None:
    seeking_early, at = planner(unchanging), START
    for limit in limits:
        if at["s"].id == EntryId(LENGTH, 0):
            return
        without = planner(unchanging).plan_next(at, BatchLimits(max_entries=limit))
        assert isinstance(without, Advance)
        at = plan(seeking_early, at, limit)
        assert at == without.end


def test_the_next_batch_of_the_same_size_is_planned_without_a_seek(filled: Client) -> None:
    planned_by = planner(filled)
    at = plan(planned_by, START, 20_000)
    before = commands_run(filled.execute)
    planned = planned_by.plan_next(at, BatchLimits(max_entries=20_000))
    found = commands_run(filled.execute) - before
    assert isinstance(planned, Advance)
    assert planned.end == {"s": Position(EntryId(40_000, 0), 40_000)}
    assert planned.entries == 20_000
    assert "xreadgroup" not in found


def test_a_larger_batch_seeks_only_what_was_not_found_early(filled: Client) -> None:
    planned_by = planner(filled)
    at = plan(planned_by, START, 20_000)
    before = commands_run(filled.execute)
    planned = planned_by.plan_next(at, BatchLimits(max_entries=25_000))
    found = commands_run(filled.execute) - before
    assert isinstance(planned, Advance)
    assert planned.end == {"s": Position(EntryId(45_000, 0), 45_000)}
    assert found["xreadgroup"] == 2  # the probe of the rights, and 5,000 entries


def test_entries_deleted_after_the_early_seek_make_the_batch_smaller_and_no_count_wrong(filled: Client) -> None:
    planned_by = planner(filled)
    at = plan(planned_by, START, 20_000)
    filled.execute("XDEL", "s", "30000-0")
    planned = planned_by.plan_next(at, BatchLimits(max_entries=20_000))
    assert isinstance(planned, Advance)
    assert planned.end == {"s": Position(EntryId(40_000, 0), 40_000)}


def test_entries_deleted_during_the_early_seek_leave_no_count(filled: Client) -> None:
    before = fetch(filled, ["s"])["s"]
    assert before is not None
    filled.execute("XDEL", "s", "30000-0")
    early = EarlySeek(filled)
    start = Position(EntryId(20_000, 0), 20_000)
    early.prepare({"s": Distance(start, 20_000, before)})
    early.begin()
    await_seek()
    assert early.furthest("s", start, 20_000) == (Position(EntryId(40_001, 0), None), 20_000)


def test_a_stream_that_was_trimmed_is_planned_from_where_it_begins_now(filled: Client) -> None:
    planned_by = planner(filled, failOnDataLoss="false")
    at = plan(planned_by, START, 20_000)
    filled.execute("XTRIM", "s", "MINID", "25001-0")
    planned = planned_by.plan_next(at, BatchLimits(max_entries=10_000))
    assert isinstance(planned, Advance)
    assert planned.end == {"s": Position(EntryId(35_000, 0), 35_000)}


def test_what_was_found_behind_another_position_is_not_used(filled: Client) -> None:
    planned_by = planner(filled)
    plan(planned_by, START, 20_000)
    other = Offsets({"s": Position(EntryId(7, 0), 7)})
    planned = planned_by.plan_next(other, BatchLimits(max_entries=20_000))
    assert isinstance(planned, Advance)
    assert planned.end == {"s": Position(EntryId(20_007, 0), 20_007)}


def test_no_group_is_left_behind_by_a_seek_that_ends_early(filled: Client) -> None:
    calls = iter([False, True])
    found = seek(filled, {"s": Seek(ZERO_ID, 1_000, 10)}, give_up=lambda: next(calls))
    assert found["s"].ids == [EntryId(1_000, 0)]
    assert filled.execute("XINFO", "GROUPS", "s") == []


def test_what_an_early_seek_has_found_before_it_is_ended_early_is_right(filled: Client) -> None:
    early = EarlySeek(filled)
    info = fetch(filled, ["s"])["s"]
    assert info is not None
    early.prepare({"s": Distance(BEGINNING, LENGTH, info)})
    early.begin()
    early.end()
    await_seek()
    position, count = early.furthest("s", BEGINNING, LENGTH)
    assert position.id.ms == position.entries_added == count


def test_an_early_seek_that_redis_refuses_leaves_the_plan_as_it_was(filled: Client) -> None:
    planned_by = planner(filled)
    planned = planned_by.plan_next(START, BatchLimits(max_entries=20_000))
    assert isinstance(planned, Advance)
    filled.execute("ACL", "SETUSER", "default", "-xgroup")
    try:
        planned_by.plan_tasks(START, planned.end)
        await_seek()
    finally:
        filled.execute("ACL", "SETUSER", "default", "+xgroup")
    following = planned_by.plan_next(planned.end, BatchLimits(max_entries=20_000))
    assert isinstance(following, Advance)
    assert following.end == {"s": Position(EntryId(40_000, 0), 40_000)}
