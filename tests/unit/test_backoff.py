"""Backoff: the waits between retries."""

import pytest

from millstream.clock import Backoff, wait_after

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
