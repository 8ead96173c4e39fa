"""`millstream bench`: what it measures, when it asks first, and that it leaves nothing behind."""

import itertools
import signal
import threading
import time
from collections.abc import Callable

import pytest

from millstream import App, Message
from millstream.cli.bench import is_local
from millstream.cli.bench_rounds import BenchRounds
from millstream.errors import MillstreamError, Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.raw_loop import read_and_acknowledge
from tests.support.commandline import call, ended, in_a_terminal, running
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli]

MESSAGES = 2_500
QUICK = ("bench", "--for", "1s")


def keys(client: Client) -> list[bytes]:
    found: list[bytes] = client.execute("KEYS", "*")
    return found


def test_a_round_measures_each_loop_over_all_messages_and_removes_its_keys(fresh_client: Client) -> None:
    rounds = BenchRounds(fresh_client, threading.Event(), messages=MESSAGES)
    reported: list[tuple[int, str]] = []

    def report(number: int, what: str, rate: float) -> None:
        assert rate > 0
        reported.append((number, what))
        if what == "keyed":
            (stream,) = fresh_client.scan_streams()
            assert fresh_client.execute("XLEN", stream) == MESSAGES
            groups = fresh_client.execute("XINFO", "GROUPS", stream)
            assert sorted(group[1].decode().rpartition(".")[2] for group in groups) == ["keyed", "plain", "raw"]
            assert fresh_client.execute("TTL", stream) > 0, "should the process be killed"
            assert all(rounds.name.encode() in key for key in keys(fresh_client))

    found = rounds.run(1.0, report)
    assert found is not None
    number, rates = found
    assert reported == [(n, what) for n in range(1, number + 1) for what in ("raw", "plain", "keyed")]
    assert min(rates.raw, rates.plain, rates.keyed) > 0
    fresh_client.execute("SET", "mine", 1)
    rounds.remove()
    assert keys(fresh_client) == [b"mine"]


def test_the_raw_loop_reads_and_acknowledges_the_whole_stream(fresh_client: Client) -> None:
    fresh_client.pipeline([("XADD", "s", "*", "n", n) for n in range(MESSAGES)])
    count, took_s = read_and_acknowledge(fresh_client.url, "s", most_s=1_000.0, give_up=lambda: False)
    assert (count, took_s > 0) == (MESSAGES, True)
    assert fresh_client.execute("XPENDING", "s", "raw")[0] == 0
    with pytest.raises(Unavailable):
        read_and_acknowledge("redis://127.0.0.1:1/0", "s", most_s=1.0, give_up=lambda: False)


def test_a_measurement_without_a_message_says_what_to_do(fresh_client: Client) -> None:
    rounds = BenchRounds(fresh_client, threading.Event(), messages=MESSAGES)
    with pytest.raises(MillstreamError, match=r"no message was processed within 0\.0 s \(raw\): see millstream doctor"):
        rounds.run(0.0, lambda *_: None)


def test_the_clock_of_a_worker_starts_after_a_tenth_of_the_messages(
    fresh_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = 10_000
    rounds = BenchRounds(fresh_client, threading.Event(), messages=messages)
    rounds._fill("bench")
    app, runs_at_s = App("bench"), list[float]()
    waits, has_begun, wait = itertools.count(1), threading.Event(), rounds._wait

    def noted(condition: Callable[[], bool]) -> None:
        if next(waits) == 2:  # the first is that for a tenth
            has_begun.set()
        wait(condition)

    @app.handler("bench", key="key")
    def waits_at_half(_: Message) -> None:
        if len(runs_at_s) >= messages // 2:  # else all may run before the clock starts, on a busy machine
            has_begun.wait(FAIL_SAFE_S)
        runs_at_s.append(time.perf_counter())

    monkeypatch.setattr(rounds, BenchRounds._wait.__name__, noted)
    count, took_s = rounds._measure(app.handlers["waits_at_half"], 0.0)
    assert 0 < count <= messages * 0.9
    assert len(runs_at_s) >= messages // 10
    assert took_s <= time.perf_counter() - runs_at_s[messages // 10 - 1]


def test_an_empty_local_redis_is_measured_with_the_rights_of_its_page_without_a_question_and_empty_afterwards(
    fresh_client: Client,
) -> None:
    rule = call("acl", "worker", "producer", "--stream", "bench-*", "--user", "some").out
    fresh_client.execute(*rule.split(), "+dbsize", ">secret")
    shown = call(*QUICK, url=fresh_client.url.replace("redis://", "redis://some:secret@", 1))
    assert shown.code == 0
    assert fresh_client.execute("ACL", "LOG") == []
    heading, *rows = shown.out.splitlines()
    assert heading.split("  ")[0] == "one process"
    assert [row.split("  ")[0] for row in rows] == ["redis-py, read and ack", "worker, no key", "worker, by key"]
    assert rows[0].split()[-1] == "1.00"
    assert "its keys have bench-" in shown.err
    assert "round 1: worker, by key: " in shown.err
    assert keys(fresh_client) == []


def test_a_redis_with_other_data_is_asked_about_first_and_keeps_it_and_json_has_rates_and_their_ratios(
    fresh_client: Client,
) -> None:
    fresh_client.execute("SET", "mine", 1)
    refused = call(*QUICK, url=fresh_client.url)
    assert refused.code == 2
    assert "holds 1 key. For about 1s it would be kept busy" in refused.err
    assert "add --yes" in refused.err
    assert in_a_terminal(*QUICK, url=fresh_client.url, answer=b"n\n").code == 1
    assert keys(fresh_client) == [b"mine"]
    shown = call(*QUICK, "--yes", "--json", url=fresh_client.url)
    assert shown.code == 0
    assert keys(fresh_client) == [b"mine"]
    found = shown.json()
    for name in ("worker", "keyed"):
        assert is_ratio(found[f"{name}_ratio"], found[f"{name}_per_s"], found["raw_per_s"]), found


def is_ratio(ratio: float, rate: int, raw_rate: int) -> bool:
    """Whether it is the ratio of two rates, as exact as rates without decimals and a ratio with three can be."""
    return (rate - 0.5) / (raw_rate + 0.5) - 0.0005 <= ratio <= (rate + 0.5) / (raw_rate - 0.5) + 0.0005


@pytest.mark.parametrize(
    ("number", "code", "measured"), [(signal.SIGINT, 130, b".keyed:"), (signal.SIGTERM, 1, b".plain:")]
)
def test_its_keys_are_removed_when_it_is_interrupted_in_the_last_measurement_or_before(
    fresh_client: Client, number: signal.Signals, code: int, measured: bytes
) -> None:
    with running("bench", "--for", "50m", url=fresh_client.url) as process:
        eventually(lambda: any(measured in key for key in keys(fresh_client)), "the keys of the measurement")
        process.send_signal(number)
        stopped = ended(process)
    assert (stopped.code, stopped.out) == (code, "")
    assert keys(fresh_client) == []


def test_a_redis_that_is_nearly_full_is_refused_and_not_written_to(fresh_client: Client) -> None:
    fresh_client.execute("CONFIG", "SET", "maxmemory", "32mb")
    refused = call(*QUICK, "--yes", url=fresh_client.url)
    assert refused.code == 1
    assert "left up to maxmemory, and this needs up to 64.0 MB: choose another Redis" in refused.err
    assert keys(fresh_client) == []


@pytest.mark.parametrize("url", ["redis+cluster://127.0.0.1:7000", "redis+sentinel://127.0.0.1:26379/name/0"])
def test_what_is_not_one_server_is_refused(url: str) -> None:
    refused = call(*QUICK, url=url)
    assert (refused.code, "give --url the address of a primary" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("redis://127.0.0.1:6379/0", True),
        ("redis://user:pass@localhost/0", True),
        ("rediss://[::1]:6379", True),
        ("unix:///run/redis.sock", True),
        ("redis://redis:6379", False),
        ("redis://10.0.0.7:6379", False),
        ("redis://localhost.example.com:6379", False),
    ],
)
def test_a_redis_is_local_if_its_address_is_of_this_machine(url: str, local: bool) -> None:
    assert is_local(url) == local
