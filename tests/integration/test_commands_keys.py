"""`millstream keys`, `park`, `unpark` and `skip`, run as a user runs them."""

from collections.abc import Iterator
from typing import Any

import pytest

from millstream.delivery.key_queues import count_parked
from millstream.delivery.keyed_stream import KeyedStream, queue_of_key
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from tests.support.commandline import call
from tests.support.keyed_fixtures import keys_in_each_state

pytestmark = [pytest.mark.cli, pytest.mark.keys]


@pytest.fixture
def client(millstream_fresh_server: EmbeddedServer) -> Iterator[Client]:
    with Client(millstream_fresh_server.url) as opened:
        yield opened


@pytest.fixture
def stream(client: Client) -> KeyedStream:
    return keys_in_each_state(client)


def asked(client: Client, *words: str) -> Any:
    return call(*words, "--json", url=client.url).json()


def test_keys_says_of_each_key_what_it_waits_for(client: Client, stream: KeyedStream) -> None:
    found = asked(client, "keys", "pay")
    assert (found["keys"], found["messages"]) == (4, 11)
    assert found["states"] == {"leased": 1, "backing off": 1, "parked": 1, "ready": 1}
    rows = {row["key"]: row for row in found["shown"]}
    assert list(rows) == ["a", "b", "c", "d"]
    assert (rows["a"]["worker"], rows["a"]["messages"]) == ("w-0", 5)
    assert "attempt 2" in rows["b"]["why"]
    assert rows["c"]["parked"] == "failed: no such account"
    assert stream.check_invariants() == []


def test_keys_says_when_so_much_waits_that_other_keys_will_not_go_on(client: Client, stream: KeyedStream) -> None:
    assert asked(client, "keys", "pay")["streams"] == {"orders": {"queued": 11, "look_ahead": 1_000}}
    assert "--look-ahead" not in call("keys", "pay", url=client.url).err
    client.execute("XADD", "orders", "*", "key", "d", "n", 9)
    stream.enqueue_new(count=100, most_pending=14)
    said = call("keys", "pay", url=client.url).err
    assert "12 messages of orders are in key queues, of at most 14" in said
    assert "give the workers a greater --look-ahead" in said


def test_keys_shows_one_key_and_one_state_on_request(client: Client, stream: KeyedStream) -> None:
    assert [row["key"] for row in asked(client, "keys", "pay", "--key", "b")["shown"]] == ["b"]
    assert [row["key"] for row in asked(client, "keys", "pay", "--state", "parked")["shown"]] == ["c"]
    text = call("keys", "shop.pay", "--count", "1", url=client.url)
    assert "4 keys with 11 messages" in text.out
    assert "3 more; use --count to show them" in text.err
    assert stream.check_invariants() == []


def test_a_key_is_parked_unparked_and_its_first_message_skipped(client: Client, stream: KeyedStream) -> None:
    assert asked(client, "park", "pay", "d", "--reason", "audit")["parked"] == {"orders": True}
    assert asked(client, "keys", "pay", "--key", "d")["shown"][0]["parked"] == "audit"
    assert asked(client, "skip", "pay", "c", "--yes", "--reason", "gone")["skipped"]
    assert asked(client, "unpark", "pay", "c")["unparked"] == {"orders": True}
    (taken,) = stream.lease_keys(queues=5, entries=10, run=9, lease_ms=1_000, now_ms=0).leases
    assert (taken.key, [one.pairs[3] for one in taken.entries]) == (b"c", [b"1"])
    assert "gone" in call("dlq", "list", "--json", url=client.url).out
    assert stream.check_invariants() == []


def test_a_key_that_is_parked_before_it_has_messages_is_shown(client: Client, stream: KeyedStream) -> None:
    call("park", "pay", "ann", "--reason", "audit", url=client.url)
    (row,) = asked(client, "keys", "pay", "--key", "ann", "--state", "parked")["shown"]
    assert (row["state"], row["messages"], row["first"], row["parked"]) == ("parked", 0, "", "audit")
    assert count_parked(client, [HandlerKeys("shop", "pay", name) for name in ("orders", "none")]) == (2, 2)
    call("unpark", "pay", "ann", url=client.url)
    assert asked(client, "keys", "pay", "--key", "ann")["shown"] == []
    assert stream.check_invariants() == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("unpark", "pay", "a"), "it is not parked"),
        (("park", "pay", "c"), "it is parked already"),
        (("skip", "pay", "nobody", "--yes"), "none of its messages is queued"),
        (("keys", "nothing"), "no handler 'nothing' has run"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    client: Client, stream: KeyedStream, words: tuple[str, ...], says: str
) -> None:
    ended = call(*words, url=client.url)
    assert ended.code == 2
    assert says in ended.err
    assert ended.err.count("\n") == 1
    assert stream.check_invariants() == []


def test_info_shows_such_a_handler_as_run_by_workers(client: Client, stream: KeyedStream) -> None:
    (found,) = call("info", "--json", url=client.url).json()["handlers"]
    assert (found["engine"], found["consumers"], found["pending"], found["lag"]) == ("workers", 1, 11, 11)
    assert stream.check_invariants() == []


def test_keys_leaves_out_streams_that_are_gone_or_refused(client: Client, stream: KeyedStream) -> None:
    for name in ("gone", "secret"):
        other = KeyedStream(
            client, name, queue_of=lambda entry_id, pairs: queue_of_key(pairs[1], entry_id), app="shop", handler="pay",
            consumer="w-0",
        )  # fmt: skip
        other.join()
        client.execute("XADD", name, "*", "key", "a")
        other.enqueue_new(count=100, most_pending=1_000)
    client.execute("DEL", "gone")
    assert {row["stream"] for row in asked(client, "keys", "shop.pay")["shown"]} == {"orders", "secret"}
    client.execute("ACL", "SETUSER", "some", "on", ">secret", "+@all", "~orders", "~millstream:{orders}*")
    url = client.url.replace("redis://", "redis://some:secret@", 1)
    found = call("keys", "shop.pay", "--json", url=url)
    assert (found.code, {row["stream"] for row in found.json()["shown"]}) == (0, {"orders"})
    client.execute("ACL", "SETUSER", "some", "resetkeys", "~secret")
    assert call("keys", "shop.pay", url=url).code == 3
    assert stream.check_invariants() == []
