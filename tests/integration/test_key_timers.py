"""Timers of a key on a worker: set with the commit, one per name, for their handler alone, and shown with delayed messages."""

import json
import re
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from millstream import After, App, Breaker, Cancel, Message, Retry, State
from millstream.delivery import DelayedMessages
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.effects import Effects
from millstream.errors import AccessDenied, OutOfMemory, WrongType
from millstream.handlers.encoding import pack_output
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import REDRIVE_FIELD, TIMER_FIELD, StreamKeys
from millstream.testing.topologies import cluster
from tests.support.commandline import call
from tests.support.fields import text_fields
from tests.support.stream_reports import counted
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, KINDS, dead, either, make, now_ms, pending, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]

DUE = StreamKeys("in")
HOUR_MS = 3_600_000


def add(client: Client, key: str | bytes, *kinds: str) -> None:
    client.pipeline([("XADD", "in", "*", "key", key, "kind", kind) for kind in kinds])


def rows(client: Client) -> list[dict[str, str]]:
    return [text_fields(pairs) for _, pairs in client.execute("XRANGE", "out", "-", "+")]


def kinds(client: Client) -> list[str]:
    return [pairs[-1].decode() for _, pairs in client.execute("XRANGE", "out", "-", "+")]


def remind(message: Message, state: State) -> list[Any]:
    """Set, replace or cancel the timer `remind`, or set one that is due at once."""
    kind = message.text("kind")
    found = [{"key": message.key, "kind": kind}]
    match kind:
        case "later":
            return [*found, After("1h", {"kind": "late"}, name="remind")]
        case "minute":
            return [*found, After("1m", {"kind": "rings"}, name="remind")]
        case "soon":
            return [*found, After(timedelta(milliseconds=1), {"kind": "rings"}, name="remind")]
        case "cancel":
            return [*found, Cancel(name="remind")]
    return found


def remind_of_list(messages: list[Message], state: State) -> list[Any]:
    """The same for a list of messages of one key."""
    return [one for message in messages for one in remind(message, state)]


@KINDS
def test_a_timer_is_set_in_the_step_that_commits_its_message(client: Client, kind: str) -> None:
    running, release = threading.Event(), threading.Event()

    def handle(message: Message, state: State) -> list[Any]:
        running.set()
        release.wait(FAIL_SAFE_S)
        return remind(message, state)

    look = [("XLEN", "out"), ("ZCARD", DUE.due), ("HLEN", DUE.delayed)]
    add(client, "a", "later")
    before_ms = now_ms(client)
    with working(client, make(either(handle, kind), key="key")):
        eventually(running.is_set)
        assert client.pipeline(look) == [0, 0, 0]
        release.set()
        eventually(lambda: client.execute("XLEN", "out") > 0)
        assert client.pipeline(look) == [1, 1, 1]
    (waiting,) = DelayedMessages(client).find("in")
    assert before_ms + HOUR_MS <= waiting.due_ms <= now_ms(client) + 1 + HOUR_MS
    assert waiting.id == "timer:app.handle:remind:a"
    assert waiting.pairs == [REDRIVE_FIELD, b"app.handle", TIMER_FIELD, b"remind", b"key", b"a", b"kind", b"late"]


@pytest.mark.parametrize("function", [remind, remind_of_list])
def test_a_timer_of_a_name_is_replaced_and_canceled_and_other_keys_have_their_own(
    client: Client, function: Any
) -> None:
    add(client, "a", "later", "later", "soon")
    add(client, "b", "minute", "later", "cancel")
    add(client, "c", "cancel", "later")
    add(client, "d", "minute", "later")
    before_ms = now_ms(client)
    with working(client, make(function, key="key")) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 11)
    assert [row["kind"] for row in rows(client) if row["key"] == "a"] == ["later", "later", "soon", "rings"]
    assert kinds(client).count("rings") == 1
    waiting = DelayedMessages(client).find("in")
    assert sorted(one.id for one in waiting) == ["timer:app.handle:remind:c", "timer:app.handle:remind:d"]
    assert all(one.due_ms >= before_ms + HOUR_MS for one in waiting), "the last ones"
    assert dead(client) == []
    assert pending(client) == 0


def test_the_message_of_a_timer_is_for_its_handler_alone(client: Client) -> None:
    seen: list[str] = []
    app = App("app")

    def other(message: Message) -> None:
        seen.append(message.fields["kind"].decode())

    app.handler("in", name="other", key="key")(other)
    app.handler("in", name="unkeyed", concurrency=1)(other)  # in the order of the stream
    add(client, "a", "soon")
    with working(client, make(remind, key="key")):
        eventually(lambda: kinds(client) == ["soon", "rings"])
    add(client, "a", "last")
    for handler in app.handlers.values():
        with working(client, handler):
            eventually(lambda: seen[-1:] == ["last"])
        assert seen == ["soon", "last"]
        assert counted(client, handler.name) == [(2, 2)], "without the message of the timer"
        seen.clear()
    assert counted(client, "handle") == [(2, 2)], "its message, and that of its timer"


@pytest.mark.parametrize("key", [b"a b:c", b"\xff\x00\n", "é".encode(), b"k" * 5_000])
def test_any_bytes_can_be_the_key_of_a_timer(client: Client, key: bytes) -> None:
    add(client, key, "later", "soon")
    with working(client, make(remind, key="key")):
        eventually(lambda: kinds(client) == ["later", "soon", "rings"])
    assert client.pipeline([("EXISTS", DUE.due), ("EXISTS", DUE.delayed)]) == [0, 0]


@pytest.mark.parametrize("is_timed", [True, False])
def test_messages_of_timers_open_the_breaker_and_redriven_ones_do_not(client: Client, is_timed: bool) -> None:
    def fail(message: Message) -> None:
        raise ValueError("broken")

    timer: list[bytes | str] = [TIMER_FIELD, "t"] if is_timed else []
    client.pipeline(
        [("XADD", "in", "*", REDRIVE_FIELD, "app.handle", *timer, "key", key, "n", "1") for key in range(60)]
    )
    with working(client, make(fail, key="key", retry=Retry(attempts=1), breaker=Breaker(first=20))) as loop:
        if is_timed:
            eventually(lambda: client.execute("HEXISTS", KEYS.meta, "paused"), "the pause")
            eventually(lambda: len(loop._in_flight) == 0, "the end of what was in flight")
        else:
            eventually(lambda: loop.loop_metrics.committed == 60, "all of them")
    assert len(dead(client)) == (20 if is_timed else 60)
    assert client.execute("HEXISTS", KEYS.meta, "paused") == is_timed
    assert {letter.pairs[0] for letter in dead(client)} == {b"key"}


def test_delayed_list_shows_timers_and_delayed_cancel_cancels_one(client: Client, millstream_url: str) -> None:
    add(client, "a", "later")
    add(client, "b", "later")
    with working(client, make(remind, key="key")) as loop:
        eventually(lambda: loop.loop_metrics.committed >= 2)
    shown = [json.loads(line) for line in call("delayed", "list", "in", "--json", url=millstream_url).out.splitlines()]
    assert {one["id"] for one in shown} == {"timer:app.handle:remind:a", "timer:app.handle:remind:b"}
    assert shown[0]["fields"]["kind"] == "late"
    done = call("delayed", "cancel", "in", "timer:app.handle:remind:a", "--yes", url=millstream_url)
    assert done.code == 0, done.err
    assert [one.id for one in DelayedMessages(client).find("in")] == ["timer:app.handle:remind:b"]


def unit(expected: str, last: str, timers: Sequence[Any], **rest: Any) -> Effects:
    return Effects(b"kk", expected.encode(), first_id=last, last_id=last, message_count=1, timers=timers, **rest)


def test_a_refused_commit_changes_no_timer_and_a_repeated_one_does_not_set_it_again(client: Client) -> None:
    store = CommitStore(client, app="app", handler="handle", token=1, into="out")
    packed = pack_output({"a": "1"})
    first = unit("", "5-0", [(b"t", HOUR_MS, packed), (b"u", HOUR_MS, packed)])
    assert store.commit({"in": [first]}) == []
    set_before = DelayedMessages(client).find("in")
    DelayedMessages(client).cancel("in", ["u"])
    stale = unit("", "5-0", [(b"t", "", b""), (b"v", 0, packed)], outputs=[packed])
    assert store.commit({"in": [first, stale]}) == [first, stale]
    assert DelayedMessages(client).find("in") == [one for one in set_before if one.id == "t"]
    assert store.commit({"in": [unit("5-0", "6-0", [(b"t", "", b"")], dead_letters=[("id", "6-0")])]}) == []
    assert client.pipeline([("EXISTS", DUE.due), ("EXISTS", DUE.delayed)]) == [0, 0]
    assert client.execute("XLEN", KEYS.dead_letters) == 1


def test_a_timer_that_cannot_be_set_commits_nothing_of_its_message(client: Client) -> None:
    client.execute("SET", DUE.due, "no sorted set")
    store = CommitStore(client, app="app", handler="handle", token=1)
    with pytest.raises(WrongType):
        store.commit({"in": [unit("", "5-0", [(b"t", HOUR_MS, pack_output({"a": "1"}))], state=b"\x81")]})
    assert client.pipeline([("EXISTS", KEYS.offsets), ("EXISTS", KEYS.state), ("EXISTS", DUE.delayed)]) == [0, 0, 0]


@pytest.mark.parametrize("key", [DUE.due, DUE.delayed])
def test_a_timer_that_cannot_be_set_writes_no_output_however_often_it_is_tried(client: Client, key: str) -> None:
    client.execute("SET", key, "x")
    store = CommitStore(client, app="app", handler="handle", token=1, into="out")
    packed = pack_output({"a": "1"})
    one = unit("", "5-0", [(b"t", HOUR_MS, packed)], outputs=[packed, packed])
    for _ in range(3):
        with pytest.raises(WrongType, match=re.escape(f"{key} holds a string")):
            store.commit({"in": [one]})
    assert client.execute("EXISTS", "out") == 0
    client.execute("DEL", key)
    assert store.commit({"in": [one]}) == []
    assert client.pipeline([("XLEN", "out"), ("ZCARD", DUE.due)]) == [2, 1]


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        ("-zadd", f"ZADD {DUE.due}"),
        ("-zrem", f"ZREM {DUE.due}"),
        (f"resetkeys ~out ~in ~millstream:{{in}}:in:app.handle:* ~{DUE.due}", f"HSET {DUE.delayed}"),
    ],
)
def test_a_timer_without_the_right_to_set_it_writes_no_output(client: Client, rule: str, error: str) -> None:
    client.execute("ACL", "SETUSER", "limited", "reset", "on", ">word", "+@all", "~*", *rule.split())
    packed = pack_output({"a": "1"})
    try:
        with Client(client.url.replace("redis://", "redis://limited:word@")) as limited:
            store = CommitStore(limited, app="app", handler="handle", token=1, into="out")
            with pytest.raises(AccessDenied, match=re.escape(error)):
                store.commit({"in": [unit("", "5-0", [(b"t", HOUR_MS, packed)], outputs=[packed])]})
            assert client.execute("EXISTS", "out") == 0
            assert store.commit({"in": [unit("", "5-0", [], outputs=[packed])]}) == []
    finally:
        client.execute("ACL", "DELUSER", "limited")


@KINDS
def test_timers_of_a_key_with_the_same_delay_come_in_the_order_in_which_they_were_set(
    client: Client, kind: str
) -> None:
    def handle(message: Message, state: State) -> list[Any]:
        first = int(message.fields.get("first", 0))
        names = range(first, first + 3 if first else 0)
        return [*({"key": "a", "kind": message.text("kind")} for _ in range(not first)), *map(after, names)]

    def after(number: int) -> After:
        return After("1s", {"kind": f"t{number}"}, name=f"t{number}")

    client.pipeline([("XADD", "in", "*", "key", "a", "first", first) for first in range(7, 22, 3)])
    with working(client, make(either(handle, kind), key="key")):
        eventually(lambda: client.execute("XLEN", "out") == 15)
    assert kinds(client) == [f"t{number}" for number in range(7, 22)]


def test_thousands_of_timers_of_one_call_come_in_order_and_none_early(client: Client) -> None:
    store = CommitStore(client, app="app", handler="handle", token=1)
    ids = [b"t%d" % number for number in range(5_000)]
    before_ms = now_ms(client)
    changes = [(own_id, HOUR_MS, pack_output({"id": own_id})) for own_id in ids]
    assert store.commit({"in": [unit("", "5-0", changes[:2_500]), unit("5-0", "6-0", changes[2_500:])]}) == []
    after_ms = now_ms(client)
    assert client.execute("ZRANGE", DUE.due, 0, -1) == ids
    due_ms = [one.due_ms for one in DelayedMessages(client).find("in", limit=5_000)]
    assert before_ms + HOUR_MS <= due_ms[0]
    assert due_ms[-1] <= after_ms + HOUR_MS + 5_000 // 2_048 + 1


def test_at_maxmemory_the_message_that_asks_for_a_timer_is_committed_once_there_is_room(
    millstream_fresh_server: EmbeddedServer,
) -> None:
    one = unit("", "5-0", [(b"t", HOUR_MS, pack_output({"a": "1"}))])
    assert not one.is_ack_only, "else a worker would commit it beyond the limit"
    with Client(millstream_fresh_server.url) as client:
        store = CommitStore(client, app="app", handler="handle", token=1)
        client.execute("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(OutOfMemory):
            store.commit({"in": [one]})
        client.execute("CONFIG", "SET", "maxmemory", 0)
        assert store.commit({"in": [one]}) == []
        assert DelayedMessages(client).count("in") == 1


def test_timers_work_on_redis_cluster() -> None:
    with cluster() as deployment, Client(deployment.url) as client:
        handler = make(remind, key="key", into="{in}:out")
        add(client, "a", "later", "soon")
        add(client, "b", "soon", "cancel")

        def kinds_of(key: str) -> list[str]:
            found = [text_fields(pairs) for _, pairs in client.execute("XRANGE", "{in}:out", "-", "+")]
            return [row["kind"] for row in found if row["key"] == key]

        with working(client, handler):
            eventually(lambda: kinds_of("a")[2:] == ["rings"] and "cancel" in kinds_of("b"))
        assert kinds_of("a") == ["later", "soon", "rings"]
