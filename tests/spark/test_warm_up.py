"""The warm-up of a run: it runs the plan of a batch in Python workers."""

import logging
import threading
from typing import cast

import pytest
from pyspark.sql import SparkSession

from millstream.spark.run.warm_up import start_warm_up
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.spark]


def test_a_warm_up_that_fails_raises_nothing_and_logs_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    caplog.set_level(logging.DEBUG, "millstream")
    start_warm_up(cast(SparkSession, None)).join(FAIL_SAFE_S)  # as PySpark has none in the middle of a stop
    assert raised == []
    (message,) = caplog.messages
    assert "the warm-up of Spark has failed" in message
    assert "\n" not in message


def test_a_warm_up_runs_its_job_to_the_end(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "millstream")
    tracker = spark.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup(None))
    start_warm_up(spark).join(FAIL_SAFE_S)
    jobs = [tracker.getJobInfo(number) for number in set(tracker.getJobIdsForGroup(None)) - before]
    assert jobs
    assert "warm-up" not in caplog.text
    assert {job.status for job in jobs if job is not None} == {"SUCCEEDED"}
