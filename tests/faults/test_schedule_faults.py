"""Workers and drivers of an app with schedules that are killed at random: each firing is in its stream exactly once."""

import os
import random
import time
from pathlib import Path

import pytest

from millstream.redis_client.client import Client
from tests.support.drivers import APPS, Driver
from tests.support.waiting import eventually
from tests.support.worker_processes import RunningWorkers, kill
from tests.support.workers import now_ms

pytestmark = [pytest.mark.worker, pytest.mark.faults]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
KILLS = 200 if SOAK else 6
DRIVER_KILLS = 50
PERIOD_MS = 1_000


def firings(client: Client, stream: str) -> list[int]:
    return [int(pairs[-1]) for _, pairs in client.execute("XRANGE", stream, "-", "+")]


def await_firings(client: Client, workers: RunningWorkers, after_ms: float) -> None:
    """Wait until each schedule has published a firing later than a time of the server."""
    for stream in ("ticks:all", "ticks:once", "ticks:skip"):
        eventually(lambda: max(firings(client, stream), default=0) > after_ms, "a firing", log=workers.log)  # noqa: B023 - at once


def check(client: Client) -> None:
    """Each firing is published once and in order: with missed="all" every one, also of the time without workers."""
    every = firings(client, "ticks:all")
    assert every == list(range(every[0], every[-1] + 1, PERIOD_MS))
    for stream in ("ticks:once", "ticks:skip"):
        some = firings(client, stream)
        assert some == sorted(set(some))
        assert {one % PERIOD_MS for one in some} == {0}


def test_workers_that_are_killed_at_random_publish_each_firing_once(fresh_client: Client, tmp_path: Path) -> None:
    chance = random.Random(random.SystemRandom().randrange(1 << 32))
    with RunningWorkers(fresh_client.url, tmp_path, app="scheduled") as workers:
        await_firings(fresh_client, workers, 0)
        killed = 0
        while killed < KILLS:
            time.sleep(chance.random())  # a kill at any point of the second
            for victim in chance.sample(found := workers.children(), k=min(len(found), chance.randint(1, 2))):
                killed += kill(victim)
        await_firings(fresh_client, workers, now_ms(fresh_client))
        assert workers.stop() == 0
    check(fresh_client)


def test_firings_of_a_time_without_workers_are_published_by_the_next_as_each_policy_says(
    fresh_client: Client, tmp_path: Path
) -> None:
    with RunningWorkers(fresh_client.url, tmp_path, app="scheduled") as workers:
        await_firings(fresh_client, workers, 0)
        workers.kill_all()
    since = now_ms(fresh_client)
    published = {stream: firings(fresh_client, stream) for stream in ("ticks:all", "ticks:once", "ticks:skip")}
    eventually(lambda: now_ms(fresh_client) > since + 5 * PERIOD_MS, "five firings that no worker publishes")
    until = now_ms(fresh_client)
    with RunningWorkers(fresh_client.url, tmp_path, "--name", "others", app="scheduled") as workers:
        await_firings(fresh_client, workers, until)
        assert workers.stop() == 0
    check(fresh_client)
    missed = {one for one in firings(fresh_client, "ticks:all") if since < one < until - PERIOD_MS}
    assert len(missed) >= 3
    for stream in ("ticks:once", "ticks:skip"):
        found = firings(fresh_client, stream)
        assert found[: len(published[stream])] == published[stream]
        assert missed.isdisjoint(found), "a later one was due when the workers came back"
    assert "firings left out" in workers.log()


def fired_by(client: Client, pid: int) -> bool:
    """Whether this process has published a firing of each schedule."""
    streams = ("ticks:all", "ticks:once", "ticks:skip")
    return all(any(int(pairs[1]) == pid for _, pairs in client.execute("XRANGE", one, "-", "+")) for one in streams)


@pytest.mark.skipif(not SOAK, reason="a Spark of its own, started often: make soak")
@pytest.mark.spark
@pytest.mark.drivers
def test_drivers_that_are_killed_beside_workers_publish_each_firing_once(fresh_client: Client, tmp_path: Path) -> None:
    """The workers of every second round are killed as well, so that no process is left: the next ones continue."""
    chance = random.Random(random.SystemRandom().randrange(1 << 32))
    driver_options = ("--only", "work", "--spark-master", "local[1]")
    program, url = f"{APPS}/worker_app.py:scheduled", fresh_client.url
    with Driver(program, url=url, folder=tmp_path, options=driver_options) as driver:
        for number in range(DRIVER_KILLS):
            driver.start()
            eventually(lambda: fired_by(fresh_client, driver.process.pid), "the driver's firings", log=driver.errors)
            options = ("--only", "rest", "--name", f"round-{number}")
            with RunningWorkers(url, tmp_path, *options, app="scheduled") as workers:
                workers.ready()
                time.sleep(chance.random())  # a kill at any point of the second
                driver.kill()
                if number % 2 == 0:
                    workers.kill_all()
                else:
                    await_firings(fresh_client, workers, now_ms(fresh_client))
                    assert workers.stop() == 0
    with RunningWorkers(url, tmp_path, "--name", "last", app="scheduled") as workers:
        await_firings(fresh_client, workers, now_ms(fresh_client))
        assert workers.stop() == 0
    check(fresh_client)
