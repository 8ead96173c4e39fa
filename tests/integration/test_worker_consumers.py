"""Workers join and leave their consumer groups, and dead letters are seen whichever worker wrote them."""

import threading
from typing import Any

import pytest

from millstream import Message, Reject, Retry
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import GroupMissing, HandlerStuck
from millstream.groups import Group
from millstream.observability import metrics as m
from millstream.observability.health import Health
from millstream.observability.metrics import Recorder
from millstream.observability.metrics_and_health_server import HealthServer
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import WAITING, worker_name_key
from tests.support.clocks import LeapClock
from tests.support.service_process import get
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, double, ending, figure, fill, make, outputs, pending, working

pytestmark = [pytest.mark.worker]

KINDS: list[dict[str, Any]] = [{}, {"key": "n"}, {"order": "stream"}]


def consumers(client: Client, stream: str = "in") -> set[str]:
    try:
        return {one.name for one in Group(client, stream, KEYS.group).consumers()}
    except GroupMissing:
        return set()


@pytest.mark.parametrize("options", KINDS, ids=["entries", "keys", "streams"])
def test_a_worker_that_stops_in_order_leaves_the_consumer_group(client: Client, options: dict[str, Any]) -> None:
    fill(client, 20)
    with working(client, make(double, **options), "w1"):
        eventually(lambda: len(outputs(client)) == 20 and pending(client) == 0)
        assert "w1" in consumers(client)
    assert "w1" not in consumers(client)


def test_a_worker_that_stops_with_work_in_flight_leaves_it_to_others(client: Client) -> None:
    began, release = threading.Event(), threading.Event()

    def handle(message: Message) -> dict[str, Any]:
        began.set()
        release.wait(FAIL_SAFE_S)
        return double(message)

    fill(client, 20)
    with working(client, make(handle), "leaves") as loop:
        eventually(lambda: began.is_set() and loop.loop_metrics.read == 20)
        loop.stop()
        release.set()
    summary = Group(client, "in", KEYS.group).pending.summary()
    assert len(outputs(client)) + summary.by_consumer.get(WAITING, 0) == 20, "none is dropped with the consumer"
    assert "leaves" not in consumers(client)
    with working(client, make(double), "stays"):
        eventually(lambda: len(outputs(client)) == 20)


@pytest.mark.parametrize("options", KINDS, ids=["entries", "keys", "streams"])
def test_a_worker_that_starts_removes_consumers_that_are_gone_for_long(
    client: Client, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReliableStream, "consumer_idle_ms", 1)
    fill(client, 1)
    handler = make(double, **options)
    with working(client, handler, "first"):
        eventually(lambda: len(outputs(client)) == 1)
    group = Group(client, "in", KEYS.group)
    for name in ("gone", "alive"):
        group.create_consumer(name)
    client.execute("SET", worker_name_key("app", "alive"), "its supervisor")
    with working(client, handler, "next"):
        eventually(lambda: "gone" not in consumers(client), "what is gone to be removed")
        assert "alive" in consumers(client)


def test_a_worker_leaves_the_consumer_group_of_a_stream_that_it_released(client: Client) -> None:
    handler = make(double, pattern="s:*", order="stream")
    streams = [f"s:{n}" for n in range(6)]

    def of(name: str) -> int:
        return sum(name in consumers(client, stream) for stream in streams)

    for stream in streams:
        fill(client, 1, stream)
    with working(client, handler, "first"):
        eventually(lambda: of("first") == 6)
        with working(client, handler, "second"):
            eventually(lambda: of("first") == 3, "it to have left those that the other has")
            for stream in streams:
                fill(client, 1, stream, first=1)
            eventually(lambda: (of("first"), of("second"), len(outputs(client))) == (3, 3, 12))
    assert (of("first"), of("second")) == (0, 0)
    assert sorted(outputs(client)) == [0] * 6 + [1] * 6


def test_every_counter_is_exported_before_the_first_message(client: Client) -> None:
    """The first scrape must be 0, or `increase` never shows a change."""
    recorder, health = Recorder(), Health()

    def shown() -> list[str]:
        return get(f"{server.url}/metrics").text.splitlines()

    def fail(message: Message) -> None:
        raise ValueError("always")

    dead = 'millstream_messages_dead_lettered_total{handler="app.handle",reason="failed"}'
    trimmed = 'millstream_messages_trimmed_total{handler="app.handle"}'
    with (
        HealthServer(health, recorder) as server,
        working(client, make(fail, retry=Retry(attempts=1)), metrics=recorder, health=health),
    ):
        assert {f"{dead} 0.0", f"{trimmed} 0.0"} <= set(shown())
        fill(client, 1)
        eventually(lambda: f"{dead} 1.0" in shown())


def test_a_dead_letter_that_its_process_could_not_count_is_in_the_figures_of_others(client: Client) -> None:
    hangs, release, clock = threading.Event(), threading.Event(), LeapClock()

    def handle(message: Message) -> None:
        hangs.set()
        release.wait(FAIL_SAFE_S)

    fill(client, 1)
    with ending(
        HandlerStuck, client, make(handle, time_limit_ms=600_000, retry=Retry(attempts=1)), "hangs", clock=clock
    ):
        eventually(hangs.is_set)
        clock.leap(602_000)
    release.set()
    assert client.execute("XLEN", KEYS.dead_letters) == 1
    assert figure(client, m.DEAD_LETTERS, reason="failed") == 1


@pytest.mark.parametrize("options", KINDS, ids=["entries", "keys", "streams"])
def test_dead_letters_are_counted_in_redis_until_they_are_redriven(client: Client, options: dict[str, Any]) -> None:
    def refuse(message: Message) -> None:
        raise Reject("no")

    fill(client, 3)
    with working(client, make(refuse, **options), "first"):
        eventually(lambda: client.execute("XLEN", KEYS.dead_letters) == 3)
    assert figure(client, m.DEAD_LETTERS, reason="rejected") == 3
    client.execute("XTRIM", KEYS.dead_letters, "MAXLEN", 0)
    assert figure(client, m.DEAD_LETTERS, reason="rejected") == 0
