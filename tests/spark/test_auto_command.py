"""`millstream auto` changes the engine of an app by its lag: each effect and each firing comes once, in order."""

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from millstream.redis_client.client import Client
from tests.support.automatic import Automatic
from tests.support.processes import lives
from tests.support.waiting import eventually
from tests.support.worker_processes import PrintFigures

pytestmark = [pytest.mark.spark, pytest.mark.drivers, pytest.mark.keys]

Kill = tuple[Literal["command", "engine"], Literal["stop", "start", "work"]]
"""What is killed in a change: the command or its engine, while an engine stops, while the other one starts, or at work."""

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))
KILLS: list[Kill] = [
    ("command", "stop"),
    ("engine", "stop"),
    ("command", "start"),
    ("engine", "start"),
    ("engine", "work"),
]
"""In turn: their number is odd, so each comes in changes to both engines."""
TURNS = [*itertools.islice(itertools.cycle(KILLS), 50)] if SOAK else [KILLS[0], None, None]
LONGEST_S: Mapping[tuple[str, str], float] = {
    ("stop", "spark"): 0.1,
    ("stop", "workers"): 1,
    ("start", "spark"): 10,
    ("start", "workers"): 1,
}
"""About how long it takes in a change to an engine; the kill comes at any point of this time."""
BACKLOG = 2_000


class ChangeKiller:
    """Kills what is in turn in each change of the engine. `killed`: how often each was killed, and in changes to which engine."""

    def __init__(self, app: Automatic, chance: random.Random) -> None:
        self.killed: Counter[tuple[str, str, str]] = Counter()
        self._app = app
        self._chance = chance
        self._turns = iter(TURNS)
        self._left = len(TURNS)
        self._turn: Kill | None = None
        app.on_event = self._on_event

    def is_done(self) -> bool:
        """Whether all changes have begun and all kills were done."""
        return not self._left and self._turn is None

    def figures(self) -> Mapping[str, int]:
        """How often each was killed, by words."""
        return {" ".join(names): count for names, count in sorted(self.killed.items())}

    def _on_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "change" and self._left:
            self._turn = next(self._turns)
            self._left -= 1
            self._kill_at("stop", event["engine"])
        elif event["event"] == "changed":
            self._kill_at("start", event["engine"])
            self._kill_at("work", event["engine"])

    def _kill_at(self, point: str, engine: str) -> None:
        if self._turn is None or self._turn[1] != point:
            return
        victim = self._turn[0]
        if point == "work":
            before = self._app.done()
            eventually(lambda: self._app.done() > before, "an engine at work", log=self._app.errors)
        else:
            time.sleep(self._chance.random() * LONGEST_S[point, engine])
        if victim == "command":
            self._app.kill()
        else:
            eventually(self._kill_engine, "an engine to kill", log=self._app.errors)
        self.killed[victim, point, engine] += 1
        self._turn = None

    def _kill_engine(self) -> bool:
        """Kill the command of the engine, or one of the processes below it."""
        try:
            command = self._app.child()
            victim = self._chance.choice([command, self._chance.choice([command, *command.children(recursive=True)])])
            if not lives(victim):
                return False
            victim.kill()
        except psutil.NoSuchProcess:  # it has ended meanwhile
            return False
        return True


def test_spark_and_the_workers_take_over_from_each_other_though_they_and_the_command_are_killed_in_the_change(
    client: Client, tmp_path: Path, print_figures: PrintFigures
) -> None:
    """Schedules fire meanwhile. With the full counts, each change has a kill."""
    seed = random.SystemRandom().randrange(1 << 32)
    with Automatic(client, tmp_path, "--worker-options", "--claim 5s") as app:
        app.publish(BACKLOG)
        app.start()
        app.runs_on("spark")
        eventually(lambda: fires_beside_a_backlog(app), "a firing that Spark has published", log=app.errors)
        killer = ChangeKiller(app, random.Random(seed))
        for number in range(len(TURNS)):
            eventually(lambda: changes_again(app, number), f"change {number}; seed {seed}", log=app.errors)  # noqa: B023 - at once
        eventually(lambda: goes_on(app) and killer.is_done(), f"the last kill; seed {seed}", log=app.errors)
        app.ends()
        assert app.stop() == 0
        app.check()
        print_figures(None, kills=killer.killed.total(), seed=seed, messages=app.published, **killer.figures())
        assert {one["engine"] for one in app.events if one["event"] == "changed"} == {"spark", "workers"}
        killed = sum(count for (victim, *_), count in killer.killed.items() if victim == "command")
        assert len([*(tmp_path / "checkpoints").iterdir()]) <= killed


def fires_beside_a_backlog(app: Automatic) -> bool:
    """Keep a backlog, so that Spark has to drain it; True once Spark has published a firing of the schedule."""
    keep_backlog(app)
    return app.fired_by("spark") > 0


def changes_again(app: Automatic, number: int) -> bool:
    """Start the command again if it was killed; keep a backlog once the workers are at work, so that Spark takes over.

    True once more than `number` changes have begun.
    """
    start_again(app)
    if app.engines()[-1] == "workers":
        if app.is_at_work():
            keep_backlog(app)  # the workers may drain it before the command reads the lag
        else:
            keep_at_work(app)
    return app.count("change") > number


def goes_on(app: Automatic) -> bool:
    """Start the command again if it was killed, and keep its engine at work; True while no change has begun."""
    start_again(app)
    keep_at_work(app)
    return app.has_started() and bool(app.events[-1]["event"] != "change")


def start_again(app: Automatic) -> None:
    """Start the command if it was killed."""
    if (code := app.process.poll()) is not None:
        assert code == -signal.SIGKILL
        app.start()


def keep_at_work(app: Automatic) -> None:
    """Publish some more if nothing is left."""
    if app.done() == app.published:
        app.publish(10)


def keep_backlog(app: Automatic) -> None:
    """Publish more if less than half of the backlog is left."""
    if app.published - app.done() < BACKLOG // 2:
        app.publish(BACKLOG // 2)
