"""The sweep: each stream is read within `sweep_ms`, and one that was read for another reason only after as long."""

import sys
from collections.abc import Iterable

import pytest

from millstream.observability.metrics import NO_METRICS
from millstream.router.budget import Budget
from millstream.router.cursors import CursorCallbacks, CursorTable
from millstream.router.subscriber_buffer import Cursor, SubscriberBuffer
from millstream.router.sweep import STEP_MS, Sweep

pytestmark = [pytest.mark.router]

STEPS = 12


class Bench:
    """A sweep of `STEPS` steps over some streams, whose reads end at once."""

    def __init__(self, streams: int) -> None:
        budget = Budget(1 << 30)
        self.table = CursorTable(
            CursorCallbacks(schedule=lambda cursor: None, wake=lambda inbox: None), NO_METRICS, budget
        )
        self.cursors = [self._subscribe(f"s{number}", budget) for number in range(streams)]
        self.sweep = Sweep(self.table, STEPS * STEP_MS)

    def _subscribe(self, name: str, budget: Budget) -> Cursor:
        inbox = SubscriberBuffer(name, budget, limit=10, limit_bytes=1 << 20, when_full="wait")
        self.table.add(inbox, name.encode(), b"0-0")
        return self.table.of(name.encode())[0]

    def unsubscribe(self, number: int) -> Cursor:
        """End the only subscription of a stream; return its cursor, and forget that."""
        cursor = self.cursors.pop(number)
        self.table.remove(*cursor.buffers)
        return cursor

    def step(self) -> list[Cursor]:
        """The cursors read by one step."""
        due = self.sweep.step()
        self.read(due)
        return due

    def read(self, cursors: Iterable[Cursor]) -> None:
        """As a stream reader does when a reply has come."""
        for cursor in cursors:
            cursor.read_step = self.table.step


def test_each_stream_is_read_once_in_a_sweep_and_as_many_in_each_step() -> None:
    bench = Bench(10 * STEPS)
    for _ in range(2 * STEPS):
        bench.step()
    for _ in range(3):
        reads = [bench.step() for _ in range(STEPS)]
        assert sorted(cursor.key for due in reads for cursor in due) == sorted(cursor.key for cursor in bench.cursors)
        assert max(map(len, reads)) <= 30


@pytest.mark.parametrize("read_at", range(STEPS))
def test_a_stream_read_for_another_reason_is_read_again_just_within_a_sweep(read_at: int) -> None:
    bench = Bench(5)
    for _ in range(2 * STEPS + read_at):
        bench.step()
    cursor = bench.cursors[2]
    bench.read([cursor])
    steps = next(step for step in range(1, 10 * STEPS) if cursor in bench.step())
    assert steps == STEPS


def test_streams_with_messages_are_not_read_by_the_sweep() -> None:
    bench = Bench(40)
    busy, idle = bench.cursors[::2], set(bench.cursors[1::2])
    swept: list[Cursor] = []
    for step in range(6 * STEPS):
        bench.read(busy[step % (STEPS - 1) :: STEPS - 1])
        due = bench.step()
        if step >= 2 * STEPS:
            swept += due
    assert set(swept) == idle
    assert len(swept) == 4 * len(idle)


def test_streams_that_were_read_together_are_not_all_read_in_one_step_again() -> None:
    bench = Bench(100 * STEPS)
    most = 0
    for _ in range(10):
        bench.read(bench.cursors)
        most = max(most, *(len(bench.step()) for _ in range(2 * STEPS)))
    assert most <= 300


def test_a_stream_whose_read_has_not_ended_is_not_read_once_more() -> None:
    bench = Bench(3)
    bench.cursors[1].in_flight = True
    due = {cursor for _ in range(2 * STEPS) for cursor in bench.step()}
    assert due == {bench.cursors[0], bench.cursors[2]}
    bench.cursors[1].in_flight = False
    assert any(bench.cursors[1] in bench.step() for _ in range(STEPS))


def test_the_entry_that_identifies_a_stream_is_replaced_although_messages_keep_the_sweep_from_reading_it() -> None:
    bench = Bench(4)
    cursor, anchors = bench.cursors[1], []
    for step in range(1, 4 * STEPS + 1):
        cursor.last = b"%d-0" % step
        bench.read([cursor])
        assert cursor not in bench.sweep.step()
        anchors.append(cursor.anchor)
    assert anchors[-1] in {b"%d-0" % step for step in range(2 * STEPS + 1, 3 * STEPS + 1)}, "one to two sweeps old"


def test_the_sweep_neither_keeps_nor_reads_a_stream_that_loses_its_subscriber_while_it_is_put_off() -> None:
    bench = Bench(STEPS)
    for _ in range(2 * STEPS):
        bench.step()
    bench.read(bench.cursors)
    for _ in range(STEPS - 1):
        assert not bench.step(), "they are put off"
    gone = [bench.unsubscribe(number) for number in range(STEPS // 2)]
    assert max(map(sys.getrefcount, gone)) <= 2, "only the list and this call refer to them"
    assert {cursor for _ in range(STEPS) for cursor in bench.step()} == set(bench.cursors)
