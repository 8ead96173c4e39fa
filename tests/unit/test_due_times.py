"""Due times: when each of many streams or messages is due next."""

from math import inf

import pytest

from millstream.worker.due_times import DelayQueue

pytestmark = [pytest.mark.worker]


def test_due_items_are_returned_once_in_order_up_to_the_requested_number() -> None:
    queue = DelayQueue[str]()
    for name, due_ms in (("late", 30.0), ("first", 10.0), ("second", 20.0)):
        queue.put(name, due_ms)
    assert queue.pop_due(25, 1) == ["first"]
    assert queue.pop_due(25, 9) == ["second"]
    assert queue.pop_due(25, 9) == []
    assert queue.wait_ms(25) == 5
    assert queue.pop_due(30, 9) == ["late"]
    assert queue.wait_ms(30) == inf


def test_the_last_due_time_of_an_item_counts_whether_earlier_or_later() -> None:
    queue = DelayQueue[str]()
    queue.put("a", 10)
    queue.put("a", 50)
    assert queue.pop_due(20, 9) == []
    queue.put("a", 20)
    assert queue.pop_due(20, 9) == ["a"]
    assert queue.pop_due(99, 9) == []


def test_an_item_that_is_put_again_and_again_does_not_grow_the_queue() -> None:
    queue = DelayQueue[str]()
    for round_number in range(5_000):
        queue.put("same", 1e9)
        queue.put("earlier each time", 1e9 - round_number)
        queue.put("late", 2e9)
    assert len(queue._heap) < 1_100
    assert queue.pop_due(3e9, 9) == ["earlier each time", "same", "late"]


def test_items_that_cannot_be_compared_are_due_in_the_order_in_which_they_were_put() -> None:
    first, second, third = object(), object(), object()
    queue = DelayQueue[object]()
    for item in (second, third, first):
        queue.put(item, 10)
    queue.put(third, 5)
    assert queue.pop_due(10) == [third, second, first]
