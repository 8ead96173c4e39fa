"""targetBatchDuration: the size of a batch follows from how long the ones before took."""

import pytest

from millstream.spark.source.batch_sizer import BatchSizer
from tests.support.clocks import ManualClock

pytestmark = [pytest.mark.spark]

TARGET_MS = 2_000.0


class Batches:
    """A query whose batches take so many milliseconds, and so many more for each entry."""

    def __init__(self, *, overhead_ms: float = 0.0, entry_ms: float = 0.0, maximum: int = 50_000) -> None:
        self.clock = ManualClock()
        self.sizer = BatchSizer(TARGET_MS, clock=self.clock)
        self.overhead_ms, self.entry_ms, self.maximum = overhead_ms, entry_ms, maximum

    def run(self, backlog: int = 1_000_000) -> int:
        """Run one batch; return how many entries it had."""
        size = min(self.sizer.max_entries(self.maximum), backlog)
        self.sizer.on_planned(size)
        self.clock.now_ms += self.overhead_ms + size * self.entry_ms
        return size


def test_the_first_batch_is_small_and_each_at_most_four_times_the_one_before_up_to_the_maximum() -> None:
    batches = Batches(overhead_ms=100, entry_ms=0.001)
    assert [batches.run() for _ in range(5)] == [1_000, 4_000, 16_000, 50_000, 50_000]


def test_batches_come_to_take_as_long_as_wanted() -> None:
    batches = Batches(overhead_ms=200, entry_ms=0.1)
    for _ in range(10):
        size = batches.run()
    assert size == pytest.approx(18_000, rel=0.01)


def test_batches_of_a_slow_handler_become_small_though_few_entries_wait() -> None:
    batches = Batches(entry_ms=10)
    assert [batches.run(backlog=400) for _ in range(4)] == [400, 400, 250, 200]
    batches.entry_ms = 1_000
    assert [batches.run() for _ in range(3)] == [200, 100, 100]


def test_the_time_that_a_query_takes_to_start_makes_no_batch_smaller() -> None:
    batches = Batches(overhead_ms=2_000, entry_ms=0.1)
    assert batches.run() == 1_000
    batches.overhead_ms = 200
    assert [batches.run() for _ in range(2)] == [4_000, 13_333]


def test_a_first_batch_that_takes_longer_than_a_start_makes_the_next_one_smaller() -> None:
    batches = Batches(overhead_ms=2_000, entry_ms=4)
    assert [batches.run() for _ in range(2)] == [1_000, 500]


def test_a_small_batch_that_was_quick_says_nothing_about_larger_ones() -> None:
    batches = Batches(overhead_ms=300, entry_ms=0.1)
    assert [batches.run(backlog=10) for _ in range(3)] == [10, 10, 10]
    assert batches.run() == 1_000


def test_the_time_without_a_batch_and_batches_of_unknown_size_count_for_nothing() -> None:
    batches = Batches()
    assert batches.sizer.max_entries(50_000) == 1_000
    batches.clock.now_ms += 3_600_000
    assert batches.sizer.max_entries(50_000) == 1_000
    batches.sizer.on_planned(None)
    batches.clock.now_ms += 3_600_000
    assert batches.sizer.max_entries(50_000) == 1_000
    batches.sizer.on_planned(0)
    batches.clock.now_ms += 3_600_000
    assert batches.sizer.max_entries(50_000) == 1_000


def test_no_batch_is_larger_than_the_maximum() -> None:
    batches = Batches(overhead_ms=1, maximum=30)
    assert [batches.run() for _ in range(3)] == [30, 30, 30]
