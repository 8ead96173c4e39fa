"""`millstream forget`: nothing is left of a handler, and nothing of others is touched."""

from typing import Any

import pytest

from millstream import App, Message, Reject, Retry, State
from millstream.admin import forgetting
from millstream.admin.forgetting import Forgetting
from millstream.balancer import announce
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import MillstreamError
from millstream.groups import Group
from millstream.partitions.partitioned_producer import PartitionedProducer
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, StreamKeys, audit_key, ended_process_key, stage_group
from millstream.spark.run.liveness import announce_run
from millstream.worker.incarnations import ProcessEnd
from millstream.worker.static_membership import StaticMembership
from tests.support.commandline import call
from tests.support.deployments import lent_cluster
from tests.support.waiting import eventually
from tests.support.workers import KEYS, fill, make, working

pytestmark = [pytest.mark.cli]

STREAMS = {b"in", b"out", b"calls-input"}


def everything(client: Client) -> set[bytes]:
    """All keys, except streams of messages, which are the users', and the audit, which has what the command has done."""
    return {key for page in client.scan_key_pages("*") for key in page} - STREAMS - {audit_key().encode()}


def refuse_some(message: Message) -> None:
    """A handler with dead letters."""
    if message.text("n") == "3":
        raise Reject("no")


def count_or_refuse(message: Message, state: State) -> None:
    """A handler with state and dead letters."""
    refuse_some(message)
    state["n"] = state.get("n", 0) + 1


def names_in_info(client: Client) -> list[str]:
    return [one["name"] for one in call("info", "--json", url=client.url).json()["readers"]]


def remains_of_a_worker(client: Client, keys: HandlerKeys = KEYS) -> None:
    """Leave what a worker that was killed long ago has left."""
    fill(client, 1, keys.stream)
    stream = ReliableStream(client, keys.stream, app=keys.app, handler=keys.handler, consumer="w")
    stream.join()
    client.execute("HSET", keys.state, "A", b"\x80")
    client.execute("XADD", keys.dead_letters, "*", "a", "b")


KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "entries": (("in",), {}),
    "keys": (("in",), {"key": "n"}),
    "streams": (("s:0", "s:1"), {"pattern": "s:*", "order": "stream"}),
    "announced": (("s:0", "s:1"), {"announced": "calls", "order": "stream"}),
    "partitions": (("{orders.0}", "{orders.1}"), {"key": "n", "partitions": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_forget_leaves_no_key_and_no_group_of_the_handler(client: Client, kind: str) -> None:
    streams, options = KINDS[kind]
    with PartitionedProducer(client, "orders", key="n", partitions=2) as producer:
        for n in range(6):
            producer.publish({"n": n})
    for stream in ("in", "s:0", "s:1"):
        fill(client, 6, stream)
    for stream in streams if kind == "announced" else ():
        announce(client, "calls", stream)
    before = everything(client)
    app, function = App("app"), count_or_refuse if options else refuse_some
    named = () if {"pattern", "announced"} & options.keys() else ("orders" if kind == "partitions" else "in",)
    app.handler(*named, name="handle", retry=Retry(attempts=1), **options)(function)
    places = [HandlerKeys("app", "handle", stream) for stream in streams]
    names = StaticMembership(client, "app", "w")
    with working(client, app.handlers["handle"], names.acquire(1)[0]):
        expected = 6 * (1 if kind == "partitions" else len(streams))
        eventually(lambda: sum(int(client.execute("HGET", one.meta, "committed") or 0) for one in places) == expected)
    names.record_end("t-0", ProcessEnd(died=True, cause="test"))
    names.release()
    made = everything(client) - before
    assert {one.meta.encode() for one in places} <= made
    assert call("forget", "app.handle", "--dry-run", url=client.url).code == 0
    assert call("forget", "app.handle", url=client.url).code == 2, "there is no terminal to confirm at"
    assert everything(client) - before == made
    (row,) = call("forget", "app.handle", "--dead-letters", "--yes", "--json", url=client.url).json()["removed"]
    assert (row["streams"], row["groups"], row["dead_letters"]) == (len(streams), len(streams), expected // 6)
    services = {key for key in everything(client) if b":calls-input:" in key}  # of the users
    assert everything(client) - services == before - services
    assert "app.handle" not in names_in_info(client)
    for stream in streams:
        assert client.execute("XLEN", stream) >= 1
        assert client.execute("XINFO", "GROUPS", stream) == []
    assert call("forget", "app.handle", "--yes", url=client.url).code == 1, "there is nothing left"


def test_forget_removes_key_queues_and_progress_and_keeps_dead_letters_unless_asked(
    client: Client,
) -> None:
    remains_of_a_worker(client)
    store = CommitStore(client, app="app", handler="handle")
    store.with_token(store.new_token(["in"])).set_crash_count("in", "1-0", 1)
    client.execute("HSET", KEYS.parked, b"kA", "1 why")
    client.execute("RPUSH", KEYS.queue(b"k\xff:odd"), "1-0")
    client.execute("SET", KEYS.forwarded("s", b"1-0"), "2-0")
    shown = call("forget", "app.handle", "--yes", url=client.url)
    assert "its dead letters stay; --dead-letters removes them as well" in shown.err
    assert everything(client) == {KEYS.dead_letters.encode()}
    again = call("forget", "app.handle", "--yes", url=client.url)
    assert (again.code, "has left nothing in this Redis but 1 dead letter" in again.err) == (1, True)
    assert call("forget", "app.handle", "--yes", "--dead-letters", url=client.url).code == 0
    assert everything(client) == set()


def test_forget_refuses_and_removes_nothing_while_a_worker_or_a_run_is_alive(client: Client) -> None:
    fill(client, 1)
    with working(client, make(refuse_some), "w1"):
        eventually(lambda: client.execute("HGET", KEYS.meta, "committed") == b"1")
        outcome = call("forget", "app.handle", "--yes", url=client.url)
        assert (outcome.code, "still alive, or within the last minute: app.handle: w1" in outcome.err) == (1, True)
        assert client.execute("HGET", KEYS.meta, "committed") == b"1"
    announce_run(client, "app", ["handle"], epoch=1)
    outcome = call("forget", "app", "--yes", url=client.url)
    assert (outcome.code, "app.handle: a run on Spark" in outcome.err) == (1, True)
    assert client.execute("EXISTS", KEYS.meta) == 1


def test_a_run_that_starts_after_the_question_keeps_its_keys(client: Client) -> None:
    remains_of_a_worker(client)
    one = Forgetting(client, "app", "handle", dead_letters=False)
    assert [found.label for found in one.find()] == ["app.handle"]
    announce_run(client, "app", ["handle"], epoch=1)
    with pytest.raises(MillstreamError, match="still alive"):
        one.remove()
    assert client.execute("EXISTS", KEYS.meta) == 1


OTHERS = (
    HandlerKeys("app", "other", "in"),
    HandlerKeys("app2", "handle", "in"),
    HandlerKeys("app", "handle2", "in"),
    HandlerKeys("b", "h", "x:app.handle:y"),
    HandlerKeys("b", "h", "{a}:x:app.handle:y"),
    HandlerKeys("app", "other", "{a}:in:app.handle:k"),
)


def leave_delayed(client: Client, stream: str) -> None:
    """Leave a delayed message of a stream."""
    fill(client, 1, stream)
    client.execute("ZADD", StreamKeys(stream).due, 1, "1")


def test_forget_keeps_all_keys_of_other_handlers_whatever_the_names_of_their_streams(client: Client) -> None:
    for keys in OTHERS:
        remains_of_a_worker(client, keys)
        client.execute("RPUSH", keys.queue(b"k:app.handle:x"), "1-0")
    for stream in ("x:app.handle:y", "{a}:x:app.handle:y", "{a}:x:app.handle:app.handle:y", "{b}:x:app.handle"):
        leave_delayed(client, stream)
    client.execute("ZADD", StreamKeys("later:app.handle:y").due, 1, "1")  # there is no such stream yet
    client.execute("SET", ended_process_key("app", "t-1"), "x")
    before = everything(client)
    remains_of_a_worker(client)
    for stream in ("{a}:x", "{a}:x:app.handle:y"):
        remains_of_a_worker(client, HandlerKeys("app", "handle", stream))
    assert call("forget", "app.handle", "--yes", "--dead-letters", url=client.url).code == 0
    assert everything(client) - {b"{a}:x"} == before
    assert all(Group(client, keys.stream, keys.group).info() for keys in OTHERS)


def test_forget_removes_a_whole_app_with_its_stages_and_processes(client: Client) -> None:
    for name in ("one", "two"):
        remains_of_a_worker(client, HandlerKeys("shop", name, "in"))
    Group(client, "in", stage_group("shop", "minutes")).create()
    client.execute("SET", ended_process_key("shop", "t-1"), "x")
    outcome = call("forget", "shop", "--yes", "--dead-letters", "--json", url=client.url)
    assert [one["name"] for one in outcome.json()["removed"]] == ["minutes", "one", "two"]
    assert everything(client) == set()
    assert client.execute("XINFO", "GROUPS", "in") == []


def test_forget_removes_the_rest_after_an_interruption(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    remains_of_a_worker(client)
    for n in range(50):
        client.execute("RPUSH", KEYS.queue(b"k%d" % n), "1-0")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(forgetting, "disown_service", interrupted)
        assert call("forget", "app.handle", "--yes", "--dead-letters", url=client.url).code == 130
    assert Group(client, "in", KEYS.group).info() is not None
    assert call("forget", "app.handle", "--yes", "--dead-letters", url=client.url).code == 0
    assert everything(client) == set()
    assert Group(client, "in", KEYS.group).info() is None


def test_forget_removes_the_keys_on_all_nodes_of_a_cluster(request: pytest.FixtureRequest) -> None:
    with Client(lent_cluster(request).url) as client:
        streams = [f"s:{n}" for n in range(8)]
        for stream in streams:
            remains_of_a_worker(client, HandlerKeys("app", "handle", stream))
        outcome = call("forget", "app.handle", "--yes", "--dead-letters", "--json", url=client.url)
        assert outcome.json()["removed"][0]["streams"] == len(streams)
        assert everything(client) == {stream.encode() for stream in streams}


def test_forget_keeps_the_groups_of_masters(client: Client) -> None:
    outcome = call("forget", "master.bill", "--yes", url=client.url)
    assert (outcome.code, "belong to other programs" in outcome.err) == (2, True)
