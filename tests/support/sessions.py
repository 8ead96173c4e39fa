"""The Spark session that all tests of one process share, and the end of the Java behind it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from millstream.spark.run.session import close_session, open_session
from millstream.spark.versions import end_java, has_java
from tests.support.spark_pythons import VARIABLE, quick_spark_pythons
from tests.support.waiting import FAIL_SAFE_S, eventually


@contextmanager
def shared_session() -> Iterator[SparkSession]:
    """Two cores, tasks that may fail three times, two shuffle partitions, no web page and a quiet log."""
    with quick_spark_pythons():
        spark = open_session("tests", master="local[2,4]", conf={"spark.sql.shuffle.partitions": "2"})
        del os.environ[VARIABLE]  # Java has it; other processes that tests start do without
        yield spark
        _end_session(spark)


def _end_session(spark: SparkSession) -> None:
    """Stop it, and end its Java, which otherwise lives as long as this process."""
    if not has_java():
        return  # it has ended already
    close_session(spark)
    assert end_java(FAIL_SAFE_S) is not None


def await_no_tasks(spark: SparkSession) -> None:
    """Wait until no task runs: what the tasks of a failed run still commit is not for the next test."""
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    eventually(
        lambda: not any(executor.numRunningTasks() for executor in tracker.getExecutorInfos()), "the end of all tasks"
    )
