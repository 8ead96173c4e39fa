"""`readFrom=replica`: the rows are those of the primary, whatever its replicas do; on real servers, without Spark."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain

import pytest

from millstream.admin.acl import RoleName, acl_rule
from millstream.errors import DataLoss, ServerError, Unavailable
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.resp import Command
from millstream.spark.source import replica_reads as replicas_module
from millstream.spark.source.batch_planner import BatchPlanner
from millstream.spark.source.entry_runs import StreamEntries
from millstream.spark.source.group_partition_reader import GroupPartition, GroupPartitionReader
from millstream.spark.source.offset_ranges import OffsetRange
from millstream.spark.source.options import parse
from millstream.spark.source.partition_reader import PartitionReader
from millstream.spark.source.replica_reads import ReplicaReads, Replicas
from millstream.spark.source.stream_info import fetch_calls
from millstream.testing.proxy import Proxy
from millstream.testing.topologies import cluster
from tests.support.reading import by_stream
from tests.support.replicas import FOLLOWS, asked, asked_for, is_primary, kill_primary, none_asked, steady_trio
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("replica_reads")]

PATIENCE_MS = round(FAIL_SAFE_S * 1000)
USUAL = {
    "replica-read-only": "yes",
    "replica-serve-stale-data": "yes",
    "replica-ignore-maxmemory": "yes",
    "maxmemory": "0",
    "key-load-delay": "0",
}


@dataclass
class Deployment:
    """A primary, and two replicas: one behind a proxy that can hold back what the primary sends."""

    primary: EmbeddedServer
    late: EmbeddedServer
    prompt: EmbeddedServer
    link: Proxy
    client: Client
    replicas: Replicas
    patch: pytest.MonkeyPatch

    def give_up_soon(self) -> None:
        """From now on a replica that hangs is given up."""
        self.patch.setattr(replicas_module, "_TIMEOUT_MS", 500)
        self.replicas.close()  # for the next connections

    def follow(self, *followers: EmbeddedServer) -> None:
        """Make these, and no others, replicas, with all that the primary has."""
        for server in (self.late, self.prompt):
            server.call("REPLICAOF", "NO", "ONE")  # a history of its own, so that nothing it has can be kept
            server.call("REPLICAOF", *self.source(server) if server in followers else ("NO", "ONE"))
        eventually(lambda: self.attached == len(followers), "the replicas to be attached")
        for server in followers:
            eventually(lambda server=server: b"master_link_status:up" in server.call("INFO", "replication"), "the link")  # type: ignore[misc]
        self.settle(len(followers))

    def source(self, server: EmbeddedServer) -> tuple[str, int]:
        return ("127.0.0.1", self.link.port if server is self.late else self.primary.port)

    @property
    def attached(self) -> int:
        return int(self.primary.call("INFO", "replication").count(b"state=online"))

    def settle(self, replicas: int) -> None:
        """Wait until so many replicas have all that was written."""
        self.client.pipeline([("XADD", "tick", "*", "a", "b"), ("DEL", "tick")])
        eventually(lambda: self.client.execute("WAIT", replicas, 1_000) >= replicas, "the replicas to have it all")

    def add(self, stream: str, numbers: Sequence[int]) -> None:
        self.client.pipeline([("XADD", stream, f"{n + 1}-0", "n", n) for n in numbers])

    def read(self, parts: Sequence[OffsetRange]) -> list[tuple[str, int]]:
        reading = PartitionReader(self.client, parts, limit_ms=0, fail_on_data_loss=True, replicas=self.replicas)
        return rows(reading.batches(by_stream))

    def planned(self, **given: str) -> list[OffsetRange]:
        """What the tasks of a batch read from both ends of all streams."""
        options = parse({"url": self.client.url, "subscribePattern": "*", **given}, {})
        planner = BatchPlanner(self.client, options, cores=2)
        return list(
            chain.from_iterable(planner.plan_tasks(planner.starting_offsets("earliest"), planner.latest_offsets()))
        )


def rows(batches: Iterator[list[StreamEntries]]) -> list[tuple[str, int]]:
    return [(name, int(pairs[1])) for runs in batches for name, entries in runs for _, pairs in entries]


def stands_alone(server: EmbeddedServer) -> bool:
    with suppress(ServerError):  # LOADING
        return bool(server.call("REPLICAOF", "NO", "ONE"))
    return False


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[EmbeddedServer, EmbeddedServer, EmbeddedServer, Proxy]]:
    with ExitStack() as stack:
        primary, late, prompt = (stack.enter_context(EmbeddedServer(extra=FOLLOWS)) for _ in range(3))
        yield primary, late, prompt, stack.enter_context(Proxy(primary.port))


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Replicas are waited for, unless a test says otherwise, and are tried again at once."""
    monkeypatch.setattr(replicas_module, "_TIMEOUT_MS", PATIENCE_MS)
    monkeypatch.setattr(replicas_module, "_CATCH_UP_MS", float(PATIENCE_MS))
    monkeypatch.setattr(replicas_module, "_MIN_BAN_MS", 1.0)
    monkeypatch.setattr(replicas_module, "_BAN_FACTOR", 0)
    monkeypatch.setattr(replicas_module, "_NO_REPLICA_BAN_MS", 1.0)
    return monkeypatch


@pytest.fixture
def deployment(
    servers: tuple[EmbeddedServer, EmbeddedServer, EmbeddedServer, Proxy], patience: pytest.MonkeyPatch
) -> Iterator[Deployment]:
    """All three, emptied."""
    primary, late, prompt, link = servers
    link.resume()
    for server in (late, prompt):
        if not server.running:
            server.start()
        server.resume()
        server.call("CONFIG", "RESETSTAT")
        for name, value in USUAL.items():
            server.call("CONFIG", "SET", name, value)
        eventually(lambda server=server: stands_alone(server), "the end of what it loads")  # type: ignore[misc]
    primary.call("FLUSHALL")
    with Client(primary.url) as client:
        replicas = Replicas(client)
        yield Deployment(primary, late, prompt, link, client, replicas, patience)
        replicas.close()


def test_rows_are_those_of_the_primary_and_only_replicas_are_read(deployment: Deployment) -> None:
    deployment.follow(deployment.late, deployment.prompt)
    deployment.add("a", range(5_000))
    deployment.add("b", range(30))
    deployment.client.execute("XTRIM", "a", "MAXLEN", 4_000)
    deployment.client.execute("XDEL", "b", "5-0")
    deployment.settle(2)
    parts = deployment.planned()
    found: list[list[tuple[str, int]]] = []

    def both_asked() -> bool:
        found.append(deployment.read(parts))
        return min(asked(deployment.late), asked(deployment.prompt)) > 0

    with none_asked(deployment.primary):
        eventually(both_asked, "a read from each: which of them is read, is drawn")
    there = rows(PartitionReader(deployment.client, parts, limit_ms=0, fail_on_data_loss=True).batches(by_stream))
    assert sorted(there) == [("a", n) for n in range(1_000, 5_000)] + [("b", n) for n in range(30) if n != 4]
    assert all(some == there for some in found)
    with asked_for(deployment.primary):
        assert deployment.read([OffsetRange("a", ZERO_ID, EntryId(2_500, 7), 500, None)]) == there[:1_500], (
            "with no entry there"
        )


def test_a_missing_replica_is_warned_of_once_and_a_later_one_is_found(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    deployment.follow()
    deployment.add("s", range(100))
    parts = deployment.planned()
    assert [len(deployment.read(parts)) for _ in range(3)] == [100] * 3
    assert caplog.text.count("no connected replica") == 1
    deployment.follow(deployment.prompt)
    with none_asked(deployment.primary), asked_for(deployment.prompt):
        assert len(deployment.read(parts)) == 100


# --- Replicas that are behind ---

NEWS: dict[str, list[Command]] = {
    "more is added": [("XADD", "s", f"{n}-0", "n", n - 1) for n in range(101, 201)],
    "the head is trimmed": [("XTRIM", "s", "MAXLEN", 40)],
    "an entry is deleted": [("XDEL", "s", "50-0")],
    "the stream is made anew": [("DEL", "s"), *(("XADD", "s", f"{n}-0", "n", -n) for n in range(61, 101))],
    "the stream is deleted": [("DEL", "s")],
    "its last id is moved": [("XSETID", "s", "300-0")],
}


@pytest.mark.parametrize("news", NEWS)
def test_entries_that_a_replica_has_not_received_are_read_from_the_primary(
    deployment: Deployment, news: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "_CATCH_UP_MS", 20.0)
    deployment.follow(deployment.late)
    deployment.add("s", range(100))
    deployment.settle(1)
    deployment.link.freeze()
    deployment.client.pipeline(NEWS[news])
    parts = deployment.planned()
    expected = [("s", int(pairs[1])) for _, pairs in deployment.client.execute("XRANGE", "s", "-", "+")]
    assert deployment.read(parts) == deployment.read(parts) == expected
    assert len(caplog.records) == (1 if expected else 0), "trouble is said once"
    assert not expected or "bytes behind its primary" in caplog.text
    deployment.link.resume()
    deployment.settle(1)
    monkeypatch.setattr(replicas_module, "_CATCH_UP_MS", float(PATIENCE_MS))
    with asked_for(*([deployment.late] if expected else [])):
        assert deployment.read(parts) == expected


def test_a_read_waits_for_a_replica_that_is_behind_for_a_moment(deployment: Deployment) -> None:
    deployment.follow(deployment.late)
    deployment.link.freeze()
    deployment.add("s", range(100))
    parts = deployment.planned()
    resume = threading.Timer(0.2, deployment.link.resume)
    resume.start()
    with none_asked(deployment.primary), asked_for(deployment.late):
        assert len(deployment.read(parts)) == 100
    resume.join()


def test_a_task_does_not_read_an_older_state_from_a_replica_than_it_has_read_from_the_primary(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.follow(deployment.late)
    deployment.add("s", range(100))
    deployment.settle(1)
    reads = ReplicaReads(deployment.replicas)
    with none_asked(deployment.primary):
        assert len(reads.fetch([("XRANGE", "s", "-", "300-0", "COUNT", 10)])[0]) == 10
    deployment.link.freeze()
    deployment.add("s", range(100, 200))
    with asked_for(deployment.primary, deployment.late):
        assert len(reads.fetch([("XRANGE", "s", "(10-0", "300-0", "COUNT", 150)])[0]) == 150
    monkeypatch.setattr(replicas_module, "_CATCH_UP_MS", 20.0)
    with none_asked(deployment.late):
        assert len(reads.fetch([("XRANGE", "s", "(50-0", "60-0", "COUNT", 10)])[0]) == 10


def test_a_connection_that_was_closed_between_two_tasks_is_opened_again(deployment: Deployment) -> None:
    deployment.follow(deployment.prompt)
    deployment.add("s", range(100))
    deployment.settle(1)
    parts = deployment.planned()
    for _ in range(2):
        with none_asked(deployment.primary):
            assert len(deployment.read(parts)) == 100
        assert deployment.prompt.call("CLIENT", "KILL", "TYPE", "normal") > 0


def test_a_replica_that_did_not_answer_is_not_used_for_a_while(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "_MIN_BAN_MS", float(PATIENCE_MS))
    deployment.follow(deployment.late)
    deployment.add("s", range(100))
    parts = deployment.planned()
    deployment.late.pause()
    deployment.give_up_soon()
    assert len(deployment.read(parts)) == 100
    deployment.late.resume()
    deployment.settle(1)
    with none_asked(deployment.late):
        assert len(deployment.read(parts)) == 100


# --- Replicas that change while they are read ---


def hang(deployment: Deployment) -> None:
    deployment.late.pause()
    deployment.give_up_soon()


def die(deployment: Deployment) -> None:
    deployment.late.kill()


def become_primary(deployment: Deployment) -> None:
    deployment.late.call("REPLICAOF", "NO", "ONE")
    deployment.late.call("XDEL", "s", "50-0")


def follow_another(deployment: Deployment) -> None:
    """It has the other one's data already."""
    deployment.prompt.call("FLUSHALL")
    deployment.prompt.call("XADD", "s", "100-0", "n", -1)
    deployment.late.call("REPLICAOF", "127.0.0.1", deployment.prompt.port)
    eventually(lambda: deployment.late.call("XLEN", "s") == 1, "the other one's data")


def wait_for_its_primary(deployment: Deployment) -> None:
    """It was a primary meanwhile, is a replica again, and has not met its primary yet."""
    become_primary(deployment)
    deployment.link.freeze()
    deployment.late.call("REPLICAOF", *deployment.source(deployment.late))


def refuse_stale_data(deployment: Deployment) -> None:
    deployment.late.call("CONFIG", "SET", "replica-serve-stale-data", "no")
    deployment.link.freeze()
    deployment.link.cut_all()
    eventually(lambda: b"master_link_status:down" in deployment.late.call("INFO", "replication"), "the end of the link")


def load(deployment: Deployment) -> None:
    """It has to fetch everything anew, and is slow about it."""
    deployment.client.pipeline([("XADD", f"t{n}", "*", "value", "x" * 2_000) for n in range(100)])
    for name, value in (("key-load-delay", 100_000), ("loading-process-events-interval-bytes", 1_024)):
        deployment.late.call("CONFIG", "SET", name, value)
    deployment.late.call("REPLICAOF", "NO", "ONE")
    deployment.late.call("SET", "own", "history")
    deployment.late.call("REPLICAOF", *deployment.source(deployment.late))
    eventually(lambda: b"loading:1" in deployment.late.call("INFO", "persistence"), "its loading")


def be_written_to(deployment: Deployment) -> None:
    deployment.late.call("CONFIG", "SET", "replica-read-only", "no")
    deployment.late.call("XDEL", "s", "50-0")


def evict(deployment: Deployment) -> None:
    """It gives up the stream, and makes one of its own from what comes after."""
    settings = {"replica-ignore-maxmemory": "no", "maxmemory-policy": "allkeys-random", "maxmemory": "1"}
    for name, value in settings.items():
        deployment.late.call("CONFIG", "SET", name, value)
    eventually(lambda: deployment.late.call("EXISTS", "s") == 0, "the eviction")
    deployment.late.call("CONFIG", "SET", "maxmemory", 0)
    deployment.client.execute("XADD", "s", "101-0", "n", 100)
    eventually(lambda: deployment.late.call("XLEN", "s") == 1, "the rest of the stream")


def lose_the_key(deployment: Deployment) -> None:
    """As one whose clock is ahead does with a key that expires; nothing else shows it."""
    be_written_to(deployment)
    deployment.late.call("DEL", "s")
    deployment.late.call("CONFIG", "SET", "replica-read-only", "yes")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (hang, "cannot be reached: Timeout"),
        (die, "cannot be reached"),
        (become_primary, "it is not a replica now"),
        (follow_another, "it no longer replicates the same primary"),
        (wait_for_its_primary, "it no longer replicates the same primary"),
        (refuse_stale_data, "Link with MASTER is down"),
        (load, "cannot be reached|loading"),
        (be_written_to, "clients may write to it"),
        (evict, "it has evicted keys itself"),
        (lose_the_key, ""),
    ],
)
def test_rows_stay_the_same_whatever_happens_to_a_replica_within_a_task(
    deployment: Deployment, change: Callable[[Deployment], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    deployment.follow(deployment.late)
    deployment.add("s", range(100))
    deployment.settle(1)
    reads = ReplicaReads(deployment.replicas)
    with none_asked(deployment.primary):
        (found,) = reads.fetch([("XRANGE", "s", "-", "101-0", "COUNT", 10)])
    assert len(found) == 10
    change(deployment)
    rest = [("XRANGE", "s", "(10-0", "101-0", "COUNT", 90), ("XRANGE", "s", "50-0", "50-0")]
    assert reads.fetch(rest) == reads.fetch(rest) == fetch_calls(deployment.client, rest)
    assert re.search(why, "".join(record.getMessage() for record in caplog.records[:1]))
    assert bool(caplog.records) == bool(why)


def test_another_replica_is_read_after_one_dies(deployment: Deployment) -> None:
    deployment.follow(deployment.late, deployment.prompt)
    deployment.add("s", range(100))
    deployment.settle(2)
    reads = ReplicaReads(deployment.replicas)
    with none_asked(deployment.primary):
        assert len(reads.fetch([("XRANGE", "s", "-", "100-0", "COUNT", 10)])[0]) == 10
        late_first = asked(deployment.late) > 0
        (deployment.late if late_first else deployment.prompt).kill()
        (found,) = reads.fetch([("XRANGE", "s", "(10-0", "100-0", "COUNT", 90)])
        assert len(found) == 90


def test_a_task_continues_while_there_is_no_primary(deployment: Deployment) -> None:
    deployment.follow(deployment.prompt)
    deployment.add("s", range(100))
    deployment.settle(1)
    reads = ReplicaReads(deployment.replicas)
    assert len(reads.fetch([("XRANGE", "s", "-", "100-0", "COUNT", 10)])[0]) == 10
    deployment.primary.pause()
    try:
        assert len(reads.fetch([("XRANGE", "s", "(10-0", "100-0", "COUNT", 90)])[0]) == 90
    finally:
        deployment.primary.resume()


# --- Through a group ---


def test_entries_of_a_group_batch_are_read_from_replicas_and_checked_on_the_primary(
    deployment: Deployment,
) -> None:
    deployment.follow(deployment.late)
    deployment.add("s", range(1_000))
    deployment.client.execute("RPUSH", "near", *(f"{n + 1}-0" for n in range(300)))
    deployment.client.execute("RPUSH", "far", *(f"{n + 1}-0" for n in range(0, 1_000, 10)))
    deployment.settle(1)
    portions = [GroupPartition("s", 0, 300, "near"), GroupPartition("s", 0, 100, "far")]
    expected = [("s", n) for n in (*range(300), *range(0, 1_000, 10))]

    def read() -> list[tuple[str, int]]:
        reading = GroupPartitionReader(
            deployment.client, portions, limit_ms=0, fail_on_data_loss=True, replicas=deployment.replicas
        )
        return rows(reading.batches(by_stream))

    with none_asked(deployment.primary), asked_for(deployment.late):
        assert read() == expected
    lose_the_key(deployment)
    assert read() == expected
    deployment.client.execute("XDEL", "s", "11-0")
    with pytest.raises(DataLoss):
        read()


# --- Rights, and other deployments ---


def test_reading_from_replicas_needs_the_printed_rights(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    deployment.follow(deployment.prompt)
    deployment.add("s", range(100))
    deployment.settle(1)
    parts = deployment.planned()
    for servers, replicas, why in (
        ((deployment.primary, deployment.prompt), True, None),
        ((deployment.primary, deployment.prompt), False, "cannot find the primary's replicas: .*info"),
        ((deployment.primary,), True, "cannot read from .*: .* refuses the credentials"),
    ):
        for server in (deployment.primary, deployment.prompt):
            server.call("ACL", "DELUSER", "reader")
            server.call("ACL", "LOG", "RESET")
        line = acl_rule("reader", [RoleName.SOURCE], streams=["s"], replicas=replicas).line
        for server in servers:
            server.call(*line.split(), ">secret")
        caplog.clear()
        with Client(deployment.primary.url.replace("//", "//reader:secret@")) as client:
            limited = Replicas(client)
            reading = PartitionReader(client, parts, limit_ms=0, fail_on_data_loss=True, replicas=limited)
            with none_asked(*([deployment.prompt] if why else [deployment.primary])):
                assert len(rows(reading.batches(by_stream))) == 100
            limited.close()
        if why is None:
            assert deployment.primary.call("ACL", "LOG") == deployment.prompt.call("ACL", "LOG") == []
        else:
            (record,) = caplog.records
            assert re.search(why, record.getMessage())


def test_the_replicas_of_a_server_that_is_no_primary_any_more_are_not_read(deployment: Deployment) -> None:
    deployment.follow(deployment.prompt)
    deployment.add("s", range(10))
    deployment.late.call("REPLICAOF", "127.0.0.1", deployment.prompt.port)
    eventually(lambda: b"master_link_status:up" in deployment.late.call("INFO", "replication"), "its link")
    deployment.settle(1)
    with Client(deployment.prompt.url) as client:
        replicas = Replicas(client)
        parts = [OffsetRange("s", ZERO_ID, EntryId(10, 0), 10, 10)]
        reading = PartitionReader(client, parts, limit_ms=0, fail_on_data_loss=True, replicas=replicas)
        with none_asked(deployment.late), asked_for(deployment.prompt):
            assert len(rows(reading.batches(by_stream))) == 10
        replicas.close()


@pytest.mark.usefixtures("patience")
def test_each_shard_of_a_cluster_has_its_own_replicas() -> None:
    extra = {"cluster-enabled": "yes", "cluster-node-timeout": "5000", **FOLLOWS}
    with cluster() as deployed, EmbeddedServer(extra=extra) as replica, Client(deployed.url) as admin:
        first = deployed.nodes[0]
        replica.call("CLUSTER", "MEET", "127.0.0.1", first.port)
        first_id = first.call("CLUSTER", "MYID")
        eventually(lambda: first_id in replica.call("CLUSTER", "NODES"), "the nodes to meet")
        first.call("CONFIG", "SET", "repl-diskless-sync-delay", 0)
        eventually(lambda: replicates(replica, first_id), "the replica")
        streams = [f"s{n}" for n in range(12)]
        for name in streams:
            admin.pipeline([("XADD", name, f"{n + 1}-0", "n", n) for n in range(50)])
        line = acl_rule("reader", [RoleName.SPARK], streams=["s*"], cluster=True, replicas=True).line
        for server in (*deployed.nodes, replica):
            server.call(*line.split(), ">secret")
        eventually(lambda: all(knows(node, replica) for node in deployed.nodes), "the cluster to know of it")
        eventually(lambda: b"cluster_state:ok" in replica.call("CLUSTER", "INFO"), "it to know the cluster")
        parts = [OffsetRange(name, ZERO_ID, EntryId(50, 0), 50, 50) for name in streams]
        with Client(deployed.url.replace("//", "//reader:secret@")) as client:
            replicas = Replicas(client)
            reading = PartitionReader(client, parts, limit_ms=0, fail_on_data_loss=True, replicas=replicas)
            with none_asked(first), asked_for(replica, *deployed.nodes[1:]):
                found = rows(reading.batches(by_stream))
            assert sorted(found) == sorted((name, n) for name in streams for n in range(50))
            of_others = next(name for name in streams if not client.shard(name).replicas)
            with pytest.raises(Unavailable, match="does not serve this hash slot"):
                replicas.client_of(("127.0.0.1", replica.port)).execute("XRANGE", of_others, "-", "+")
            replicas.close()
        assert not any(server.call("ACL", "LOG") for server in (*deployed.nodes, replica))


def replicates(replica: EmbeddedServer, primary_id: bytes) -> bool:
    with suppress(ServerError):  # until it knows the other for a primary
        replica.call("CLUSTER", "REPLICATE", primary_id)
    return b"master_link_status:up" in replica.call("INFO", "replication")


def knows(node: EmbeddedServer, replica: EmbeddedServer) -> bool:
    return any(replica.port in (other[1] for other in row[3:]) for row in node.call("CLUSTER", "SLOTS"))


@pytest.mark.usefixtures("patience")
def test_the_replica_is_read_behind_sentinel_and_after_a_failover_the_next_one() -> None:
    with steady_trio() as trio, Client(trio.url) as client:
        client.pipeline([("XADD", "s", f"{n + 1}-0", "n", n) for n in range(100)])
        eventually(lambda: client.execute("WAIT", 1, 1_000) == 1, "the replica to have it all")
        replicas = Replicas(client)
        reads = ReplicaReads(replicas)
        with none_asked(trio.primary):
            (found,) = reads.fetch([("XRANGE", "s", "-", "100-0", "COUNT", 10)])
        kill_primary(trio)
        (more,) = reads.fetch([("XRANGE", "s", "(10-0", "100-0", "COUNT", 40)])
        eventually(lambda: is_primary(trio.replica), "the failover")
        last = [("XRANGE", "s", "(50-0", "100-0", "COUNT", 50)]
        (rest,) = client.retry_while_unavailable(lambda: reads.fetch(last), what="the test", limit_ms=PATIENCE_MS)
        replicas.close()
    assert [int(pairs[1]) for _, pairs in (*found, *more, *rest)] == list(range(100))
