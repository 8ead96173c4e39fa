"""Clock: the waits between retries, and what happens at most once in a while."""

import pytest

from millstream.clock import Backoff, Every, wait_after

pytestmark = [pytest.mark.worker]


def test_each_wait_is_twice_the_one_before_up_to_the_longest() -> None:
    backoff = Backoff(50, 300)
    assert [backoff.next_ms() for _ in range(5)] == [50, 100, 200, 300, 300]
    assert backoff.upcoming_ms == 300


def test_the_back_off_begins_anew_after_a_success() -> None:
    backoff = Backoff(50, 300)
    assert not backoff.has_begun
    backoff.next_ms()
    assert (backoff.has_begun, backoff.upcoming_ms) == (True, 100)
    backoff.reset()
    assert (backoff.has_begun, backoff.next_ms()) == (False, 50)


def test_the_first_retry_may_come_at_once() -> None:
    backoff = Backoff(50, 300, at_once=True)
    assert [backoff.next_ms() for _ in range(4)] == [0, 50, 100, 200]
    backoff.reset()
    assert [backoff.next_ms() for _ in range(2)] == [0, 50]


def test_the_wait_after_a_number_of_failures_doubles_with_each_up_to_the_longest() -> None:
    assert [wait_after(failures, 50, 300) for failures in range(1, 6)] == [50, 100, 200, 300, 300]
    assert wait_after(100_000, 50, 300) == 300


def test_something_is_due_at_once_and_then_once_per_interval() -> None:
    every = Every(100)
    assert [now for now in range(0, 400, 10) if every.is_due(now)] == [0, 100, 200, 300]


def test_the_interval_begins_when_it_was_due_last_not_when_it_might_have_been() -> None:
    every = Every(100)
    assert [every.is_due(now) for now in (1_000, 1_050, 1_170, 1_200, 1_269, 1_270)] == [
        True,
        False,
        True,
        False,
        False,
        True,
    ]
    every.reset()
    assert every.is_due(1_271)
