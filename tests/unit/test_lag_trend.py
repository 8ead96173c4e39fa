"""Lags that rise by the history: five samples in a row, all of which have the handler."""

from collections.abc import Sequence

import pytest

from millstream.admin.figure_history import STEP_MS, HandlerSample, Sample
from millstream.admin.lag_trend import rising_lags

pytestmark = [pytest.mark.cli]


def samples_of(lags: Sequence[int | None]) -> list[Sample]:
    """A sample a minute, with these lags; None: it has not the handler."""
    return [
        Sample(
            at_ms=minute * STEP_MS,
            is_partial=True,
            handlers={}
            if lag is None
            else {
                "shop.rare": HandlerSample(
                    streams=7, added=90, done=40, dead=0, lag=lag, oldest_ms=None, dead_letters=0, stuck=0
                )
            },
        )
        for minute, lag in enumerate(lags)
    ]


def test_a_lag_that_rises_for_five_samples_is_named() -> None:
    (found,) = rising_lags(samples_of([500, None, 0, 50, 100, 150, 200]), {"shop.rare"})
    assert found.what == "shop.rare: its lag has risen from 0 to 200 entries in 4 min"


@pytest.mark.parametrize(
    "lags", [[0, 50, 100, 150, 200, None], [0, 50, None, 100, 150, 200]], ids=["it has left", "it was away"]
)
def test_a_sample_without_the_handler_breaks_the_row(lags: Sequence[int | None]) -> None:
    assert list(rising_lags(samples_of(lags), {"shop.rare"})) == []
