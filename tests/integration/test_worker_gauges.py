"""Gauges of a worker: how many messages run, for how long, and whether its rate makes it wait."""

import json
import threading
from pathlib import Path

import pytest

from millstream import Message
from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.worker import WorkerPolicy
from tests.support.clocks import LeapClock
from tests.support.commandline import start
from tests.support.processes import end
from tests.support.service_process import get
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import QUICK, double, fill, make, outputs, working

pytestmark = [pytest.mark.worker]

APP = """
import time
from pathlib import Path
from millstream import App, Message

app = App("shop")

@app.handler("orders")
def waits(message: Message) -> None:
    while not Path({file!r}).exists():
        time.sleep(0.01)

@app.handler("orders", rate=1 / 3_600)
def slow(message: Message) -> None: ...
"""


@pytest.mark.parametrize("key", [None, "n"])
def test_the_runs_that_have_not_ended_are_counted_with_the_time_of_the_longest(client: Client, key: str | None) -> None:
    release, clock, recorder = threading.Event(), LeapClock(), Recorder()

    def handle(message: Message) -> None:
        release.wait(FAIL_SAFE_S)

    def value(gauge: m.Metric) -> float:
        return recorder.value(gauge, handler="app.handle")

    fill(client, 5)
    policy = WorkerPolicy(
        block_ms=QUICK.block_ms, claim_ms=QUICK.claim_ms, sweep_ms=QUICK.sweep_ms, stop_ms=QUICK.stop_ms, threads=3
    )
    handler = make(handle, into=None, key=key, time_limit_ms=86_400_000)
    with working(client, handler, policy=policy, metrics=recorder, clock=clock):
        assert value(m.RUNNING_LIMIT) == 3
        eventually(lambda: value(m.RUNNING) >= 1, "a run")
        clock.leap(30_000)
        eventually(lambda: value(m.LONGEST_RUN) >= 30, "the time of the longest run")
        assert value(m.RUNNING) <= 3
        assert value(m.WAITING_FOR_RATE) == 0
        release.set()
        eventually(lambda: value(m.RUNNING) == value(m.LONGEST_RUN) == 0, "the end of all runs")


def test_the_limit_is_that_of_the_kind_of_handler(client: Client) -> None:
    async def one(message: Message) -> None:
        """Do nothing."""

    def many(messages: list[Message]) -> None:
        """Do nothing."""

    for handler, limit in (
        (make(one, into=None, concurrency=7), 7),
        (make(many, into=None, batch_size=10), 160),
    ):
        recorder = Recorder()
        with working(client, handler, metrics=recorder):
            assert recorder.value(m.RUNNING_LIMIT, handler="app.handle") == limit


@pytest.mark.parametrize("options", [{}, {"key": "n"}])
def test_a_handler_that_waits_for_its_rate_says_so(client: Client, options: dict[str, str]) -> None:
    fill(client, 3)
    recorder = Recorder()
    with working(client, make(double, rate=1 / 3_600, **options), metrics=recorder):
        eventually(lambda: outputs(client) == [0], "the first output")
        eventually(lambda: recorder.value(m.WAITING_FOR_RATE, handler="app.handle") == 1, "that it waits")


@pytest.mark.parametrize("options", [{}, {"key": "n"}])
def test_a_handler_below_its_rate_does_not_say_so(client: Client, options: dict[str, str]) -> None:
    fill(client, 3)
    recorder = Recorder()
    with working(client, make(double, rate=1_000_000, **options), metrics=recorder):
        eventually(lambda: len(outputs(client)) == 3, "the outputs")
        eventually(lambda: recorder.value(m.WAITING_FOR_RATE, handler="app.handle") == 0, "that it does not wait")


def test_a_worker_process_serves_them_from_its_start_on(client: Client, tmp_path: Path) -> None:
    app, released = tmp_path / "gauges_app.py", tmp_path / "released"
    app.write_text(APP.format(file=str(released)))
    worker = start(
        "worker", str(app), "--name", "w", "--metrics-address", "0", "--threads", "2", "--json", url=client.url
    )
    try:
        assert worker.stdout is not None
        url = json.loads(worker.stdout.readline())["metrics"]

        def value(name: str, handler: str) -> float | None:
            found = [
                one
                for one in get(url).text.splitlines()
                if one.startswith(f'millstream_{name}{{handler="shop.{handler}"')
            ]
            return float(found[0].rpartition(" ")[2]) if found else None

        for handler in ("waits", "slow"):
            eventually(lambda: value("messages_running_limit", handler) == 2, "its limit")  # noqa: B023 - at once
            for name in ("messages_running", "longest_run_seconds", "waiting_for_rate"):
                assert value(name, handler) == 0
        client.pipeline([("XADD", "orders", "*", "n", n) for n in range(5)])
        eventually(lambda: (value("longest_run_seconds", "waits") or 0) > 0, "a run")
        eventually(lambda: value("waiting_for_rate", "slow") == 1, "that it waits for its rate")
        assert value("waiting_for_rate", "waits") == 0
        released.touch()
        eventually(lambda: value("messages_running", "waits") == 0, "the end of the runs")
    finally:
        end(worker)
        for pipe in (worker.stdout, worker.stderr):
            assert pipe is not None
            pipe.close()
