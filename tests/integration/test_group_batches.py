"""What a Spark query takes from a group that it shares, without Spark: batches, restarts, fences and losses."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from millstream.errors import ConfigError, DataLoss, GroupMissing, StaleOwner, Unavailable
from millstream.groups import ClaimOptions, Group
from millstream.groups.entries import BEGINNING
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.spark.source import claim_renewal
from millstream.spark.source.group_batch_planner import GroupBatchPlanner
from millstream.spark.source.group_batches import Batches
from millstream.spark.source.group_offsets import BEFORE_FIRST_BATCH, GroupOffset, dump, load
from millstream.spark.source.group_partition_reader import GroupPartitionReader
from millstream.spark.source.options import parse
from tests.support.deployments import lent_cluster
from tests.support.planning import planned_group_end
from tests.support.reading import by_stream
from tests.support.waiting import eventually

pytestmark = [pytest.mark.groups, pytest.mark.spark]

GROUP = "workers"
HOUR_MS = 3_600_000


class Query:
    """A query's driver, run by run, and its tasks; `place` is what Spark would have in its checkpoint."""

    def __init__(self, url: str, place: GroupOffset = BEFORE_FIRST_BATCH, **options: str) -> None:
        given = {"subscribe": "s", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "1000", **options}
        self.options = parse({"url": url, "readAs": "group", "group": GROUP, **given}, {})
        self.client = Client(url)
        self.place = place
        self.takers: list[GroupBatchPlanner] = []
        self.start()

    def start(self) -> GroupBatchPlanner:
        """Start the driver again; return the one before, which may still run."""
        assert self.options.sharing is not None
        self.takers.append(GroupBatchPlanner(self.client, self.options, self.options.sharing, cores=2))
        return self.takers[-2:][0]

    @property
    def reader(self) -> GroupBatchPlanner:
        """The driver."""
        return self.takers[-1]

    def close(self) -> None:
        """End all drivers."""
        for reader in self.takers:
            reader.close()
        self.client.close()

    def plan(self) -> GroupOffset:
        """What Spark would log next."""
        found = planned_group_end(self.reader, self.place, limit=self.options.limits.max_per_trigger)
        assert load(dump(found)) == found
        return found

    def rows(self, end: GroupOffset, start: GroupOffset | None = None) -> list[int]:
        """What the tasks of a batch read, one after the other."""
        read: list[int] = []
        for portions in self.reader.plan_tasks(start or self.place, end):
            fail = self.options.fail_on_data_loss
            reading = GroupPartitionReader(self.client, portions, limit_ms=1_000, fail_on_data_loss=fail)
            for runs in reading.batches(by_stream):
                read += [int(pairs[1]) for _, entries in runs for _, pairs in entries]
        return read

    def batch(self) -> list[int]:
        """Plan a batch, read it and commit it; it is acknowledged by the next plan."""
        end = self.plan()
        rows = self.rows(end)
        self.place = end
        return rows


@pytest.fixture
def query(millstream_url: str) -> Iterator[Callable[..., Query]]:
    """Makes queries."""
    made: list[Query] = []

    def make(**options: Any) -> Query:
        made.append(Query(millstream_url, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def add(client: Client, numbers: Sequence[int], stream: str = "s") -> list[bytes]:
    found: list[bytes] = []
    for at in range(0, len(numbers), 5_000):
        found += client.pipeline([("XADD", stream, "*", "n", n) for n in numbers[at : at + 5_000]])
    return found


def work(client: Client, consumer: str, count: int) -> list[tuple[bytes, int]]:
    """What an ordinary worker is given."""
    read = ("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count, "STREAMS", "s", ">")
    return [(entry_id, int(pairs[1])) for _, entries in client.execute(*read) or () for entry_id, pairs in entries]


def age(client: Client, stream: str) -> None:
    """Have all that is pending have been pending for an hour."""
    pending = Group(client, stream, GROUP).pending
    for name in pending.summary().by_consumer:
        ids = [entry.id for entry in pending.iter_entries(consumer=name)]
        pending.claim_ids(ids, consumer=name, min_idle_ms=0, options=ClaimOptions(idle_ms=HOUR_MS))


def is_kept(client: Client, stream: str) -> bool:
    """Whether its holders have said since that they are at work on all of it."""
    return all(entry.idle_ms < HOUR_MS for entry in Group(client, stream, GROUP).pending.iter_entries())


def holders(client: Client, stream: str = "s") -> dict[str, int]:
    return dict(Group(client, stream, GROUP).pending.summary().by_consumer)


def test_a_batch_is_pending_in_its_portions_and_acknowledged_when_the_next_is_planned(
    client: Client, query: Callable[..., Query]
) -> None:
    add(client, range(2_500))
    one = query(minPartitions="3", maxOffsetsPerTrigger="2000")
    end = one.plan()
    assert one.rows(end) == list(range(2_000)), "in stream order, task after task"
    assert [len(portions) for portions in one.reader.plan_tasks(one.place, end)] == [1, 1, 1]
    assert holders(client) == {"spark:0": 667, "spark:1": 667, "spark:2": 666}
    one.place = end
    assert one.batch() == list(range(2_000, 2_500))
    assert sum(holders(client).values()) == 500
    assert one.plan() == one.place
    assert holders(client) == {}
    info = Group(client, "s", GROUP).info()
    assert info is not None
    assert (info.lag, info.entries_read) == (0, 2_500)
    assert client.execute("KEYS", "millstream:*:batch:*") == [b"millstream:{s}:s:batch:workers:spark:record"]


def test_workers_of_the_group_read_the_entries_that_the_query_does_not_read(
    client: Client, query: Callable[..., Query]
) -> None:
    add(client, range(3_000))
    one = query(maxOffsetsPerTrigger="700")
    Group(client, "s", GROUP).create(BEGINNING)
    worked: list[int] = []
    read: list[int] = []
    while found := work(client, "w", 37):
        client.execute("XACK", "s", GROUP, *(entry_id for entry_id, _ in found))
        worked += [number for _, number in found]
        read += one.batch()
    assert sorted(worked + read) == list(range(3_000))
    assert len(worked) > 100
    assert len(read) > 1_000


def test_a_driver_that_dies_between_plan_and_commit_is_followed_by_one_that_reads_the_same_rows(
    client: Client, query: Callable[..., Query]
) -> None:
    add(client, range(900))
    one = query(maxOffsetsPerTrigger="400")
    one.batch()
    end = one.plan()
    first = one.rows(end)
    add(client, range(900, 1_000))
    one.start()  # Spark has logged the batch: it asks for it before anything else
    assert one.rows(end) == first == list(range(400, 800))
    assert one.rows(end) == first
    one.place = end
    lost = one.plan()
    one.start()  # Spark has not: the batch is planned again
    assert one.plan() == lost
    assert one.batch() == list(range(800, 1_000))


def test_entries_that_a_lost_reply_delivered_are_in_the_next_batch(
    client: Client, query: Callable[..., Query], caplog: pytest.LogCaptureFixture
) -> None:
    add(client, range(50))
    one = query(failOnDataLoss="false")
    Group(client, "s", GROUP).create(BEGINNING)
    lost = work(client, "spark", 30)  # as a driver that died before it noted a batch
    client.execute("XDEL", "s", lost[0][0])
    assert one.batch() == list(range(1, 50))
    assert "1 pending entries of stream 's' were trimmed or deleted before they were read" in caplog.text


def test_a_batch_of_a_hundred_thousand_is_planned_read_and_acknowledged(
    client: Client, query: Callable[..., Query]
) -> None:
    add(client, range(100_000))
    one = query(maxOffsetsPerTrigger="100000")
    end = one.plan()
    assert len(str(dump(end))) < 200
    assert one.rows(end) == list(range(100_000))
    one.place = end
    assert one.plan() == end
    assert holders(client) == {}


def test_consumers_with_names_that_end_in_numbers_are_distinct(client: Client, query: Callable[..., Query]) -> None:
    add(client, range(100))
    Group(client, "s", GROUP).create(BEGINNING)
    work(client, "spark-0", 30)
    one, two = (query(consumer=name, maxOffsetsPerTrigger="20") for name in ("spark", "spark-1"))
    for expected in (range(30, 50), range(70, 90)):
        assert one.batch() == list(expected)
        assert two.batch() == list(range(expected.stop, min(expected.stop + 20, 100)))
    assert holders(client) == {"spark-0": 30, "spark:0": 20, "spark-1:0": 10}


def test_entries_of_a_dead_consumer_are_claimed_and_those_of_a_live_one_are_not(
    client: Client, query: Callable[..., Query]
) -> None:
    ids = add(client, range(100))
    Group(client, "s", GROUP).create(BEGINNING)
    work(client, "dead", 40)
    work(client, "alive", 50)
    client.execute("XCLAIM", "s", GROUP, "dead", 0, *ids[:40:2], "IDLE", HOUR_MS, "JUSTID")
    one = query(claimAfter="1h", maxOffsetsPerTrigger="15")
    assert one.batch() == list(range(0, 30, 2))
    assert holders(client) == {"dead": 25, "alive": 50, "spark:0": 15}
    assert one.batch() == [*range(30, 40, 2), *range(90, 100)]
    assert one.plan() == one.place
    assert holders(client) == {"dead": 20, "alive": 50}


def test_a_task_reads_a_portion_with_entries_of_other_consumers_in_between(
    client: Client, query: Callable[..., Query]
) -> None:
    for stream, mine in (("a", slice(0, 10, 2)), ("b", slice(0, 5))):
        ids = add(client, range(mine.stop), stream)
        Group(client, stream, GROUP).create(BEGINNING)
        client.execute("XREADGROUP", "GROUP", GROUP, "dead", "STREAMS", stream, ">")
        if others := set(ids) - set(ids[mine]):
            client.execute("XACK", stream, GROUP, *others)
        client.execute("XCLAIM", stream, GROUP, "dead", 0, *ids[mine], "IDLE", HOUR_MS, "JUSTID")
    one = query(subscribe="a,b", claimAfter="1h")
    assert sorted(one.batch()) == sorted([*range(0, 10, 2), *range(5)])


def test_a_stream_that_is_deleted_while_its_idle_entries_are_claimed_stops_no_batch(
    client: Client, query: Callable[..., Query]
) -> None:
    for stream in "ab":
        ids = add(client, range(20), stream)
        Group(client, stream, GROUP).create(BEGINNING)
        client.execute("XREADGROUP", "GROUP", GROUP, "dead", "STREAMS", stream, ">")
        client.execute("XCLAIM", stream, GROUP, "dead", 0, *ids, "IDLE", HOUR_MS, "JUSTID")
    one = query(subscribe="a,b", claimAfter="1h", maxOffsetsPerTrigger="10", failOnDataLoss="false")
    assert one.batch() == list(range(10))
    client.execute("DEL", "b")
    assert one.batch() == list(range(10, 20))
    assert one.batch() == []


def test_claims_on_the_other_streams_are_renewed_when_the_group_of_one_is_gone(
    client: Client, query: Callable[..., Query]
) -> None:
    for stream in "abc":
        add(client, range(5), stream)
    one = query(subscribe="a,b,c")
    one.plan()
    age(client, "c")
    Group(client, "a", GROUP).destroy()
    client.execute("DEL", "b")
    with pytest.raises(GroupMissing):
        one.reader._batches.renew("abc")
    assert len(list(Group(client, "c", GROUP).pending.iter_entries())) == 5
    assert is_kept(client, "c")


def test_claims_of_a_long_batch_are_renewed_except_for_entries_that_others_have_claimed(
    client: Client, query: Callable[..., Query], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert claim_renewal._RENEWALS_PER_IDLE_TIME >= 2, "one look that comes late costs nothing"
    monkeypatch.setattr(claim_renewal, "_RENEWALS_PER_IDLE_TIME", HOUR_MS / 50)
    ids = add(client, range(1_200))
    one = query(claimAfter="1h", maxOffsetsPerTrigger="1200")
    end = one.plan()
    assert len(one.rows(end)) == 1_200
    pending = Group(client, "s", GROUP).pending
    for _ in range(2):
        age(client, "s")
        eventually(lambda: is_kept(client, "s"), "all to be kept")
        assert not pending.claim_ids(ids, consumer="w", min_idle_ms=HOUR_MS)
    assert pending.claim_ids(ids[:3], consumer="w", min_idle_ms=0) == ids[:3]
    client.execute("XACK", "s", GROUP, ids[3])
    one.place = end
    with caplog.at_level(logging.WARNING):
        one.plan()
    assert holders(client) == {"w": 3}
    assert "3 were claimed by other consumers and 1 were no longer pending" in caplog.text


def lost_connection(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, but for the first time."""
    answers = iter([Unavailable("the connection is gone")])

    def call(*args: Any) -> Any:
        if error := next(answers, None):
            raise error
        return step(*args)

    return call


def test_a_zombie_driver_reads_and_acknowledges_nothing(
    client: Client, query: Callable[..., Query], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(client, range(100))
    one = query(maxOffsetsPerTrigger="30")
    one.batch()
    zombie = one.start()
    end = one.plan()
    with pytest.raises(StaleOwner, match="give each a consumer name of its own"):
        planned_group_end(zombie, one.place, limit=30)
    monkeypatch.setattr(zombie, zombie._fetch_infos.__name__, lost_connection(zombie._fetch_infos))
    with pytest.raises(Unavailable):
        planned_group_end(zombie, end, limit=30)
    with pytest.raises(StaleOwner):  # it begins anew, and is still the older one
        planned_group_end(zombie, end, limit=30)
    assert holders(client) == {"spark:0": 30}
    with pytest.raises(StaleOwner):
        zombie.plan_tasks(one.place, end)
    assert one.rows(end) == list(range(30, 60))


def test_a_recovered_batch_does_not_grow_by_a_call_that_arrives_late(
    client: Client, query: Callable[..., Query], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(client, range(1_010))
    one = query(maxOffsetsPerTrigger="10")
    one.batch()
    one = query(maxOffsetsPerTrigger="1000", place=one.place)
    fill, calls = Batches._run, list[Callable[[], None]]()

    def cut_off(self: Batches, script: Any, args: Any, **options: Any) -> object:
        if not calls and script.name == "groups/fill_batch":
            fill(self, script, args, **options)
            epoch = self.epoch

            def arrive() -> None:
                self._epoch = epoch
                fill(self, script, args, **options)

            calls.append(arrive)
            raise Unavailable("the reply is lost")
        return fill(self, script, args, **options)

    monkeypatch.setattr(Batches, Batches._run.__name__, cut_off)
    with pytest.raises(Unavailable):
        one.plan()
    end = one.plan()
    assert end.counts == {"s": 500}
    with pytest.raises(StaleOwner):
        calls[0]()
    zombie = one.start()
    assert one.plan() == end
    with pytest.raises(StaleOwner):
        zombie._batches.add(end.token, end.batch, {"s": 1_000}, step=500)
    assert one.batch() == list(range(10, 510))
    assert one.batch() == list(range(510, 1_010))


def test_another_checkpoint_claims_the_uncommitted_entries_of_the_one_before(
    client: Client, query: Callable[..., Query], caplog: pytest.LogCaptureFixture
) -> None:
    add(client, range(100))
    one = query(maxOffsetsPerTrigger="40")
    one.batch()
    end = one.plan()
    assert len(one.rows(end)) == 40
    another = query(maxOffsetsPerTrigger="60")
    with caplog.at_level(logging.WARNING):
        assert another.batch() == list(range(40, 100))
    assert "40 entries belong to batches of another checkpoint" in caplog.text
    one.start()
    with pytest.raises(DataLoss, match="another checkpoint now uses"):
        one.rows(end)


@pytest.mark.parametrize("fail", [True, False])
def test_trimmed_pending_entries_are_an_error_or_a_warning(
    fail: bool, client: Client, query: Callable[..., Query], caplog: pytest.LogCaptureFixture
) -> None:
    ids = add(client, range(100))
    Group(client, "s", GROUP).create(BEGINNING)
    work(client, "dead", 20)
    client.execute("XCLAIM", "s", GROUP, "dead", 0, *ids[:20], "IDLE", HOUR_MS, "JUSTID")
    client.execute("XTRIM", "s", "MINID", "=", ids[5])
    one = query(failOnDataLoss=str(fail).lower(), claimAfter="1h")
    if fail:
        for _ in range(2):  # it is not forgotten by a restart
            with pytest.raises(DataLoss, match="5 pending entries of stream 's' were trimmed"):
                one.plan()
            one.start()
        one = query(failOnDataLoss="false", claimAfter="1h")
    end = one.plan()
    assert caplog.text.count("5 pending entries of stream 's' were trimmed") == 1
    client.execute("XTRIM", "s", "MINID", "=", ids[10])
    client.execute("XDEL", "s", ids[50])
    caplog.clear()
    left = [n for n in range(10, 100) if n != 50]
    if fail:
        strict = query()
        strict.takers = one.takers
        with pytest.raises(DataLoss, match=r"\d pending entries of stream 's' are gone"):
            strict.rows(end, one.place)
    assert one.rows(end) == left
    assert "entries of stream 's' are gone" in caplog.text
    one.place = end
    one.plan()
    assert holders(client) == {}


def test_a_destroyed_group_is_a_loss_and_is_created_again_if_losses_are_allowed(
    client: Client, query: Callable[..., Query]
) -> None:
    add(client, range(10))
    one = query(failOnDataLoss="false", subscribe="s,t")
    one.batch()
    Group(client, "s", GROUP).destroy()
    strict = query(subscribe="s,t")
    strict.place = one.place
    with pytest.raises(DataLoss, match="the group 'workers' of stream 's' is gone"):
        strict.plan()
    one.start()
    assert one.batch() == list(range(10))
    add(client, range(3), "t")  # from its beginning, as it was not there when the query began
    assert one.batch() == [0, 1, 2]
    client.execute("DEL", "t")
    end = one.plan()
    assert end.counts == {"s": 0}


def test_a_group_is_created_at_the_start_of_the_query_and_an_existing_one_is_kept(
    client: Client, query: Callable[..., Query]
) -> None:
    add(client, range(10))
    ids = add(client, range(10), "t")
    Group(client, "t", GROUP).create(ids[3], entries_read=4)
    one = query(subscribe="s,t", startingOffsets="latest")
    assert sorted(one.batch()) == [4, 5, 6, 7, 8, 9]
    add(client, range(20, 22))
    assert one.batch() == [20, 21]


def test_streams_share_a_batch_by_their_backlog(client: Client, query: Callable[..., Query]) -> None:
    for stream, count in (("big", 800), ("small", 90), ("tiny", 10)):
        add(client, range(count), stream)
    one = query(subscribe="big,small,tiny", maxOffsetsPerTrigger="100")
    end = one.plan()
    assert end.counts == {"big": 89, "small": 10, "tiny": 1}
    total = len(one.rows(end))
    one.place = end
    while found := one.batch():
        total += len(found)
    assert total == 900


def test_available_now_reads_no_entries_past_its_target(client: Client, query: Callable[..., Query]) -> None:
    add(client, range(10))
    one = query(maxOffsetsPerTrigger="10")
    target = one.reader.latest_offsets()
    add(client, range(10, 15))
    end = planned_group_end(one.reader, BEFORE_FIRST_BATCH, limit=10, target=target)
    assert end.counts == {"s": 10}
    assert planned_group_end(one.reader, end, limit=10, target=target) == end


def test_a_query_survives_a_redis_that_restarts_within_a_batch(millstream_fresh_server: EmbeddedServer) -> None:
    with Client(millstream_fresh_server.url) as client:
        add(client, range(500))
        one = Query(millstream_fresh_server.url)
        end = one.plan()
        millstream_fresh_server.kill()
        millstream_fresh_server.start()
        rows = client.retry_while_unavailable(lambda: one.rows(end), what="the test")
        assert rows == list(range(500))
        one.close()


def test_streams_on_all_nodes_of_a_cluster_share_a_batch(request: pytest.FixtureRequest) -> None:
    deployed = lent_cluster(request)
    with Client(deployed.url) as client:
        for stream in "abcdef":
            add(client, range(50), stream)
        one = Query(deployed.url, subscribe="a,b,c,d,e,f")
        end = one.plan()
        rows = one.rows(end)
        assert sorted(rows) == sorted([*range(50)] * 6)
        one.start()
        assert one.rows(end) == rows
        one.place = end
        assert one.plan() == end
        assert all(holders(client, stream) == {} for stream in "abcdef")
        one.close()


def test_batches_that_spark_skipped_are_refused(query: Callable[..., Query], client: Client) -> None:
    add(client, range(10))
    one = query()
    end: Any = one.plan()
    with pytest.raises(ConfigError, match="asyncProgressTrackingEnabled"):
        one.reader.plan_tasks(BEFORE_FIRST_BATCH, end._replace(batch=3))
    with pytest.raises(ConfigError, match="new checkpoint folder"):
        load({"s": ["1-1", 5]})
