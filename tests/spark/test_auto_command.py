"""`millstream auto` changes the engine of an app by its lag: each effect and each firing comes once, in order."""

import os
from pathlib import Path

import psutil
import pytest

from millstream.redis_client.client import Client
from tests.support.automatic import Automatic
from tests.support.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.drivers, pytest.mark.keys]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
CHANGES = 50 if SOAK else 2
BACKLOG = 2_000


def test_spark_drains_a_backlog_the_workers_take_over_and_spark_again_when_the_lag_grows(
    client: Client, tmp_path: Path
) -> None:
    """Schedules fire meanwhile. With the full counts, a child is killed after each change."""
    with Automatic(client, tmp_path) as app:
        app.publish(BACKLOG)
        app.start()
        engines = ["spark"]
        app.runs_on(*engines)
        eventually(lambda: fires_beside_a_backlog(app), "a firing that Spark has published", log=app.errors)
        for _ in range(CHANGES):
            if SOAK:
                kill_child(app)
            engines.append("workers" if engines[-1] == "spark" else "spark")
            if engines[-1] == "spark":
                app.publish(10)
                app.ends()
                eventually(lambda: publishes_until_changed(app, len(engines)), "a change to Spark", log=app.errors)
            app.runs_on(*engines)
        app.ends()
        assert app.stop() == 0
        app.check()
        assert app.events[-1]["changes"] >= CHANGES
        assert not list((tmp_path / "checkpoints").iterdir())


def fires_beside_a_backlog(app: Automatic) -> bool:
    """Keep a backlog, so that Spark has to drain it; True once Spark has published a firing of the schedule."""
    keep_backlog(app)
    return app.fired_by("spark") > 0


def publishes_until_changed(app: Automatic, changes: int) -> bool:
    """Keep a backlog, as the workers may drain it before the command reads the lag; True once a change has begun."""
    if sum(one["event"] in ("started", "change") for one in app.events) >= changes:
        return True
    keep_backlog(app)
    return False


def keep_backlog(app: Automatic) -> None:
    """Publish more if less than half of the backlog is left."""
    if app.published - app.done() < BACKLOG // 2:
        app.publish(BACKLOG // 2)


def kill_child(app: Automatic) -> None:
    """Kill the engine once it has run messages of its own."""
    before = app.done()
    app.publish(BACKLOG // 20)
    eventually(lambda: app.done() > before, "an engine at work", log=app.errors)

    def is_killed() -> bool:
        try:
            app.child().kill()
        except psutil.NoSuchProcess:  # the command has stopped it meanwhile
            return False
        return True

    eventually(is_killed, "an engine to kill", log=app.errors)
