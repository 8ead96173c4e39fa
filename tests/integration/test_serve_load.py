"""Many clients, some of which read nothing. With MILLSTREAM_SOAK=1 as many as a process is meant to hold."""

import asyncio
import os

import pytest

from benchmarks.serve import compare, follow

pytestmark = [pytest.mark.router]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
CLIENTS, RATE, SECONDS = (10_000, 1_000, 20.0) if SOAK else (100, 200, 1.0)


def test_many_clients_get_everything_beside_some_that_stall() -> None:
    stalled = max(2, CLIENTS // 100)
    found = asyncio.run(follow(CLIENTS, RATE, SECONDS, stalled=stalled))
    assert found["messages"] > 0
    assert found["missing"] == 0
    assert found["stalled"] == stalled, "they were connected for the whole time"


@pytest.mark.alone
@pytest.mark.skipif(not SOAK, reason="takes a minute of the whole machine: MILLSTREAM_SOAK=1")
def test_one_in_a_hundred_that_stalls_leaves_the_others_latency_unchanged() -> None:
    found = compare(2_000, 1_000, 20.0)
    assert found["beside_missing"] == found["calm_missing"] == 0
    assert found["beside_p99_ms"] < 1.5 * found["calm_p99_ms"] + 2
