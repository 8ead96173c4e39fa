"""Timers: when each of many streams is due next."""

from math import inf

import pytest

from millstream.worker.timers import DelayQueue

pytestmark = [pytest.mark.worker]


def test_due_items_are_returned_once_in_order_up_to_the_requested_number() -> None:
    agenda = DelayQueue()
    for name, due_ms in (("late", 30.0), ("first", 10.0), ("second", 20.0)):
        agenda.put(name, due_ms)
    assert agenda.pop_due(25, 1) == ["first"]
    assert agenda.pop_due(25, 9) == ["second"]
    assert agenda.pop_due(25, 9) == []
    assert agenda.wait_ms(25) == 5
    assert agenda.pop_due(30, 9) == ["late"]
    assert agenda.wait_ms(30) == inf


def test_the_last_due_time_of_an_item_counts_whether_earlier_or_later() -> None:
    agenda = DelayQueue()
    agenda.put("a", 10)
    agenda.put("a", 50)
    assert agenda.pop_due(20, 9) == []
    agenda.put("a", 20)
    assert agenda.pop_due(20, 9) == ["a"]
    assert agenda.pop_due(99, 9) == []


def test_an_item_that_is_put_again_and_again_does_not_grow_the_queue() -> None:
    agenda = DelayQueue()
    for round_number in range(5_000):
        agenda.put("same", 1e9)
        agenda.put("earlier each time", 1e9 - round_number)
        agenda.put("late", 2e9)
    assert len(agenda._heap) < 1_100
    assert agenda.pop_due(3e9, 9) == ["earlier each time", "same", "late"]
