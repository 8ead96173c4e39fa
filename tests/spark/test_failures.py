"""What a query's error means: of a damaged checkpoint, or of something else, in which case it is not for a person yet."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millstream import App, Rows
from millstream.spark.run.failures import Failure, failure_of
from millstream.spark.run.session import prefill_environment
from tests.support.pipelines import Pipelines
from tests.support.sources import Bench
from tests.support.triggers import await_end, start_to_end
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark]


def environment_of(spark: SparkSession) -> Any:
    """The variables of the one Python function that Spark keeps for the data source, in Java."""
    return (
        spark._jsparkSession.sessionState()
        .dataSourceManager()
        .lookupDataSource("redis-streams")
        .dataSourceCls()
        .envVars()
    )


@contextmanager
def miscounted(spark: SparkSession) -> Iterator[Callable[[], None]]:
    """That map counts an entry too many, as when two threads have put the same one; what is given mends it."""
    environment = environment_of(spark)
    prefill_environment(spark)

    def field(of: Any, name: str) -> Any:
        kind = of.getClass()
        while kind is not None:
            for one in kind.getDeclaredFields():
                if one.getName().endswith(name):
                    one.setAccessible(True)
                    return one
            kind = kind.getSuperclass()
        raise AssertionError(f"{of} has no field {name}")

    inner = field(environment, "underlying").get(environment)
    size = field(inner, "contentSize")
    right = size.getInt(inner)
    size.setInt(inner, right + 1)
    try:
        yield lambda: size.setInt(inner, right)
    finally:
        size.setInt(inner, right)


def copies() -> App:
    app = App("app")

    @app.stage(Rows("in", "n string"), into="out")
    def copy(rows: DataFrame) -> DataFrame:
        return rows

    return app


def test_a_run_that_spark_cannot_serialise_for_backs_off_and_retries_whatever_its_checkpoint(
    pipelines: Pipelines,
) -> None:
    pipelines.add("in", {"n": 1})
    pipelines.once(copies())
    pipelines.add("in", {"n": 2})
    with miscounted(pipelines.spark) as mend, pipelines.running(copies()) as run:
        eventually(lambda: len(pipelines.events_named("restarting")) >= 3 or run.error, "three failures")
        mend()
        eventually(lambda: len(pipelines.entries("out")) == 2 or run.error, "the second row")
    assert run.error is None
    for event in pipelines.events_named("restarting"):
        assert "Task not serializable (java.lang.IllegalStateException: Illegal size" in event["reason"]


def test_the_shared_environment_of_queries_is_filled_before_the_first_query(bench: Bench) -> None:
    environment = environment_of(bench.spark)
    for name in list(environment):
        environment.remove(name)
    prefill_environment(bench.spark)
    before = set(environment)
    bench.add("s", 3)
    assert bench.collect(bench.stream("s", startingOffsets="earliest")).numbers == [0, 1, 2]
    assert set(environment) == before, "a query has added to what others share with it"


# --- What is of the checkpoint ---


def emptied(files: list[Path]) -> None:
    for file in files:
        file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
        file.write_text("")


def overwritten(files: list[Path]) -> None:
    for file in files:
        file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
        file.write_bytes(b"\xffnonsense" * 10)


def changed_without_its_checksum(files: list[Path]) -> None:
    for file in files:
        file.write_bytes(b"\xffnonsense" * 10)


def removed(files: list[Path]) -> None:
    for file in files:
        file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
        file.unlink()


def unique(bench: Bench) -> DataFrame:
    """A query with state."""
    return bench.stream("s", startingOffsets="earliest", schema="n string").dropDuplicates(["n"])


def outcome(bench: Bench, frame: DataFrame, checkpoint: str = "checkpoint") -> Failure:
    """How a query on the checkpoint ends."""
    before = len(bench.queries)
    try:
        bench.collect(frame, checkpoint)
    except (PySparkException, Py4JError) as error:
        (query,) = bench.queries[before:] or (None,)  # none, if its start has failed
        ended = query.exception() if query and not query.isActive else None
        return failure_of(ended or error)
    raise AssertionError("it went on")


DAMAGES: list[tuple[str, Callable[[list[Path]], None]]] = [
    ("offsets/0", emptied),
    ("offsets/0", overwritten),
    ("offsets/0", changed_without_its_checksum),
    ("commits/0", overwritten),
    ("state/0/*/1.*delta", removed),
    ("state/0/*/1.*delta", overwritten),
]


def test_damage_that_spark_finds_in_a_checkpoint_is_distinguished_from_other_errors(bench: Bench) -> None:
    bench.add("s", 20)
    bench.collect(unique(bench))
    bench.add("s", 20, start=20)
    for what, damage in DAMAGES:
        damaged = f"{damage.__name__} {what.partition('/')[0]}"  # a folder each: Spark keeps state in memory by folder
        files = list(shutil.copytree(bench.folder / "checkpoint", bench.folder / damaged).glob(what))
        assert files
        damage(files)
        found = outcome(bench, unique(bench), damaged)
        assert found.in_checkpoint, (damaged, found)


def test_an_error_in_a_row_a_batch_or_serialising_does_not_count_as_damage_of_the_checkpoint(
    bench: Bench, pipelines: Pipelines
) -> None:
    bench.add("s", 20)
    bench.collect(unique(bench))
    bench.add("s", 20, start=20)

    def fail(*_: object) -> Any:
        raise ValueError("no")

    def fail_batch(frame: DataFrame, number: int) -> None:
        fail()

    rows = outcome(bench, unique(bench).select(F.udf(fail, "string")("n").alias("n")))
    writer = (
        unique(bench)
        .writeStream.option("checkpointLocation", str(bench.folder / "checkpoint"))
        .foreachBatch(fail_batch)
    )
    query = start_to_end(writer)
    with pytest.raises(PySparkException):
        await_end(query)
    ended = query.exception()
    assert ended is not None
    batch = failure_of(ended)
    with miscounted(bench.spark):
        serialising = outcome(bench, unique(bench))
    for found in (rows, batch, serialising):
        assert not found.in_checkpoint, found
    assert "no" in rows.reason
    assert "no" in batch.reason
