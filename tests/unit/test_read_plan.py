"""Which streams a worker reads next: no more entries come than there is room for, and no stream is starved."""

from collections.abc import Sequence

import pytest

from millstream.worker.fetching.read_plan import ReadPlan, ReadScheduler

pytestmark = [pytest.mark.worker]

NAMES = [f"s{number}" for number in range(10)]


def most(count: int, names: Sequence[str] = NAMES) -> dict[str, int]:
    return dict.fromkeys(names, count)


def test_the_free_slots_are_shared_among_the_streams() -> None:
    assert ReadScheduler().next_plan(most(5_000, NAMES[:1]), 1_000) == ReadPlan(most(1_000, NAMES[:1]), may_wait=True)
    assert ReadScheduler().next_plan(most(5_000), 105) == ReadPlan(most(10), may_wait=True)
    assert ReadScheduler().next_plan(most(3), 105) == ReadPlan(most(3), may_wait=True)


@pytest.mark.parametrize("room", [1, 3, 9])
def test_each_stream_is_read_even_with_fewer_free_slots_than_streams(room: int) -> None:
    scheduler = ReadScheduler()
    seen: list[str] = []
    while not (plan := scheduler.next_plan(most(100), room)).may_wait:
        assert sorted(plan.counts.values()) == [1] * room
        seen += plan.counts
        scheduler.on_read(plan, {})
    assert (set(seen), plan) == (set(NAMES), ReadPlan(most(1), may_wait=True))
    assert len(seen) < 2 * len(NAMES)


def wait_for_all(scheduler: ReadScheduler, room: int) -> ReadPlan:
    """Find all streams empty; return the read that blocks on them."""
    while not (plan := scheduler.next_plan(most(100), room)).may_wait:
        scheduler.on_read(plan, {})
    return plan


@pytest.mark.parametrize("room", [1, 3, 9])
def test_an_entry_in_one_of_many_streams_costs_no_reads_of_the_others(room: int) -> None:
    scheduler = ReadScheduler()
    scheduler.on_read(wait_for_all(scheduler, room), {"s4": 1})
    again = scheduler.next_plan(most(100), room)
    assert again == ReadPlan({"s4": room}, may_wait=False), "it may have more"
    scheduler.on_read(again, {})
    assert scheduler.next_plan(most(100), room) == ReadPlan(most(1), may_wait=True)


def test_all_streams_with_an_entry_are_read_again_with_less_room_than_such_streams() -> None:
    scheduler = ReadScheduler()
    scheduler.on_read(wait_for_all(scheduler, 2), {"s1": 1, "s4": 1, "s7": 1})
    for names in (["s1", "s4"], ["s7"]):
        again = scheduler.next_plan(most(100), 2)
        assert (list(again.counts), again.may_wait) == (names, False)
        scheduler.on_read(again, {"s7": 2} if names == ["s7"] else {})
    assert scheduler.next_plan(most(100), 2) == ReadPlan(most(1), may_wait=True), (
        "s7 has more, the others have their turn"
    )


def test_streams_that_a_large_entry_left_no_room_for_are_read_round_robin() -> None:
    scheduler = ReadScheduler()
    scheduler.on_read(wait_for_all(scheduler, 1), {"s0": 1}, may_repeat=False)
    scheduler.on_read(scheduler.next_plan(most(100), 1), {"s0": 1})
    seen: set[str] = set()
    while not (plan := scheduler.next_plan(most(100), 1)).may_wait:
        seen |= plan.counts.keys()
        scheduler.on_read(plan, {})
    assert seen == set(NAMES)


def test_streams_with_a_backlog_get_no_more_entries_than_there_is_room_for() -> None:
    scheduler = ReadScheduler()
    scheduler.on_read(wait_for_all(scheduler, 2), most(1))
    seen: list[str] = []
    for _ in range(2 * len(NAMES)):
        plan = scheduler.next_plan(most(100), 2)
        assert (len(plan.counts), plan.may_wait) == (2, False)
        seen += plan.counts
        scheduler.on_read(plan, plan.counts)
    assert {seen.count(name) for name in NAMES} == {4}


def test_a_stream_that_has_more_than_its_share_is_read_by_itself_in_between() -> None:
    scheduler = ReadScheduler()
    scheduler.on_read(scheduler.next_plan(most(1_000), 100), {"s3": 10, "s4": 9})
    busy = scheduler.next_plan(most(1_000), 100)
    assert busy == ReadPlan({"s3": 100}, may_wait=False)
    scheduler.on_read(busy, {"s3": 100})
    assert scheduler.next_plan(most(1_000), 100).counts.keys() == set(NAMES)


def test_a_stream_that_is_paused_meanwhile_is_not_read() -> None:
    scheduler = ReadScheduler()
    scheduler.on_read(scheduler.next_plan(most(1_000), 100), {"s3": 10})
    assert scheduler.next_plan(most(1_000, NAMES[:3]), 100).counts.keys() == set(NAMES[:3])


def test_a_stream_of_which_few_entries_may_be_read_leaves_the_others_their_share() -> None:
    scheduler = ReadScheduler()
    plan = scheduler.next_plan({**most(1_000), "s3": 1}, 100)
    assert plan == ReadPlan({**most(10), "s3": 1}, may_wait=True)
    scheduler.on_read(plan, {"s3": 1, "s4": 9})
    assert scheduler.next_plan(most(1_000), 100) == ReadPlan({"s3": 100}, may_wait=False), "it may have more"
