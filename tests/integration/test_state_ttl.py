"""State that expires: so long after the last commit that changed it, on both engines, wherever its key moves."""

import string
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from millstream import Message, State
from millstream.admin.acl import RoleName, acl_rule
from millstream.delivery.commit_store import KEY_PREFIX, CommitStore
from millstream.delivery.effects import Effects
from millstream.errors import AccessDenied, Incompatible
from millstream.handlers.handler import Handler
from millstream.partitions.partition_map import PartitionMap
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import HandlerKeys
from tests.support.commandline import call
from tests.support.partition_fixtures import BASE, Publisher, Worker, keys_of
from tests.support.servers import server_that_knows
from tests.support.task_fixtures import TaskFixture
from tests.support.waiting import eventually
from tests.support.workers import ending, make, working

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
def expiring(newer: EmbeddedServer) -> Iterator[Client]:
    """A client of that server, which is empty."""
    newer.call("FLUSHALL")
    with Client(newer.url) as client:
        yield client


@pytest.fixture
def lasting(client: Client) -> Client:
    """A client of a server that cannot let hash fields expire."""
    if client.execute("COMMAND", "INFO", "HPEXPIRE") != [None]:
        pytest.skip("the server of this run can let hash fields expire")
    return client


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


def expires_ms(client: Client, key: str = "a") -> int:
    """When the state of a key expires, in Unix milliseconds; -1 for never, -2 without one."""
    found: int = client.execute("HPEXPIRETIME", KEYS.state, "FIELDS", 1, key)[0]
    return found


def left_ms(client: Client, key: str = "a") -> int:
    """How long the state of a key lasts."""
    found: int = client.execute("HPTTL", KEYS.state, "FIELDS", 1, key)[0]
    return found


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
        eventually(lambda: expiring.execute("HGET", KEYS.state, "a") is None, "the end of its state")
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
    state = HandlerKeys("app", "handle", "in").state
    bench.process(bench.handler(state_ttl_ms=SOON_MS), bench.rows((1, b"a", {"n": 5})))
    eventually(lambda: expiring.execute("HGET", state, "a") is None, "the end of its state")
    bench.process(bench.handler(state_ttl_ms=HOUR_MS), bench.rows((2, b"a", {"n": 7})))
    assert msgspec.msgpack.decode(expiring.execute("HGET", state, "a")) == {"sum": 7}
    assert 0 < left_ms(expiring) <= HOUR_MS


def test_each_commit_that_changes_a_state_sets_when_it_expires_and_none_without_the_option(expiring: Client) -> None:
    commit(expiring, b"\x81", 1, ttl_ms=HOUR_MS)
    first = expires_ms(expiring)
    commit(expiring, b"\x82", 2, ttl_ms=2 * HOUR_MS)
    assert expires_ms(expiring) >= first + HOUR_MS
    commit(expiring, b"\x83", 3, ttl_ms=None)
    assert expires_ms(expiring) == -1
    commit(expiring, b"", 4, ttl_ms=HOUR_MS)
    assert expires_ms(expiring) == -2


def test_a_restart_of_the_server_keeps_when_a_state_expires(
    newer: EmbeddedServer, expiring: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(expiring, b"\x81", 1, ttl_ms=HOUR_MS)
    before = expires_ms(expiring)
    monkeypatch.setenv("PATH", str(Path(newer.program.path).parent))  # that program again
    newer.kill()
    newer.start()
    with Client(newer.url) as again:
        assert again.execute("HGET", KEYS.state, "a") == b"\x81"
        assert expires_ms(again) == before


class ExpiringWorker(Worker):
    """A worker of a handler whose states expire."""

    state_ttl_ms = HOUR_MS


def expiries(client: Client, layout: PartitionMap) -> dict[bytes, int]:
    """When the state of each key expires, in whatever partition it is."""
    found: dict[bytes, int] = {}
    for place in range(layout.count):
        state = keys_of(layout, place).state
        for key in client.execute("HKEYS", state):
            assert key not in found, "a key has two states"
            (found[key],) = client.execute("HPEXPIRETIME", state, "FIELDS", 1, key)
    return found


def test_a_key_that_moves_to_another_partition_keeps_when_its_state_expires(expiring: Client) -> None:
    publisher, worker = Publisher(expiring), ExpiringWorker(expiring)
    publisher.publish(defaultdict(list), string.ascii_uppercase)
    worker.work()
    before = expiries(expiring, Partitions(expiring, BASE).require())
    assert len(before) == len(string.ascii_uppercase)
    assert min(before.values()) > 0
    # A state that was set before the handler had the option never expires; neither does it after its key has moved.
    lasting_key = next(iter(before))
    for place in range(2):
        expiring.execute("HPERSIST", keys_of(worker.moves.partition_map, place).state, "FIELDS", 1, lasting_key)
    layout = Partitions(expiring, BASE).grow(8)
    worker.refresh()
    worker.work()
    assert worker.moves.undrained() == []
    assert expiries(expiring, layout) == {**before, lasting_key: -1}


def test_a_server_whose_hash_fields_cannot_expire_is_refused_before_anything_is_read(lasting: Client) -> None:
    publish(lasting)
    with pytest.raises(Incompatible, match=r"app\.handle has state_ttl_ms, .* Redis 7\.4 or newer, or Valkey 9"):
        CommitStore(lasting, app="app", handler="handle", token=1, keyed=True, state_ttl_ms=HOUR_MS).begin_run(["in"])
    with ending(Incompatible, lasting, counting()):
        pass
    with ending(Incompatible, lasting, counting(pattern="i*")):
        pass
    assert lasting.execute("EXISTS", KEYS.meta, KEYS.state, "out") == 0
    with working(lasting, counting(state_ttl_ms=None)):
        eventually(lambda: outputs(lasting) == [1], "the message, without the option")


def begin(store: CommitStore, role: RoleName) -> None:
    """Begin a run, or join as a worker."""
    if role is RoleName.SPARK:
        store.begin_run(["in"])
    else:
        store.join_workers("in", "0")


def test_the_rights_for_states_that_expire_are_printed_when_asked_and_checked_at_the_start(expiring: Client) -> None:
    for role in (RoleName.WORKER, RoleName.SPARK):
        for lacking in ("hpexpire", "hpexpireat", "hpexpiretime", ""):
            line = acl_rule("clerk", [role], app="app", state_ttl=True).line.split()
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
    at_ms = expires_ms(expiring)
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
