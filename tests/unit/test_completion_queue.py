"""The completion queue of a worker: which outcomes are collected together, when, and in which order."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millstream.handlers.attempt import Outcome, RetryLater
from millstream.worker.completion_queue import CompletionQueue, FinishedRun
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.worker]

FOR_EVER_S = 3_600.0


def ran(number: int, producer: int = 0) -> FinishedRun:
    outcome: Outcome = RetryLater(number, str(producer))
    return (), outcome


def numbers(found: list[FinishedRun]) -> list[float]:
    return [outcome.delay_ms for _, outcome in found if isinstance(outcome, RetryLater)]


@contextmanager
def collecting(queue: CompletionQueue) -> Iterator[list[list[float]]]:
    """Collect once during the block; at its end the collected runs must be these."""
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(numbers(queue.collect(None)[0])), daemon=True)
    thread.start()
    yield found
    thread.join(FAIL_SAFE_S)
    assert not thread.is_alive()


def test_outcomes_that_are_not_urgent_wait_for_an_urgent_one() -> None:
    queue = CompletionQueue(10, linger_s=FOR_EVER_S)
    queue.put(ran(1))
    assert numbers(queue.collect(None)[0]) == [1]
    with collecting(queue) as found:
        queue.put(ran(2), urgent=False)
        queue.put(ran(3), urgent=False)
        time.sleep(0.05)
        assert found == []
        queue.put(ran(4))
    assert found == [[2, 3, 4]]


def test_an_outcome_that_is_not_urgent_waits_no_longer_than_the_linger() -> None:
    queue = CompletionQueue(10, linger_s=0.01)
    queue.put(ran(1))
    queue.collect(None)
    queue.put(ran(2), urgent=False)
    with collecting(queue) as found:
        pass
    assert found == [[2]]


def test_an_outcome_after_an_idle_time_is_collected_at_once() -> None:
    queue = CompletionQueue(10, linger_s=0.001)
    with collecting(queue) as found:
        time.sleep(0.1)
        queue.put(ran(1), urgent=False)
    assert found == [[1]]


def test_as_many_outcomes_as_may_be_settled_together_are_collected_at_once() -> None:
    queue = CompletionQueue(3, linger_s=FOR_EVER_S)
    with collecting(queue) as found:
        time.sleep(0.05)
        for number in range(3):
            queue.put(ran(number), urgent=False)
    assert found == [[0, 1, 2]]
    for number in range(5):
        queue.put(ran(number), urgent=False)
    assert numbers(queue.collect(None)[0]) == [0, 1, 2]
    queue.put(ran(5), urgent=False)
    assert numbers(queue.collect(None)[0]) == [3, 4, 5]


def test_collect_returns_no_outcome_after_its_time_limit() -> None:
    assert CompletionQueue(3, linger_s=FOR_EVER_S).collect(0.01) == ([], False)


def test_the_end_is_reported_with_the_last_outcomes() -> None:
    queue = CompletionQueue(2, linger_s=FOR_EVER_S)
    for number in range(3):
        queue.put(ran(number), urgent=False)
    queue.close()
    first, second = queue.collect(None), queue.collect(None)
    assert [(numbers(some), ended) for some, ended in (first, second)] == [([0, 1], False), ([2], True)]


def test_no_outcome_is_lost_or_out_of_order_between_threads() -> None:
    each, producers = 20_000, 3
    queue = CompletionQueue(100, linger_s=0.0005)

    def produce(producer: int) -> None:
        for number in range(each):
            queue.put(ran(number, producer), urgent=number % 7 == 0)
            if number % 1_000 == 0:
                time.sleep(0.002)  # lets the collector go idle now and then

    threads = [threading.Thread(target=produce, args=(producer,)) for producer in range(producers)]
    for thread in threads:
        thread.start()
    seen: dict[str, list[float]] = {str(producer): [] for producer in range(producers)}
    while sum(map(len, seen.values())) < each * producers:
        began_s = time.monotonic()
        found, ended = queue.collect(FAIL_SAFE_S)
        # A late notification may find nothing, as an earlier collect took all; no collector may sleep on a run.
        slept_on = time.monotonic() - began_s >= FAIL_SAFE_S / 2
        assert found or not slept_on, "a run was put, and the collector was not notified"
        assert not ended
        assert len(found) <= 100
        for _, outcome in found:
            assert isinstance(outcome, RetryLater)
            seen[outcome.error].append(outcome.delay_ms)
    for thread in threads:
        thread.join()
    assert all(one == list(range(each)) for one in seen.values())
