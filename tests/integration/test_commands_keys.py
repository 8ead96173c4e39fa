"""`millstream key`, run as a user runs it."""

import re
from typing import Any

import pytest

from millstream.admin.key_queues import count_parked
from millstream.delivery.keyed_stream import KeyedStream, LeaseRelease, queue_of_key
from millstream.delivery.last_error import LastError
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.commandline import call
from tests.support.keyed_fixtures import joined_by_field, keys_in_each_state, violations
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli, pytest.mark.keys]


@pytest.fixture
def stream(fresh_client: Client) -> KeyedStream:
    return keys_in_each_state(fresh_client)


def asked(client: Client, *words: str) -> Any:
    return call(*words, "--json", url=client.url).json()


def listed(client: Client, *words: str) -> list[Any]:
    return call("key", "list", *words, "--json", url=client.url).json_lines()


def test_the_list_shows_for_each_key_why_it_waits(fresh_client: Client, stream: KeyedStream) -> None:
    rows = {row["key"]: row for row in listed(fresh_client, "shop.pay")}
    assert list(rows) == ["c", "a", "b", "d"]
    assert {row["state"] for row in rows.values()} == {"leased", "backing off", "parked", "ready"}
    assert (rows["a"]["handler"], rows["a"]["worker"], rows["a"]["messages"]) == ("shop.pay", "w-0", 5)
    assert "attempt 2" in rows["b"]["why"]
    assert rows["c"]["parked"] == "failed: no such account"
    assert violations(stream) == []


def test_the_last_error_of_a_waiting_key_is_listed_and_shown_with_its_traceback(
    fresh_client: Client, stream: KeyedStream
) -> None:
    error = LastError(error="RuntimeError: no gateway", traceback="Traceback\n  in pay\nRuntimeError: no gateway\n")
    (lease,) = stream.lease_keys(queues=1, entries=1, run=1, lease_ms=60_000, now_ms=0).leases
    assert lease.key == b"d"
    stream.release_leases([LeaseRelease(lease, "backoff", 60_000, 2, error.pack())])
    rows = {row["key"]: (row["error"], row["traceback"]) for row in listed(fresh_client, "shop.pay")}
    assert rows["d"] == (error.error, error.traceback)
    assert rows["a"] == rows["b"] == (None, None)
    table = call("key", "list", "shop.pay", url=fresh_client.url).out
    assert "RuntimeError: no gateway\n" in table
    assert "in pay" not in table
    shown = call("key", "show", "shop.pay", "d", url=fresh_client.url).out
    assert shown.endswith("\nTraceback\n  in pay\nRuntimeError: no gateway\n")
    assert "error            RuntimeError: no gateway\n" in shown
    call("key", "skip", "shop.pay", "d", "--yes", url=fresh_client.url)
    (letter,) = call("dlq", "list", "--json", url=fresh_client.url).json_lines()
    assert letter["error"] == "skipped by an operator; last error: RuntimeError: no gateway"


def test_a_key_that_backs_off_is_listed_with_its_attempts(fresh_client: Client, stream: KeyedStream) -> None:
    (lease,) = stream.lease_keys(queues=1, entries=1, run=1, lease_ms=60_000, now_ms=0).leases
    error = LastError(error="RuntimeError: no gateway", attempts=5)
    stream.release_leases([LeaseRelease(lease, "backoff", 60_000, 2, error.pack())])
    (row,) = (one for one in listed(fresh_client, "shop.pay") if one["key"] == "d")
    assert (row["attempts"], row["blocked"]) == (5, False)
    assert re.match(r"attempt 3 of its first entry, which has failed for [\d.]+ \w+, is due in ", row["why"])
    assert row["why"].endswith(", of 5 attempts")


def test_a_key_whose_first_message_has_failed_is_stuck_also_while_it_is_attempted_again(
    fresh_client: Client, stream: KeyedStream
) -> None:
    (lease,) = stream.lease_keys(queues=1, entries=1, run=1, lease_ms=60_000, now_ms=0).leases
    error = LastError(error="RuntimeError: no gateway", attempts=2, blocks=True)
    stream.release_leases([LeaseRelease(lease, "backoff", 0, 2, error.pack())])
    again = eventually(lambda: stream.lease_keys(queues=1, entries=1, run=1, lease_ms=60_000, now_ms=0).leases)
    assert [one.key for one in again] == [b"d"]
    rows = {row["key"]: row for row in listed(fresh_client)}
    assert (rows["d"]["state"], rows["d"]["blocked"]) == ("leased", True)
    since_ms = rows["d"]["failing_since_ms"]
    assert "its first entry has failed for " in rows["d"]["why"]
    stream.release_leases([LeaseRelease(again[0], "backoff", 60_000, 3, error.pack())])
    (backing_off,) = (row for row in listed(fresh_client) if row["key"] == "d")
    assert backing_off["failing_since_ms"] == since_ms, "the first of its failures counts"
    assert ", which has failed for " in backing_off["why"]
    assert sorted(rows) == ["b", "c", "d"], "the leased one that has not failed is not stuck"
    call("key", "unpark", "shop.pay", "c", url=fresh_client.url)
    call("key", "skip", "shop.pay", "b", "--yes", url=fresh_client.url)
    assert "d" in {row["key"] for row in listed(fresh_client)}, "where no key is parked or backs off"


def test_stuck_keys_of_all_handlers_are_listed_if_no_handler_is_given(
    fresh_client: Client, stream: KeyedStream
) -> None:
    other = joined_by_field(fresh_client, "refunds", app="bank", handler="back")
    fresh_client.execute("XADD", "refunds", "*", "key", "e")
    other.enqueue_new(count=100, max_pending=1_000)
    assert [(row["handler"], row["key"]) for row in listed(fresh_client)] == [("shop.pay", "c"), ("shop.pay", "b")]
    call("key", "park", "bank.back", "e", url=fresh_client.url)
    assert [row["key"] for row in listed(fresh_client)] == ["c", "e", "b"]
    assert [row["key"] for row in listed(fresh_client, "bank")] == ["e"]
    assert [row["key"] for row in listed(fresh_client, "--limit", "1")] == ["c"]
    assert [row["key"] for row in listed(fresh_client, "--state", "ready")] == ["d"]
    shown = call("key", "list", "--limit", "2", url=fresh_client.url)
    assert shown.out.splitlines()[1].split()[:4] == ["handler", "key", "stream", "state"]
    assert "1 more; use --limit to show them" in shown.err


def test_keys_are_counted_by_handler_stream_and_state(fresh_client: Client, stream: KeyedStream) -> None:
    counted = listed(fresh_client, "shop.pay", "--count")
    states = {"leased": 1, "backing off": 1, "parked": 1, "ready": 1}
    assert counted == [
        {
            "handler": "shop.pay",
            "stream": "orders",
            "keys": 4,
            "messages": 11,
            "states": states,
            "queued": 11,
            "pause": None,
            "look_ahead": 1_000,
        }
    ]
    output = call("key", "list", "--count", url=fresh_client.url).out
    assert output == "shop.pay on orders: 2 keys with 5 messages: 1 backing off, 1 parked\n"


def test_the_list_warns_when_waiting_messages_nearly_fill_the_look_ahead(
    fresh_client: Client, stream: KeyedStream
) -> None:
    assert "--look-ahead" not in call("key", "list", "shop.pay", url=fresh_client.url).err
    fresh_client.execute("XADD", "orders", "*", "key", "d", "n", 9)
    stream.enqueue_new(count=100, max_pending=14)
    output = call("key", "list", "shop.pay", url=fresh_client.url).err
    assert "12 messages of orders are in key queues, of at most 14" in output
    assert "give the workers a greater --look-ahead" in output


def test_the_list_says_since_when_an_operator_has_paused_the_handler(fresh_client: Client, stream: KeyedStream) -> None:
    assert call("pause", "shop.pay", url=fresh_client.url).code == 0
    paused = r"shop.pay on orders is paused by an operator, since \d{4}-.*Z; to go on: millstream resume shop.pay\n"
    assert re.search(paused, call("key", "list", "shop.pay", url=fresh_client.url).err)
    rows = {row["key"]: row["why"] for row in listed(fresh_client, "shop.pay")}
    assert rows["d"].startswith("waits for the end of the handler's pause")


def test_the_list_says_that_no_worker_is_alive(fresh_client: Client, stream: KeyedStream) -> None:
    warning = "no worker and no run of shop.pay is alive: its keys wait until one starts"
    assert warning not in call("key", "list", "shop.pay", url=fresh_client.url).err
    keys = HandlerKeys("shop", "pay", stream.stream)
    for consumer in fresh_client.execute("XINFO", "CONSUMERS", keys.stream, keys.group):
        fresh_client.execute("XGROUP", "DELCONSUMER", keys.stream, keys.group, consumer[1])
    assert warning in call("key", "list", "shop.pay", url=fresh_client.url).err


def test_one_key_and_one_state_can_be_shown_alone(fresh_client: Client, stream: KeyedStream) -> None:
    assert asked(fresh_client, "key", "show", "shop.pay", "b")["state"] == "backing off"
    shown = call("key", "show", "shop.pay", "b", url=fresh_client.url).out
    assert "attempt 2 of its first entry" in shown
    assert re.search(r"^until +20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$", shown, re.MULTILINE)
    assert re.search(r"^blocked +no$", shown, re.MULTILINE)
    assert call("key", "show", "shop.pay", "nobody", url=fresh_client.url).code == 1
    assert [row["key"] for row in listed(fresh_client, "shop.pay", "--state", "parked")] == ["c"]
    text = call("key", "list", "shop.pay", "--limit", "1", url=fresh_client.url)
    assert "4 keys with 11 messages" in text.out
    assert "3 more; use --limit to show them" in text.err
    assert violations(stream) == []


def test_a_key_is_parked_unparked_and_its_first_message_skipped(fresh_client: Client, stream: KeyedStream) -> None:
    assert asked(fresh_client, "key", "park", "shop.pay", "d", "--reason", "audit")["parked"] == {"orders": True}
    assert asked(fresh_client, "key", "show", "shop.pay", "d")["parked"] == "audit"
    parked = call("key", "park", "shop.pay", "dd", url=fresh_client.url)
    assert parked.code == 0
    assert "dd has no messages on orders now" in parked.err
    assert parked.err.rstrip().endswith("millstream key unpark shop.pay dd")
    assert asked(fresh_client, "key", "unpark", "shop.pay", "dd")["unparked"] == {"orders": True}
    tried = asked(fresh_client, "key", "skip", "shop.pay", "c", "--dry-run")
    assert (tried["dry_run"], list(tried["skipped"])) == (True, ["orders"])
    assert asked(fresh_client, "key", "show", "shop.pay", "c")["messages"] == 2
    assert (
        asked(fresh_client, "key", "skip", "shop.pay", "c", "--yes", "--reason", "gone")["skipped"] == tried["skipped"]
    )
    assert asked(fresh_client, "key", "unpark", "shop.pay", "c")["unparked"] == {"orders": True}
    (lease,) = stream.lease_keys(queues=5, entries=10, run=9, lease_ms=1_000, now_ms=0).leases
    assert (lease.key, [one.pairs[3] for one in lease.entries]) == (b"c", [b"1"])
    assert "gone" in call("dlq", "list", "--json", url=fresh_client.url).out
    assert violations(stream) == []


def test_a_parked_key_whose_message_was_skipped_blames_that_message_and_not_the_next_one(
    fresh_client: Client, stream: KeyedStream
) -> None:
    fresh_client.pipeline([("XADD", "orders", "*", "key", "c", "n", n) for n in range(2)])
    stream.enqueue_new(count=100, max_pending=1_000)
    before = asked(fresh_client, "key", "show", "shop.pay", "c")["parked"]
    for _ in range(2):
        skipped = asked(fresh_client, "key", "skip", "shop.pay", "c", "--yes")["skipped"]["orders"]
        shown = asked(fresh_client, "key", "show", "shop.pay", "c")
        assert shown["parked"] == f"message {skipped} was skipped, unpark the key to run the next one; before: {before}"
        assert (shown["state"], shown["first"] > skipped) == ("parked", True)
        assert asked(fresh_client, "why", "shop.pay", "c")["mend"][0] == "millstream key unpark shop.pay c"
        assert "key skip" not in str(asked(fresh_client, "why", "shop.pay", "c")["mend"])
    assert violations(stream) == []


def test_all_parked_keys_of_a_handler_are_unparked_at_once_after_a_dry_run(
    fresh_client: Client, stream: KeyedStream
) -> None:
    call("key", "park", "shop.pay", "d", url=fresh_client.url)
    assert asked(fresh_client, "key", "unpark", "shop.pay", "--all", "--dry-run")["unparked"] == 2
    assert len(listed(fresh_client, "shop.pay", "--state", "parked")) == 2
    assert asked(fresh_client, "key", "unpark", "shop.pay", "--all", "--yes")["unparked"] == 2
    assert listed(fresh_client, "shop.pay", "--state", "parked") == []
    for words in ((), ("a", "--all")):
        refused = call("key", "unpark", "shop.pay", *words, url=fresh_client.url)
        assert (refused.code, "or give --all" in refused.err) == (2, True)
    assert (
        call("key", "unpark", "shop.pay", "--all", "--yes", url=fresh_client.url).out == "0 keys of shop.pay unparked\n"
    )
    assert violations(stream) == []


def test_a_key_that_is_parked_before_it_has_messages_is_shown(fresh_client: Client, stream: KeyedStream) -> None:
    call("key", "park", "shop.pay", "ann", "--reason", "audit", url=fresh_client.url)
    row = asked(fresh_client, "key", "show", "shop.pay", "ann")
    assert (row["state"], row["messages"], row["first"], row["parked"]) == ("parked", 0, None, "audit")
    assert count_parked(fresh_client, [HandlerKeys("shop", "pay", name) for name in ("orders", "none")]) == (2, 2)
    call("key", "unpark", "shop.pay", "ann", url=fresh_client.url)
    assert call("key", "show", "shop.pay", "ann", url=fresh_client.url).code == 1
    assert violations(stream) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("key", "unpark", "shop.pay", "a"), "it is not parked"),
        (("key", "park", "shop.pay", "c"), "it is parked already"),
        (("key", "skip", "shop.pay", "nobody", "--yes"), "none of its messages is queued"),
        (("key", "list", "shop.nothing"), "no handler 'shop.nothing' has run"),
        (("key", "list", "nothing"), "no handler of an app 'nothing' has run"),
    ],
)
def test_a_command_that_cannot_be_done_fails_with_one_line(
    fresh_client: Client, stream: KeyedStream, words: tuple[str, ...], message: str
) -> None:
    ended = call(*words, url=fresh_client.url)
    assert ended.code == 1
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert violations(stream) == []


def test_info_shows_a_handler_with_a_key_as_run_by_workers(fresh_client: Client, stream: KeyedStream) -> None:
    (found,) = call("info", "--json", url=fresh_client.url).json()["handlers"]
    assert (found["engine"], found["consumers"], found["pending"], found["lag"]) == ("workers", 1, 11, 11)
    assert violations(stream) == []


def test_the_list_leaves_out_streams_that_are_gone_or_not_readable(fresh_client: Client, stream: KeyedStream) -> None:
    for name in ("gone", "secret"):
        other = KeyedStream(
            fresh_client,
            name,
            queue_of=lambda entry_id, pairs: queue_of_key(pairs[1], entry_id),
            app="shop",
            handler="pay",
            consumer="w-0",
        )
        other.join()
        fresh_client.execute("XADD", name, "*", "key", "a")
        other.enqueue_new(count=100, max_pending=1_000)
    fresh_client.execute("DEL", "gone")
    assert {row["stream"] for row in listed(fresh_client, "shop.pay")} == {"orders", "secret"}
    fresh_client.execute("ACL", "SETUSER", "some", "on", ">secret", "+@all", "~orders", "~millstream:{orders}*")
    url = fresh_client.url.replace("redis://", "redis://some:secret@", 1)
    found = call("key", "list", "shop.pay", "--json", url=url)
    assert (found.code, {row["stream"] for row in found.json_lines()}) == (0, {"orders"})
    fresh_client.execute("ACL", "SETUSER", "some", "resetkeys", "~secret")
    assert call("key", "list", "shop.pay", url=url).code == 3
    assert violations(stream) == []
