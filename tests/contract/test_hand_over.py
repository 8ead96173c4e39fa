"""An app moves from workers to Spark and back in mid-stream: nothing is lost and nothing takes effect twice."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millstream import App, Message, Reject, Retry, State
from millstream.delivery.commit_store import ENTRY_PREFIX, CommitStore
from millstream.delivery.effects import Effects
from millstream.delivery.reliable_stream import ReliableStream
from millstream.errors import ConfigError, PipelineFailed, StaleOwner
from millstream.handlers.encoding import pack_output
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.spark.run.supervisor import RunSettings, Supervisor
from millstream.testing.history import check_outputs
from millstream.worker import ReadingLoop, WorkerPolicy
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.worker, pytest.mark.keys, pytest.mark.spark]

KEYS = HandlerKeys("app", "handle", "in")
POLICY = WorkerPolicy(block_ms=100, claim_ms=1_000, sweep_ms=100)
PATIENT_POLICY = replace(POLICY, claim_ms=60_000)  # no lease ends because this process stands still
PART = 300
KEY_COUNT = 30
SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
ROUNDS = 3 if SOAK else 2


def handle(message: Message) -> dict[str, Any]:
    """Takes a moment; every seventh message fails at first, every fiftieth is rejected."""
    time.sleep(0.004)
    n = int(message.fields["n"])
    if n % 7 == 0 and message.attempt == 1:
        raise RuntimeError("not yet")
    if n % 50 == 49:
        raise Reject("not this one")
    return {"id": message.id, "fence": message.fence}


def handle_keyed(message: Message, state: State) -> dict[str, Any]:
    """The same for one of 30 keys, whose messages it counts."""
    output = handle(message)
    state["count"] = state.get("count", 0) + 1
    return {**output, "key": message.key or b"", "count": state["count"]}


def app_of_one(*, keyed: bool = False, stream: str = "in") -> App:
    app = App("app")
    options: dict[str, Any] = {"into": "out", "retry": Retry(attempts=3, delay_ms=150), "name": "handle"}
    if keyed:
        app.handler(stream, key=lambda message: int(message.fields["n"]) % KEY_COUNT, **options)(handle_keyed)
    else:
        app.handler(stream, **options)(handle)
    return app


class Bench:
    """One stream, its handler, and both engines; `ids` are the entries published."""

    def __init__(self, client: Client, spark: SparkSession, folder: Path, *, keyed: bool = False) -> None:
        self.keyed = keyed
        self.client = client
        self.spark = spark
        self.folder = folder
        self.ids: list[str] = []

    def publish(self, count: int) -> None:
        first = len(self.ids)
        commands = [("XADD", "in", "*", "n", n) for n in range(first, first + count)]
        self.ids += [entry_id.decode() for entry_id in self.client.pipeline(commands)]

    def done(self) -> int:
        return int(self.client.execute("XLEN", "out")) + int(self.client.execute("XLEN", KEYS.dead_letters))

    def goes_on(self, count: int) -> None:
        """Wait until `count` more messages are done, or all of them."""
        self._reaches(min(self.done() + count, len(self.ids)))

    def ends(self) -> None:
        """Wait until all messages are done."""
        self._reaches(len(self.ids))

    def runs_in_part(self, engine: "Engine", count: int, is_left: Callable[[], bool]) -> None:
        """Run an engine until `count` more messages are done, and stop it in mid-stream; again if it was quicker."""

        def is_stopped_in_mid_stream() -> bool:
            with engine() as running:
                self.goes_on(count)
            assert running.error is None
            if not is_left():
                self.publish(PART)
                return False
            return True

        eventually(is_stopped_in_mid_stream, "an engine that was stopped in mid-stream")

    def is_pending(self) -> bool:
        """Whether workers have read messages that are not done."""
        return self.pending() > 0

    def is_undone(self) -> bool:
        """Whether messages are not done."""
        return self.done() < len(self.ids)

    def _reaches(self, aim: int) -> None:
        eventually(lambda: self.done() >= aim, f"{aim} done", log=self.done)

    @contextmanager
    def worker(self) -> Iterator["Running"]:
        handler = app_of_one(keyed=self.keyed).handlers["handle"]
        loop = ReadingLoop(handler, self.client.url, consumer="w1", policy=POLICY)
        with running(loop.run, lambda: loop.stop(deadline_ms=0)) as thread:
            yield thread

    @contextmanager
    def pipeline(self, checkpoint: str) -> Iterator["Running"]:
        settings = RunSettings(
            url=self.client.url, checkpoint=str(self.folder / checkpoint), max_per_batch=120, start="from-committed"
        )
        runner = Supervisor(app_of_one(keyed=self.keyed), self.spark, settings, on_event=lambda event: None)
        with running(runner.run, runner.stop) as thread:
            yield thread

    def pending(self) -> int:
        return int(self.client.execute("XPENDING", "in", KEYS.group)[0])

    def check(self) -> None:
        """Every entry has had its effect, once."""
        outputs = [(None, pairs[1].decode()) for _, pairs in self.client.execute("XRANGE", "out", "-", "+")]
        letters = self.client.execute("XRANGE", KEYS.dead_letters, "-", "+")
        dead = [pairs[pairs.index(b"id") + 1].decode() for _, pairs in letters]
        check_outputs({None: self.ids}, outputs, dead).raise_if_bad()
        assert len(dead) == len(self.ids) // 50
        assert self.pending() == 0
        if self.keyed:
            self.check_keys()

    def check_keys(self) -> None:
        """Each key's messages took effect in stream order, each on the state that the one before had left."""
        place = {entry_id: n for n, entry_id in enumerate(self.ids)}
        last: dict[bytes, tuple[int, int]] = {}
        for _, (_, entry_id, _, _, _, key, _, count) in self.client.execute("XRANGE", "out", "-", "+"):
            n, before = place[entry_id.decode()], last.get(key, (-1, 0))
            assert n > before[0], f"key {key!r} went back to {n} after {before[0]}"
            assert int(count) == before[1] + 1, f"key {key!r} has count {count!r} after {before[1]}"
            last[key] = (n, int(count))
        assert len(last) == KEY_COUNT


Engine = Callable[[], AbstractContextManager["Running"]]


class Running(threading.Thread):
    """An engine in the background; `error` is what ended it."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - returned to the test
            self.error = error


@contextmanager
def running(work: Callable[[], object], stop: Callable[[], None]) -> Iterator[Running]:
    thread = Running(work)
    thread.start()
    try:
        yield thread
    finally:
        stop()
        thread.join(FAIL_SAFE_S)
    assert not thread.is_alive()


@pytest.fixture
def bench(millstream_url: str, spark: SparkSession, tmp_path: Path) -> Iterator[Bench]:
    with Client(millstream_url) as client:
        yield Bench(client, spark, tmp_path)


def test_an_app_with_keys_moves_between_the_engines_in_mid_stream_and_keeps_order_and_state(
    client: Client, spark: SparkSession, tmp_path: Path
) -> None:
    client.execute("FLUSHALL")
    bench = Bench(client, spark, tmp_path, keyed=True)
    for _ in range(2):
        bench.publish(PART)
        bench.runs_in_part(bench.worker, 60, bench.is_pending)
        bench.runs_in_part(partial(bench.pipeline, "same"), 80, bench.is_undone)
    with bench.worker():
        bench.ends()
    bench.check()


def test_both_engines_run_an_app_at_once_on_different_streams_with_one_output(
    client: Client, spark: SparkSession, tmp_path: Path
) -> None:
    client.execute("FLUSHALL")
    streams = {
        name: [f"{which}-{n + 1}" for n in range(200)] for which, name in enumerate(("for-spark", "for-workers"))
    }
    for name, ids in streams.items():
        client.pipeline([("XADD", name, one, "n", n) for n, one in enumerate(ids)])
    apps = {name: app_of_one(keyed=True, stream=name) for name in streams}
    loop = ReadingLoop(apps["for-workers"].handlers["handle"], client.url, consumer="w1", policy=PATIENT_POLICY)
    settings = RunSettings(url=client.url, checkpoint=str(tmp_path / "one"), max_per_batch=50)
    runner = Supervisor(apps["for-spark"], spark, settings, on_event=lambda event: None)
    letters_of = [HandlerKeys("app", "handle", name).dead_letters for name in streams]

    def is_done() -> bool:
        return client.execute("XLEN", "out") >= 2 * 196 and all(client.execute("XLEN", one) >= 4 for one in letters_of)

    with running(loop.run, loop.stop) as worker, running(runner.run, runner.stop) as pipeline:
        eventually(is_done, "all outputs and dead letters", log=lambda: (worker.error, pipeline.error))
    assert (worker.error, pipeline.error) == (None, None)
    outputs = [(pairs[1].decode(), int(pairs[7])) for _, pairs in client.execute("XRANGE", "out", "-", "+")]
    for name, ids in streams.items():
        letters = client.execute("XRANGE", HandlerKeys("app", "handle", name).dead_letters, "-", "+")
        assert sorted(pairs[pairs.index(b"id") + 1].decode() for _, pairs in letters) == sorted(ids[49::50])
        for key in range(KEY_COUNT):
            of_key = [one for n, one in enumerate(ids) if n % KEY_COUNT == key]
            wanted = [one for one in of_key if one not in ids[49::50]]
            assert [pair for pair in outputs if pair[0] in of_key] == [(one, at + 1) for at, one in enumerate(wanted)]


@pytest.mark.parametrize("checkpoints", [("one", "two", "three"), ("same",) * 3], ids=["new", "same"])
def test_an_app_moves_from_workers_to_spark_and_back_in_mid_stream(bench: Bench, checkpoints: tuple[str, ...]) -> None:
    for checkpoint in checkpoints[:ROUNDS]:
        bench.publish(PART)
        bench.runs_in_part(bench.worker, 60, bench.is_pending)
        bench.runs_in_part(partial(bench.pipeline, checkpoint), 80, bench.is_undone)
    with bench.worker():
        bench.ends()
        bench.publish(10)
        bench.ends()
    bench.check()


def test_a_takeover_ends_the_running_engine_with_an_error_and_refuses_its_late_commits(
    bench: Bench,
) -> None:
    bench.publish(2 * PART)
    frozen = ReliableStream(bench.client, "in", app="app", handler="handle", consumer="frozen", into="out")
    frozen.join()
    (late,) = frozen.fetch(count=1)
    with bench.worker() as worker:
        bench.goes_on(50)
        with bench.pipeline("one") as pipeline:
            worker.join(FAIL_SAFE_S)
            assert isinstance(worker.error, StaleOwner)
            unit = frozen.effects_of(late)
            unit.outputs = [pack_output({"id": late.id, "fence": frozen.token})]
            with pytest.raises(StaleOwner, match="taken over"):
                frozen.commit([unit])
            frozen.fetch(count=5)  # as a worker that has not noticed yet
            bench.goes_on(120)
            with bench.worker():
                pipeline.join(FAIL_SAFE_S)
                assert isinstance(pipeline.error, PipelineFailed)
                assert "a newer run of app.handle has taken over" in str(pipeline.error)
                with pytest.raises(StaleOwner, match="taken over"):
                    CommitStore(bench.client, app="app", handler="handle", token=frozen.token).begin_run(["in"])
                bench.ends()
    bench.check()


@pytest.mark.parametrize("newer", ["worker", "pipeline"])
def test_a_takeover_ends_an_idle_pipeline(bench: Bench, newer: str) -> None:
    bench.publish(20)
    with bench.pipeline("one") as pipeline:
        bench.ends()
        with bench.worker() if newer == "worker" else bench.pipeline("two"):
            pipeline.join(FAIL_SAFE_S)
            assert isinstance(pipeline.error, PipelineFailed)
            assert "a newer run of app.handle has taken over" in str(pipeline.error)


def test_a_pipeline_whose_output_key_is_not_a_stream_reads_nothing(bench: Bench) -> None:
    bench.publish(3)
    bench.client.execute("SET", "out", "text")
    settings = RunSettings(url=bench.client.url, checkpoint=str(bench.folder / "new"), once=True)
    with pytest.raises(ConfigError, match=r"app\.handle cannot write its outputs to 'out', which holds a string"):
        Supervisor(app_of_one(), bench.spark, settings, on_event=lambda event: None).run()
    assert not (bench.folder / "new").exists()


def test_a_new_pipeline_on_a_stream_of_workers_is_refused_without_from_committed(bench: Bench) -> None:
    bench.publish(20)
    with bench.worker():
        bench.goes_on(20)
    settings = RunSettings(url=bench.client.url, checkpoint=str(bench.folder / "new"), once=True)
    with pytest.raises(
        ConfigError, match=f"has processed 'in' up to {bench.ids[-1]}.*--from-committed to continue there"
    ):
        Supervisor(app_of_one(), bench.spark, settings, on_event=lambda event: None).run()


# What happens at the seams, step by step, with the ledger in place of a run on Spark


@pytest.fixture
def client(millstream_url: str) -> Iterator[Client]:
    with Client(millstream_url) as connected:
        connected.pipeline([("XADD", "in", f"{n}-0", "n", n) for n in range(1, 6)])
        yield connected


def worker_on(client: Client, consumer: str) -> ReliableStream:
    stream = ReliableStream(client, "in", app="app", handler="handle", consumer=consumer, into="out")
    stream.join()
    return stream


def spark_on(client: Client) -> tuple[CommitStore, EntryId | None]:
    store = CommitStore(client, app="app", handler="handle", into="out")
    store = store.with_token(store.new_token(["in"]))
    return store, store.begin_run(["in"])["in"].committed_id


def unit_of(entry_id: str) -> Effects:
    unit = Effects(ENTRY_PREFIX + entry_id.encode(), b"", first_id=entry_id, last_id=entry_id, message_count=1)
    unit.outputs = [pack_output({"id": entry_id})]
    return unit


def commit_what_is_left(worker: ReliableStream) -> None:
    for delivery in [*worker.claim_idle(), *worker.fetch(count=10)]:
        unit = worker.effects_of(delivery)
        unit.outputs = [pack_output({"id": delivery.id})]
        worker.commit([unit])


def effects(client: Client) -> list[str]:
    return [pairs[1].decode() for _, pairs in client.execute("XRANGE", "out", "-", "+")]


def read_and_die(client: Client) -> None:
    client.execute("XREADGROUP", "GROUP", KEYS.group, "dead", "STREAMS", "in", ">")


def test_entries_that_spark_committed_are_not_processed_again_after_a_dead_worker_read_them(client: Client) -> None:
    spark, _ = spark_on(client)
    spark.commit({"in": [unit_of("2-0"), unit_of("4-0")]})  # and ends in mid-batch
    worker_on(client, "dead")
    read_and_die(client)
    worker = worker_on(client, "w2")
    worker.checkpoint()
    worker.checkpoint()
    commit_what_is_left(worker)
    assert sorted(effects(client)) == ["1-0", "2-0", "3-0", "4-0", "5-0"]


@pytest.mark.parametrize("noted", [False, True])
def test_no_entry_is_processed_twice_after_a_late_spark_run_moves_the_group_back(client: Client, noted: bool) -> None:
    worker = worker_on(client, "w1")
    commit_what_is_left(worker)
    worker.checkpoint()
    client.execute("XGROUP", "SETID", "in", KEYS.group, "1-0")
    if noted:
        read_and_die(client)
        worker.checkpoint()
    spark, committed_id = spark_on(client)
    assert committed_id == EntryId(5, 0)
    spark.advance_committed({"in": EntryId(5, 0)})
    commit_what_is_left(worker_on(client, "w2"))
    assert effects(client) == ["1-0", "2-0", "3-0", "4-0", "5-0"]


def test_entries_that_a_worker_reads_after_spark_took_over_are_committed_by_spark_alone(client: Client) -> None:
    worker_on(client, "w1")
    spark, _ = spark_on(client)
    read_and_die(client)
    spark.commit({"in": [unit_of(f"{n}-0") for n in range(1, 6)]})
    spark.advance_committed({"in": EntryId(5, 0)})
    worker = worker_on(client, "w1")
    assert worker.claim_idle() == []
    _, committed_id = spark_on(client)
    assert committed_id == EntryId(5, 0)
