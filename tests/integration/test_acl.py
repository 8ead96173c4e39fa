"""`millstream acl`: the printed rights are enough for each role, and each of them is needed."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from millstream import App
from millstream.admin.acl import ROLES, RoleName, acl_rule
from millstream.balancer import announce
from millstream.balancer.protocol import Service
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import AccessDenied
from millstream.producer.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import PREFIX, HandlerKeys, ServiceKeys
from millstream.router import Router
from millstream.services.master.delegated_consumer import ACK_OWNED
from millstream.services.master.delegation import Delegator
from millstream.services.master.registry import Registry
from millstream.spark.sink import Publication, WriteOptions
from millstream.testing.topologies import cluster
from scripts.command_reference import all_commands
from tests.support import masters
from tests.support.acl_scenarios import commands
from tests.support.acl_scenarios.commands import operate, publish
from tests.support.acl_scenarios.console import manage
from tests.support.acl_scenarios.exporter import export
from tests.support.acl_scenarios.group import take_from_group
from tests.support.acl_scenarios.lease import serve
from tests.support.acl_scenarios.master import SETTINGS, consume, direct
from tests.support.acl_scenarios.producer import produce
from tests.support.acl_scenarios.router import follow
from tests.support.acl_scenarios.sink import share_of, write_batches
from tests.support.acl_scenarios.source import read_as_log
from tests.support.acl_scenarios.spark import run_on_spark
from tests.support.acl_scenarios.state_source import read_states
from tests.support.acl_scenarios.worker import KEYS, add, handler_for, reliable, work
from tests.support.balancers import heartbeat_request
from tests.support.commandline import Outcome, call
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import QUICK, working

pytestmark = [pytest.mark.cli, pytest.mark.xdist_group("acl")]

ACCESS_PAGE = Path(__file__).parents[2] / "docs/access-control.md"
NARROW = ("--stream", "orders*", "--stream", "{orders.*}", "--into", "out", "--app", "shop", "--service", "calls")


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
    """Make the user of a printed rule, but for one right; return the URL to connect with."""
    words = [word for word in line.split() if not (without and word == f"+{without}")]
    assert len(words) == len(line.split()) - bool(without)
    admin.execute(*words)
    admin.execute("ACL", "SETUSER", words[2], ">secret")
    return admin.url.replace("redis://", f"redis://{words[2]}:secret@", 1)


@cache
def printed(role: str, *options: str) -> str:
    """The one rule that the command prints, always the same."""
    return call("acl", role, *(options or NARROW)).out.strip()


# --- What each role does, all of it ---


DUTIES: dict[RoleName, Callable[[str, Client], None]] = {
    RoleName.WORKER: work,
    RoleName.SPARK: run_on_spark,
    RoleName.SOURCE: read_as_log,
    RoleName.GROUP_SOURCE: take_from_group,
    RoleName.STATE_SOURCE: read_states,
    RoleName.SINK: write_batches,
    RoleName.PRODUCER: produce,
    RoleName.LEASES: serve,
    RoleName.MASTER: direct,
    RoleName.CONSUMER: consume,
    RoleName.ROUTER: follow,
    RoleName.EXPORTER: export,
    RoleName.OPERATOR: operate,
    RoleName.CONSOLE: manage,
}


def perform(role: RoleName, url: str, admin: Client, folder: Path) -> None:
    DUTIES[role](url, admin)
    if role is RoleName.PRODUCER:
        publish(url, folder)


@pytest.mark.parametrize("role", RoleName)
def test_the_printed_rights_are_enough(role: RoleName, admin: Client, tmp_path: Path) -> None:
    perform(role, login(admin, printed(role)), admin, tmp_path)


def test_the_duties_of_an_operator_include_every_command_that_the_page_names(
    admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = re.search(r"^\| `operator` \| ([^|]+) \|", ACCESS_PAGE.read_text(), re.M)
    assert row is not None
    groups = re.findall(r"`([a-z]+)`", row[1])
    wanted = {" ".join(words) for words, _ in all_commands() if words[0] in groups}
    assert len(wanted) >= 30
    done: set[str] = set()

    def record(*args: str, url: str | None = None) -> Outcome:
        done.update((args[0], " ".join(args[:2])))
        return call(*args, url=url)

    monkeypatch.setattr(commands, "call", record)
    operate(admin.url, admin)
    assert wanted - done == set()


@pytest.mark.parametrize(
    ("role", "right"), [(role, right) for role in RoleName for right in ROLES[role].optional.split()]
)
def test_a_role_without_an_optional_right_warns_and_works(
    role: RoleName, right: str, admin: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    perform(role, login(admin, printed(role), without=right), admin, tmp_path)
    assert right in caplog.text


@pytest.mark.parametrize(
    ("role", "right"),
    [
        (role, right)
        for role in RoleName
        for right in sorted(ROLES[role].commands(by_pattern=True) - set(ROLES[role].optional.split()))
    ],
)
def test_a_role_without_one_of_its_required_rights_is_refused_and_the_error_names_the_right(
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
    with (
        Client(login(admin, printed("worker", *options))) as client,
        # It claims entries that are idle for a second: the right to do so is used as well.
        working(client, handler_for(), "w-0", policy=replace(QUICK, claim_ms=1_000)),
    ):
        eventually(lambda: admin.execute("XLEN", "out") == 1_000, "all but one to be written")
        eventually(lambda: admin.execute("XLEN", KEYS.dead_letters) == 1, "the dead letter")
    written = sorted(int(pairs[1]) for _, pairs in admin.execute("XRANGE", "out", "-", "+"))
    assert written == [n for n in range(1_001) if n != 3]
    assert admin.execute("ACL", "LOG") == []


def test_workers_that_share_whole_streams_run_under_the_rights_of_both_roles(admin: Client) -> None:
    app = App("shop")
    app.handler(pattern="orders:*", into="out", name="bill", order="stream")(lambda message: {"n": message.text("n")})
    options = ("leases", "--user", "both", "--stream", "orders:*", "--into", "out", "--app", "shop")
    with Client(login(admin, printed("worker", *options))) as client:
        for stream in range(4):
            add(admin, 20, f"orders:{stream}")
        policy = replace(QUICK, claim_ms=1_000)  # a third of it is what the second waits for its share
        one, other = (working(client, app.handlers["bill"], name, policy=policy) for name in ("w1", "w2"))
        with one, other:
            owners = ServiceKeys(f"{PREFIX}:shop.bill").owners
            eventually(lambda: len({one.split()[1] for one in admin.execute("HVALS", owners)}) == 2)
            for stream in range(4):
                add(admin, 20, f"orders:{stream}")
            eventually(lambda: admin.execute("XLEN", "out") == 160)
    assert admin.execute("ACL", "LOG") == []


def test_a_master_and_its_consumers_run_under_their_rights(admin: Client) -> None:
    options = ("--stream", masters.STREAM)
    url = login(admin, printed("consumer", *options))
    with Client(url) as client, masters.Master(login(admin, printed("master", *options)), *masters.PATIENT) as master:
        masters.publish(admin, "A", "A", "B")
        with masters.MemoConsumer(client, "c1", max_tickets=2) as consumer:
            consumer.register(master)
            for _ in range(3):
                consumer.finish(master, consumer.next()[0])
        eventually(lambda: masters.is_clean(admin), "the end of all")
        assert client.script(ACK_OWNED, (masters.STREAM,), (masters.GROUP, "c1", "1-1")) == 0
    assert admin.execute("ACL", "LOG") == []


def test_the_rights_end_at_the_services_that_were_named(admin: Client) -> None:
    with Client(login(admin, printed("leases", "--service", "calls"))) as client:
        for service in ("callers", f"{PREFIX}:shop.bill"):
            with pytest.raises(AccessDenied):
                Service(client, service, consumer="w", incarnation="1").heartbeat(heartbeat_request())
        Service(client, "calls", consumer="w", incarnation="1").heartbeat(heartbeat_request())


def test_a_consumer_that_lacks_a_right_changes_nothing(admin: Client) -> None:
    announce(admin, "calls", "orders")
    keys = ServiceKeys("calls")
    for right in ("hdel", "lpush", "sadd", "srem", "xack", "xclaim", "xdel", "xpending", "xgroup|delconsumer", "zrem"):
        url = login(admin, printed("leases"), without=right)
        with Client(url) as client, pytest.raises(AccessDenied):
            Service(client, "calls", consumer="w", incarnation="1").heartbeat(heartbeat_request())
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
        client.execute("XADD", KEYS.dead_letters, "*", "a", "b")


def test_an_operator_of_some_streams_sees_only_those_streams(admin: Client) -> None:
    for stream in ("orders", "payments"):
        add(admin, 3, stream)
        ReliableStream(admin, stream, app="shop", handler="bill", consumer="w", into="out").join()
    url = login(admin, printed("operator", "--stream", "orders"))
    found = call("info", "--json", url=url).json()
    assert [one["name"] for one in found["streams"]] == ["orders"]
    assert [one["stream"] for one in found["handlers"]] == ["orders"]
    assert call("dlq", "list", "--stream", "orders", url=url).code == 0


def test_commands_leave_out_streams_that_an_operator_may_not_read_and_say_so(admin: Client) -> None:
    add(admin, 3, "tickets")
    ReliableStream(admin, "tickets", app="shop", handler="pay", consumer="w").join()
    admin.execute("HSET", HandlerKeys("shop", "pay", "tickets").meta, "committed_id", "0-0")
    url = login(admin, printed("operator", "--stream", "orders"))
    words = "not shown: 1 stream and 1 handler on a stream that this Redis user may not access\n"
    for more in ("", "shop"):  # with nothing that it may see, and with something
        shown = call("info", *more.split(), url=url)
        assert (shown.code, shown.err.startswith(words)) == (0, True)
        assert "tickets" not in shown.out
        add(admin, 3, "orders")
    found = call("info", "--json", url=url).json()
    assert [one["name"] for one in found["streams"]] == ["orders"]
    assert (found["handlers"], found["hidden_streams"], found["hidden_handlers"]) == ([], 1, 1)
    assert call("key", "list", "shop.pay", url=url).code == 3  # what is asked by name is not left out
    url = login(admin, printed("operator", "--stream", "orders"), without="xinfo|stream")
    assert call("info", url=url).code == 3


def test_the_printed_acl_rule_can_be_run_again_and_keeps_the_password_but_no_other_right(admin: Client) -> None:
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


def test_a_user_may_have_several_roles(admin: Client, tmp_path: Path) -> None:
    outcome = call("acl", "producer", "worker", "--user", "both", *NARROW, "--json").json()
    (found,) = outcome
    assert (found["user"], found["roles"]) == ("both", ["producer", "worker"])
    assert (
        found["line"]
        == acl_rule(
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
    for role, line in zip(RoleName, outcome.out.splitlines(), strict=True):
        assert line.endswith(" ~millstream:{*}:*:*.*:meta" if role == RoleName.STATE_SOURCE else " ~*"), line
    assert "restrict" in outcome.err
    assert call("acl", "nobody").code == 2
    assert call("acl", "--app", "a.b").code == 2


def test_the_roles_need_a_few_more_rights_on_a_cluster() -> None:
    with cluster() as deployed, Client(deployed.url) as client:
        for right in ("cluster|slots", "command"):  # `asking` is for slots that are on the move
            line = printed("producer", "--cluster", "--user", "lacks").replace(f" +{right}", "")
            for node in client._route.pools():
                client._execute_on([*line.split(), ">secret"], node)
            url = deployed.url.replace("redis+cluster://", "redis+cluster://lacks:secret@")
            with Client(url) as limited, pytest.raises(AccessDenied, match=right.replace("|", r"\|")):
                limited.execute("ZCARD", "orders")
        for role in RoleName:
            line = printed(role, "--cluster", *NARROW)
            for node in client._route.pools():
                client._execute_on([*line.split(), ">secret"], node)
            url = deployed.url.replace("redis+cluster://", f"redis+cluster://millstream-{role}:secret@")
            with Client(url) as limited:
                for node in client._route.pools():
                    client._execute_on(["FLUSHALL"], node)
                if role is RoleName.WORKER:
                    client.execute("XADD", "orders", "*", "n", 1)
                    stream = ReliableStream(limited, "orders", app="shop", handler="bill", consumer="w")
                    stream.join()
                    assert stream.ack(*stream.fetch(count=1)) == []
                elif role is RoleName.PRODUCER:
                    with Producer(limited) as producer:
                        producer.publish("orders", {"n": 1})
                elif role is RoleName.SINK:
                    share = share_of(limited, "run", 0)
                    assert Publication(limited, "query", WriteOptions()).publish([share], batch=0, epoch=share.epoch)
                elif role is RoleName.LEASES:
                    consumer = Service(limited, "calls", consumer="w", incarnation="1")
                    announce(limited, "calls", "orders")
                    assert consumer.end_leases("done", consumer.heartbeat(heartbeat_request()).added) == set()
                elif role is RoleName.MASTER:
                    Delegator(limited, Registry(limited, SETTINGS.keys), SETTINGS).join()
                elif role is RoleName.CONSUMER:
                    client.execute("XGROUP", "CREATE", "orders", "bill", "$", "MKSTREAM")
                    assert limited.script(ACK_OWNED, ("orders",), ("bill", "c1", "1-1")) == 0
                elif role is RoleName.ROUTER:
                    client.execute("XADD", "orders", "*", "n", 1)
                    with Router(url, reader="tracking") as router:
                        assert router.subscribe("orders").get(1_000 * FAIL_SAFE_S) is not None
                else:
                    limited.scan_streams()
