"""Schedules of an app that runs on Spark: a run publishes their firings, and a worker beside it, each once."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream import App, Message
from millstream.producer.schedule_loop import ScheduleLoop
from millstream.redis_client.client import Client
from millstream.spark.run import supervisor as runner
from millstream.worker.process.worker_process import WorkerProcess, WorkerSettings
from tests.support.pipelines import Pipelines
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.spark]

PERIOD_MS = 1_000


class Function:
    """The function of a schedule in one process, which a test may hold up."""

    def __init__(self, by: str) -> None:
        self.is_held = threading.Event()
        self._by = by
        self._free = threading.Event()
        self._free.set()

    def __call__(self) -> dict[str, str]:
        """Return the message of a firing: the process that made it."""
        if not self._free.is_set():
            self.is_held.set()
            self._free.wait(FAIL_SAFE_S)
        return {"by": self._by}

    def hold(self) -> None:
        """Hold up the next call."""
        self._free.clear()

    def release(self) -> None:
        """Let calls return."""
        self._free.set()


def app_with(function: Callable[[], dict[str, str]], handle: Callable[[Message], None]) -> App:
    """A handler for the run and one for the worker, as each engine takes a handler over; and the same schedule."""
    app = App("app")
    app.handler("in", name="on-spark")(handle)
    app.handler("rest", name="on-workers")(handle)
    app.every("1s", stream="ticks", missed="all", name="tick")(function)
    return app


def nothing(message: Message) -> None:
    """A handler."""


def firings(client: Client) -> list[tuple[str, int]]:
    """The process that has published each firing, and when it was due."""
    found = client.execute("XRANGE", "ticks", "-", "+")
    return [(by.decode(), int(firing)) for _, (_, by, _, firing) in found]


def published(client: Client, by: str) -> int:
    return sum(one == by for one, _ in firings(client))


@contextmanager
def working(app: App, url: str) -> Iterator[None]:
    """A worker of the handler that is not for Spark."""
    stopping = threading.Event()
    process = WorkerProcess(app, WorkerSettings(url=url, consumer="w", only=("on-workers",)))
    thread = threading.Thread(target=process.run, args=(stopping,))
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(FAIL_SAFE_S)


def schedule_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "millstream-schedule-tick"]


def test_a_run_that_ends_with_its_messages_and_a_worker_publish_each_firing_once(
    pipelines: Pipelines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each in turn is held up in the middle of a firing, which the other one publishes; both are refused afterwards."""
    monkeypatch.setattr(runner, "_STOP_MS", 100.0)
    by_run, by_worker, gate, client = Function("run"), Function("worker"), tmp_path / "gate", pipelines.client

    def wait(message: Message) -> None:
        while not gate.exists():
            time.sleep(0.02)

    pipelines.add("in", {"n": 1})
    with working(app_with(by_worker, nothing), pipelines.url):
        eventually(lambda: published(client, "worker"), "a firing that the worker has published")
        by_worker.hold()
        eventually(by_worker.is_held.is_set, "a firing of the worker that is held up")
        with pipelines.running(app_with(by_run, wait).only(["on-spark"]), once=True) as run:
            eventually(lambda: published(client, "run") >= 3, "firings of the run", log=lambda: run.error)
            by_run.hold()
            eventually(by_run.is_held.is_set, "a firing of the run that is held up")
            gate.touch()
            eventually(lambda: not run.is_alive(), "the end of the run")
        assert "schedule app.tick: a firing was under way at the stop; another process publishes it" in caplog.text
        so_far = published(client, "worker")
        by_worker.release()
        eventually(lambda: published(client, "worker") >= so_far + 2, "firings of the worker since")
        by_run.release()
    eventually(lambda: not schedule_threads(), "the end of the thread that was held up")
    assert pipelines.meta("app", "on-spark", "in")["committed"] == "1"
    found = [firing for _, firing in firings(client)]
    assert found == list(range(found[0], found[-1] + 1, PERIOD_MS))


def test_an_error_that_ends_the_thread_of_a_schedule_ends_the_run(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(loop: ScheduleLoop) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(ScheduleLoop, "run", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        pipelines.supervisor(app_with(Function("run"), nothing).only(["on-spark"])).run()
