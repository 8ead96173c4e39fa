"""Stages: ordinary PySpark beside the handlers of an app, started, watched and started again as they are."""

import copy
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from examples import sales
from millstream import App, Rows, State, load_app
from millstream.errors import ConfigError, PipelineFailed
from millstream.redis_client.key_names import stage_group
from millstream.redis_client.replies import mapping_of
from millstream.spark.run.liveness import begin_run
from millstream.spark.run.stage_query import StageQuery
from millstream.spark.run.supervisor import RunSettings, Supervisor
from tests.support.pipelines import Pipelines
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]


@dataclass
class Order:
    """What is ordered."""

    order: str
    customer: str
    amount: int
    at: str


PAYMENTS = Rows("payments", "order string, paid double, at timestamp")


def shop(folder: Path, *, version: int) -> App:
    """A handler, a stage on what it reads and one on what it writes; version 2 says more in what it writes."""
    app = App("shop")

    @app.handler("orders", key="customer", into="totals")
    def total(order: Order, state: State) -> dict[str, object]:
        state["sum"] = state.get("sum", 0) + order.amount
        return {"order": order.order, "sum": state["sum"], "at": order.at, "version": version}

    @app.stage(Rows("orders", Order), into="minutes")
    def per_minute(orders: DataFrame) -> DataFrame:
        orders = orders.withColumn("at", F.to_timestamp("at")).withWatermark("at", "1 minute")
        found = orders.groupBy(F.window("at", "1 minute")).agg(
            F.count("*").alias("orders"), F.sum("amount").alias("sum")
        )
        return found.select(F.col("window.start").alias("minute"), "orders", "sum", F.lit(version).alias("version"))

    @app.stage(Rows(total, "order string, sum long, version int, at timestamp"), PAYMENTS)
    def matched(totals: DataFrame, payments: DataFrame) -> DataStreamWriter:
        totals = totals.withColumnRenamed("at", "ordered").withWatermark("ordered", "1 hour")
        payments = payments.withColumnRenamed("order", "pays").withWatermark("at", "1 hour")
        paired = F.expr("order = pays and at between ordered and ordered + interval 1 hour")
        return totals.join(payments, paired).writeStream.format("parquet").option("path", str(folder / "matched"))

    return app


def order(number: int, minute: int) -> dict[str, object]:
    return {
        "order": f"o{number}",
        "customer": f"c{number % 3}",
        "amount": number,
        "at": f"2026-01-01T12:{minute:02}:30Z",
    }


def test_stages_branch_beside_a_handler_and_keep_their_state_through_an_upgrade(pipelines: Pipelines) -> None:
    folder, spark = pipelines.folder, pipelines.spark
    pipelines.add("orders", *(order(n, n // 4) for n in range(10)))  # minutes 0, 1 and half of 2
    pipelines.once(shop(folder, version=1))
    pipelines.add("orders", *(order(n, n // 4) for n in range(10, 40)))  # the rest of minute 2, and up to 9
    pipelines.add("payments", *({"order": f"o{n}", "paid": n, "at": "2026-01-01T12:20:00Z"} for n in range(0, 40, 2)))
    pipelines.once(shop(folder, version=2))

    minutes = {fields["minute"]: fields for _, fields in pipelines.entries("minutes")}
    assert len(minutes) == len(pipelines.entries("minutes")) >= 8, "a window is closed once"
    assert minutes["2026-01-01T12:02:00+00:00"] | {"version": "?"} == {
        "minute": "2026-01-01T12:02:00+00:00",
        "orders": "4",
        "sum": str(8 + 9 + 10 + 11),
        "version": "?",
    }

    # The handler's outputs may come just after the stage has polled for them the last time.
    pipelines.once(shop(folder, version=2).only(["matched"]))
    rows = spark.read.parquet(str(folder / "matched")).collect()
    assert sorted((row["order"], row["sum"], row["paid"], row["version"]) for row in rows) == sorted(
        (f"o{n}", sum(range(n % 3, n + 1, 3)), float(n), 1 if n < 10 else 2) for n in range(0, 40, 2)
    )
    batches = [event for event in pipelines.events if event["event"] == "batch" and event.get("stage") == "matched"]
    assert sum(batch["messages"] for batch in batches) == 40 + 20


def test_a_stage_that_fails_is_restarted_and_stops_with_the_rest(pipelines: Pipelines, tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    made: list[DataFrame] = []

    def fragile(n):  # type: ignore[no-untyped-def]  # Spark makes of some annotations what they do not mean
        if n == 7 and not mended.exists():
            raise ValueError("seven")
        return n

    app = App("app")

    @app.stage(Rows("in", "n int", options={"maxOffsetsPerTrigger": 5}), into="out")
    def copy(rows: DataFrame) -> DataFrame:
        made.append(rows)
        if len(made) == 2:
            raise ConnectionError("the table is away")
        return rows.select(F.udf(fragile, "int")("n").alias("n"))

    pipelines.add("in", *({"n": n} for n in range(10)), {"millstream.redrive": "app.other", "n": 3})
    began_ms = time.time_ns() // 1_000_000
    with pipelines.running(app) as background:
        eventually(lambda: "ValueError: seven" in [event.get("reason") for event in pipelines.events], "it")
        eventually(lambda: "ValueError: seven" in pipelines.reported("copy").last_failure, "its failure in Redis")
        failed = eventually(lambda: one if (one := pipelines.reported("copy")).failures else None, "their number")
        assert failed is not None
        assert began_ms <= (failed.failing_since_ms or 0) <= time.time() * 1000
        mended.touch()
        eventually(lambda: "the table is away" in str(pipelines.events), "its failure to begin anew")
        eventually(lambda: len(pipelines.entries("out")) == 10, "the rest")
        eventually(lambda: background.supervisor.lag() == 0, "no lag")
        eventually(lambda: (pipelines.reported("copy").batch or 0) >= 1, "its second micro-batch in Redis")
        batch = pipelines.reported("copy")
        assert batch.took_ms
        assert batch.rows is not None
        assert batch.rows_per_s is not None
        assert batch.began_ms
    assert background.error is None
    assert [fields["n"] for _, fields in pipelines.entries("out")] == [str(n) for n in range(10)]
    events = [(event["event"], event.get("stage")) for event in pipelines.events]
    assert events[0] == ("started", "copy")
    assert events[-1] == ("stopped", None)


def test_a_run_of_a_stage_ends_once_a_newer_run_has_taken_over(pipelines: Pipelines) -> None:
    app = App("app")
    app.stage(Rows("in", "n int"), name="copy")(lambda rows: rows.writeStream.format("noop"))
    with pipelines.running(app, fails=True) as background:
        eventually(lambda: pipelines.events_named("started"), "its start")
        begin_run(pipelines.client, "app", ["other"])
        begin_run(pipelines.client, "other", ["copy"])
        pipelines.add("in", {"n": 1})
        eventually(lambda: pipelines.events_named("batch"), "a batch: these are other runs")
        begin_run(pipelines.client, "app", ["copy"])
        eventually(lambda: not background.is_alive(), "its end")
    assert isinstance(background.error, PipelineFailed)
    assert "app.copy stopped: a newer run of it has taken over" in str(background.error)


def test_a_stage_whose_checkpoint_another_run_has_moved_on_is_restarted_once(pipelines: Pipelines) -> None:
    app = App("app")
    app.stage(Rows("in", "n int"), into="out", name="copy")(lambda rows: rows)
    pipelines.add("in", {"n": 1})
    pipelines.once(app)
    (record,) = pipelines.client.execute("KEYS", "millstream:{sink:*}:record")
    pipelines.client.execute("HSET", record, "batch", 7)  # published by a run that was at work when this one read it
    pipelines.add("in", {"n": 2})
    supervisor = pipelines.supervisor(app, once=True)
    with pytest.raises(PipelineFailed, match="batch 1 comes before batch 7"):
        supervisor.run()
    (restart,) = pipelines.events_named("restarting")
    assert "BatchBehind" not in restart["reason"]
    assert [fields["n"] for _, fields in pipelines.entries("out")] == ["1"]

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "restarting":
            pipelines.client.execute("HSET", record, "batch", 0)

    settings = RunSettings(url=pipelines.url, checkpoint=str(pipelines.folder / "checkpoint"), once=True)
    pipelines.client.execute("HSET", record, "batch", 7)
    Supervisor(app, pipelines.spark, settings, on_event=on_event).run()
    assert [fields["n"] for _, fields in pipelines.entries("out")] == ["1", "2"]


def test_a_new_checkpoint_of_a_stage_with_progress_is_refused_without_a_choice_of_the_start(
    pipelines: Pipelines,
) -> None:
    app = App("app")
    app.stage(Rows("in", "n int"), into="out", name="copy")(lambda rows: rows)
    pipelines.add("in", *({"n": n} for n in range(3)))
    pipelines.once(app)
    pipelines.add("in", {"n": 3})
    with pytest.raises(ConfigError, match=r"app\.copy has read 'in' up to .* use --from-committed"):
        pipelines.once(app, checkpoint="new")
    pipelines.once(app, checkpoint="new", start="from-committed")
    assert [fields["n"] for _, fields in pipelines.entries("out")] == ["0", "1", "2", "3"]
    (group,) = pipelines.client.execute("XINFO", "GROUPS", "in")
    about = mapping_of(group)
    assert (about[b"name"], about[b"lag"]) == (stage_group("app", "copy").encode(), 0)
    with pytest.raises(ConfigError, match="needs a new --checkpoint"):
        pipelines.once(app, checkpoint="new", start="reprocess")
    pipelines.once(app, checkpoint="newer", start="reprocess")
    assert len(pipelines.entries("out")) == 8


def test_a_stage_keeps_its_start_even_if_it_has_had_no_batch_yet(pipelines: Pipelines) -> None:
    app = App("app")
    app.stage(Rows("in", "n int"), into="out", name="copy")(lambda rows: rows)
    pipelines.add("in", {"n": 1})
    with pipelines.running(app, start_at="latest") as background:
        eventually(lambda: pipelines.client.execute("XINFO", "GROUPS", "in"), "its place")
        failed = copy.copy(background.supervisor._supervised[0])
        failed.query = None
        assert isinstance(failed, StageQuery)
        assert failed._starting_offsets() == "group", "where it began, also if it is started again"
    pipelines.add("in", {"n": 2})
    pipelines.once(app, start_at="latest")
    assert [fields["n"] for _, fields in pipelines.entries("out")] == ["2"]


REFUSED: list[tuple[Callable[[Any], Any], dict[str, Any], str]] = [
    (lambda rows: None, {}, "returns nothing"),
    (lambda rows: 7, {}, "returns a int"),
    (lambda rows: rows, {}, 'give it into="stream"'),
    (lambda rows: rows.sparkSession.range(3), {"into": "out"}, "is not streaming"),
    (
        lambda rows: rows.writeStream.format("noop").option("checkpointLocation", "/tmp/x").start(),
        {},
        r"without \.start",
    ),
    (lambda rows: rows.select("nowhere"), {"into": "out"}, r"`nowhere`.*test_stages\.py, line"),
    (lambda rows: rows.no_such_method(), {"into": "out"}, r"no_such_method.*test_stages\.py, line"),
    (lambda rows: sys.exit("no rates yet"), {}, r"no rates yet.*test_stages\.py, line"),
]


def test_an_invalid_stage_is_refused_before_anything_runs(pipelines: Pipelines) -> None:
    for function, options, reason in REFUSED:
        app = App("app")
        app.stage(Rows("in", "n int"), name="wrong", **options)(function)
        with pytest.raises(ConfigError, match=reason) as refused:
            pipelines.once(app)
        assert str(refused.value).startswith("app.wrong ")
        assert "\n" not in str(refused.value)
    app = App("app")
    app.stage(Rows("in", options={"maxOffsetPerTrigger": 5}), into="out", name="wrong")(lambda rows: rows)
    with pytest.raises(ConfigError, match=r"app\.wrong .*did you mean 'maxOffsetsPerTrigger'"):
        pipelines.once(app)
    for rows, reason in (
        (Rows("in", "n nonsense"), "(?i)nonsense"),
        (Rows("in", "n array<int>"), "cannot be of type array"),
        (Rows("in", 7), "is not a model"),
    ):
        app = App("app")
        app.stage(rows, into="out", name="wrong")(lambda rows: rows)
        with pytest.raises((ConfigError, PipelineFailed), match=reason):
            pipelines.once(app)
    app = App("app")
    app.stage(Rows("in", "n int"), into="out", name="wrong")(lambda rows: rows.groupBy("n").count())
    with pytest.raises(PipelineFailed, match=r"app\.wrong stopped: .*watermark"):
        pipelines.once(app)
    app = App("app")
    app.stage(Rows("in", "n int"), name="wrong")(
        lambda rows: (
            rows.groupBy("n")
            .count()
            .writeStream.outputMode("update")
            .format("redis-streams")
            .options(url=pipelines.url, stream="out")
        )
    )
    pipelines.client.execute("XADD", "in", "*", "n", 1)
    with pytest.raises(PipelineFailed, match=r"app\.wrong stopped: .*Update mode: use the mode append.*foreachBatch"):
        pipelines.once(app)
    assert not [event for event in pipelines.events if event["event"] in ("batch", "restarting")]


def test_the_stages_of_sales_are_functions_of_frames_that_batches_can_test(spark: SparkSession) -> None:
    app = load_app(f"{Path(__file__).parents[2]}/examples/sales.py:app")
    assert (list(app.handlers), list(app.stages)) == (["total"], ["per_minute", "paid", "archive"])
    at = [datetime(2026, 1, 1, 12, 0, second, tzinfo=UTC) for second in (10, 50)]
    orders = spark.createDataFrame(
        [("o1", "ann", 5.0, at[0]), ("o2", "bob", 7.0, at[1])],
        "order string, customer string, amount double, at timestamp",
    )
    payments = spark.createDataFrame(
        [("o2", 7.0, datetime(2026, 1, 2, tzinfo=UTC))], "order string, paid double, at timestamp"
    )
    assert [tuple(row)[1:] for row in sales.per_minute(orders).collect()] == [(2, 12.0)]
    (row,) = sales.paid(orders, payments).collect()
    assert (row["order"], row["customer"], row["amount"], row["paid"]) == ("o2", "bob", 7.0, 7.0)
