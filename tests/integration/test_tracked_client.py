"""Replies that are kept while nothing has changed: they are those that the server would give now."""

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.admin.lag import COUNT_ENTRIES
from millstream.errors import Unavailable, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.replies import mapping_of, pairs_of
from millstream.redis_client.resp import Command, Reply
from millstream.redis_client.tracked_client import GROUPS_MS, TrackedClient
from tests.support.clocks import ManualClock
from tests.support.command_stats import commands_run
from tests.support.deployments import lent_cluster

pytestmark = [pytest.mark.cli]

STREAMS = ("a", "b{1}")
GROUPS = ("g", "h")
READS: Sequence[Command] = (
    *(("XINFO", kind, stream) for stream in STREAMS for kind in ("STREAM", "GROUPS")),
    *(("XPENDING", stream, group) for stream in STREAMS for group in GROUPS),
    *(("XINFO", "CONSUMERS", stream, group) for stream in STREAMS for group in GROUPS),
    *(("XPENDING", stream, "g", "-", "+", 5) for stream in STREAMS),
    *(("XLEN", stream) for stream in STREAMS),
    ("HMGET", "hash", "x", "y"),
    ("HLEN", b"hash"),
    ("LLEN", "list"),
    ("ZCARD", "zset"),
    ("ZRANGE", "zset", 0, 0, "WITHSCORES"),
    ("ZRANGE", "zset", 0, -1),
    ("GET", "text"),
)
STREAM = st.sampled_from(STREAMS)
GROUP = st.sampled_from(GROUPS)
CONSUMER = st.sampled_from(("c", "d"))
VALUE = st.sampled_from(("x", "y", "z"))
CHANGES = st.one_of(
    st.tuples(st.just("XADD"), STREAM, st.just("*"), VALUE, VALUE),
    st.tuples(st.just("XTRIM"), STREAM, st.just("MAXLEN"), st.sampled_from((0, 1, 2))),
    st.tuples(
        *map(st.just, ("XREADGROUP", "GROUP")),
        GROUP,
        CONSUMER,
        st.just("COUNT"),
        st.just(2),
        st.just("STREAMS"),
        STREAM,
    ).map(lambda one: (*one, ">")),
    st.tuples(st.just("ack"), STREAM, GROUP),
    st.tuples(st.just("claim"), STREAM, GROUP, CONSUMER),
    st.tuples(st.just("delete"), STREAM),
    st.tuples(st.just("HSET"), st.just("hash"), VALUE, VALUE),
    st.tuples(st.just("HDEL"), st.just("hash"), VALUE),
    st.tuples(st.just("RPUSH"), st.just("list"), VALUE),
    st.tuples(st.just("LPOP"), st.just("list")),
    st.tuples(st.just("ZADD"), st.just("zset"), st.sampled_from(("1", "2.5", "1e15")), VALUE),
    st.tuples(st.just("ZREM"), st.just("zset"), VALUE),
    st.tuples(st.just("SET"), st.just("text"), VALUE),
    st.tuples(st.just("DEL"), st.sampled_from(("hash", "list", "zset"))),
)
CHANGES_OF_GROUPS = st.one_of(
    st.tuples(st.just("XGROUP"), st.just("CREATE"), STREAM, GROUP, st.sampled_from(("0", "$")), st.just("MKSTREAM")),
    st.tuples(st.just("XGROUP"), st.just("SETID"), STREAM, GROUP, st.sampled_from(("0", "$"))),
    st.tuples(st.just("XGROUP"), st.just("DESTROY"), STREAM, GROUP),
)


def change(client: Client, wanted: Command) -> None:
    """Make a change; nothing, where Redis refuses it."""
    kind, stream, *rest = wanted
    if kind in ("ack", "claim"):
        (pending,) = client.pipeline([("XPENDING", stream, rest[0], "-", "+", 1)])
        if isinstance(pending, list) and pending:
            first = pending[0][0]
            client.pipeline(
                [("XACK", stream, rest[0], first) if kind == "ack" else ("XCLAIM", stream, *rest, 0, first)]
            )
    elif kind == "delete":
        for one in client.execute("XRANGE", stream, "-", "+", "COUNT", 2)[1:]:
            client.execute("XDEL", stream, one[0])
    else:
        client.pipeline([wanted])
        if rest and wanted[:2] == ("XGROUP", "CREATE"):  # a first read would add a consumer, and announce nothing
            client.pipeline([("XGROUP", "CREATECONSUMER", wanted[2], wanted[3], name) for name in ("c", "d")])


def comparable(command: Command, reply: Reply) -> Reply:
    """What of a reply does not depend on the time: no idle times; of entries their ids; errors by their text."""
    if isinstance(reply, Exception):
        return str(reply)
    if command[:2] == ("XINFO", "CONSUMERS"):
        return sorted((one[b"name"], one[b"pending"]) for one in map(mapping_of, reply))
    if command[:2] == ("XINFO", "GROUPS"):
        return [mapping_of(one) for one in reply]
    if command[:2] == ("XINFO", "STREAM"):
        return {name: one[0] if isinstance(one, list) else one for name, one in pairs_of(reply)}
    if command[0] == "XPENDING" and len(command) > 3:
        return [(entry, owner) for entry, owner, *_ in reply]
    if "WITHSCORES" in command:
        return [(member, float(score)) for member, score in pairs_of(reply)]
    return reply


def shown(client: Client, commands: Sequence[Command] = READS) -> list[Reply]:
    return [comparable(one, reply) for one, reply in zip(commands, client.pipeline(commands), strict=True)]


@pytest.fixture
def tracked(client: Client) -> Iterator[TrackedClient]:
    with TrackedClient(client.url, clock=ManualClock(), scripts=(COUNT_ENTRIES,)) as opened:
        yield opened


@settings(max_examples=40)
@given(changes=st.lists(st.tuples(st.one_of(CHANGES, CHANGES_OF_GROUPS), st.booleans()), max_size=40))
def test_each_collection_has_the_replies_that_the_server_gives_now(
    client: Client, changes: list[tuple[Command, bool]]
) -> None:
    client.execute("FLUSHALL")
    with TrackedClient(client.url, clock=ManualClock()) as tracked:
        anew = True
        for one, is_read in changes:
            change(client, one)
            anew |= one[0] == "XGROUP"  # invalidates nothing
            if is_read:
                tracked.begin_collection(anew=anew)
                assert shown(tracked) == shown(client)
                anew = False


def fill(client: Client, streams: Sequence[str]) -> None:
    """Streams with an entry that a group has read and acknowledged, and a hash."""
    for name in streams:
        entry = client.execute("XADD", name, "*", "text", "secret")
        client.execute("XGROUP", "CREATE", name, "g", "0")
        client.execute("XREADGROUP", "GROUP", "g", "c", "STREAMS", name, ">")
        client.execute("XACK", name, "g", entry)
        client.execute("HSET", f"hash:{name}", "x", "1")


def reads_of(streams: Sequence[str]) -> list[Command]:
    return [
        *(("XINFO", "STREAM", name) for name in streams),
        *(("XINFO", "GROUPS", name) for name in streams),
        *(("XPENDING", name, "g") for name in streams),
        *(("XINFO", "CONSUMERS", name, "g") for name in streams),
        *(("HMGET", f"hash:{name}", "x") for name in streams),
    ]


def sent_by(client: Client, tracked: TrackedClient, commands: Sequence[Command], *, anew: bool = False) -> Counter[str]:
    """The commands that a collection sends, without those of this count."""
    before = commands_run(client.execute)
    tracked.begin_collection(anew=anew)
    assert shown(tracked, commands) == shown(tracked, commands), "once in each collection"
    found = commands_run(client.execute)
    found.subtract(before)
    return +Counter({name: count for name, count in found.items() if name != "info"})


def test_a_collection_costs_what_has_changed_since_the_one_before(client: Client, tracked: TrackedClient) -> None:
    names = [f"s{number}" for number in range(50)]
    fill(client, names)
    reads = reads_of(names)
    assert sent_by(client, tracked, reads).total() >= len(reads)
    assert sent_by(client, tracked, reads) == {"client|tracking": 1}
    client.execute("XADD", "s7", "*", "text", "secret")
    client.execute("HSET", "hash:s8", "x", "2")
    assert sent_by(client, tracked, reads) - Counter(xadd=1, hset=1) == {
        "client|tracking": 1,
        "xinfo|stream": 1,
        "xinfo|groups": 1,
        "xpending": 1,
        "xinfo|consumers": 1,
        "hmget": 1,
    }
    again = sent_by(client, tracked, reads)
    assert again == {"client|tracking": 1, "xinfo|groups": 1, "xpending": 1, "xinfo|consumers": 1}, "an entry waits"


def test_what_a_group_reads_and_acknowledges_shows_in_the_next_collection(
    client: Client, tracked: TrackedClient
) -> None:
    fill(client, ["s"])
    reads = reads_of(["s"])
    entry = client.execute("XADD", "s", "*", "a", "b")
    for command in (("PING",), ("XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">"), ("XACK", "s", "g", entry)):
        client.execute(*command)
        sent_by(client, tracked, reads)
        assert shown(tracked, reads) == shown(client, reads), command


def test_groups_for_which_nothing_waits_are_read_again_after_a_time_and_at_once_where_asked(
    client: Client, tracked: TrackedClient
) -> None:
    clock = tracked._clock
    assert isinstance(clock, ManualClock)
    fill(client, ["s"])
    reads = reads_of(["s"])
    sent_by(client, tracked, reads)
    client.execute("XGROUP", "CREATE", "s", "late", "0")
    clock.now_ms += GROUPS_MS - 1
    assert sent_by(client, tracked, reads) == {"client|tracking": 1}
    clock.now_ms += 1
    of_groups = Counter({"xinfo|stream": 1, "xinfo|groups": 1, "xpending": 1, "xinfo|consumers": 1})
    assert sent_by(client, tracked, reads) == of_groups + Counter({"client|tracking": 1})
    assert shown(tracked, reads) == shown(client, reads)
    client.execute("XGROUP", "DESTROY", "s", "late")
    sent_by(client, tracked, reads, anew=True)
    assert shown(tracked, reads) == shown(client, reads)


def test_no_content_of_an_entry_is_kept(client: Client, tracked: TrackedClient) -> None:
    fill(client, ["s"])
    tracked.begin_collection()
    for _ in range(2):
        (reply,) = tracked.pipeline([("XINFO", "STREAM", "s")])
        assert mapping_of(reply)[b"first-entry"][1] == []
        assert "secret" not in repr(reply)


def test_a_count_of_entries_is_kept_until_its_stream_changes(client: Client, tracked: TrackedClient) -> None:
    def counted() -> int:
        (reply,) = tracked.scripts([(COUNT_ENTRIES, ("s",), ("0-0", 1_000, "+"))])
        return int(reply[0])

    fill(client, ["s"])
    for number in range(3):  # at first the server lacks the script
        tracked.begin_collection()
        assert counted() == 1, number
    before = commands_run(client.execute)["evalsha"]
    tracked.begin_collection()
    assert counted() == 1
    assert commands_run(client.execute)["evalsha"] == before
    client.execute("XADD", "s", "*", "a", "b")
    tracked.begin_collection()
    assert counted() == 2


def test_an_error_names_the_key_and_is_not_kept(client: Client, tracked: TrackedClient) -> None:
    client.execute("SET", "hash:s", "text")
    for _ in range(2):
        tracked.begin_collection()
        (reply,) = tracked.pipeline([("HLEN", "hash:s")])
        assert isinstance(reply, WrongType)
        assert "hash:s" in str(reply)
    client.execute("DEL", "hash:s")
    tracked.begin_collection()
    assert tracked.pipeline([("HLEN", "hash:s")]) == [0]


def test_keys_that_collections_no_longer_use_are_forgotten(client: Client, tracked: TrackedClient) -> None:
    fill(client, ["s", "t"])
    sent_by(client, tracked, reads_of(["s", "t"]))
    for _ in range(5):
        sent_by(client, tracked, reads_of(["t"]))
    assert set(tracked._kept._keys) == {"t", "hash:t"}
    for number in range(20):  # each time another command about the same key
        sent_by(client, tracked, [("HMGET", "hash:t", f"x{number}")])
    assert set(tracked._kept._keys) == {"hash:t"}
    assert len(tracked._kept._keys["hash:t"].replies) <= 4


def test_replies_are_right_after_an_outage_and_after_flushall() -> None:
    reads = reads_of(["s"])
    with EmbeddedServer() as server, Client(server.url) as client, TrackedClient(server.url) as tracked:
        fill(client, ["s"])
        tracked.begin_collection()
        assert shown(tracked, reads) == shown(client, reads)
        client.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        client.execute("XADD", "s", "*", "a", "b")
        tracked.begin_collection()
        assert shown(tracked, reads) == shown(client, reads)
        client.execute("FLUSHALL")
        tracked.begin_collection()
        assert shown(tracked, reads) == shown(client, reads)
        fill(client, ["s"])
        server.kill()
        tracked.begin_collection()
        with pytest.raises(Unavailable):
            tracked.pipeline(reads)
        server.start()
        client.retry_while_unavailable(lambda: client.execute("PING"), what="test")
        tracked.begin_collection()
        assert shown(tracked, reads) == shown(client, reads)


def test_without_the_right_to_key_tracking_no_reply_is_kept(
    client: Client,
    millstream_server: EmbeddedServer,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    rights = ("on", ">word", "~*", "+@all", "-client|tracking")
    client.execute("ACL", "SETUSER", "untracked", *rights)
    fill(client, ["s"])
    request.addfinalizer(lambda: millstream_server.call("ACL", "DELUSER", "untracked"))
    with TrackedClient(millstream_server.url.replace("://", "://untracked:word@")) as tracked:
        for value in ("2", "3"):
            client.execute("HSET", "hash:s", "x", value)
            tracked.begin_collection()
            assert shown(tracked, reads_of(["s"])) == shown(client, reads_of(["s"]))
    assert "client|tracking" in caplog.text


def test_on_a_cluster_each_node_reports_its_changes(request: pytest.FixtureRequest) -> None:
    cluster = lent_cluster(request)
    names = [f"s{number}" for number in range(20)]
    reads = reads_of(names)
    with Client(cluster.url) as client, TrackedClient(cluster.url) as tracked:
        fill(client, names)
        for name in ("", *names[:6]):
            if name:
                client.execute("HSET", f"hash:{name}", "x", "2")
                client.execute("XADD", name, "*", "a", "b")
            tracked.begin_collection()
            assert shown(tracked, reads) == shown(client, reads)
