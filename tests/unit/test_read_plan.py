"""Which streams a worker reads next: no more entries come than there is room for, and no stream is starved."""

import pytest

from millstream.worker.fetching.read_plan import ReadPlan, ReadScheduler

pytestmark = [pytest.mark.worker]

NAMES = [f"s{number}" for number in range(10)]


def test_the_free_slots_are_shared_among_the_streams() -> None:
    assert ReadScheduler().next_plan(NAMES[:1], 1_000, 5_000) == ReadPlan(NAMES[:1], 1_000, may_wait=True)
    assert ReadScheduler().next_plan(NAMES, 105, 5_000) == ReadPlan(NAMES, 10, may_wait=True)
    assert ReadScheduler().next_plan(NAMES, 105, 3) == ReadPlan(NAMES, 3, may_wait=True)


@pytest.mark.parametrize("room", [1, 3, 9])
def test_each_stream_is_read_even_with_fewer_free_slots_than_streams(room: int) -> None:
    scheduler = ReadScheduler()
    seen: list[str] = []
    while not (plan := scheduler.next_plan(NAMES, room, 100)).may_wait:
        assert (len(plan.streams), plan.count) == (room, 1)
        seen += plan.streams
        scheduler.on_read(plan, {})
    assert (set(seen), plan) == (set(NAMES), ReadPlan(NAMES, 1, may_wait=True))
    assert len(seen) < 2 * len(NAMES)
    scheduler.on_read(plan, {"s4": 1})
    scheduler.next_plan(NAMES, room, 100)  # s4 again, which may have more
    assert not scheduler.next_plan(NAMES, room, 100).may_wait


def test_a_stream_that_has_more_than_its_share_is_read_by_itself_in_between() -> None:
    scheduler = ReadScheduler()
    scheduler.on_read(scheduler.next_plan(NAMES, 100, 1_000), {"s3": 10, "s4": 9})
    busy = scheduler.next_plan(NAMES, 100, 1_000)
    assert busy == ReadPlan(["s3"], 100, may_wait=False)
    scheduler.on_read(busy, {"s3": 100})
    assert scheduler.next_plan(NAMES, 100, 1_000).streams == NAMES


def test_a_stream_that_is_paused_meanwhile_is_not_read() -> None:
    scheduler = ReadScheduler()
    scheduler.on_read(scheduler.next_plan(NAMES, 100, 1_000), {"s3": 10})
    assert scheduler.next_plan(NAMES[:3], 100, 1_000).streams == NAMES[:3]
