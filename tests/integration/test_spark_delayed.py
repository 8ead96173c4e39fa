"""Delayed messages during a run on Spark, without Spark: what is refused on one stream holds up no other."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from millstream.errors import ConfigError
from millstream.producer.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.spark.run.delayed_mover import move_delayed
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.spark]

Read = Callable[[], Sequence[str]]


@contextmanager
def running_mover(url: str, *reads: Read) -> Iterator[None]:
    """Move the delayed messages of these streams during the block."""
    ended = threading.Event()
    mover = threading.Thread(target=move_delayed, args=(url, reads, ended))
    mover.start()
    try:
        yield
    finally:
        ended.set()
        mover.join(FAIL_SAFE_S)


def publish(client: Client, *streams: str) -> None:
    with Producer(client) as producer:
        for stream in streams:
            producer.publish(stream, {"n": 1}, delay_ms=1)


def wait_for(client: Client, stream: str, count: int) -> None:
    eventually(lambda: client.execute("XLEN", stream) == count, f"{count} messages in {stream}")


def test_a_stream_that_redis_refuses_holds_up_no_other_and_is_warned_of_once(
    client: Client, millstream_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    rules = ("reset", "on", ">secret", "+@all", "~b", "~millstream:{b}*")
    client.execute("ACL", "SETUSER", "limited", *rules)
    try:
        with running_mover(millstream_server.url.replace("redis://", "redis://limited:secret@"), lambda: ["a", "b"]):
            for n in (1, 2, 3):
                publish(client, "a", "b")
                wait_for(client, "b", n)
            assert client.execute("XLEN", "a") == 0
            client.execute("ACL", "SETUSER", "limited", "~*")
            wait_for(client, "a", 3)
    finally:
        client.execute("ACL", "DELUSER", "limited")
    assert caplog.text.count("cannot move delayed messages") == 1


def test_streams_that_cannot_be_found_hold_up_no_other(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Sequence[str]:
        raise ConfigError("its partitions are closed")

    with running_mover(client.url, fails, lambda: ["b"]):
        for n in (1, 2, 3):
            publish(client, "b")
            wait_for(client, "b", n)
    assert caplog.text.count("its partitions are closed") == 1


def test_a_stream_that_can_have_no_delayed_messages_holds_up_no_other(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with running_mover(client.url, lambda: ["a}b", "ok"]):
        publish(client, "ok")
        wait_for(client, "ok", 1)
    assert not [one for one in caplog.records if one.name.startswith("millstream")], "others may log at any time"
