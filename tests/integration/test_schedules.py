"""Recurring messages on a real Redis: each firing is published once, by any number of workers, after any downtime."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from millstream import App
from millstream.errors import AccessDenied, ConfigError, OutOfMemory, Unavailable, WrongType
from millstream.handlers.schedule import Schedule
from millstream.producer.firings import FIRE, FiringRecord, Firings
from millstream.producer.schedule_loop import MOST_MISSED, ScheduleLoop
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import FIRING_FIELD, StreamKeys
from millstream.testing.proxy import Proxy
from millstream.worker import WorkerPolicy
from millstream.worker.process.worker_process import WorkerProcess, WorkerSettings
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import now_ms

pytestmark = [pytest.mark.worker]

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
ANY = 1_000_000
KEY = StreamKeys("ticks").schedules


def schedule(when: str, function: Callable[..., Any] = lambda: {"n": 1}, **options: Any) -> Schedule:
    app = App("app")
    app.every(when, **{"stream": "ticks", "name": "tick", **options})(function)
    return app.schedules["tick"]


def loop_of(client: Client, one: Schedule) -> ScheduleLoop:
    return ScheduleLoop(client, one, threading.Event())


def daily_two_hours_ago(client: Client) -> str:
    """A schedule whose last firing was two hours ago: no firing is due in the course of the test."""
    minutes = (int(now_ms(client)) - 2 * HOUR_MS) % DAY_MS // 60_000
    return f"{minutes % 60} {minutes // 60} * * *"


def hourly_half_an_hour_ago(client: Client) -> str:
    """A schedule with a firing each hour, the last one half an hour ago: none is due in the course of the test."""
    return f"{(int(now_ms(client)) - HOUR_MS // 2) % HOUR_MS // 60_000} * * * *"


def last_published(client: Client, one: Schedule, last_ms: float) -> None:
    """As if no worker had run since that firing."""
    client.execute("HSET", KEY, one.label, f"{int(last_ms)} {one.rule}")


def due_firings(client: Client, one: Schedule, last_ms: float) -> list[int]:
    return list(one.times.last_between(int(last_ms), int(now_ms(client)), ANY))


def firings(client: Client) -> list[int]:
    """The firings in the stream, in its order."""
    found = [pairs[-2:] for _, pairs in client.execute("XRANGE", "ticks", "-", "+")]
    assert {name for name, _ in found} <= {FIRING_FIELD}
    return [int(value) for _, value in found]


@pytest.mark.parametrize("missed", ["once", "all", "skip"])
def test_a_schedule_that_is_new_fires_nothing_of_the_past(client: Client, missed: str) -> None:
    one = schedule(daily_two_hours_ago(client), missed=missed)
    before = now_ms(client)
    loop = loop_of(client, one)
    assert loop.publish_due() == 0
    assert loop.publish_due() > 0
    assert firings(client) == []
    record = client.execute("HGET", KEY, "app.tick").decode()
    assert int(before) <= int(record.partition(" ")[0]) <= now_ms(client)


@pytest.mark.parametrize(("missed", "published"), [("once", 1), ("all", 5), ("skip", 0)])
def test_after_a_downtime_the_policy_decides_which_of_the_missed_firings_are_published(
    client: Client, caplog: pytest.LogCaptureFixture, missed: str, published: int
) -> None:
    one = schedule(daily_two_hours_ago(client), missed=missed)
    since = now_ms(client) - 5 * DAY_MS
    last_published(client, one, since)
    due = due_firings(client, one, since)
    assert len(due) == 5
    for _ in range(3):
        loop_of(client, one).publish_due()
    assert firings(client) == due[5 - published :]
    assert ("left out" in caplog.text) == (published < 5)
    if published < 5:
        assert f"schedule app.tick: {5 - published} firings left out, from " in caplog.text
        assert f"missed='{missed}'" in caplog.text


def test_a_firing_that_is_due_for_less_than_a_minute_is_published_with_skip_also(client: Client) -> None:
    one = schedule("1s", missed="skip")
    last_published(client, one, now_ms(client) - 10_000)
    loop_of(client, one).publish_due()
    (firing,) = firings(client)
    assert firing > now_ms(client) - FAIL_SAFE_S * 1_000


def test_after_a_long_downtime_all_is_bounded_and_the_log_says_what_was_left_out(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    one = schedule(hourly_half_an_hour_ago(client), missed="all")
    since = now_ms(client) - 3_000 * HOUR_MS
    last_published(client, one, since)
    due = due_firings(client, one, since)
    loop_of(client, one).publish_due()
    assert firings(client)[:MOST_MISSED] == due[-MOST_MISSED:]
    assert f"{len(due) - MOST_MISSED:,} firings left out, from " in caplog.text


def test_many_workers_at_once_publish_each_firing_once_and_in_order(client: Client) -> None:
    one = schedule("1h", missed="all")
    since = now_ms(client) - 200 * HOUR_MS
    last_published(client, one, since)
    due = due_firings(client, one, since)
    threads = [threading.Thread(target=publish_all, args=(client.url, one, due[-1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAIL_SAFE_S)
    assert firings(client)[: len(due)] == due


def publish_all(url: str, one: Schedule, until_ms: int) -> None:
    with Client(url) as client:
        loop = loop_of(client, one)
        while not firings(client) or firings(client)[-1] < until_ms:
            loop.publish_due()


def test_a_firing_whose_reply_is_lost_is_published_once(millstream_server: EmbeddedServer, client: Client) -> None:
    one = schedule("1h", missed="all")
    since = now_ms(client) - 20 * HOUR_MS
    last_published(client, one, since)
    due = due_firings(client, one, since)
    client.execute("SCRIPT", "LOAD", FIRE.text)  # so that it is called by its hash
    stopping = threading.Event()
    with Proxy(millstream_server.port) as proxy, Client(proxy.url) as fragile:
        proxy.cut_after("EVALSHA", containing=FIRE.sha, times=6)
        thread = threading.Thread(target=ScheduleLoop(fragile, one, stopping).run)
        thread.start()
        eventually(lambda: firings(client)[-1:] >= due[-1:], "the last firing")
        stopping.set()
        thread.join(FAIL_SAFE_S)
        assert proxy.cuts["after", "EVALSHA"] == 6
    assert firings(client)[: len(due)] == due


def test_a_function_that_returns_none_skips_its_firing(client: Client) -> None:
    one = schedule(daily_two_hours_ago(client), lambda: None)
    last_published(client, one, now_ms(client) - DAY_MS)
    loop = loop_of(client, one)
    assert loop.publish_due() == 0
    assert loop.publish_due() > 0, "nothing is due"
    assert client.execute("EXISTS", "ticks") == 0


@pytest.mark.parametrize("problem", [ValueError("no figures"), SystemExit(1), {"n": float("nan")}])
def test_a_firing_whose_function_fails_is_tried_again_and_not_skipped(
    client: Client, caplog: pytest.LogCaptureFixture, problem: Any
) -> None:
    calls: list[int] = []

    def fails_at_first() -> dict[str, Any]:
        calls.append(1)
        if len(calls) > 1:
            return {"n": len(calls)}
        if isinstance(problem, BaseException):
            raise problem
        return dict(problem)

    one = schedule(daily_two_hours_ago(client), fails_at_first)
    since = now_ms(client) - DAY_MS
    last_published(client, one, since)
    stopping = threading.Event()
    thread = threading.Thread(target=ScheduleLoop(client, one, stopping).run)
    thread.start()
    eventually(lambda: client.execute("EXISTS", "ticks"), "the message")
    stopping.set()
    thread.join(FAIL_SAFE_S)
    assert firings(client) == due_firings(client, one, since)
    assert "schedule app.tick: no message for the firing at " in caplog.text
    assert "; trying again in 1 s" in caplog.text


def test_a_new_rule_begins_at_the_start_of_a_worker_and_an_older_worker_beside_it_does_not_reset_it(
    client: Client,
) -> None:
    old, new = schedule("1h", missed="all"), schedule("30m", missed="all")
    last_published(client, old, now_ms(client) - 5 * HOUR_MS)
    loop = loop_of(client, new)
    loop.publish_due()
    assert firings(client) == []
    since = now_ms(client) - 2 * HOUR_MS
    last_published(client, old, since)  # as an older worker does that runs for a while yet
    due = due_firings(client, new, since)
    loop.publish_due()
    assert firings(client)[: len(due)] == due


def test_a_firing_is_due_by_the_clock_of_the_server_alone(client: Client) -> None:
    one = schedule("1h")
    found = Firings(client, one)
    first = found.read()
    found.publish(first, first.now_ms - HOUR_MS)
    seen = found.read()
    assert found.publish(seen, seen.now_ms + HOUR_MS, [b"n", b"1"]) is None
    assert client.execute("EXISTS", "ticks") == 0
    assert isinstance(found.publish(seen, seen.now_ms, [b"n", b"1"]), FiringRecord)
    assert found.publish(seen, seen.now_ms, [b"n", b"1"]) is None
    assert client.execute("XLEN", "ticks") == 1


def test_a_user_without_the_right_to_write_the_record_adds_no_message(
    client: Client, millstream_server: EmbeddedServer
) -> None:
    one = schedule("1h")
    last_published(client, one, now_ms(client) - 5 * HOUR_MS)
    client.execute("ACL", "SETUSER", "half", "on", "nopass", "~*", "+@all", "-hset")
    try:
        with Client(f"redis://half:x@127.0.0.1:{millstream_server.port}/0") as half, pytest.raises(AccessDenied):
            loop_of(half, one).publish_due()
    finally:
        client.execute("ACL", "DELUSER", "half")
    assert client.execute("EXISTS", "ticks") == 0


def test_a_stream_that_cannot_take_the_message_is_logged_and_tried_again(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    one = schedule(daily_two_hours_ago(client))
    last_published(client, one, now_ms(client) - DAY_MS)
    client.execute("SET", "ticks", "text")
    with pytest.raises(WrongType):
        loop_of(client, one).publish_due()
    stopping = threading.Event()
    thread = threading.Thread(target=ScheduleLoop(client, one, stopping).run)
    thread.start()
    eventually(lambda: "its firings cannot be published" in caplog.text, "the log")
    client.execute("DEL", "ticks")
    eventually(lambda: client.execute("EXISTS", "ticks"), "the message")
    stopping.set()
    thread.join(FAIL_SAFE_S)
    assert len(firings(client)) == 1


def test_a_partition_is_refused_since_only_its_producers_know_its_generation(client: Client) -> None:
    one = schedule("1h", stream="{orders.0}")
    keys = StreamKeys("{orders.0}")
    client.execute("HSET", keys.partition, "generation", 1)
    with pytest.raises(ConfigError, match="is a partition: name a stream without partitions"):
        loop_of(client, one).publish_due()
    assert client.execute("EXISTS", keys.stream, keys.schedules) == 0


def test_a_stop_waits_for_a_firing_until_its_deadline_only(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    begun, gate, stopping = threading.Event(), threading.Event(), threading.Event()

    def hang() -> dict[str, int]:
        begun.set()
        gate.wait()
        return {"n": 1}

    app = App("app")
    app.handler("in", name="work")(lambda message: None)
    app.every("1s", stream="ticks", name="tick")(hang)
    settings = WorkerSettings(url=client.url, consumer="w", policy=WorkerPolicy(stop_ms=100))
    thread = threading.Thread(target=WorkerProcess(app, settings).run, args=(stopping,))
    thread.start()
    assert begun.wait(FAIL_SAFE_S)
    stopping.set()
    thread.join(FAIL_SAFE_S)
    assert not thread.is_alive(), "its function still waits"
    assert "schedule app.tick: a firing was under way at the stop; another process publishes it" in caplog.text
    assert firings(client) == []
    gate.set()
    eventually(lambda: firings(client), "the firing, which no other worker has published")


def test_the_log_has_the_firings_that_were_left_out_in_a_step_whose_reply_was_lost(
    millstream_server: EmbeddedServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    one = schedule(daily_two_hours_ago(client))
    last_published(client, one, now_ms(client) - 5 * DAY_MS)
    loop_of(client, schedule("1h", stream="other")).publish_due()  # the scripts are loaded
    with Proxy(millstream_server.port) as proxy, Client(proxy.url) as fragile:
        loop = loop_of(fragile, one)
        record = loop._firings.read()
        proxy.cut_after("EVALSHA", times=1)
        with pytest.raises(Unavailable):
            loop._publish(record, one.times.last_between(record.last_ms, record.now_ms, 1))
    assert len(firings(client)) == 1, "it was done"
    assert "schedule app.tick: 4 firings left out, from " in caplog.text


def test_the_log_has_the_firings_that_were_left_out_once_after_a_time_without_memory(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    one = schedule(daily_two_hours_ago(client))
    last_published(client, one, now_ms(client) - 5 * DAY_MS)
    loop = loop_of(client, one)
    client.execute("CONFIG", "SET", "maxmemory", "1")
    try:
        for _ in range(2):
            with pytest.raises(OutOfMemory):
                loop.publish_due()
    finally:
        client.execute("CONFIG", "SET", "maxmemory", "0")
    assert "left out" not in caplog.text
    loop.publish_due()
    assert caplog.text.count("schedule app.tick: 4 firings left out, from ") == 1


MALFORMED = (
    b"2026-11-27",
    b"\xff\xfe 1s",
    b" 1s",
    b"-1 1s",
    b"1795734964001",
    "١٢٣ 1s".encode(),
    b"999999999999999 1s",
    b"9" * 5_000 + b" 1s",
    b"text\r\nof another program",
)


@pytest.mark.parametrize("record", MALFORMED)
def test_a_record_that_no_schedule_has_written_is_logged_once_with_the_command_that_deletes_it(
    client: Client, caplog: pytest.LogCaptureFixture, record: bytes
) -> None:
    one = schedule("1s")
    client.execute("HSET", KEY, one.label, record)
    with pytest.raises(ConfigError, match=f"HDEL {KEY} app.tick$"):
        loop_of(client, one).publish_due()
    stopping = threading.Event()
    thread = threading.Thread(target=ScheduleLoop(client, one, stopping).run)
    thread.start()
    eventually(lambda: "its firings cannot be published: the record of its last firing is '" in caplog.text, "the log")
    client.execute("HDEL", KEY, one.label)
    eventually(lambda: firings(client), "a firing")
    stopping.set()
    thread.join(FAIL_SAFE_S)
    assert not thread.is_alive()
    assert caplog.text.count("its firings cannot be published") == 1


def test_handlers_go_on_beside_a_schedule_whose_record_is_malformed(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    handled = threading.Event()
    app = App("app")
    app.handler("in", name="work")(lambda message: handled.set())
    app.every("1s", stream="ticks", name="tick")(lambda: {"n": 1})
    client.execute("HSET", KEY, "app.tick", "2026-11-27")
    stopping = threading.Event()
    thread = threading.Thread(
        target=WorkerProcess(app, WorkerSettings(url=client.url, consumer="w")).run, args=(stopping,)
    )
    thread.start()
    eventually(lambda: "its firings cannot be published" in caplog.text, "the log")
    client.execute("XADD", "in", "*", "n", "1")
    eventually(handled.is_set, "the message", log=lambda: caplog.text)
    stopping.set()
    thread.join(FAIL_SAFE_S)


def test_a_last_firing_in_the_future_is_logged_once_with_the_command_that_lets_the_schedule_begin_anew(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    one = schedule("1s")
    loop = loop_of(client, one)
    last_published(client, one, now_ms(client) + 30_000)
    assert loop.publish_due() > 0
    assert "schedule app.tick" not in caplog.text, (
        "a clock may differ a little from that of the server before a failover"
    )
    last_published(client, one, now_ms(client) + DAY_MS)
    for _ in range(2):
        assert loop.publish_due() == 60_000
    assert caplog.text.count("schedule app.tick: its last firing is that of ") == 1
    command = f"HDEL {KEY} app.tick"
    assert f"to let the schedule begin anew: {command}\n" in caplog.text
    client.execute(*command.split())
    eventually(lambda: loop.publish_due() == 0 and firings(client), "a firing")
