"""The waits between polls of several streams."""

import pytest

from millstream.worker.fetching.poll_wait import PollWait

pytestmark = [pytest.mark.worker]


def waits(wait: PollWait, streams: int) -> list[float]:
    return [wait.next_ms(streams) for _ in range(8)]


def test_a_wait_doubles_up_to_a_tenth_of_a_second_until_a_poll_finds_something() -> None:
    wait = PollWait(500)
    assert waits(wait, 2) == [20, 40, 80, 100, 100, 100, 100, 100]
    wait.reset()
    assert wait.next_ms(2) == 20


@pytest.mark.parametrize(
    ("most_ms", "streams", "longest_ms"), [(500, 60, 300), (500, 200, 500), (3_600_000, 200, 1_000), (50, 2, 50)]
)
def test_many_streams_are_polled_more_rarely_but_not_after_the_longest_wait(
    most_ms: float, streams: int, longest_ms: float
) -> None:
    assert waits(PollWait(most_ms), streams)[-1] == longest_ms
