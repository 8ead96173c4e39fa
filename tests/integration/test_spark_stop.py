"""A run on Spark that is stopped while Redis is unavailable, without Spark: nothing goes on retrying."""

import threading
from collections.abc import Callable

import pytest

from millstream import App
from millstream.clock import SYSTEM_CLOCK
from millstream.errors import Unavailable
from millstream.observability.failure_log import FailureLog
from millstream.redis_client.client import Client
from millstream.spark.engine.deferred_jobs import DeferredJobs
from millstream.spark.engine.micro_batch import Engine
from millstream.spark.engine.run_breaker import Rows, RunBreaker
from millstream.spark.engine.task import Job
from millstream.spark.run.query import RunContext, RunSettings
from tests.support.task_fixtures import only

pytestmark = [pytest.mark.spark]

NOWHERE = "redis://127.0.0.1:1"
JOB = Job(handler=only(App("app"), lambda message: None, name="handle", key="k"), url=NOWHERE, token=1)


def deferred_jobs(*streams: str, ended: threading.Event) -> DeferredJobs:
    return DeferredJobs(JOB, None, streams=streams, give_up=ended.is_set)  # type: ignore[arg-type]


def test_a_run_to_the_end_can_be_stopped_while_it_asks_for_deferred_keys() -> None:
    stopping, ended = threading.Event(), threading.Event()
    with Client(NOWHERE) as client:
        context = RunContext(
            spark=None,  # type: ignore[arg-type]
            settings=RunSettings(url=NOWHERE, checkpoint="none", once=True),
            client=client,
            clock=SYSTEM_CLOCK,
            stopping=stopping,
            ended=ended,
            on_event=lambda event: None,
        )
        stopping.set()
        with pytest.raises(Unavailable):
            context.retry_while_unavailable(deferred_jobs("in", ended=ended).is_finished, "app.handle")
    assert not ended.is_set(), "the run ends only once this call has ended"


class FinishedTasks(RunBreaker):
    """Stands for Spark: the tasks of each batch have ended."""

    def run(self, run_tasks: Callable[[Job], Rows]) -> Rows:
        return [{"stream": "in", "last_id": "1-0", "has_queues": False}]


def test_a_batch_whose_tasks_have_ended_gives_up_its_commit_once_the_run_has_ended() -> None:
    ended = threading.Event()
    with Client(NOWHERE) as client:
        engine = Engine(
            JOB,
            on_batch=lambda totals: None,
            deferred_jobs=deferred_jobs(ended=ended),
            failures=FailureLog(JOB.handler),
            breaker=FinishedTasks(JOB, client, streams=lambda: ["in"], give_up=ended.is_set),
            give_up=ended.is_set,
        )
        ended.set()
        with pytest.raises(Unavailable):
            engine(None, 0)  # type: ignore[arg-type]
