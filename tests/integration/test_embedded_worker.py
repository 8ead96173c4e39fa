"""A worker inside a program: it starts and stops with the program, and the program ends with it."""

import asyncio
import gc
import os
import random
import signal
import time
from pathlib import Path

import pytest

from millstream import App, Message
from millstream.errors import ConfigError, WrongType
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.worker import EmbeddedWorker
from tests.support.applications import Application, application
from tests.support.counts import check_counts, publish_numbers
from tests.support.waiting import eventually, eventually_async
from tests.support.worker_processes import PrintFigures
from tests.support.workers import QUICK, double, fill, outputs

pytestmark = [pytest.mark.worker]

TARGET = "tests.support.apps.embedded_app:api"
GROUP = HandlerKeys("inside", "copy", "in").group
KILLS = 50 if os.environ.get("MILLSTREAM_SOAK") else 2
PART = 400
"""How many messages of each stream a web server has more to process than at its start before."""


def new_app(*streams: str) -> App:
    app = App("app")
    for stream in streams:
        app.handler(stream, name=f"of-{stream}", into="out")(double)
    return app


def publish(to: Application, **fields: str) -> str:
    answer = to.http.post("/in", json=fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json())


def numbers(client: Client) -> list[int]:
    return sorted(int(pairs[1]) for _, pairs in client.execute("XRANGE", "out", "-", "+"))


# --- In a web server ---


def test_a_web_server_publishes_and_processes_in_one_process_and_stops_in_order(client: Client, tmp_path: Path) -> None:
    with application(TARGET, client.url, tmp_path / "log") as web:
        for n in range(5):
            publish(web, n=str(n))
        publish(web, n="5", do="wait")
        eventually(
            lambda: client.execute("GET", "runs") == str(web.process.pid).encode(), "the run of the last message"
        )
        web.process.send_signal(signal.SIGTERM)
        eventually(lambda: "Waiting for application shutdown" in web.log.read_text(), "the stop", log=web.log.read_text)
        client.execute("SET", "gate", "open")
        assert web.wait() == -signal.SIGTERM, web.log.read_text()
        assert "Application shutdown complete" in web.log.read_text()
    assert numbers(client) == list(range(6)), "the running message was finished"
    assert client.execute("XPENDING", "in", GROUP)[0] == 0
    assert client.execute("XINFO", "CONSUMERS", "in", GROUP) == [], "the worker has left its group"


def test_a_message_that_outlasts_the_stop_is_reported_and_the_next_process_processes_it(
    client: Client, tmp_path: Path
) -> None:
    with application(TARGET, client.url, tmp_path / "log", env={"MILLSTREAM_TEST_STOP_MS": "0"}) as web:
        entry_id = publish(web, n="1", do="wait")
        eventually(lambda: client.execute("GET", "runs"), "the run of the message")
        web.process.send_signal(signal.SIGTERM)
        web.wait()
        assert f"message {entry_id} of in was still running at the stop" in web.log.read_text()
    client.execute("SET", "gate", "open")
    with application(TARGET, client.url, tmp_path / "next"):
        eventually(lambda: numbers(client) == [1], "its output", log=(tmp_path / "next").read_text)


def test_a_worker_that_cannot_continue_ends_its_web_server(client: Client, tmp_path: Path) -> None:
    env = {"MILLSTREAM_TEST_LIMIT_MS": "200", "MILLSTREAM_TEST_STOP_MS": "0"}
    with application(TARGET, client.url, tmp_path / "log", env=env) as web:
        publish(web, n="1", do="hang")
        assert web.wait() == -signal.SIGTERM, web.log.read_text()
        log = web.log.read_text()
    assert "the embedded worker of inside ended: " in log
    assert "millstream.errors.HandlerStuck" in log, "the lifespan raises the cause"
    assert "Application shutdown failed" in log


def test_a_web_server_that_is_killed_at_work_again_and_again_loses_doubles_and_reorders_nothing(
    client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    env = {"MILLSTREAM_TEST_CLAIM_MS": "2000"}
    published, interrupted = 0, 0
    for number in range(KILLS):
        fill(client, PART, first=published)
        publish_numbers(client, "numbers", published, PART)
        published += PART
        before = done(client)
        with application(TARGET, client.url, tmp_path / f"log{number}", env=env) as web:
            eventually(lambda: min(map(int.__sub__, done(client), before)) > 0, "both at work", log=web.log.read_text)  # noqa: B023 - at once
            time.sleep(chance.random() / 3)
            web.process.kill()
            web.wait()
        interrupted += min(done(client)) < published
    with application(TARGET, client.url, tmp_path / "last", env=env) as web:
        what = f"all outputs; seed {seed}"
        eventually(lambda: min(done(client)) >= published, what, log=lambda: (done(client), web.log.read_text()))
    assert numbers(client) == list(range(published))
    check_counts(client, "counts", published)
    print_figures(None, kills=KILLS, at_work=interrupted, messages=2 * published, seed=seed)


def done(client: Client) -> list[int]:
    """How many outputs each handler has."""
    return [int(client.execute("XLEN", stream)) for stream in ("out", "counts")]


# --- In a program of asyncio ---


def test_a_program_processes_within_the_block_and_its_event_loop_goes_on(client: Client) -> None:
    fill(client, 10)

    async def main() -> None:
        async with EmbeddedWorker(new_app("in"), client.url, policy=QUICK):
            await eventually_async(lambda: len(outputs(client)) == 10, "all outputs")

    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    asyncio.run(main())
    assert outputs(client) == list(range(10))
    assert gc.get_threshold() == thresholds, "the garbage is the program's own affair"
    still_frozen = gc.get_freeze_count()  # what was frozen may have been freed meanwhile
    assert (still_frozen <= frozen, still_frozen > 0) == (True, frozen > 0)


def test_a_worker_that_cannot_continue_cancels_the_block_and_stops_its_other_handlers(client: Client) -> None:
    client.execute("SET", "broken", "no stream")
    fill(client, 1)
    reached: list[str] = []

    async def main() -> None:
        async with EmbeddedWorker(new_app("in", "broken"), client.url, policy=QUICK) as worker:
            try:
                await asyncio.Event().wait()
            finally:
                reached.append(type(worker.failure).__name__)

    async def outer() -> None:
        with pytest.raises(WrongType, match="broken"):
            await main()
        await asyncio.sleep(0)
        reached.append("after the block")

    asyncio.run(outer())
    assert reached == ["WrongType", "after the block"], "the task is not cancelled any more"


def test_a_server_with_a_handler_of_sigterm_gets_that_signal_and_its_tasks_are_not_cancelled(client: Client) -> None:
    client.execute("SET", "broken", "no stream")

    async def main() -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        async with EmbeddedWorker(new_app("broken"), client.url, policy=QUICK):
            await stopped.wait()

    with pytest.raises(WrongType, match="broken"):
        asyncio.run(main())


def test_the_event_loop_goes_on_while_the_worker_stops(client: Client) -> None:
    app = App("app")

    @app.handler("in", into="out")
    def until_the_gate_opens(message: Message) -> dict[str, str]:
        with Client(client.url) as own:
            own.execute("SET", "runs", os.getpid())
            eventually(lambda: own.execute("EXISTS", "gate"), "the gate")
        return {"n": message.text("n", "")}

    async def main() -> None:
        fill(client, 1)
        worker = EmbeddedWorker(app, client.url, policy=QUICK)
        await worker.__aenter__()
        await eventually_async(lambda: client.execute("EXISTS", "runs"), "the run")
        stop = asyncio.create_task(worker.__aexit__())
        await asyncio.sleep(0)
        assert not stop.done()
        client.execute("SET", "gate", "open")  # by a task of the same event loop
        await stop
        assert (worker.failure, list(worker.leftovers)) == (None, [])

    asyncio.run(main())
    assert outputs(client) == [0]


def test_an_embedded_worker_runs_once_and_refuses_what_it_cannot_run(client: Client) -> None:
    with pytest.raises(ConfigError, match="no handler 'absent'"):
        EmbeddedWorker(new_app("in"), client.url, only=["absent"])
    with pytest.raises(ConfigError, match="worker name"):
        EmbeddedWorker(new_app("in"), client.url, name="a b")

    async def twice() -> None:
        worker = EmbeddedWorker(new_app("in"), client.url, policy=QUICK)
        async with worker:
            pass
        async with worker:
            pass

    with pytest.raises(ConfigError, match="runs once"):
        asyncio.run(twice())
