"""Many clients, some of which read nothing. With MILLSTREAM_SOAK=1 as many as a process is meant to hold."""

import asyncio
import os

import pytest

from benchmarks.serve import compare, follow
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.router]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
CLIENTS, RATE, SECONDS = (10_000, 1_000, 20.0) if SOAK else (100, 200, 1.0)


def test_many_clients_get_every_message_beside_some_that_stall() -> None:
    stalled = max(2, CLIENTS // 100)
    found = asyncio.run(follow(CLIENTS, RATE, SECONDS, stalled=stalled, limit_s=FAIL_SAFE_S))
    assert found["messages"] > 0
    assert found["missing"] == 0
    assert found["stalled"] == stalled, "they were connected for the whole time"


@pytest.mark.skipif(not SOAK, reason="takes a minute of the whole machine: MILLSTREAM_SOAK=1")
def test_no_client_misses_a_message_where_one_in_a_hundred_stalls() -> None:
    found = compare(2_000, 1_000, 20.0)  # how long it takes them is what `benchmarks serve` reports
    assert found["beside_missing"] == found["calm_missing"] == 0
