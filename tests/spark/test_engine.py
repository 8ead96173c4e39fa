"""The handler engine on real Spark: what a pipeline promises, run after run."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millstream import App, Message, Reject, Retry, State
from millstream.delivery.commit_store import CommitStore
from millstream.errors import ConfigError, PipelineFailed
from millstream.redis_client.key_names import REDRIVE_FIELD, HandlerKeys
from millstream.redis_client.replies import mapping_of
from millstream.spark.engine.micro_batch import Shuffle, Tasks
from millstream.spark.engine.task import Job
from millstream.spark.key_blocks import SORT_COLUMNS, bucket_count, read_chunks
from millstream.spark.run.warm_up import unchanged
from millstream.spark.source.block_maker import BlockMaker
from millstream.spark.source.options import Columns
from millstream.spark.source.partition_reader import _BATCH_ROWS
from millstream.spark.source.schema import default_schema
from millstream.spark.versions import ArrowFunction
from tests.support.calls import calls_of
from tests.support.pipelines import Pipelines
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]


@dataclass
class Step:
    """One message of these tests."""

    key: str
    n: int
    fail: int = 0


def counting_app(**options: Any) -> App:
    """Counts the messages of each key; rejects negative numbers."""
    app = App("app")

    @app.handler("in", **{"key": "key", "into": "out", "retry": Retry(attempts=3, delay_ms=5), **options})
    def count(step: Step, message: Message, state: State) -> dict[str, object]:
        if step.n < 0:
            raise Reject("negative")
        state["count"] = state.get("count", 0) + 1
        if message.attempt <= step.fail:
            raise RuntimeError("not yet")
        return {"key": step.key, "n": step.n, "count": state["count"]}

    return app


def steps(count: int, *, keys: int = 10, start: int = 0) -> list[dict[str, object]]:
    return [{"key": f"k{n % keys}", "n": n} for n in range(start, start + count)]


def numbers(pipelines: Pipelines, key: str, stream: str = "out") -> list[int]:
    return [int(fields["n"]) for _, fields in pipelines.entries(stream) if fields["key"] == key]


def test_messages_run_in_order_per_key_with_state_over_batches_and_restarts(pipelines: Pipelines) -> None:
    app = counting_app()
    pipelines.add("in", *steps(300))
    pipelines.once(app, max_per_batch=120)
    pipelines.add("in", *steps(300, start=300))
    pipelines.once(app, max_per_batch=120)
    for key in range(10):
        assert numbers(pipelines, f"k{key}") == list(range(key, 600, 10))
        assert pipelines.state("app", "count", "in", f"k{key}") == {"count": 60}
    assert pipelines.meta("app", "count", "in")["committed"] == "600"
    batches = [event for event in pipelines.events if event["event"] == "batch"]
    assert max(batch["messages"] for batch in batches) <= 120
    assert sum(batch["committed"] for batch in batches) == 600


def test_a_key_stays_in_order_over_the_blocks_of_several_tasks(pipelines: Pipelines) -> None:
    app = App("app")

    @app.handler("in", key="key")
    def follow(step: Step, state: State) -> None:
        state["broken"] = state.get("broken", 0) + (step.n != state.get("last", step.n - 5) + 5)
        state["last"] = step.n

    count = 3 * _BATCH_ROWS
    pipelines.add("in", *steps(count, keys=5))
    pipelines.once(app, max_per_batch=count)
    assert [event["messages"] for event in pipelines.events_named("batch")] == [count]
    for key in range(5):
        assert pipelines.state("app", "follow", "in", f"k{key}") == {"broken": 0, "last": count - 5 + key}


def blocks(pipelines: Pipelines, *batches: pa.RecordBatch) -> DataFrame:
    """One partition with the blocks of these batches, in this order."""
    rows = [row for batch in batches for row in batch.to_pylist()]
    return pipelines.spark.createDataFrame(rows, default_schema(Columns(packed=True))).coalesce(1)


@pytest.mark.parametrize("partitions", [1, 2, 7, 30])
def test_each_partition_gets_its_share_of_the_buckets(pipelines: Pipelines, partitions: int) -> None:
    buckets = bucket_count(partitions)
    entries = [(b"%d-0" % n, [b"k", b"%d" % n]) for n in range(1, 50 * buckets)]
    frame = blocks(pipelines, BlockMaker(b"k", buckets)([("in", entries)]))
    assert frame.count() == buckets
    found = Counter(row[0] for row in Shuffle()(frame, partitions).select(F.spark_partition_id()).collect())
    assert sum(found.values()) == buckets
    assert (len(found), max(found.values())) == (partitions, math.ceil(buckets / partitions))


def test_a_shuffle_to_many_partitions_takes_no_more_calls_of_the_jvm_than_one_to_few(pipelines: Pipelines) -> None:
    frame = blocks(pipelines, BlockMaker(b"k", 2)([("in", [(b"1-0", [b"k", b"a"])])]))
    shuffle, made = Shuffle(), []
    for count in (2, 100):
        shuffle(frame, count)  # the first one asks Spark where it moves which number
        made.append(calls_of(partial(shuffle, frame, count)).count("send_command"))
    assert made[0] == made[1]


def test_the_plans_of_later_batches_take_a_fifth_of_the_calls_of_the_jvm(pipelines: Pipelines) -> None:
    frame = blocks(pipelines, BlockMaker(b"k", 2)([("in", [(b"1-0", [b"k", b"a"])])]))
    shuffle, function = Shuffle(), ArrowFunction(unchanged, frame.columns, frame.schema)

    def plan_anew() -> None:
        texts = [F.col(name) for name in SORT_COLUMNS]
        frame.repartition(2, F.expr("bucket")).sortWithinPartitions(*texts).mapInArrow(unchanged, frame.schema)

    def plan() -> None:
        function.on(shuffle(frame, 2))

    plan()
    assert 5 * calls_of(plan).count("send_command") <= calls_of(plan_anew).count("send_command")


def test_a_kept_function_runs_on_frames_of_other_batches(pipelines: Pipelines) -> None:
    make = BlockMaker(b"k", 2)
    frames = [blocks(pipelines, make([("in", [(b"%d-0" % n, [b"k", b"a"])])])) for n in (1, 2)]
    function = ArrowFunction(unchanged, frames[0].columns, frames[0].schema)
    assert [function.on(frame).collect() for frame in frames] == [frame.collect() for frame in frames]


def test_the_tasks_of_another_job_run_its_handler(pipelines: Pipelines) -> None:
    def job_of(output: str) -> Job:
        app = App("app")

        @app.handler("in", key="k", into=output)
        def copy(message: Message) -> dict[str, Any]:
            return {"n": message.id}

        return Job(handler=app.handlers["copy"], url=pipelines.url, token=token)

    store = CommitStore(pipelines.client, app="app", handler="copy")
    token = store.new_token(["in"])
    store.with_token(token).begin_run(["in"])
    make, tasks = BlockMaker(b"k", 2), Tasks()
    first, second = job_of("a"), job_of("b")
    calls = []
    for n, job in enumerate((first, first, second, first), 1):
        frame = blocks(pipelines, make([("in", [(b"%d-0" % n, [b"k", b"a"])])]))
        calls.append(calls_of(partial(tasks.run, job, frame)).count("send_command"))
    assert [fields["n"] for _, fields in pipelines.entries("a")] == ["1-0", "2-0", "4-0"]
    assert [fields["n"] for _, fields in pipelines.entries("b")] == ["3-0"]
    assert 2 * calls[1] <= calls[0], "the function was made anew"


def test_blocks_that_a_partition_gets_in_any_order_are_sorted(pipelines: Pipelines) -> None:
    make = BlockMaker(b"k", 64)
    ids = [f"{n}-0" for n in (1, 9, 10, 99, 100, 1_000)]
    backwards = [make([("in", [(one.encode(), [b"k", b"a"])])]) for one in reversed(ids)]
    (chunk,) = read_chunks(Shuffle()(blocks(pipelines, *backwards), 2).toArrow().to_batches())
    assert chunk.messages["in", b"a"][::2] == [one.encode() for one in ids]


@pytest.mark.parametrize("key", ["k", lambda message: message.fields.get("k", "")], ids=["field", "function"])
def test_messages_without_a_key_count_as_read_up_to_the_last_one(pipelines: Pipelines, key: Any) -> None:
    app = App("app")

    @app.handler("in", key=key, into="out", missing_key="unordered")
    def copy(message: Message) -> dict[str, Any]:
        return {"n": message.fields["n"]}

    ids = pipelines.add("in", *({"n": n, **({"k": "a"} if n % 9 == 8 else {})} for n in range(60)))
    pipelines.once(app)
    assert pipelines.meta("app", "copy", "in")["committed_id"] == ids[-1]
    with pipelines.running(app) as background:
        eventually(lambda: background.supervisor.lag() == 0, "no lag")
    assert len(pipelines.entries("out")) == 60
    assert sum(event["messages"] for event in pipelines.events_named("batch")) == 60


def test_a_failing_message_keeps_its_place_and_dies_after_its_last_attempt(pipelines: Pipelines) -> None:
    pipelines.add("in", {"key": "a", "n": 1, "fail": 2}, {"key": "a", "n": 2, "fail": 9}, {"key": "a", "n": 3})
    pipelines.once(counting_app())
    assert numbers(pipelines, "a") == [1, 3]
    (letter,) = pipelines.dead("app", "count", "in")
    assert (letter.reason, letter.attempts, letter.error) == ("failed", 3, "RuntimeError: not yet")
    assert pipelines.state("app", "count", "in", "a") == {"count": 2}


def test_several_handlers_streams_patterns_and_key_functions_work_side_by_side(pipelines: Pipelines) -> None:
    app = App("app")

    @app.handler("left", "right", key=lambda message: message.text("key", "")[:2], into="pairs")
    def pair(message: Message, state: State) -> dict[str, object]:
        state["n"] = state.get("n", 0) + 1
        return {"stream": message.stream, "key": (message.key or b"").decode(), "n": state["n"]}

    @app.handler(pattern="shard:*", into="merged")
    def merge(step: Step) -> dict[str, object]:
        return {"key": step.key, "n": step.n}

    pipelines.add("left", {"key": "aa1"}, {"key": "aa2"}, {"key": "bb1"}, {"other": "x"})
    pipelines.add("right", {"key": "aa3"})
    for shard in range(5):
        pipelines.add(f"shard:{shard}", *steps(3, start=shard * 3))
    pipelines.once(app)
    found = sorted((f["stream"], f["key"], f["n"]) for _, f in pipelines.entries("pairs"))
    assert found == [("left", "aa", "1"), ("left", "aa", "2"), ("left", "bb", "1"), ("right", "aa", "1")]
    assert [letter.reason for letter in pipelines.dead("app", "pair", "left")] == ["missing-key"]
    assert sorted(int(f["n"]) for _, f in pipelines.entries("merged")) == list(range(15))


def test_async_handlers_run_on_spark(pipelines: Pipelines) -> None:
    app = App("app")

    @app.handler("in", key="key", into="out")
    async def later(step: Step) -> list[dict[str, object]]:
        import asyncio

        await asyncio.sleep(0.001)
        return [{"key": step.key, "n": step.n}]

    pipelines.add("in", *steps(100))
    pipelines.once(app)
    assert numbers(pipelines, "k3") == list(range(3, 100, 10))


def test_a_new_checkpoint_over_commits_is_refused_without_a_choice_of_the_start(pipelines: Pipelines) -> None:
    app = counting_app()
    pipelines.add("in", *steps(20))
    pipelines.once(app)
    with pytest.raises(ConfigError, match="--from-committed to continue there, --reprocess to delete"):
        pipelines.once(app, checkpoint="second")
    pipelines.add("in", *steps(10, start=20))
    pipelines.once(app, checkpoint="second", start="from-committed")
    assert numbers(pipelines, "k0") == [0, 10, 20]
    pipelines.once(app, checkpoint="third", start="reprocess")
    assert numbers(pipelines, "k0") == [0, 10, 20, 0, 10, 20]
    assert pipelines.state("app", "count", "in", "k0") == {"count": 3}
    with pytest.raises(ConfigError, match="needs a new --checkpoint"):
        pipelines.once(app, checkpoint="third", start="reprocess")


def test_a_start_at_the_latest_entry_is_kept_even_without_a_first_batch(pipelines: Pipelines) -> None:
    app = counting_app()
    old = pipelines.add("in", *steps(10))
    runner = pipelines.supervisor(app, start_at="latest", once=True)
    runner.stop()
    runner.run()  # ends before its first batch
    assert pipelines.meta("app", "count", "in")["committed_id"] == old[-1]
    pipelines.add("in", *steps(10, start=10))
    pipelines.once(app, start_at="latest")
    assert sorted(int(fields["n"]) for _, fields in pipelines.entries("out")) == list(range(10, 20))


def test_lost_commits_of_a_first_batch_are_made_again(pipelines: Pipelines) -> None:
    app = counting_app()
    pipelines.add("in", *steps(10))
    pipelines.once(app)
    keys = HandlerKeys("app", "count", "in")
    pipelines.client.execute("DEL", keys.meta, keys.state, "out")
    pipelines.add("in", *steps(10, start=10))
    pipelines.once(app)
    assert sorted(int(fields["n"]) for _, fields in pipelines.entries("out")) == list(range(20))


def test_a_stream_recreated_below_the_committed_offset_stops_the_run_and_is_never_skipped(
    pipelines: Pipelines,
) -> None:
    app = counting_app()
    pipelines.add("in", *steps(10))
    pipelines.once(app)
    pipelines.client.execute("DEL", "in")
    pipelines.client.execute("XADD", "in", "5-1", "key", "a", "n", 1)
    for settings in ({"fail_on_data_loss": False}, {"checkpoint": "second", "start": "from-committed"}):
        with pytest.raises(PipelineFailed, match=r"recreated with ids below .* --reprocess"):
            pipelines.once(app, **settings)
    pipelines.once(app, checkpoint="third", start="reprocess")
    assert numbers(pipelines, "a") == [1]


def test_a_run_that_a_newer_one_has_replaced_stops_with_a_clear_error(pipelines: Pipelines) -> None:
    app = counting_app()
    pipelines.add("in", *steps(10))
    with pipelines.running(app, fails=True) as background:
        eventually(lambda: len(pipelines.entries("out")) == 10, "the first ten")
        newer = CommitStore(pipelines.client, app="app", handler="count", token=9_000_000_000_000_000)
        newer.begin_run(["in"])
        pipelines.add("in", *steps(10, start=10))
        eventually(lambda: not background.is_alive(), "the end of the older run")
    assert isinstance(background.error, PipelineFailed)
    assert "a newer run of app.count has taken over" in str(background.error)
    assert len(pipelines.entries("out")) == 10


def test_lost_commits_are_made_again(pipelines: Pipelines) -> None:
    app = counting_app()
    ids = pipelines.add("in", *steps(30, keys=1))
    pipelines.once(app)
    keys = HandlerKeys("app", "count", "in")
    # As after the loss of the last second: state, outputs and committed_id are those of the tenth message.
    pipelines.client.execute("HSET", keys.meta, "committed_id", ids[9])
    pipelines.client.execute("HSET", keys.state, "k0", b"\x81\xa5count\x0a")
    outputs = pipelines.client.execute("XRANGE", "out", "-", "+")
    pipelines.client.execute("XDEL", "out", *(entry_id for entry_id, _ in outputs[10:]))
    pipelines.add("in", {"key": "k0", "n": 30})
    pipelines.once(app)
    assert numbers(pipelines, "k0") == list(range(31))
    assert pipelines.state("app", "count", "in", "k0") == {"count": 31}


def test_trimmed_entries_stop_the_run_or_are_skipped_on_request(pipelines: Pipelines) -> None:
    app = counting_app()
    pipelines.add("in", *steps(10))
    pipelines.once(app)
    pipelines.add("in", *steps(10, start=10))
    pipelines.client.execute("XTRIM", "in", "MAXLEN", 4)
    with pytest.raises(PipelineFailed, match=r"app\.count stopped: .*6 "):
        pipelines.once(app)
    pipelines.once(app, fail_on_data_loss=False)
    assert pipelines.meta("app", "count", "in")["committed"] == "14"


def test_progress_is_shown_in_a_group_that_any_redis_tool_can_read(pipelines: Pipelines) -> None:
    pipelines.add("in", *steps(10))
    pipelines.once(counting_app())
    (group,) = pipelines.client.execute("XINFO", "GROUPS", "in")
    shown = mapping_of(group)
    assert shown[b"name"] == b"millstream:app.count"
    assert shown[b"last-delivered-id"].decode() == pipelines.meta("app", "count", "in")["committed_id"]
    assert (shown[b"lag"], shown[b"pending"]) == (0, 0)


def test_key_offsets_are_removed_when_all_is_committed_so_that_idle_keys_cost_nothing(pipelines: Pipelines) -> None:
    app = App("app")

    @app.handler("in", key="key")
    def ignore(step: Step) -> None: ...

    pipelines.add("in", *steps(2000, keys=2000))
    pipelines.once(app)
    keys = HandlerKeys("app", "ignore", "in")
    assert pipelines.client.execute("EXISTS", keys.offsets, keys.state, keys.crashes, keys.dead_letters) == 0


def test_a_redriven_entry_goes_to_its_handler_alone_even_with_a_key_function(pipelines: Pipelines) -> None:
    app = App("app")
    for name in ("first", "second"):

        def handle(message: Message) -> dict[str, object]:
            return {"key": (message.key or b"").decode(), "n": len(message.pairs)}

        app.handler("in", name=name, key=lambda message: message.text("key"), into=f"out.{name}")(handle)
    pipelines.add("in", [REDRIVE_FIELD, "app.second", "key", "a", "n", 1])
    pipelines.once(app)
    assert pipelines.entries("out.first") == []
    assert [fields for _, fields in pipelines.entries("out.second")] == [{"key": "a", "n": "4"}]


def test_a_wrong_type_at_the_streams_key_stops_the_run_with_a_clear_error(pipelines: Pipelines) -> None:
    pipelines.client.execute("SET", "in", "not a stream")
    with pytest.raises(PipelineFailed, match=r"app\.count stopped: the key 'in' holds another type"):
        pipelines.once(counting_app())
    pipelines.client.execute("DEL", "in")
    pipelines.add("in", *steps(10))
    pipelines.once(counting_app())
    assert len(pipelines.entries("out")) == 10


def test_the_last_event_names_the_parked_keys_and_every_event_counts_its_outcomes(pipelines: Pipelines) -> None:
    app = counting_app(retry=Retry(attempts=2, delay_ms=5, then="park"))
    pipelines.add("in", *({"key": "bad", "n": n, "fail": 9} for n in range(3)), *steps(20), {"key": "k0", "n": -1})
    pipelines.once(app)
    assert pipelines.events[-1] == {"event": "stopped", "parked": {"count": {"keys": 1, "messages": 3}}}
    assert sum(event.get("committed", 0) for event in pipelines.events) == 21
    assert sum(event.get("dead", 0) for event in pipelines.events) == 1
