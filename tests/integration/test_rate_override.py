"""The rate of a handler that an operator sets while its workers run, in place of the one in code."""

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from millstream.delivery.commit_store import CommitStore, reservation_size
from millstream.delivery.rate_override import RateOverride, format_rate, parse_rate, parse_rate_override
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import ConfigError
from millstream.handlers.handler import BAD_RATE
from millstream.redis_client.client import Client
from millstream.worker.fetching.entry_fetcher import EntryFetcher
from millstream.worker.fetching.rate_limiter import RateLimiter
from tests.support.commandline import call
from tests.support.waiting import eventually
from tests.support.workers import KEYS, RecordingLoop, double, fill, make, make_context, now_ms, outputs, working

pytestmark = [pytest.mark.worker]

HOURLY = 1 / 3_600
HANDLERS = pytest.mark.parametrize("options", [{}, {"key": "n"}], ids=["entries", "keys"])


def store_of(client: Client) -> CommitStore:
    return CommitStore(client, app="app", handler="handle")


def set_rate(client: Client, rate: float | None, *loops: RecordingLoop) -> None:
    """Set the rate, and wait until the next reads of the loops keep it."""
    store_of(client).set_rate(["in"], rate)
    stored = store_of(client).rate_override("in")
    for loop in loops:
        eventually(lambda: limiter_of(loop)._overrides.get("in") == stored, "the rate")  # noqa: B023 - at once


def limiter_of(loop: RecordingLoop) -> RateLimiter:
    return loop._ordering.fetcher._rate_limiter


def committed(loops: Sequence[RecordingLoop]) -> int:
    return sum(loop.loop_metrics.committed for loop in loops)


@HANDLERS
def test_a_worker_that_waits_an_hour_for_the_rate_in_code_follows_a_higher_one(
    client: Client, options: dict[str, Any]
) -> None:
    fill(client, 50)
    with working(client, make(double, rate=HOURLY, **options)) as loop:
        eventually(lambda: loop.loop_metrics.committed == 1)
        set_rate(client, 1_000)
        eventually(lambda: loop.loop_metrics.committed == 50)
        set_rate(client, None, loop)
        fill(client, 5, first=50)
        eventually(lambda: loop.loop_metrics.committed == 51)  # an hour later the next
        eventually(lambda: limiter_of(loop).is_waiting)
        assert loop.loop_metrics.committed == 51


@HANDLERS
def test_workers_of_a_handler_without_a_rate_keep_one_that_is_set_together_until_it_is_cleared(
    client: Client, options: dict[str, Any]
) -> None:
    handler = make(double, **options)
    with ExitStack() as stack:
        loops = [stack.enter_context(working(client, handler, f"w{number}")) for number in range(2)]
        fill(client, 10)
        eventually(lambda: committed(loops) == 10)
        set_rate(client, HOURLY, *loops)
        fill(client, 10, first=10)
        eventually(lambda: committed(loops) == 11)
        eventually(lambda: any(limiter_of(loop).is_waiting for loop in loops))
        assert committed(loops) == 11, "the second reservation is of the next hour"
        set_rate(client, None)
        eventually(lambda: committed(loops) == 20)
        assert not client.execute("HEXISTS", KEYS.meta, "rate_at")


def test_a_rate_outlasts_restarts_and_holds_for_workers_that_start(client: Client) -> None:
    handler = make(double)
    with working(client, handler):
        pass
    set_rate(client, HOURLY)
    fill(client, 10)
    for name in ("w1", "w2"):
        with working(client, handler, name) as loop:
            eventually(lambda: limiter_of(loop).is_waiting)
            eventually(lambda: outputs(client) == [0])
    assert outputs(client) == [0]


def test_all_workers_together_keep_a_rate_that_is_set_while_they_run(client: Client) -> None:
    with ExitStack() as stack:
        handler = make(double, rate=100_000)
        loops = [stack.enter_context(working(client, handler, f"w{number}")) for number in range(3)]
        eventually(lambda: all(len(loop._ordering.streams) == 1 for loop in loops))
        set_rate(client, 100, *loops)
        began_ms = now_ms(client)
        fill(client, 1_000)
        eventually(lambda: client.execute("XLEN", "out") >= 100)
    for number, (entry_id, _) in enumerate(client.execute("XRANGE", "out", "-", "+"), 1):
        came_ms = int(entry_id.partition(b"-")[0]) + 1 - began_ms
        # each worker may have reserved once before
        assert number <= 100 * came_ms / 1000 + (1 + len(loops)) * reservation_size(100)


def test_nothing_is_reserved_at_a_rate_that_an_operator_has_replaced(client: Client) -> None:
    store = store_of(client)
    store.set_rate(["in"], 0.5)
    assert store.reserve_rate("in", 100, 20) is None
    assert client.execute("HGET", KEYS.meta, "rate_at") == b"0"
    known = store.rate_override("in")
    assert known is not None
    assert store.reserve_rate("in", known.rate, 1, known) == 0
    store.set_rate(["in"], None)
    assert store.reserve_rate("in", known.rate, 1, known) is None
    assert store.reserve_rate("in", 100, 20) == 0


@pytest.mark.parametrize(
    "stored",
    [
        *(b"x", b"0x10 1", b"-1 1", b"0 1", b"1e999 1", b"1.2.3 1", b"5", b"\xff", b"1e-300 1", b"9e-7 1"),
        *(b"1 " + b"9" * 5_000, b"1 " + b"9" * 15, b"1" + b"0" * 32 + b" 1"),
    ],
    ids=lambda stored: repr(stored[:12]),
)
def test_the_rate_in_code_holds_where_another_program_wrote_what_is_no_rate(client: Client, stored: bytes) -> None:
    client.execute("HSET", KEYS.meta, "rate", stored)
    assert store_of(client).rate_override("in") is None
    assert store_of(client).reserve_rate("in", 100, 20) == 0


def test_messages_of_the_lowest_rate_wait_for_as_long_as_it_demands(client: Client) -> None:
    lowest = parse_rate("0.000001")
    store_of(client).set_rate(["in"], lowest)
    known = store_of(client).rate_override("in")
    assert known is not None
    began_ms = now_ms(client)
    assert store_of(client).reserve_rate("in", lowest, 1_000, known) == 0
    wait_ms = store_of(client).reserve_rate("in", lowest, 1_000, known)
    assert wait_ms is not None
    assert 1e12 - (now_ms(client) - began_ms) <= wait_ms <= 1e12


@pytest.mark.parametrize(
    ("text", "rate", "shown"),
    [
        ("50", 50, "50/s"),
        ("0.5", 0.5, "30/m"),
        ("60/m", 1, "1/s"),
        ("50/m", 50 / 60, "50/m"),
        ("100/h", 100 / 3_600, "1.66667/m"),
        ("5/d", 5 / 86_400, "5/d"),
        ("1e3/s", 1_000, "1,000/s"),
    ],
)
def test_a_rate_is_written_with_or_without_a_unit(text: str, rate: float, shown: str) -> None:
    assert parse_rate(text) == rate
    assert format_rate(rate) == shown
    override = RateOverride(rate=rate, at_ms=7)
    assert parse_rate_override(override.encode()) == override


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "x", "60/w", "60/", "/m", "nan", "inf", "1e999", "1.2.3", "6 0", "1e-300", "9e-7"]
)
def test_a_rate_that_is_none_is_refused_in_the_words_of_code(client: Client, text: str) -> None:
    with pytest.raises(ConfigError, match=BAD_RATE):
        parse_rate(text)
    ran(client, "a")
    done = call("rate", "set", "app.handle", "--", text, url=client.url)
    assert (done.code, BAD_RATE in done.err) == (2, True)
    assert not client.execute("HEXISTS", KEYS.meta, "rate")


def fetcher_of(client: Client, streams: dict[str, ReliableStream]) -> EntryFetcher:
    for name in ("limited", "unlimited"):
        streams[name] = ReliableStream(client, name, app="app", handler="handle", consumer="w")
        streams[name].join()
    store_of(client).set_rate(["limited"], HOURLY)
    streams["limited"].refresh()
    return EntryFetcher(make_context(client, make(double, pattern="*limited")), streams)


def test_a_low_rate_on_one_stream_does_not_limit_how_many_entries_are_read_of_another(client: Client) -> None:
    fill(client, 300, "unlimited")
    fetcher = fetcher_of(client, {})
    for _ in range(4):  # the first entry tells the size of more; then a share of the room, and then all of it
        fetcher.fetch(200, threading.Event())
    in_flight = Counter(one.stream.stream for one in fetcher._in_flight.deliveries)
    assert in_flight == {"unlimited": 300}
    fill(client, 5, "limited")
    for _ in range(3):
        fetcher.fetch(200, threading.Event())
    in_flight = Counter(one.stream.stream for one in fetcher._in_flight.deliveries)
    assert in_flight == {"unlimited": 300, "limited": 1}


def test_a_stream_that_has_left_delays_no_other_and_is_forgotten(client: Client) -> None:
    fill(client, 5, "limited")
    streams: dict[str, ReliableStream] = {}
    fetcher = fetcher_of(client, streams)
    for _ in range(2):
        fetcher.fetch(200, threading.Event())
    assert fetcher._rate_limiter.is_waiting
    del streams["limited"]
    fetcher.fetch(200, threading.Event())
    assert not fetcher._rate_limiter.is_waiting
    assert fetcher._rate_limiter._overrides == {}


# The commands


def ran(client: Client, *streams: str) -> None:
    for stream in streams:
        client.execute("XADD", stream, "*", "n", "1")
        client.execute("HSET", store_of(client).keys(stream).meta, "committed_id", "0-0", "owner", "workers")


def rates(client: Client) -> dict[str, float | None]:
    return {one["stream"]: one["rate"] for one in call("rate", "show", "--json", url=client.url).json_lines()}


def test_the_commands_set_and_clear_a_rate_on_each_stream_and_info_shows_it(client: Client) -> None:
    ran(client, "a", "b")
    done = call("rate", "set", "app.handle", "60/m", "--json", "--dry-run", url=client.url)
    about = {"app": "app", "handler": "handle", "streams": ["a", "b"], "rate": 1}
    assert done.json() == {**about, "dry_run": True}
    assert rates(client) == {"a": None, "b": None}
    assert call("rate", "set", "app.handle", "60/m", "--json", url=client.url).json() == {**about, "dry_run": False}
    assert rates(client) == {"a": 1, "b": 1}
    assert "app.handle has the rate 1/s, set by an operator, since" in call("info", url=client.url).out
    assert "1/s" in call("rate", "show", "app.handle", "--stream", "a", url=client.url).out
    done = call("rate", "clear", "app.handle", "--stream", "a", url=client.url)
    assert done.out == "app.handle has its rate in code on a\n"
    assert rates(client) == {"a": None, "b": 1}
    shown = call("info", "--json", url=client.url).json()["handlers"]
    assert {one["stream"]: one["rate_override"] and one["rate_override"]["rate"] for one in shown} == {
        "a": None,
        "b": 1,
    }


@pytest.mark.parametrize("words", [("set", "app.gone", "1"), ("clear", "app.gone"), ("show", "app.gone")])
def test_a_handler_that_has_not_run_has_no_rate_to_set(client: Client, words: tuple[str, ...]) -> None:
    done = call("rate", *words, url=client.url)
    assert (done.code, "no handler 'app.gone' has run" in done.err) == (1, True)


def test_why_says_that_a_ready_key_waits_for_the_rate_that_an_operator_has_set(client: Client) -> None:
    fill(client, 3)
    with working(client, make(double, key="n", rate=100_000)) as loop:
        eventually(lambda: loop.loop_metrics.committed == 3)
        set_rate(client, HOURLY, loop)
        fill(client, 3, first=3)
        eventually(lambda: loop.loop_metrics.committed == 4)
        eventually(lambda: client.execute("LLEN", KEYS.ready) > 0)
        (row, *_) = call("key", "list", "app.handle", "--json", url=client.url).json_lines()
        found = call("why", "app.handle", row["key"], url=client.url).out
    assert "for the handler's rate (1/h, set by an operator, since " in found
    assert "mend: millstream rate clear app.handle  # back to the rate in code; or set another" in found
