"""The engine's task on partitions that grow: each key keeps its order, its state and its single run."""

import asyncio
import random
import string
from collections import defaultdict

import pyarrow as pa
import pytest

from millstream import App, Message, State
from millstream.admin.key_queues import park, unpark
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.deferral import RUNNABLE_KEYS, runnable_keys
from millstream.handlers.handler import Handler
from millstream.model import EntryId
from millstream.partitions.key_migration import KeyMigration
from millstream.partitions.partitioned_producer import PartitionedProducer
from millstream.partitions.partitions import Partitions
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.spark.engine.deferred_jobs import DeferredJobs
from millstream.spark.engine.entry_points import task_of
from millstream.spark.engine.task import Job, PartitionTask
from millstream.spark.source.block_maker import BlockMaker
from tests.support.clocks import ManualClock
from tests.support.command_stats import commands_run
from tests.support.task_fixtures import QUEUE_SCHEMA

pytestmark = [pytest.mark.spark]

BASE = "orders"


def count(message: Message, state: State) -> dict[str, object]:
    """Gives the number of each message of a key that comes right after the one before it."""
    n = int(message.fields["n"])
    if state.get("n", 0) != n - 1:
        raise RuntimeError(f"{n} comes after {state.get('n', 0)}")
    state["n"] = n
    return {"k": message.key or b"", "n": n}


class Pipeline:
    """A run on Spark, without Spark, whose every step the test chooses."""

    def __init__(self, client: Client) -> None:
        app = App("app")
        app.handler(BASE, partitions=2, key="k", into="out", name="handle")(count)
        self.client = client
        self.handler: Handler = app.handlers["handle"]
        self.producer = PartitionedProducer(client, BASE, key="k", partitions=2)
        self.sent: dict[str, int] = defaultdict(int)
        self.partitions = Partitions(client, BASE)
        self.partitions.create(2)
        self.begin()

    @property
    def streams(self) -> list[str]:
        return self.partitions.require().streams

    @property
    def store(self) -> CommitStore:
        return CommitStore(self.client, app="app", handler="handle", token=self.token, keyed=True)

    def begin(self) -> None:
        self.token = CommitStore(self.client, app="app", handler="handle").new_token(self.streams)
        self.store.begin_run(self.streams)

    def publish(self, keys: str) -> None:
        rows = []
        for key in keys:
            self.sent[key] += 1
            rows.append({"k": key, "n": self.sent[key]})
        self.producer.publish_many(rows)

    def batch(self, most: int, *, dies: bool = False) -> None:
        """A batch of up to so many entries of each partition; it may die before its end."""
        runs, ends = [], {}
        frontiers = self.store.committed_ids(self.streams)
        for stream in self.streams:
            after = frontiers.get(stream, EntryId(0, 0))
            if entries := self.client.execute("XRANGE", stream, f"({after}", "+", "COUNT", most):
                ends[stream] = EntryId.parse(entries[-1][0])
                runs.append((stream, entries))
        if runs:
            asyncio.run(self._task().process([BlockMaker(b"k", buckets=1)(runs)]))
        if not dies:
            self.store.advance_committed(ends)

    def catch_up(self) -> bool:
        found = runnable_keys(self.store, self.streams, 100)
        rows = [{"stream": stream, "queue": queue} for stream, ready in found.items() for queue in ready.queues]
        asyncio.run(
            self._task().process_deferred([pa.RecordBatch.from_pylist(rows, schema=QUEUE_SCHEMA)] if rows else [])
        )
        return bool(rows)

    def move(self) -> bool:
        layout = self.partitions.require()
        moves = KeyMigration(self.client, layout, app="app", handler="handle")
        return bool(moves.import_keys(range(layout.count)) + moves.drain(range(layout.count)))

    def drain(self) -> None:
        for _ in range(4 + len(self.streams)):
            self.batch(1_000)
            while self.move() or self.catch_up():
                pass

    def _task(self) -> PartitionTask:
        return task_of(Job(handler=self.handler, url=self.client.url, token=self.token), self.client, retried=False)

    def check(self) -> None:
        found: dict[str, list[int]] = defaultdict(list)
        for _, (_, key, _, n) in self.client.execute("XRANGE", "out", "-", "+"):
            found[key.decode()].append(int(n))
        assert dict(found) == {key: list(range(1, last + 1)) for key, last in self.sent.items()}
        assert [
            self.client.execute("XLEN", HandlerKeys("app", "handle", stream).dead_letters) for stream in self.streams
        ] == [0] * len(self.streams)


@pytest.fixture
def pipeline(client: Client) -> Pipeline:
    return Pipeline(client)


@pytest.mark.parametrize("seed", range(5))
def test_migrating_keys_keep_their_order_and_state_whatever_dies_meanwhile(pipeline: Pipeline, seed: int) -> None:
    chance = random.Random(seed)
    for step in range(60):
        if step in (15, 35):
            pipeline.partitions.grow(2 + step // 7)
        match chance.randrange(7):
            case 0 | 1:
                pipeline.publish("".join(chance.choices(string.ascii_letters, k=20)))
            case 2 | 3:
                pipeline.batch(chance.choice((2, 8, 50)), dies=chance.random() < 0.3)
            case 4:
                pipeline.catch_up()
            case 5:
                pipeline.move()
            case 6:
                pipeline.begin()
    pipeline.drain()
    pipeline.check()


def test_a_key_that_is_parked_in_its_old_partition_waits_in_the_new_one_as_well(pipeline: Pipeline) -> None:
    pipeline.publish(string.ascii_letters)
    old = pipeline.partitions.require()
    for stream in old.streams:
        for key in string.ascii_letters:
            park(pipeline.client, HandlerKeys("app", "handle", stream), b"k" + key.encode(), "by hand")
    pipeline.batch(100)
    pipeline.partitions.grow(6)
    pipeline.publish(string.ascii_letters)
    pipeline.begin()
    pipeline.drain()
    assert pipeline.client.execute("XLEN", "out") == 0
    for stream in old.streams:
        for key in string.ascii_letters:
            unpark(pipeline.client, HandlerKeys("app", "handle", stream), b"k" + key.encode())
    pipeline.drain()
    pipeline.check()


def test_a_run_is_not_settled_while_migrating_keys_wait_and_no_batch_waits_for_them(
    millstream_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(millstream_url) as client:
        pipeline = Pipeline(client)
        pipeline.publish(string.ascii_letters)
        pipeline.partitions.grow(6)
        pipeline.publish(string.ascii_letters)
        pipeline.begin()
        pipeline.batch(1_000)
        job = Job(handler=pipeline.handler, url=millstream_url, token=pipeline.token)
        catch_up = DeferredJobs(job, None, streams=pipeline.streams, give_up=lambda: False)  # type: ignore[arg-type]
        assert client.execute("XLEN", "out") < 2 * len(string.ascii_letters)
        assert not catch_up.is_finished()
        monkeypatch.setattr("millstream.spark.engine.deferred_jobs.MAX_DEFERRED_ENTRIES", 1)
        catch_up.wait_for_capacity()


def test_streams_without_runnable_keys_are_polled_together_and_seldom(millstream_url: str) -> None:
    with Client(millstream_url) as client:
        pipeline, clock = Pipeline(client), ManualClock()
        streams = [f"s{n}" for n in range(250)]
        pipeline.token = CommitStore(client, app="app", handler="handle").new_token(streams)
        pipeline.store.begin_run(streams)
        for stream in streams:
            client.execute("XADD", stream, "1-0", "k", "A")
            park(client, HandlerKeys("app", "handle", stream), b"kA", "by hand")
        job = Job(handler=pipeline.handler, url=millstream_url, token=pipeline.token)
        catch_up = DeferredJobs(job, None, streams=streams, give_up=lambda: False, clock=clock)  # type: ignore[arg-type]

        def asked() -> int:
            """How many streams were asked for since the last time."""
            found = commands_run(client.execute)["evalsha"]
            client.execute("CONFIG", "RESETSTAT")
            return found

        client.execute("SCRIPT", "LOAD", RUNNABLE_KEYS.text)  # so that each stream takes one call
        asked()
        assert catch_up.run() is None
        assert asked() == 250
        assert catch_up.run() is None
        catch_up.wait_for_capacity()
        assert asked() == 0
        catch_up.add_streams(["s3"])
        assert catch_up.run() is None
        assert asked() == 1
        assert catch_up.is_finished()
        assert asked() == 250, "the end is not told from what was seen before"
        clock.now_ms += 1_000.0
        unpark(client, HandlerKeys("app", "handle", "s7"), b"kA")
        asked()
        assert catch_up.run() is None
        assert asked() == 250, "what a person does is seen without being told of"
        assert len(catch_up.streams()) == 249
