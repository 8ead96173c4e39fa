"""Which streams a worker reads next: no more entries come than there is room for, and no stream is starved."""

import pytest

from millstream.worker.fetching.read_plan import ReadPlan, ReadScheduler

pytestmark = [pytest.mark.worker]

NAMES = [f"s{number}" for number in range(10)]


def test_the_room_is_shared_among_the_streams() -> None:
    assert ReadScheduler().next_plan(NAMES[:1], 1_000, 5_000) == ReadPlan(NAMES[:1], 1_000, may_wait=True)
    assert ReadScheduler().next_plan(NAMES, 105, 5_000) == ReadPlan(NAMES, 10, may_wait=True)
    assert ReadScheduler().next_plan(NAMES, 105, 3) == ReadPlan(NAMES, 3, may_wait=True)


@pytest.mark.parametrize("room", [1, 3, 9])
def test_with_less_room_than_streams_each_has_its_turn_and_all_are_waited_for_when_they_are_empty(room: int) -> None:
    turns = ReadScheduler()
    seen: list[str] = []
    while not (turn := turns.next_plan(NAMES, room, 100)).may_wait:
        assert (len(turn.streams), turn.count) == (room, 1)
        seen += turn.streams
        turns.on_read(turn, {})
    assert (set(seen), turn) == (set(NAMES), ReadPlan(NAMES, 1, may_wait=True))
    assert len(seen) < 2 * len(NAMES)
    turns.on_read(turn, {"s4": 1})
    turns.next_plan(NAMES, room, 100)  # s4 again, which may have more
    assert not turns.next_plan(NAMES, room, 100).may_wait


def test_a_stream_that_has_more_than_its_share_is_read_by_itself_in_between() -> None:
    turns = ReadScheduler()
    turns.on_read(turns.next_plan(NAMES, 100, 1_000), {"s3": 10, "s4": 9})
    busy = turns.next_plan(NAMES, 100, 1_000)
    assert busy == ReadPlan(["s3"], 100, may_wait=False)
    turns.on_read(busy, {"s3": 100})
    assert turns.next_plan(NAMES, 100, 1_000).streams == NAMES


def test_a_stream_that_is_paused_meanwhile_is_not_read() -> None:
    turns = ReadScheduler()
    turns.on_read(turns.next_plan(NAMES, 100, 1_000), {"s3": 10})
    assert turns.next_plan(NAMES[:3], 100, 1_000).streams == NAMES[:3]
