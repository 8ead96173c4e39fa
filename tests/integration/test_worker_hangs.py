"""Runs that hang: their process ends at the time limit, and one that runs in isolation keeps no message from others."""

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest

from millstream import Message, Retry
from millstream.admin.doctor import diagnose
from millstream.admin.inspection import inspect
from millstream.admin.key_queues import skip
from millstream.delivery.keyed_stream import queue_of_key
from millstream.delivery.last_error import LastError
from millstream.errors import HandlerStuck
from millstream.redis_client.client import Client
from tests.support.clocks import LeapClock
from tests.support.commandline import call
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import (
    KEYS,
    LONG_AGO_MS,
    QUICK,
    deliver_to,
    double,
    ending,
    fill,
    make,
    outputs,
    pending,
    working,
)

pytestmark = [pytest.mark.worker]


@pytest.mark.parametrize("how", ["skipped by an operator", "claimed by another worker"])
def test_a_hanging_run_ends_its_process_at_the_time_limit_even_if_its_message_was_claimed(
    client: Client, how: str
) -> None:
    hangs, release, clock = threading.Event(), threading.Event(), LeapClock()

    def handle(message: Message) -> None:
        hangs.set()
        release.wait(FAIL_SAFE_S)

    is_keyed = how == "skipped by an operator"
    client.execute("XADD", "in", "*", "key", "k", "n", 0)
    handler = make(handle, time_limit_ms=600_000, into=None, **({"key": "key"} if is_keyed else {}))
    with ending(HandlerStuck, client, handler, match="longer than its time limit of 600,000 ms", clock=clock) as loop:
        eventually(hangs.is_set)
        if is_keyed:
            assert skip(client, KEYS, queue_of_key(b"k", b""), error="by an operator")
        else:
            client.execute("XAUTOCLAIM", "in", KEYS.group, "other", 0, 0)
        clock.leap(30_000)  # the next renewal of its claim or lease is due
        eventually(lambda: loop.loop_metrics.refused == 1)
        assert not loop.ended.is_set()
        clock.leap(602_000)
    release.set()


def test_a_key_whose_run_exceeds_its_time_limit_shows_that_as_its_error(client: Client) -> None:
    hangs, release, clock = threading.Event(), threading.Event(), LeapClock()

    def handle(message: Message) -> None:
        hangs.set()
        release.wait(FAIL_SAFE_S)

    client.execute("XADD", "in", "1-0", "key", "k", "n", 0)
    handler = make(handle, key="key", time_limit_ms=600_000, into=None)
    long = replace(QUICK, claim_ms=3_600_000)  # the lease watchdog must not be the first to end the run
    with ending(HandlerStuck, client, handler, match="longer than its time limit", clock=clock, policy=long):
        eventually(hangs.is_set)
        clock.leap(602_000)
    stored = LastError.parse(client.execute("HGET", KEYS.crashes, "1-0e"))
    assert (stored.error, stored.attempts) == ("it took longer than its time limit of 600,000 ms", 3)
    assert "release.wait(FAIL_SAFE_S)" in stored.traceback
    release.set()


@pytest.mark.parametrize("key", [b"a key", None], ids=["key", "no key"])
def test_a_run_of_over_a_minute_is_shown_to_operators_with_where_it_is_until_it_ends(
    client: Client, caplog: pytest.LogCaptureFixture, key: bytes | None
) -> None:
    hangs, release, clock = threading.Event(), threading.Event(), LeapClock()

    def handle(message: Message) -> None:
        hangs.set()
        release.wait(FAIL_SAFE_S)

    client.execute("XADD", "in", "1-0", "key", "a key")
    handler = make(handle, time_limit_ms=600_000, into=None, **({"key": "key"} if key else {}))
    with working(client, handler, "w1", clock=clock, policy=replace(QUICK, claim_ms=3_600_000)):
        eventually(hangs.is_set)
        assert not inspect(client).long_runs
        clock.leap(90_000)
        (run,) = eventually(lambda: inspect(client).long_runs, "its report")
        assert (run.handler, run.stream, run.id, run.worker) == ("app.handle", "in", "1-0", "w1")
        assert (run.key, run.time_limit_ms, run.isolated) == (key and key.decode(), 600_000, False)
        shown = f"app.handle: message 1-0 of in{', key a key,' if key else ''} has been running for "
        assert shown in call("info", url=client.url).out
        (row,) = call("info", "--json", url=client.url).json()["long_runs"]
        assert (row["id"], row["started_ms"]) == ("1-0", run.started_ms)
        (finding,) = (one for one in diagnose(client).findings if one.check == "long-runs")
        assert finding.what.startswith(shown)
        listed = call("key", "list", "--json", url=client.url).json_lines()
        assert [(one["key"], one["state"]) for one in listed] == ([("a key", "leased")] if key else [])
        release.set()
        eventually(lambda: not inspect(client).long_runs, "the removal of its report")
    (record,) = (one for one in caplog.records if "has been running for" in one.message)
    assert "release.wait(FAIL_SAFE_S)" in (record.exc_text or "")
    assert vars(record)["key"] == (key and key.decode())


def test_a_process_that_runs_a_suspect_in_isolation_reads_nothing_until_that_run_has_ended(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    running, release = threading.Event(), threading.Event()

    def handle(message: Message) -> dict[str, Any]:
        running.set()
        release.wait(FAIL_SAFE_S)
        return double(message)

    with working(client, make(double)):
        eventually(lambda: client.execute("EXISTS", KEYS.meta) == 1)
    fill(client, 1)
    deliver_to(client, "dead", times=3)
    with working(client, make(handle, retry=Retry(attempts=5)), "isolated") as isolated:
        eventually(running.is_set)
        eventually(lambda: not isolated.loop_metrics._is_poll_wanted, "the end of its reads")
        assert caplog.text.count("it runs in isolation") == 1
        fill(client, 5, first=1)
        with working(client, make(double), "other"):
            eventually(lambda: sorted(outputs(client)) == list(range(1, 6)), "all others, elsewhere")
        release.set()
        eventually(lambda: len(outputs(client)) == 6)


def add_suspect(client: Client, *, keyed: bool) -> None:
    """Add a message with the number 99 that has ended three processes, without a worker reading it in between."""
    if keyed:
        client.execute("HSET", KEYS.crashes, "9000000000000-0l", 3)
        client.execute("XADD", "in", "9000000000000-0", "n", 99)
        return
    add = """
    local id = redis.call('XADD', KEYS[1], '9000000000000-0', 'n', 99)
    redis.call('XREADGROUP', 'GROUP', ARGV[1], 'dead', 'STREAMS', KEYS[1], '>')
    redis.call('XCLAIM', KEYS[1], ARGV[1], 'dead', 0, id, 'IDLE', ARGV[2], 'RETRYCOUNT', 3, 'JUSTID')
    """
    client.execute("EVAL", add, 1, "in", KEYS.group, LONG_AGO_MS)


@pytest.mark.parametrize("key", [None, "n"])
def test_entries_that_a_process_had_read_before_an_isolation_go_to_the_others(client: Client, key: str | None) -> None:
    running: list[int] = []
    isolated, go_on, release = threading.Event(), threading.Event(), threading.Event()

    def handle(message: Message) -> dict[str, Any]:
        number = int(message.fields["n"])
        if number >= 100:
            return double(message)
        running.append(number)
        if number == 99:
            isolated.set()
            release.wait(FAIL_SAFE_S)
        else:
            go_on.wait(FAIL_SAFE_S)
        return double(message)

    def small() -> list[int]:
        return sorted(number for number in outputs(client) if number < 100)

    options: dict[str, Any] = {"retry": Retry(attempts=5), "key": key}
    with working(client, make(handle, **options), "isolated", policy=replace(QUICK, threads=2)) as loop:
        rounds = itertools.count(1)

        def reads_ahead() -> bool:
            fill(client, 300, first=300 * next(rounds))
            eventually(lambda: pending(client) == 0 and loop._in_flight.is_empty, "the end of what makes it do so")
            return loop._in_flight._limit >= 64  # with nothing left that may wait for long, and have it read less again

        eventually(reads_ahead, "a worker that reads far ahead")
        fill(client, 2, first=1)
        eventually(lambda: len(running) == 2, "two runs")
        fill(client, 10, first=3)
        eventually(lambda: len(loop._in_flight) == 12, "ten more in flight")
        add_suspect(client, keyed=key is not None)
        eventually(lambda: b"9000000000000-0" in loop._in_flight.entry_ids("in"), "the suspect in flight")
        eventually(lambda: not loop._in_flight.gate.is_set(), "nothing else to be started")
        go_on.set()
        eventually(isolated.is_set, "its run in isolation")
        begun = list(running)
        assert len(begun) <= 6, "two or three had begun, and the suspect"
        with working(client, make(double, **options), "other"):
            eventually(lambda: small() == [*range(1, 13)], "the others, elsewhere")
        assert running == begun
        release.set()
        eventually(lambda: small() == [*range(1, 13), 99])
    assert running == begun
