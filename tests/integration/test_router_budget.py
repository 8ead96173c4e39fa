"""Slow subscribers of large messages: what is held for them is bounded in bytes, and no other subscriber waits for them."""

from typing import Any

import pytest

from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.router import END, ReadPolicy, Router
from millstream.router.budget import LEAST_BYTES
from tests.support.routers import READERS, ids, ids_in, make_router, publish, take_items
from tests.support.waiting import eventually

pytestmark = [pytest.mark.router]

SIZE = 100_000
NEXT = 2 * SIZE  # one more message may come than there is room for


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Any:
    return request.param


def publish_large(client: Client, stream: str, count: int) -> list[str]:
    client.pipeline([("XADD", stream, "*", "n", "x" * SIZE) for _ in range(count)])
    return ids_in(client, stream)


def buffered_bytes(router: Router) -> int:
    """How many bytes of messages are in memory for subscribers."""
    return router._cursors.budget.update()


def test_a_slow_subscriber_buffers_no_more_bytes_than_allowed_and_loses_nothing(
    client: Client, millstream_url: str, reader: Any
) -> None:
    there = publish_large(client, "s", 60)
    with make_router(millstream_url, reader) as router:
        slow, narrow = router.subscribe("s"), router.subscribe("s", buffer_bytes=1)
        eventually(lambda: slow._buffer.paused and narrow._buffer.paused, "both to be read on for no more")
        assert slow._buffer.held_bytes <= 1024 * 1024 + NEXT
        assert narrow.buffered == 1
        assert ids(take_items(slow, 60)) == there
        assert ids(take_items(narrow, 60)) == there


def test_a_router_at_its_budget_warns_and_continues_for_subscribers_that_read(
    client: Client, millstream_url: str, reader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    there = publish_large(client, "large", 60)
    recorder, read = Recorder(), ReadPolicy(budget_bytes=1_000_000)
    with make_router(millstream_url, reader, metrics=recorder, read=read) as router:
        quick, ahead = router.subscribe("small", after=END, report_start=True), router.subscribe("large")
        take_items(quick, 1)
        stalled = [router.subscribe("large", after=there[n]) for n in range(10)]
        eventually(lambda: recorder.value(m.ROUTER_AT_BUDGET) == 1, "the router to be at its budget")
        eventually(lambda: all(one._buffer.paused for one in stalled), "all to be read on for no more")
        publish(client, ["small"], range(500))
        assert ids(take_items(quick, 500)) == ids_in(client, "small")
        assert ids(take_items(ahead, 60)) == there
        assert buffered_bytes(router) <= 1_000_000 + 11 * (LEAST_BYTES + NEXT)
        assert "router is at its budget" in caplog.text
        for one in stalled:
            one.close()
        eventually(lambda: recorder.value(m.ROUTER_AT_BUDGET) == 0, "the router to have room again")
        eventually(lambda: recorder.value(m.ROUTER_BUFFERED_BYTES) == 0, "nothing to be held")
