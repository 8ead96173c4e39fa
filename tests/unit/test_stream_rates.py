"""The rates of streams, by two reads of a console."""

import pytest

from millstream.services.console.stream_rates import StreamRates
from tests.support.clocks import ManualClock

pytestmark = [pytest.mark.cli]


def test_a_rate_is_that_between_two_reads_and_a_read_that_comes_too_soon_keeps_it() -> None:
    clock = ManualClock(1_000.0)
    rates = StreamRates(clock)
    assert rates.update({"a": 100, "b": 7}) == {"a": None, "b": None}
    clock.now_ms += 1_999
    assert rates.update({"a": 150}) == {"a": None}
    clock.now_ms += 3_001
    assert rates.update({"a": 200, "c": 0}) == {"a": 20.0, "c": None}
    clock.now_ms += 1_000
    assert rates.update({"a": 900, "b": 7}) == {"a": 20.0, "b": 0.0}
    clock.now_ms += 3_000
    assert rates.update({"a": 1_000}) == {"a": 200.0}


def test_a_stream_that_was_made_anew_or_read_long_ago_has_no_rate_before_its_next_read() -> None:
    clock = ManualClock()
    rates = StreamRates(clock)
    rates.update({"a": 100, "b": 100})
    clock.now_ms += 5_000
    assert rates.update({"a": 50}) == {"a": None}
    clock.now_ms += 5_000
    assert rates.update({"a": 60}) == {"a": 2.0}
    clock.now_ms += 290_001
    assert rates.update({"b": 200}) == {"b": None}


def test_the_reads_of_the_streams_that_were_read_last_are_kept() -> None:
    clock = ManualClock()
    rates = StreamRates(clock)
    rates.update({"first": 0, "second": 0})
    rates.update({"first": 0})
    rates.update({f"s{n}": 0 for n in range(19_999)})
    clock.now_ms += 5_000
    assert rates.update({"first": 5}) == {"first": 1.0}
    assert rates.update({"second": 5}) == {"second": None}
