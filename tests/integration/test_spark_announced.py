"""What a run on Spark knows of announced streams, without Spark itself."""

import logging
from collections.abc import Callable

import pytest

from millstream import App
from millstream.balancer import announce
from millstream.balancer.protocol import announced_streams, end_leases, service_of
from millstream.clock import SYSTEM_CLOCK
from millstream.errors import ConfigError, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import ServiceKeys
from millstream.spark.run.service_membership import ServiceMembership
from millstream.spark.source.options import parse
from millstream.spark.source.subscription import subscription
from tests.support.clocks import LeapClock
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]


def membership(
    client: Client, app: str = "app", on_ended: Callable[[Exception], None] = lambda error: None
) -> ServiceMembership:
    made = App(app)
    made.handler(announced="calls", order="stream", name="handle")(lambda message: None)
    return ServiceMembership(client, made.handlers["handle"], on_ended=on_ended)


def test_a_run_reads_announced_streams_until_they_are_done_and_leaves_out_other_types(
    millstream_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(millstream_url) as client:
        client.execute("SET", "bad", "text")
        for name in ("call:1", "bad"):
            announce(client, "calls", name)
        member = membership(client)
        member.join()
        eventually(lambda: announced_streams(client, "calls") == ["bad", "call:1"], "both to be read")
        assert service_of(client, "app.handle") == "calls"
        options = parse({"url": millstream_url, "subscribeAnnounced": "calls", "layout": "packed"}, {})
        with caplog.at_level(logging.WARNING):
            assert [*subscription(client, options, clock=SYSTEM_CLOCK).names()] == ["call:1"]
        assert "the announced stream 'bad' is left out: its key holds a string" in caplog.text
        announce(client, "calls", "call:2")  # it is read while the run goes on
        eventually(lambda: "call:2" in announced_streams(client, "calls"), "the next to be read")
        assert end_leases(client, "calls", "done", ["call:1", "bad"]) == set()
        assert [*subscription(client, options, clock=SYSTEM_CLOCK).names()] == ["call:2"]
        with pytest.raises(ConfigError, match=r"workers of app\.handle own the streams"):
            membership(client, "other").join()
        member.close()


def test_a_stream_that_is_announced_again_is_checked_again(
    millstream_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(millstream_url) as client:
        announced = ServiceKeys("calls").streams
        client.execute("HSET", announced, "call:1", 1)
        options = parse({"url": millstream_url, "subscribeAnnounced": "calls", "layout": "packed"}, {})
        clock = LeapClock()
        subscribed = subscription(client, options, clock=clock)
        assert [*subscribed.names()] == ["call:1"]
        client.execute("HDEL", announced, "call:1")
        clock.leap(1_500)
        assert [*subscribed.names()] == []
        client.pipeline([("RPUSH", "call:1", "no stream"), ("HSET", announced, "call:1", 2)])
        clock.leap(1_500)
        assert [*subscribed.names()] == []
        assert "the announced stream 'call:1' is left out: its key holds a list" in caplog.text


def test_a_run_receives_the_error_that_ends_the_reading_of_announcements(millstream_url: str) -> None:
    ends: list[Exception] = []
    with Client(millstream_url) as client:
        announce(client, "calls", "call:1")
        member = membership(client, on_ended=ends.append)
        member.join()
        eventually(lambda: announced_streams(client, "calls") == ["call:1"], "it to be read")
        assert ends == []
        client.execute("DEL", ServiceKeys("calls").streams)
        client.execute("SET", ServiceKeys("calls").streams, "text")
        client.execute("XADD", ServiceKeys("calls").events, "*", "event", "a test asks for a round")
        eventually(lambda: ends, "the end to be told")
        assert isinstance(ends[0], WrongType)
        member.close()
        assert len(ends) == 1
