"""`millstream why`, run as a user runs it."""

import subprocess
from typing import Any

import pytest

from millstream.delivery.keyed_stream import KeyedStream, LeaseRelease, queue_of_key
from millstream.delivery.last_error import LastError
from millstream.delivery.long_runs import LongRun, report_long_runs
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.commandline import call
from tests.support.keyed_fixtures import keys_in_each_state
from tests.support.pages import shell_environment

pytestmark = [pytest.mark.cli, pytest.mark.keys]


@pytest.fixture
def stream(fresh_client: Client) -> KeyedStream:
    return keys_in_each_state(fresh_client)


def explained(client: Client, key: str) -> dict[str, Any]:
    (found,) = call("why", "shop.pay", key, "--json", url=client.url).json_lines()
    assert isinstance(found, dict)
    return found


def keyed_on(client: Client, stream: str) -> KeyedStream:
    """The handler on another stream."""
    found = KeyedStream(
        client,
        stream,
        queue_of=lambda entry_id, pairs: queue_of_key(pairs[1], entry_id),
        app="shop",
        handler="pay",
        consumer="w-0",
    )
    found.join()
    return found


def test_each_state_of_a_key_is_explained_with_its_worker_attempt_and_those_behind(
    fresh_client: Client, stream: KeyedStream
) -> None:
    found = {key: explained(fresh_client, key) for key in "abcdx"}
    assert {key: one["state"] for key, one in found.items()} == {
        "a": "leased",
        "b": "backing off",
        "c": "parked",
        "d": "ready",
        "x": "free",
    }
    assert "worker w-0 has leased it for " in found["a"]["why"]
    assert "4 messages wait behind its first message " in found["a"]["why"]
    assert (found["a"]["worker"], found["a"]["attempt"], found["a"]["messages"]) == ("w-0", 1, 5)
    assert "attempt 2 of its first entry" in found["b"]["why"]
    assert "parked for " in found["c"]["why"]
    assert found["c"]["parked"] == "failed: no such account"
    assert "waits for a free worker" in found["d"]["why"]
    assert "does not wait" in found["x"]["why"]
    assert (found["x"]["messages"], found["x"]["first"], found["x"]["attempt"]) == (0, None, None)


def test_the_commands_that_are_printed_for_a_parked_key_run_as_they_are_and_let_it_go_on(
    fresh_client: Client, stream: KeyedStream
) -> None:
    call("key", "park", "shop.pay", "it's d\\xff", url=fresh_client.url)
    shown = call("why", "shop.pay", "it's d\\xff", url=fresh_client.url).out
    (command,) = (line.removeprefix("mend: ") for line in shown.splitlines() if line.startswith("mend: "))
    subprocess.run(["bash", "-c", command], env=shell_environment(fresh_client.url), check=True, capture_output=True)
    assert explained(fresh_client, "it's d\\xff")["state"] == "free"


def test_a_blocked_key_is_explained_with_its_last_error_and_can_be_skipped(
    fresh_client: Client, stream: KeyedStream
) -> None:
    (lease,) = stream.lease_keys(queues=1, entries=1, run=1, lease_ms=60_000, now_ms=0).leases
    error = LastError(error="RuntimeError: no gateway", attempts=2, blocks=True)
    stream.release_leases([LeaseRelease(lease, "backoff", 60_000, 2, error.pack())])
    found = explained(fresh_client, "d")
    assert (found["blocked"], found["attempt"], found["attempts"]) == (True, 3, 2)
    assert "blocked, as 2 attempts have failed" in found["why"]
    assert "The last attempt failed with RuntimeError: no gateway." in found["why"]
    assert found["mend"][0] == "millstream key skip shop.pay d  # or give its first message up"


def test_dead_letters_of_the_key_are_counted_and_the_newest_is_named(fresh_client: Client, stream: KeyedStream) -> None:
    for key, reason in (("c", "first"), ("c", "second"), ("b", "of another key")):
        call("key", "skip", "shop.pay", key, "--yes", "--reason", reason, url=fresh_client.url)
    found = explained(fresh_client, "c")
    assert found["dead_letters"] == 2
    assert "2 of its messages are dead letters, the last one as skipped: second." in found["why"]
    assert "millstream dlq redrive shop.pay --key c" in found["mend"]
    fresh_client.pipeline(
        [("XADD", HandlerKeys("shop", "pay", "orders").dead_letters, "*", "n", n) for n in range(120)]
    )
    assert explained(fresh_client, "c")["dead_letters"] == 2, "behind entries that are no dead letters"


def test_a_pause_and_the_lack_of_workers_are_said(fresh_client: Client, stream: KeyedStream) -> None:
    assert call("pause", "shop.pay", url=fresh_client.url).code == 0
    keys = HandlerKeys("shop", "pay", "orders")
    for consumer in fresh_client.execute("XINFO", "CONSUMERS", keys.stream, keys.group):
        fresh_client.execute("XGROUP", "DELCONSUMER", keys.stream, keys.group, consumer[1])
    found = explained(fresh_client, "d")
    assert (found["paused"], found["alive"]) == (True, 0)
    assert "shop.pay is paused by an operator, since " in found["why"]
    assert "No worker and no run of shop.pay is alive." in found["why"]
    assert found["mend"] == [
        "millstream resume shop.pay",
        'millstream worker FILE.py  # FILE.py: the file with App("shop")',
    ]


def test_a_message_that_runs_for_long_is_found_by_its_id(
    fresh_client: Client, stream: KeyedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.delivery.long_runs.HELD_MS", 3_600_000)  # the test repeats no report
    run = LongRun(
        handler="shop.pay",
        stream="orders",
        id=explained(fresh_client, "a")["first"],
        key="a",
        worker="w-0",
        started_ms=1,
        time_limit_ms=300_000,
    )
    report_long_runs(fresh_client, "shop", [run])
    assert "its time limit ends it after 5 min." in explained(fresh_client, "a")["why"]
    assert "time limit" not in explained(fresh_client, "b")["why"]


def test_entries_that_full_key_queues_keep_from_being_read_are_counted(
    fresh_client: Client, stream: KeyedStream
) -> None:
    fresh_client.execute("XADD", "orders", "*", "key", "d")
    fresh_client.execute("XADD", "orders", "*", "key", "new")
    assert explained(fresh_client, "new")["unread"] == 2
    stream.enqueue_new(count=100, max_pending=12)
    assert "12 messages are in key queues, of at most 12" in explained(fresh_client, "new")["why"]


def test_delayed_messages_that_may_be_of_the_key_are_counted(fresh_client: Client, stream: KeyedStream) -> None:
    published = call("publish", "orders", "key=late", "--in", "1h", url=fresh_client.url)
    assert published.code == 0
    found = explained(fresh_client, "late")
    assert (found["state"], found["delayed"]) == ("free", 1)
    assert "1 delayed message is not in orders yet, the first is due in " in found["why"]
    assert found["mend"] == ["millstream delayed list orders"]


def test_the_command_that_is_printed_for_a_key_that_backs_off_makes_its_next_attempt_due(
    fresh_client: Client, stream: KeyedStream
) -> None:
    (command,) = explained(fresh_client, "b")["mend"]
    subprocess.run(["bash", "-c", command], env=shell_environment(fresh_client.url), check=True, capture_output=True)
    assert explained(fresh_client, "b")["state"] == "ready"


def test_of_several_streams_those_with_messages_of_the_key_are_explained(
    fresh_client: Client, stream: KeyedStream
) -> None:
    for name in ("more", "others"):
        keyed_on(fresh_client, name)
    fresh_client.execute("XADD", "more", "*", "key", "zoe")
    shown = call("why", "shop.pay", "c", url=fresh_client.url)
    assert shown.out.startswith("Key c of shop.pay on orders waits: ")
    assert "mend: millstream key unpark shop.pay c --stream orders\n" in shown.out
    assert shown.err == "it does not wait on 2 other streams of shop.pay\n"
    assert explained(fresh_client, "zoe")["stream"] == "more", "the one that may have messages of it"
    (alone,) = call("why", "shop.pay", "c", "--stream", "others", "--json", url=fresh_client.url).json_lines()
    assert (alone["state"], alone["stream"]) == ("free", "others")
    named = call("why", "shop.pay", "c", "--stream", "orders", url=fresh_client.url)
    assert "mend: millstream key unpark shop.pay c --stream orders\n" in named.out, "there are others"


def test_a_key_that_only_waits_until_it_has_left_another_partition_is_not_to_be_unparked(
    fresh_client: Client, stream: KeyedStream
) -> None:
    keys = HandlerKeys("shop", "pay", "orders")
    fresh_client.execute("HSET", keys.awaiting, "kc", "1 2 migrating from {orders.3}")
    assert explained(fresh_client, "c")["mend"] == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("shop.plain", "a"), 1, "shop.plain has no key: its messages run in no order"),
        (("shop.none", "a"), 1, "no handler 'shop.none' has run on this Redis"),
        (("shop", "a"), 2, "'shop' is not APP.HANDLER"),
        (("shop.pay", "\\x9"), 2, "invalid escape"),
    ],
)
def test_what_cannot_be_explained_is_one_line_of_error(
    fresh_client: Client, stream: KeyedStream, words: tuple[str, ...], code: int, message: str
) -> None:
    plain = HandlerKeys("shop", "plain", "orders")
    fresh_client.execute("XGROUP", "CREATE", "orders", plain.group, "0")
    fresh_client.execute("HSET", plain.meta, "owner", "workers")
    ended = call("why", *words, url=fresh_client.url)
    assert (ended.code, message in ended.err, ended.err.count("\n")) == (code, True, 1)
