"""The rates of streams, by two reads of a console."""

import pytest

from millstream.services.console.stream_rates import StreamRates
from tests.support.stream_reports import stream

pytestmark = [pytest.mark.cli]


def update(rates: StreamRates, read_ms: float, **added: int) -> dict[str, float | None]:
    return rates.update([stream(name, count) for name, count in added.items()], read_ms)


def test_a_rate_is_that_between_two_reads_and_a_read_that_comes_too_soon_keeps_it() -> None:
    rates = StreamRates()
    assert update(rates, 1_000, a=100, b=7) == {"a": None, "b": None}
    assert update(rates, 2_999, a=150) == {"a": None}
    assert update(rates, 6_000, a=200, c=0) == {"a": 20.0, "c": None}
    assert update(rates, 7_000, a=900, b=7) == {"a": 20.0, "b": 0.0}
    assert update(rates, 10_000, a=1_000) == {"a": 200.0}


def test_updates_of_two_viewers_that_come_in_the_other_order_keep_the_rate() -> None:
    rates = StreamRates()
    update(rates, 0, a=100)
    assert update(rates, 5_000, a=200) == {"a": 20.0}
    assert update(rates, 4_999, a=199) == {"a": 20.0}
    assert update(rates, 0, a=100) == {"a": 20.0}
    assert update(rates, 10_000, a=300) == {"a": 20.0}


def test_a_stream_that_was_made_anew_or_read_long_ago_has_no_rate_before_its_next_read() -> None:
    rates = StreamRates()
    update(rates, 0, a=100, b=100)
    assert update(rates, 5_000, a=50) == {"a": None}
    assert update(rates, 10_000, a=60) == {"a": 2.0}
    assert update(rates, 300_001, b=200) == {"b": None}


def test_a_stream_that_was_made_anew_has_no_rate_either_if_it_has_more_entries_now() -> None:
    rates = StreamRates()
    update(rates, 0, a=100)
    assert rates.update([stream("a", 5_000, first=1_000)], 5_000) == {"a": None}
    assert rates.update([stream("a", 6_000, first=1_000)], 10_000) == {"a": 200.0}


def test_a_stream_that_was_trimmed_to_entries_since_the_last_read_has_a_rate() -> None:
    rates = StreamRates()
    update(rates, 0, a=100)
    assert rates.update([stream("a", 5_100, first=5_001, length=100)], 5_000) == {"a": 1_000.0}
    assert rates.update([stream("a", 10_100, first=10_101, length=0)], 10_000) == {"a": 1_000.0}


def test_the_reads_of_the_streams_that_were_read_last_are_kept() -> None:
    rates = StreamRates()
    update(rates, 0, first=0, second=0)
    update(rates, 0, first=0)
    update(rates, 0, **{f"s{n}": 0 for n in range(19_999)})
    assert update(rates, 5_000, first=5) == {"first": 1.0}
    assert update(rates, 5_000, second=5) == {"second": None}
