"""`millstream acl`: the printed rights are enough for each role, and each of them is needed."""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from millstream import App, Message, Reject
from millstream.balancer import announce
from millstream.balancer.service import Service
from millstream.client import Client
from millstream.clock import SYSTEM_CLOCK
from millstream.deadletters import DeadLetter
from millstream.delayed import DelayedMessages
from millstream.errors import AccessDenied
from millstream.handlers import Handler
from millstream.keyed import Ending, KeyedStream, Lease, line_of_key
from millstream.ledger import Ledger, Unit
from millstream.lines import park, skip, survey, unpark
from millstream.master.consumer import ACK
from millstream.master.desk import Desk
from millstream.master.registry import Registry
from millstream.model import EntryId
from millstream.moves import Moves
from millstream.naming import PREFIX, HandlerKeys, ServiceKeys
from millstream.partitions import Partitions
from millstream.producer import Producer
from millstream.reliable import ReliableStream
from millstream.rights import ROLES, RoleName, rule
from millstream.router import Router
from millstream.server import EmbeddedServer
from millstream.sink import Publication, Terms
from millstream.testing.topologies import cluster
from millstream.worker import ReadingLoop, WorkerPolicy
from millstream.worker.moving import WatchedDelays
from millstream.worker.names import Names
from millstream.worker.partitions import PartitionSide
from tests.integration.test_worker import working
from tests.support import masters
from tests.support.acl_scenarios.group import take_from_group
from tests.support.acl_scenarios.lease import oversee, serve
from tests.support.acl_scenarios.master import SETTINGS, consume, direct
from tests.support.acl_scenarios.producer import produce
from tests.support.acl_scenarios.router import follow
from tests.support.acl_scenarios.sink import share_of, write_batches
from tests.support.acl_scenarios.spark import keep_lines, move_keys
from tests.support.balancers import bid
from tests.support.commandline import call
from tests.support.partition_fixtures import BASE, growth_killed_after, moved_key
from tests.support.partition_fixtures import Publisher as PartitionPublisher
from tests.support.partition_fixtures import Worker as PartitionWorker
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli, pytest.mark.xdist_group("acl")]

NARROW = ("--stream", "orders*", "--stream", "{orders.*}", "--into", "out", "--app", "shop", "--service", "calls")
KEYS = HandlerKeys("shop", "bill", "orders")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """A server of the module's own, as its users would outlive the tests."""
    with EmbeddedServer() as started:
        yield started


@pytest.fixture
def admin(server: EmbeddedServer) -> Iterator[Client]:
    """May do everything, on a Redis that is empty and has no script."""
    with Client(server.url) as client:
        client.execute("FLUSHALL")
        client.execute("SCRIPT", "FLUSH")
        client.execute("ACL", "LOG", "RESET")
        yield client


def login(admin: Client, line: str, *, without: str = "") -> str:
    """Make the user of a printed line, but for one right; return the URL to connect with."""
    words = [word for word in line.split() if not (without and word == f"+{without}")]
    assert len(words) == len(line.split()) - bool(without)
    admin.execute(*words)
    admin.execute("ACL", "SETUSER", words[2], ">secret")
    return admin.url.replace("redis://", f"redis://{words[2]}:secret@", 1)


def printed(role: str, *options: str) -> str:
    """The one line that the command prints."""
    return call("acl", role, *(options or NARROW)).out.strip()


def command(url: str, *words: str) -> None:
    """Run a command of millstream, and raise what it says if it may not."""
    outcome = call(*words, url=url)
    if outcome.code == 3:
        raise AccessDenied(outcome.err)
    assert outcome.code == 0, outcome.err


def add(admin: Client, count: int, stream: str = "orders") -> list[bytes]:
    return [admin.execute("XADD", stream, "*", "n", n) for n in range(count)]


def letter() -> DeadLetter:
    return DeadLetter(
        stream="orders", id="1-1", pairs=[b"n", b"1"], key=None, app="shop", handler="bill", attempts=1, reason="failed",
        error="no", time_ms=0,
    )  # fmt: skip


# --- What each role does, all of it ---


def reliable(client: Client, name: str = "w-0") -> ReliableStream:
    return ReliableStream(client, "orders", app="shop", handler="bill", consumer=name, into="out")


def work(url: str, admin: Client) -> None:
    """Everything that a worker ever does, one thing after the other."""
    add(admin, 8)
    with Client(url) as client:
        names = Names(client, "shop", "w")
        names.take(1)
        names.release()
        assert client.scan_streams("orders*") == ["orders"]
        stream = reliable(client)
        stream.join()
        stream.look()
        stream.reserve(1_000.0, 7)
        found = stream.read(count=7)
        effects = stream.unit(found[0])
        effects.outputs = [("n", "1")]
        assert stream.commit([effects]) == []
        assert stream.acknowledge(found[1]) == []
        assert stream.dead_letter((found[2], letter())) == []
        stream.strike(found[3])
        stream.note_failures(found[3:4])
        assert stream.extend([found[3].id]) == []
        stream.checkpoint()
        found[3].attempt = 2
        assert stream.acknowledge(found[3]) == []  # it is open, and has strikes
        admin.execute("XGROUP", "DESTROY", "orders", KEYS.group)
        stream.join()  # makes the group again, with what is open
        admin.execute("XDEL", "orders", found[4].id)
        assert [one.id for one in stream.read_pending()] == [found[5].id, found[6].id]
        admin.execute("HDEL", KEYS.meta, "engine")
        taken_over = reliable(client)
        taken_over.join()  # from Spark, which has committed one entry beyond its frontier
        beyond = add(admin, 1)[0]
        admin.execute("HSET", KEYS.marks, b"i" + beyond, beyond)
        taken_over.join()
        assert beyond not in [one.id for one in taken_over.read(count=100)]
        taken_over.trim()
        move_a_delayed_message(client, admin)
        work_by_keys(client, admin)
        work_on_partitions(client, admin)


def keyed(client: Client, name: str = "w-0") -> KeyedStream:
    """One line for each two entries with even numbers, and one for each other entry."""

    def line_of(entry_id: bytes, pairs: Sequence[bytes]) -> bytes:
        number = int(pairs[-1])
        return line_of_key(None if number % 2 else str(number // 4).encode(), entry_id)

    return KeyedStream(client, "orders", line_of=line_of, app="shop", handler="bill", consumer=name, into="out")


def take_one(stream: KeyedStream) -> Lease:
    return stream.take(lines=1, entries=10, run=10, lease_ms=60_000, now_ms=0).leases[0]


def work_by_keys(client: Client, admin: Client) -> None:
    """Everything that a worker does for a handler with a key; before, workers of another kind were here."""
    stream = keyed(client)
    stream.join()
    add(admin, 6)
    client.execute("XREAD", "COUNT", 1, "STREAMS", "orders", "0")
    while stream.route(count=100, most_pending=100):
        stream.trim()
    assert client.execute("BLPOP", KEYS.wake, 1) is not None
    leases = [take_one(stream) for _ in range(4)]
    assert stream.extend_leases(leases, 60_000, 0) == []
    unit = stream.unit_of(leases[0], [leases[0].waiting[0]])
    unit.state, unit.outputs, unit.dead = b"\x80", [("n", "1")], [letter().items()]
    unit.end_strikes("0-1")
    unit.left = len(leases[0].waiting) - 1
    assert stream.commit([unit], call=stream.new_call()) == []
    assert stream.release([Ending(leases[1], "later", 60_000, 1), Ending(leases[2], "first")]) == []
    again = keyed(client)
    again.join()
    assert again.recover([], run=10)[0] == 1
    lease = take_one(again)
    admin.execute("ZADD", KEYS.leases, 1, lease.line)
    admin.execute("XDEL", "orders", lease.waiting[0].id)
    take_one(again)
    admin.execute("XGROUP", "DESTROY", "orders", KEYS.group)
    again.route(count=1, most_pending=1)
    reliable(client).join()


def work_on_partitions(client: Client, admin: Client) -> None:
    """Everything that a worker does where keys move: one has messages and a state in its old partition."""
    worker = PartitionWorker(client, app="shop", handler="bill")
    layout = Partitions(client, BASE).found()
    key = moved_key(layout, 4)
    publisher, sent = PartitionPublisher(admin), defaultdict[str, list[int]](list)
    publisher.publish(sent, key)
    worker.work()
    publisher.publish(sent, key)
    layout = Partitions(admin, BASE).grow(4)
    publisher.publish(sent, key)
    worker.look()
    worker.route(layout.place(key.encode()))
    worker.work()
    assert Moves(admin, worker.moves.layout, app="shop", handler="bill").unsettled() == []
    assert growth_killed_after(admin, 1, 6)
    app = App("shop")
    app.handler(BASE, name="bill", key="k", partitions=2)(lambda message: None)
    side = ReadingLoop(app.handlers["bill"], client.url, consumer="w-0")._side
    assert isinstance(side, PartitionSide)
    side.find(client)
    old = layout.stream(layout.homes(key.encode())[0])
    assert side._send_on(old, key.encode(), b"1-0", [b"k", key.encode()])
    side.close()


def move_a_delayed_message(client: Client, admin: Client) -> None:
    for delayed in (DelayedMessages(client), WatchedDelays(client, SYSTEM_CLOCK)):
        with Producer(admin) as producer:
            producer.publish("orders", {"n": 1}, delay_ms=1)
        time.sleep(0.01)
        assert delayed.move_due(["orders"]).moved == 1


def handler_for(streams: tuple[str, ...] = ("orders",)) -> Handler:
    app = App("shop")

    @app.handler(*streams, into="out", name="bill")
    def bill(message: Message) -> dict[str, str]:
        if message.text("n") == "3":
            raise Reject("no threes")
        return {"n": message.text("n") or ""}

    return app.handlers["bill"]


def run_on_spark(url: str, admin: Client) -> None:
    """Everything that a pipeline does in Redis, in the driver and in the tasks, without Spark itself."""
    from millstream.spark.lag import LagGroup
    from millstream.spark.options import parse
    from millstream.spark.planner import Planner
    from millstream.spark.preparing import prepare_new
    from millstream.spark.presence import say_present

    ids = add(admin, 30)
    with Client(url) as client:
        say_present(client, "shop", ["bill"])
        handler = handler_for()
        prepare_new(client, handler, ["orders"], "cp", start="resume", start_at="latest")
        prepare_new(client, handler, ["orders"], "cp", start="reprocess", start_at="earliest")
        options = parse({"url": url, "subscribePattern": "orders*", "frontierApp": "shop", "frontierHandler": "bill",
                         "group": KEYS.group, "startingOffsets": "frontier"}, {})  # fmt: skip
        planner = Planner(client, options, cores=2)
        start = planner.starts("earliest")
        ends = planner.advance(start, limit=10, target=None)[0]
        assert ids[9] == str(ends["orders"].id).encode()
        LagGroup(client, KEYS.group).show(ends)
        ledger = Ledger(client, app="shop", handler="bill", into="out")
        ledger = ledger.renewed(ledger.new_token(["orders"]))
        ledger.begin(["orders"])
        assert ledger.load({"orders": ([b"kA"], [b"A"])}) == {"orders": {}}
        client.execute("XRANGE", "orders", "-", "+", "COUNT", 1)  # as tasks read
        ledger.strike("orders", ids[0].decode())
        unit = Unit(b"kA", b"", b"A", b"\x80", struck=[ids[0].decode()], outputs=[("n", 1)], dead=[letter().items()])
        unit.cover(ids[0].decode())
        assert ledger.commit({"orders": [unit]}) == []
        ledger.advance({"orders": EntryId.parse(ids[9])})
        LagGroup(client, KEYS.group).show(ends)
        stream = reliable(admin)
        stream.join()  # workers take over, commit one of three entries, and lose their group
        found = stream.read(count=3)
        stream.acknowledge(found[1])
        stream.checkpoint()
        admin.execute("XGROUP", "DESTROY", "orders", KEYS.group)
        frontier = ledger.renewed(ledger.new_token(["orders"])).begin(["orders"])["orders"].frontier
        assert str(frontier).encode() == ids[9]
        keyed(admin).join()  # workers of keys take over, and have some in their lines
        keyed(admin).route(count=4, most_pending=100)
        ledger.renewed(ledger.new_token(["orders"])).begin(["orders"])
        keep_lines(client, admin, KEYS)
        move_keys(client, admin, "shop", "bill")
        move_a_delayed_message(client, admin)


def publish(url: str, folder: Path) -> None:
    file = folder / "rows.csv"
    file.write_text("n\n1\n2\n")
    command(url, "publish", "orders", str(file), "--wait", "0")


def operate(url: str, admin: Client) -> None:
    """Every command that looks at Redis, or mends something there."""
    add(admin, 5)
    stream = reliable(admin)
    stream.join()
    found = stream.read(count=3)
    stream.dead_letter((found[0], letter()), (found[1], letter()))
    stream.checkpoint()
    admin.execute("HSET", KEYS.state, "A", b"\x80")
    for words in ("info", "dlq list", "dlq redrive --limit 1 --app shop --yes", "dlq purge --all --yes"):
        command(url, *words.split())
    for words in ("list", "show", "reset --yes"):
        keys = [] if words == "list" else ["A"]
        command(url, "state", *words.split(), "shop", "bill", "orders", *keys)
    command(url, "pause", "bill")
    command(url, "resume", "bill")
    operate_lines(url, admin)
    oversee(command, url, admin)
    PartitionWorker(admin, app="shop", handler="bill")
    operate_partitions(url)
    command(url, "groups", "--pattern", "orders*")
    command(url, "groups", "create", "orders", "g", "--at", "earliest")
    command(url, "groups", "set-id", "orders", "g", "--at", "earliest", "--yes")
    for name, number in (("a", 2), ("b", 1)):
        admin.execute("XREADGROUP", "GROUP", "g", name, "COUNT", number, "STREAMS", "orders", ">")
    command(url, "groups", "consumers", "orders", "g")
    command(url, "pending", "orders", "g")
    command(url, "claim", "orders", "g", "b", found[0].id.decode())
    command(url, "claim", "orders", "g", "b", "--min-idle", "0s")
    admin.execute("XCLAIM", "orders", "g", "a", 0, found[0].id)
    command(url, "groups", "delete-consumer", "orders", "g", "a", "--heir", "b", "--yes")
    command(url, "groups", "clean", "orders", "--idle", "1h", "--yes")
    command(url, "groups", "destroy", "orders", "g", "--yes")
    command(url, "tail", "orders", "--no-follow")
    command(url, "tail", "orders", "--from", "earliest", "--count", "1")


def operate_partitions(url: str) -> None:
    command(url, "partitions", "create", BASE, "2")
    with Client(url) as client:
        layout = Partitions(client, BASE).found()
    command(url, "partitions", "grow", BASE, str(layout.count + 1))
    command(url, "partitions", "show", BASE)


def operate_lines(url: str, admin: Client) -> None:
    """What people do to the keys of a handler: of one that is worked on, and of others."""
    stream = keyed(admin)
    stream.join()
    stream.route(count=100, most_pending=100)
    line = next(name for name in admin.execute("LRANGE", KEYS.ready, 0, -1) if name.startswith(b"k"))
    admin.execute("LREM", KEYS.ready, 1, line)
    admin.execute("LPUSH", KEYS.ready, line)
    admin.execute("DEL", KEYS.wake)
    with Client(url) as client:
        assert park(client, KEYS, line, "why")
        assert unpark(client, KEYS, line)
        assert take_one(stream).line == line
        admin.execute("RPUSH", KEYS.line(line), "99999999999999-0")
        assert skip(client, KEYS, line, error="by hand") is not None
        assert survey(client, KEYS)


DUTIES: dict[RoleName, Callable[[str, Client], None]] = {
    RoleName.WORKER: work,
    RoleName.SPARK: run_on_spark,
    RoleName.GROUP_SOURCE: take_from_group,
    RoleName.SINK: write_batches,
    RoleName.PRODUCER: produce,
    RoleName.LEASES: serve,
    RoleName.MASTER: direct,
    RoleName.CONSUMER: consume,
    RoleName.ROUTER: follow,
    RoleName.OPERATOR: operate,
}


def perform(role: RoleName, url: str, admin: Client, folder: Path) -> None:
    DUTIES[role](url, admin)
    if role is RoleName.PRODUCER:
        publish(url, folder)


@pytest.mark.parametrize("role", RoleName)
def test_the_printed_rights_are_enough(role: RoleName, admin: Client, tmp_path: Path) -> None:
    perform(role, login(admin, printed(role)), admin, tmp_path)


@pytest.mark.parametrize(
    ("role", "right"), [(role, right) for role in RoleName for right in ROLES[role].helpful.split()]
)
def test_without_what_is_merely_helpful_it_says_so_and_works(
    role: RoleName, right: str, admin: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    perform(role, login(admin, printed(role), without=right), admin, tmp_path)
    assert right in caplog.text


@pytest.mark.parametrize(
    ("role", "right"),
    [
        (role, right)
        for role in RoleName
        for right in sorted(ROLES[role].commands(looking=True) - set(ROLES[role].helpful.split()))
    ],
)
def test_without_any_one_of_them_it_is_refused_and_told_which(
    role: RoleName, right: str, admin: Client, tmp_path: Path
) -> None:
    url = login(admin, printed(role), without=right)
    with pytest.raises(AccessDenied) as caught:
        perform(role, url, admin, tmp_path)
    assert right.replace("|", " ") in re.sub(r"\W+", " ", str(caught.value)).lower()


# --- Under these rights for real ---


def test_a_worker_runs_under_the_rights_for_named_streams(admin: Client) -> None:
    options = ("--stream", "orders", "--into", "out", "--app", "shop")
    add(admin, 500)
    with Producer(login(admin, printed("producer", *options))) as producer:
        producer.publish_many("orders", ({"n": n} for n in range(500, 1_000)))
        producer.publish("orders", {"n": 1_000}, delay_ms=300)
    policy = WorkerPolicy(block_ms=100, claim_ms=1_000, sweep_ms=50, stop_ms=5_000)
    loop = ReadingLoop(handler_for(), login(admin, printed("worker", *options)), consumer="w-0", policy=policy)
    thread = threading.Thread(target=loop.run)
    thread.start()
    end_ms = SYSTEM_CLOCK.monotonic_ms() + 20_000
    while admin.execute("XLEN", "out") < 1_000 and SYSTEM_CLOCK.monotonic_ms() < end_ms:
        SYSTEM_CLOCK.sleep_ms(20)
    loop.stop()
    thread.join(20)
    written = sorted(int(pairs[1]) for _, pairs in admin.execute("XRANGE", "out", "-", "+"))
    assert written == [n for n in range(1_001) if n != 3]
    assert admin.execute("XLEN", KEYS.dead) == 1
    assert admin.execute("ACL", "LOG") == []


def test_workers_that_share_whole_streams_run_under_the_rights_of_both_roles(admin: Client) -> None:
    app = App("shop")
    app.handler(pattern="orders:*", into="out", name="bill", order="stream")(lambda message: {"n": message.text("n")})
    options = ("leases", "--user", "both", "--stream", "orders:*", "--into", "out", "--app", "shop")
    with Client(login(admin, printed("worker", *options))) as client:
        for stream in range(4):
            add(admin, 20, f"orders:{stream}")
        with working(client, app.handlers["bill"], "w1"), working(client, app.handlers["bill"], "w2"):
            owners = ServiceKeys(f"{PREFIX}:shop.bill").owners
            eventually(lambda: len({one.split()[1] for one in admin.execute("HVALS", owners)}) == 2)
            for stream in range(4):
                add(admin, 20, f"orders:{stream}")
            eventually(lambda: admin.execute("XLEN", "out") == 160)
    assert admin.execute("ACL", "LOG") == []


def test_a_master_and_its_consumers_run_under_their_rights(admin: Client) -> None:
    options = ("--stream", masters.STREAM)
    url = login(admin, printed("consumer", *options))
    with Client(url) as client, masters.Master(login(admin, printed("master", *options))) as master:
        masters.publish(admin, "A", "A", "B")
        with masters.Foreign(client, "c1", max_tickets=2) as consumer:
            consumer.register(master)
            for _ in range(3):
                consumer.finish(master, consumer.next()[0])
        eventually(lambda: masters.is_clean(admin), "the end of all")
        assert client.script(ACK, (masters.STREAM,), (masters.GROUP, "c1", "1-1")) == 0
    assert admin.execute("ACL", "LOG") == []


def test_leases_end_at_the_services_that_were_named(admin: Client) -> None:
    with Client(login(admin, printed("leases", "--service", "calls"))) as client:
        for service in ("callers", f"{PREFIX}:shop.bill"):
            with pytest.raises(AccessDenied):
                Service(client, service, consumer="w", incarnation="1").round(bid())
        Service(client, "calls", consumer="w", incarnation="1").round(bid())


def test_a_consumer_that_lacks_a_right_changes_nothing(admin: Client) -> None:
    announce(admin, "calls", "orders")
    keys = ServiceKeys("calls")
    for right in ("hdel", "lpush", "sadd", "srem", "xack", "xclaim", "xdel", "xpending", "xgroup|delconsumer", "zrem"):
        url = login(admin, printed("leases"), without=right)
        with Client(url) as client, pytest.raises(AccessDenied):
            Service(client, "calls", consumer="w", incarnation="1").round(bid())
    assert admin.execute("XLEN", keys.input) == 1
    assert admin.execute("KEYS", f"{keys.base}:*") == []


def test_the_rights_end_at_the_streams_and_the_app_that_were_named(admin: Client) -> None:
    url = login(admin, printed("worker", "--stream", "orders", "--into", "out", "--app", "shop"))
    with Client(url) as client:
        for stream, app, into in (("payments", "shop", "out"), ("orders", "bank", "out"), ("orders", "shop", "other")):
            with pytest.raises(AccessDenied):
                ReliableStream(client, stream, app=app, handler="bill", consumer="w", into=into).join()
        reliable(client).join()
    url = login(admin, printed("producer", "--stream", "orders"))
    with Client(url) as client, pytest.raises(AccessDenied):
        client.execute("XADD", KEYS.dead, "*", "a", "b")


def test_an_operator_of_some_streams_is_shown_those_alone(admin: Client) -> None:
    for stream in ("orders", "payments"):
        add(admin, 3, stream)
        ReliableStream(admin, stream, app="shop", handler="bill", consumer="w", into="out").join()
    url = login(admin, printed("operator", "--stream", "orders"))
    found = call("info", "--json", url=url).json()
    assert [one["name"] for one in found["streams"]] == ["orders"]
    assert [one["stream"] for one in found["handlers"]] == ["orders"]
    assert call("dlq", "list", "--stream", "orders", url=url).code == 0


def test_the_line_can_be_run_again_and_keeps_the_password_but_no_other_right(admin: Client) -> None:
    line = printed("producer")
    url = login(admin, line)
    admin.execute("ACL", "SETUSER", "millstream-producer", "+@all", "~*", "&*")
    admin.execute(*line.split())
    with Client(url) as client:
        client.execute("PING")
        with pytest.raises(AccessDenied):
            client.execute("XRANGE", "orders", "-", "+")


def test_a_new_user_without_a_password_cannot_log_in(admin: Client) -> None:
    admin.execute(*printed("producer", "--user", "new").split())
    for password in ("", ":", ":x"):
        url = admin.url.replace("redis://", f"redis://new{password}@")
        with Client(url) as client, pytest.raises(AccessDenied):
            client.execute("PING")


def test_one_user_may_be_several_roles(admin: Client, tmp_path: Path) -> None:
    outcome = call("acl", "producer", "worker", "--user", "both", *NARROW, "--json").json()
    (found,) = outcome
    assert (found["user"], found["roles"]) == ("both", ["producer", "worker"])
    assert (
        found["line"]
        == rule(
            "both", [RoleName.PRODUCER, RoleName.WORKER], streams=["orders*", "{orders.*}"], outputs=["out"], app="shop"
        ).line
    )
    url = login(admin, found["line"])
    work(url, admin)
    admin.execute("FLUSHALL")
    perform(RoleName.PRODUCER, url, admin, tmp_path)


def test_each_role_has_a_user_of_its_own_by_default() -> None:
    outcome = call("acl")
    users = [line.split()[2] for line in outcome.out.splitlines()]
    assert users == [f"millstream-{role}" for role in RoleName]
    assert all(line.endswith(" ~*") for line in outcome.out.splitlines())
    assert "narrow" in outcome.err
    assert call("acl", "nobody").code == 2
    assert call("acl", "--app", "a.b").code == 2


def test_on_a_cluster_the_roles_need_a_few_rights_more() -> None:
    with cluster() as deployed, Client(deployed.url) as client:
        for right in ("cluster|slots", "command"):  # `asking` is for slots that are on the move
            line = printed("producer", "--cluster", "--user", "lacks").replace(f" +{right}", "")
            for node in client._route.pools():
                client._single([*line.split(), ">secret"], node)
            url = deployed.url.replace("redis+cluster://", "redis+cluster://lacks:secret@")
            with Client(url) as limited, pytest.raises(AccessDenied, match=right.replace("|", r"\|")):
                limited.execute("ZCARD", "orders")
        for role in RoleName:
            line = printed(role, "--cluster", *NARROW)
            for node in client._route.pools():
                client._single([*line.split(), ">secret"], node)
            url = deployed.url.replace("redis+cluster://", f"redis+cluster://millstream-{role}:secret@")
            with Client(url) as limited:
                for node in client._route.pools():
                    client._single(["FLUSHALL"], node)
                if role is RoleName.WORKER:
                    client.execute("XADD", "orders", "*", "n", 1)
                    stream = ReliableStream(limited, "orders", app="shop", handler="bill", consumer="w")
                    stream.join()
                    assert stream.acknowledge(*stream.read(count=1)) == []
                elif role is RoleName.PRODUCER:
                    with Producer(limited) as producer:
                        producer.publish("orders", {"n": 1})
                elif role is RoleName.SINK:
                    share = share_of(limited, "run", 0)
                    assert Publication(limited, "query", Terms()).publish([share], batch=0, epoch=share.epoch)
                elif role is RoleName.LEASES:
                    consumer = Service(limited, "calls", consumer="w", incarnation="1")
                    announce(limited, "calls", "orders")
                    assert consumer.hand_in("done", consumer.round(bid()).given) == set()
                elif role is RoleName.MASTER:
                    Desk(limited, Registry(limited, SETTINGS.keys), SETTINGS).join()
                elif role is RoleName.CONSUMER:
                    client.execute("XGROUP", "CREATE", "orders", "bill", "$", "MKSTREAM")
                    assert limited.script(ACK, ("orders",), ("bill", "c1", "1-1")) == 0
                elif role is RoleName.ROUTER:
                    client.execute("XADD", "orders", "*", "n", 1)
                    with Router(url, reader="tracking") as router:
                        assert router.subscribe("orders").get(20_000) is not None
                else:
                    limited.scan_streams()
