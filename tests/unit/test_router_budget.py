"""What buffers hold is counted in bytes: for each subscriber, and for all together."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.model import Message
from millstream.router.budget import LEAST_BYTES, Batch, Budget
from millstream.router.stream_events import Dropped, WhenFull
from millstream.router.subscriber_buffer import SubscriberBuffer

pytestmark = [pytest.mark.router]

PLENTY = 1 << 30


def batch(budget: Budget, *sizes: int, first: int = 1) -> Batch:
    """Entries with payloads of these sizes, and ids from `first` on."""
    return Batch([[b"%d-0" % number, [b"n", b"x" * size]] for number, size in enumerate(sizes, first)], budget)


def inbox(budget: Budget, limit_bytes: int, *, when_full: WhenFull = "wait", limit: int = 1_000) -> SubscriberBuffer:
    return SubscriberBuffer("s", budget, limit=limit, limit_bytes=limit_bytes, when_full=when_full)


def some(found: SubscriberBuffer, most: int) -> list[str | int]:
    """The ids of the next messages, and how many were dropped before each."""
    items = (item for _ in range(most) if (item := found.next_item()) is not None)
    return [
        item.id if isinstance(item, Message) else item.count for item in items if isinstance(item, Message | Dropped)
    ]


def everything(found: SubscriberBuffer) -> list[str | int]:
    return some(found, 1_000)


def test_as_many_entries_fit_as_their_bytes_allow() -> None:
    budget = Budget(PLENTY)
    found = inbox(budget, 100_000)
    assert found.fits(batch(budget, *[10_000] * 9))
    assert found.fitting(batch(budget, *[10_000] * 20)) == 9
    assert found.fitting(batch(budget, *[100] * 20)) == 20


def test_a_message_larger_than_the_buffer_fits_once_the_buffer_is_empty() -> None:
    budget = Budget(PLENTY)
    found = inbox(budget, 10_000)
    found.put(batch(budget, 8_000))
    large = batch(budget, 1_000_000, first=2)
    assert not found.fits(large)
    found.next_item()
    assert found.fits(large)
    found.put(large)
    assert not found.drained
    assert found.fitting(batch(budget, 1, first=3)) == 0


def test_the_next_entry_fits_into_a_subscriber_buffer_that_is_drained() -> None:
    """Otherwise the router would read it again and again."""
    budget = Budget(PLENTY)
    found = inbox(budget, 100_000)
    found.put(batch(budget, *[10_000] * 4))
    assert found.drained
    assert found.fits(batch(budget, 90_000, first=5))


def test_a_shared_batch_is_counted_once_until_its_last_subscriber_has_received_it() -> None:
    budget = Budget(PLENTY)
    both = [inbox(budget, PLENTY) for _ in range(2)]
    shared = batch(budget, 10_000, 10_000)
    for one in both:
        one.put(shared)
    size = shared.size
    del shared
    assert budget.update() == size
    everything(both[0])
    assert budget.update() == size
    everything(both[1])
    gc.collect()
    assert budget.update() == 0


def test_a_spent_budget_leaves_each_subscriber_a_minimum_until_a_quarter_is_free() -> None:
    budget = Budget(100_000)
    hoarder, other = inbox(budget, PLENTY), inbox(budget, PLENTY)
    for number in range(1, 11):
        hoarder.put(batch(budget, 10_000, first=number))
    assert budget.spent
    assert not hoarder.fits(batch(budget, 100, first=11))
    small = batch(budget, *[1_000] * 50)
    assert 0 < other.fitting(small) <= LEAST_BYTES // 1_000
    del small
    hoarder.next_item()
    budget.update()
    assert budget.spent, "nobody gains from a few bytes"
    hoarder.next_item()
    hoarder.next_item()
    hoarder.next_item()
    budget.update()
    assert not budget.spent
    assert hoarder.fits(batch(budget, 100, first=11))


@given(
    st.lists(st.lists(st.sampled_from([1, 500, 4_000, 30_000]), min_size=1, max_size=8), min_size=1, max_size=12),
    st.integers(1, 20),
    st.sampled_from([1_000, 20_000, 100_000]),
    st.integers(0, 5),
)
def test_a_subscriber_that_drops_the_oldest_stays_within_its_limits_and_counts_the_dropped(
    arrivals: list[list[int]], limit: int, limit_bytes: int, takes: int
) -> None:
    budget = Budget(PLENTY)
    found = inbox(budget, limit_bytes, when_full="drop-oldest", limit=limit)
    seen: list[str | int] = []
    number = 1
    for sizes in arrivals:
        new = batch(budget, *sizes, first=number)
        number += len(sizes)
        if found.fits(new):
            found.put(new)
        else:
            found.put_dropping(new)
            assert found.held == 1 or found.held_bytes <= limit_bytes
            assert found.held <= limit
        seen += some(found, takes)
    seen += everything(found)
    at = 0
    for one in seen:  # every message is there, or counted where it would have been
        at += one if isinstance(one, int) else 1
        assert isinstance(one, int) or one == f"{at}-0"
    assert at == number - 1
    assert (found.held, found.held_bytes) == (0, 0)


def test_what_was_freed_is_counted_again_and_again_so_that_it_takes_no_memory() -> None:
    budget = Budget(PLENTY)
    for _ in range(10_000):
        batch(budget, 10)
    assert len(budget._freed) < 1_000
