"""State that expires: so long after the last commit that changed it, on both engines, wherever its key moves, on servers
whose hash fields expire and on those where they cannot.
"""

import string
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from millstream import Message, State
from millstream.admin.acl import RoleName, acl_rule
from millstream.admin.inspection import count_states, list_states, read_state, reset_states, state_expiry
from millstream.admin.search import search
from millstream.admin.state_scan import scan_states
from millstream.delivery.commit_store import KEY_PREFIX, CommitStore
from millstream.delivery.deferral import read_queue
from millstream.delivery.effects import Effects
from millstream.delivery.state_expiry import live_states, split_expiry
from millstream.errors import AccessDenied, DecodeError
from millstream.handlers.handler import Handler
from millstream.partitions.key_migration import IMPORT_KEYS
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import server_time_ms
from millstream.redis_client.replies import mapping_of
from tests.support.commandline import call
from tests.support.partition_fixtures import BASE, Publisher, Worker, keys_of
from tests.support.servers import server_that_knows
from tests.support.task_fixtures import TaskFixture
from tests.support.waiting import eventually
from tests.support.workers import make, working

pytestmark = [pytest.mark.keys, pytest.mark.worker, pytest.mark.spark, pytest.mark.xdist_group("state_ttl")]

KEYS = HandlerKeys("app", "handle", "in")
HOUR_MS = 3_600_000
SOON_MS = 300


@pytest.fixture(scope="module")
def newer() -> Iterator[EmbeddedServer]:
    """A server whose hash fields can expire."""
    with server_that_knows("HPEXPIRE") as server:
        yield server


@pytest.fixture
def newest(newer: EmbeddedServer) -> Iterator[Client]:
    """A client of that server, which is empty."""
    newer.call("FLUSHALL")
    with Client(newer.url) as client:
        yield client


@pytest.fixture
def older(client: Client) -> Client:
    """A client of a server whose hash fields cannot expire."""
    if client.execute("COMMAND", "INFO", "HPEXPIRE") != [None]:
        pytest.skip("the server of this run can let hash fields expire")
    return client


@pytest.fixture(params=["newest", "older"])
def expiring(request: pytest.FixtureRequest) -> Client:
    """A client of each of the two."""
    found: Client = request.getfixturevalue(request.param)
    return found


def count_messages(message: Message, state: State) -> dict[str, int]:
    """A handler that returns how many messages of the key it remembers."""
    state["n"] = state.get("n", 0) + 1
    return {"n": state["n"]}


def counting(**options: object) -> Handler:
    return make(count_messages, key="key", **{"state_ttl_ms": HOUR_MS, **options})


def publish(client: Client, key: str = "a") -> None:
    client.execute("XADD", "in", "*", "key", key)


def outputs(client: Client) -> list[int]:
    return [int(fields[1]) for _, fields in client.execute("XRANGE", "out", "-", "+")]


def state_of(client: Client, key: str = "a") -> bytes | None:
    """The state of a key as it was committed; None without one."""
    (found,) = live_states(client, KEYS.state, [client.execute("HGET", KEYS.state, key)])
    return found


def left_ms(client: Client, key: str = "a") -> float:
    """How long the state of a key lasts."""
    expires_ms = state_expiry(client, KEYS, key.encode())
    assert expires_ms is not None
    return expires_ms - server_time_ms(client)


def commit(client: Client, state: bytes, entry: int, *, ttl_ms: int | None) -> None:
    """Commit a state of the key `a` with one message, as a run on Spark."""
    store = CommitStore(client, app="app", handler="handle", token=1, state_ttl_ms=ttl_ms)
    expected = f"{entry - 1}-0".encode() if entry > 1 else b""
    unit = Effects(KEY_PREFIX + b"a", expected, state_field=b"a", state=state, message_count=1)
    unit.first_id = unit.last_id = f"{entry}-0"
    assert store.commit({"in": [unit]}) == []


def test_on_workers_a_key_begins_anew_when_its_state_has_expired(expiring: Client) -> None:
    publish(expiring)
    with working(expiring, counting(state_ttl_ms=SOON_MS)):
        eventually(lambda: len(outputs(expiring)) == 1, "the first message")
        eventually(lambda: state_of(expiring) is None, "the end of its state")
        publish(expiring)
        eventually(lambda: len(outputs(expiring)) == 2, "the second message")
    assert outputs(expiring) == [1, 1]


def has_counted(client: Client, count: int) -> bool:
    return outputs(client)[-1:] == [count]


def test_on_workers_a_state_lasts_for_its_time_after_the_last_commit(expiring: Client) -> None:
    with working(expiring, counting()):
        for count in (1, 2, 3):
            publish(expiring)
            eventually(partial(has_counted, expiring, count), f"message {count}")
            assert 0 < left_ms(expiring) <= HOUR_MS


def test_on_spark_a_key_begins_anew_when_its_state_has_expired(expiring: Client) -> None:
    bench = TaskFixture(expiring)
    bench.process(bench.handler(state_ttl_ms=SOON_MS), bench.rows((1, b"a", {"n": 5})))
    eventually(lambda: state_of(expiring) is None, "the end of its state")
    bench.process(bench.handler(state_ttl_ms=HOUR_MS), bench.rows((2, b"a", {"n": 7})))
    assert msgspec.msgpack.decode(state_of(expiring) or b"") == {"sum": 7}
    assert 0 < left_ms(expiring) <= HOUR_MS


def test_each_commit_that_changes_a_state_sets_when_it_expires_and_none_without_the_option(expiring: Client) -> None:
    commit(expiring, b"\x81", 1, ttl_ms=HOUR_MS)
    first = state_expiry(expiring, KEYS, b"a")
    commit(expiring, b"\x82", 2, ttl_ms=2 * HOUR_MS)
    second = state_expiry(expiring, KEYS, b"a")
    assert first is not None
    assert second is not None
    assert second >= first + HOUR_MS
    commit(expiring, b"\x83", 3, ttl_ms=None)
    assert (state_of(expiring), state_expiry(expiring, KEYS, b"a")) == (b"\x83", None)
    commit(expiring, b"", 4, ttl_ms=HOUR_MS)
    assert expiring.execute("HEXISTS", KEYS.state, "a") == 0


def test_a_restart_of_the_server_keeps_when_a_state_expires(
    newer: EmbeddedServer, newest: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(newest, b"\x81", 1, ttl_ms=HOUR_MS)
    before = state_expiry(newest, KEYS, b"a")
    monkeypatch.setenv("PATH", str(Path(newer.program.path).parent))  # that program again
    newer.kill()
    newer.start()
    with Client(newer.url) as again:
        assert again.execute("HGET", KEYS.state, "a") == b"\x81"
        assert state_expiry(again, KEYS, b"a") == before


class ExpiringWorker(Worker):
    """A worker of a handler whose states expire."""

    state_ttl_ms = HOUR_MS


def expiries(client: Client, layout: PartitionMap) -> dict[bytes, int | None]:
    """When the state of each key expires, in whatever partition it is."""
    found: dict[bytes, int | None] = {}
    for place in range(layout.count):
        state = keys_of(layout, place).state
        for key in client.execute("HKEYS", state):
            assert key not in found, "a key has two states"
            found[key] = state_expiry(client, keys_of(layout, place), key)
    return found


def test_a_key_that_moves_to_another_partition_keeps_when_its_state_expires(expiring: Client) -> None:
    publisher, worker = Publisher(expiring), ExpiringWorker(expiring)
    publisher.publish(defaultdict(list), string.ascii_uppercase)
    worker.work()
    before = expiries(expiring, Partitions(expiring, BASE).require())
    assert len(before) == len(string.ascii_uppercase)
    assert None not in before.values()
    # A state that was set before the handler had the option never expires; neither does it after its key has moved.
    lasting_key = next(iter(before))
    for place in range(2):
        state = keys_of(worker.moves.partition_map, place).state
        if stored := expiring.execute("HGET", state, lasting_key):
            expiring.execute("HSET", state, lasting_key, split_expiry(stored)[0])
    layout = Partitions(expiring, BASE).grow(8)
    worker.refresh()
    worker.work()
    assert worker.moves.undrained() == []
    assert expiries(expiring, layout) == {**before, lasting_key: None}


def stored(state: bytes, expires_ms: int) -> bytes:
    """A state as it is stored where hash fields cannot expire."""
    return b"\xc1%d " % expires_ms + state


def test_an_expired_state_that_is_stored_with_its_time_counts_as_no_state_also_after_an_upgrade_of_the_server(
    expiring: Client,
) -> None:
    publish(expiring)
    live = msgspec.msgpack.encode({"n": 1})
    store = CommitStore(expiring, app="app", handler="handle", token=1, keyed=True)
    store.begin_run(["in"])
    now_ms = server_time_ms(expiring)
    for key, expires_ms in (("gone", now_ms - 1), ("a", now_ms + HOUR_MS)):
        expiring.execute("HSET", KEYS.state, key, stored(live, expires_ms))
        expiring.execute("RPUSH", KEYS.queue(b"k" + key.encode()), "1-1")
    assert store.load({"in": ([], [b"gone", b"a", b"none"])}) == {"in": {b"sa": live}}
    assert [read_queue(expiring, KEYS, name, 1).state for name in (b"kgone", b"ka")] == [b"", live]
    assert [one[:3] for page in scan_states(expiring, [KEYS]) for one in page] == [("in", b"a", live)]
    assert [*list_states(expiring, KEYS)] == [(b"a", (live, now_ms + HOUR_MS))]
    assert count_states(expiring, KEYS, [b"gone", b"a"]) == 1
    assert (read_state(expiring, KEYS, b"gone"), read_state(expiring, KEYS, b"a")) == (None, {"n": 1})
    assert [state_expiry(expiring, KEYS, key) for key in (b"gone", b"a")] == [None, now_ms + HOUR_MS]
    expiring.execute("DEL", KEYS.queue(b"kgone"), KEYS.queue(b"ka"))
    assert [[hit.key for hit in search(expiring, key).hits if hit.kind == "key"] for key in (b"gone", b"a")] == [
        [],
        [b"a"],
    ]
    publish(expiring, "gone")
    with working(expiring, counting(state_ttl_ms=None)):
        eventually(lambda: sorted(outputs(expiring)) == [1, 2], "both messages")


def test_a_reset_counts_no_state_that_has_expired(expiring: Client) -> None:
    now_ms = server_time_ms(expiring)
    for key, expires_ms in (("gone", now_ms - 1), ("a", now_ms + HOUR_MS)):
        expiring.execute("HSET", KEYS.state, key, stored(b"\x80", expires_ms))
    assert reset_states(expiring, KEYS, [b"gone", b"a"]) == 1
    assert expiring.execute("EXISTS", KEYS.state) == 0


def test_where_hash_fields_cannot_expire_each_state_that_is_set_removes_others_that_have_expired(older: Client) -> None:
    """At a steady rate a third of those that are stored have expired; with two samples a state it would be half."""
    now_ms = server_time_ms(older)
    lasting = {b"lasting%d" % number: b"\x81" for number in range(200)}
    lasting |= {b"later%d" % number: stored(b"\x82", now_ms + HOUR_MS) for number in range(200)}
    older.execute("HSET", KEYS.state, *(one for pair in lasting.items() for one in pair))
    store = CommitStore(older, app="app", handler="handle", token=1, state_ttl_ms=1)
    for first in range(0, 4_000, 10):
        assert store.commit({"in": [expiring_unit(first + number) for number in range(10)]}) == []
        pause_until_expired(older)
    left = mapping_of(older.execute("HGETALL", KEYS.state))
    assert {key: left.pop(key) for key in lasting} == lasting
    assert len(left) < 0.8 * len(lasting)


def expiring_unit(number: int) -> Effects:
    """One message of a key of its own, which sets a state."""
    unit = Effects(KEY_PREFIX + b"%d" % number, b"", state_field=b"%d" % number, state=b"\x81", message_count=1)
    unit.first_id = unit.last_id = f"{number + 1}-0"
    return unit


def pause_until_expired(client: Client) -> None:
    """Return when what was stored before, for a millisecond, has expired."""
    until_ms = server_time_ms(client) + 2
    eventually(lambda: server_time_ms(client) > until_ms, "two milliseconds")


@pytest.mark.parametrize("damaged", [b"\xc1", b"\xc1 ", b"\xc1x \x80", b"\xc1" + b"9" * 400 + b" \x80"])
def test_what_only_looks_like_a_state_that_expires_is_damaged_and_stays(older: Client, damaged: bytes) -> None:
    publish(older)
    older.execute("HSET", KEYS.state, "a", damaged)
    with pytest.raises(DecodeError, match="the state of b'a' is damaged"):
        read_state(older, KEYS, b"a")
    with working(older, counting()):
        eventually(lambda: older.execute("XLEN", KEYS.dead_letters) == 1, "its dead letter")
    assert older.execute("HGET", KEYS.state, "a") == damaged


def test_without_the_right_to_let_states_expire_nothing_of_a_message_is_committed(newest: Client) -> None:
    """As when the server is upgraded while the workers run, with the rights for the older one."""
    line = acl_rule("clerk", [RoleName.SPARK], app="app", streams=["in"], outputs=["out"]).line.split()
    newest.execute(*line, "nopass")
    with Client(newest.url.replace("redis://", "redis://clerk:x@")) as limited:
        store = CommitStore(limited, app="app", handler="handle", token=1, into="out", state_ttl_ms=HOUR_MS)
        unit = expiring_unit(0)
        unit.outputs = [msgspec.msgpack.encode(["n", "1"])]
        with pytest.raises(AccessDenied, match="HPEXPIRE"):
            store.commit({"in": [unit]})
    assert newest.execute("EXISTS", KEYS.state, KEYS.offsets, "out") == 0


def test_a_key_that_moves_from_a_newer_server_to_an_older_one_keeps_when_its_state_expires(older: Client) -> None:
    then_ms = server_time_ms(older) + HOUR_MS
    older.execute("HSET", HandlerKeys("app", "handle", "in").awaiting, b"ka", "0 0 migrating from out")
    store = CommitStore(older, app="app", handler="handle", token=1, keyed=True, state_ttl_ms=HOUR_MS)
    exported = b"%d \x81" % then_ms  # as lua/partitions/export_keys.lua returns it there
    assert store.run_script(IMPORT_KEYS, "in", [0, "1", b"ka", "0 0 migrating from out", exported]) == 1
    assert (state_of(older), state_expiry(older, KEYS, b"a")) == (b"\x81", then_ms)


def begin(store: CommitStore, role: RoleName) -> None:
    """Begin a run, or join as a worker."""
    if role is RoleName.SPARK:
        store.begin_run(["in"])
    else:
        store.join_workers("in", "0")


def test_the_rights_for_states_that_expire_are_printed_when_asked_and_checked_at_the_start(expiring: Client) -> None:
    is_newer = expiring.execute("COMMAND", "INFO", "HPEXPIRE") != [None]
    for role in (RoleName.WORKER, RoleName.SPARK):
        for lacking in (*(("hpexpire", "hpexpireat", "hpexpiretime") if is_newer else ("hrandfield",)), ""):
            line = acl_rule("clerk", [role], app="app", state_ttl=is_newer).line.split()
            expiring.execute(*(word for word in line if word != f"+{lacking}"), "nopass")
            with Client(expiring.url.replace("redis://", "redis://clerk:x@")) as limited:
                store = CommitStore(limited, app="app", handler="handle", token=1 << 60, state_ttl_ms=HOUR_MS)
                if lacking:
                    with pytest.raises(AccessDenied, match=lacking.upper()):
                        begin(store, role)
                else:
                    begin(store, role)


def test_the_commands_show_when_a_state_expires(expiring: Client) -> None:
    expiring.execute("XADD", "in", "*", "key", "a")
    CommitStore(expiring, app="app", handler="handle", token=1, keyed=True).begin_run(["in"])
    commit(expiring, msgspec.msgpack.encode({"n": 1}), 1, ttl_ms=HOUR_MS)
    expiring.execute("HSET", KEYS.state, "b", msgspec.msgpack.encode({"n": 2}))
    at_ms = state_expiry(expiring, KEYS, b"a")
    shown = call("state", "show", "app.handle", "a", "--json", url=expiring.url)
    assert (shown.json(), "the state expires at 20" in shown.err) == ({"n": 1}, True)
    assert "expires" not in call("state", "show", "app.handle", "b", url=expiring.url).err
    assert call("state", "list", "app.handle", "--json", url=expiring.url).json_lines() == [
        {"key": "a", "state": {"n": 1}, "expires_ms": at_ms},
        {"key": "b", "state": {"n": 2}},
    ]
    head, *rows = call("state", "list", "app.handle", url=expiring.url).out.splitlines()
    assert head.split() == ["key", "size", "expires", "state"]
    assert ["never" in row for row in rows] == [False, True]
