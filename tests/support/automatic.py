"""`millstream auto` as a process that a test may kill, with its events; and an app whose result shows each message."""

import json
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import psutil

from millstream.redis_client.client import Client
from tests.support.commandline import start
from tests.support.counts import check_counts, publish_numbers
from tests.support.json_reference import check_events
from tests.support.processes import await_end, descendants, kill_with_descendants
from tests.support.waiting import FAIL_SAFE_S, eventually

PERIOD_MS = 1_000
"""How often the schedule of the app fires."""
APP = """
import sys
import time
from pathlib import Path
from millstream import App, Message, State

app = App("app")

@app.every("1s", stream="ticks", missed="all")
def tick() -> dict[str, str]:
    return {"engine": "spark" if "pyspark" in sys.modules else "workers"}

@app.handler("in", key="k", into="out")
def count(message: Message, state: State) -> dict[str, object]:
    time.sleep(0.002)
    if "endless" in message.fields:
        Path(__file__).with_name("endless").touch()
        time.sleep(1_000_000)
    state["count"] = state.get("count", 0) + 1
    return {"k": message.fields["k"], "n": message.fields["n"], "count": state["count"]}
"""


class Automatic:
    """Runs the app on the server of `client` with limits for a test. A context manager that kills what still runs.

    `on_event` is called with each event, in the thread that reads the events of the command.
    """

    def __init__(
        self, client: Client, folder: Path, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.on_event: Callable[[Mapping[str, Any]], object] = lambda _: None
        self.published = 0
        self.starts = 0
        self._orphans: list[psutil.Process] = []
        self._client = client
        self._folder = folder
        self._path = folder / "counting.py"
        self._path.write_text(APP)
        self._options = options
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._process is not None:
            kill_with_descendants(self._process)
        for orphan in self._orphans:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()
        if error is None:
            check_events("auto", self.events)

    def start(self) -> None:
        """Start the command."""
        self.starts += 1
        with (self._folder / "stderr.log").open("ab") as errors:
            self._process = start(
                "auto",
                str(self._path),
                "--json",
                *("--poll", "100ms", "--minimum", "0", "--spark-above", "400", "--workers-below", "50"),
                *("--checkpoint", str(self._folder / "checkpoints")),
                *self._options,
                url=self._client.url,
                env=self._environment,
                stderr=errors,
            )
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if line.endswith(b"}\n"):  # a command that is killed leaves half a line
                    self.events.append(json.loads(line))
                    self.on_event(self.events[-1])

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The command."""
        assert self._process is not None
        return self._process

    def count(self, name: str) -> int:
        """How many events have this name."""
        return len([one for one in list(self.events) if one["event"] == name])

    def engines(self) -> list[str]:
        """The engines that have been started, in order."""
        return [one["engine"] for one in list(self.events) if one["event"] in ("started", "changed")]

    def child(self) -> psutil.Process:
        """The command of the engine that runs."""
        (found,) = eventually(
            lambda: psutil.Process(self.process.pid).children(), "an engine's command", log=self.errors
        )
        return found

    def kill(self) -> None:
        """Kill the command alone; what it has started ends by itself, beside what the next start starts."""
        self._orphans += descendants(self.process)
        self.process.kill()

    def has_started(self) -> bool:
        """Whether the command runs, and has chosen an engine since its last start."""
        return self.process.poll() is None and self.count("started") == self.starts

    def publish(self, count: int) -> None:
        """Publish `count` messages."""
        publish_numbers(self._client, "in", self.published, count)
        self.published += count

    def runs_on(self, *engines: str) -> None:
        """Wait until these have been the first engines that were started."""
        eventually(lambda: self.engines()[: len(engines)] == [*engines], f"{engines}", log=self.errors)

    def done(self) -> int:
        """How many messages have had an effect."""
        return int(self._client.execute("XLEN", "out"))

    def is_at_work(self) -> bool:
        """Whether a message has had an effect since the last engine was started."""
        started_ms = max(one["at_ms"] for one in list(self.events) if one["event"] in ("started", "changed"))
        last = self._client.execute("XREVRANGE", "out", "+", "-", "COUNT", 1)
        return any(int(entry_id.partition(b"-")[0]) > started_ms for entry_id, _ in last)

    def fired_by(self, engine: str) -> int:
        """How many firings this engine has published."""
        return sum(
            found == engine.encode() for _, (_, found, _, _) in self._client.execute("XRANGE", "ticks", "-", "+")
        )

    def ends(self) -> None:
        """Wait until all messages have had an effect."""
        eventually(lambda: self.done() >= self.published, f"{self.published} done", log=self.errors)

    def errors(self) -> str:
        """The end of what the command and its children have logged."""
        return f"{self.events}\n{self.done()} done\n" + (self._folder / "stderr.log").read_text()[-2500:]

    def stop(self) -> int:
        """Stop the command in order, and wait for the end of all engines; return its exit code."""
        family = descendants(self.process)
        self.process.terminate()
        code = self.process.wait(FAIL_SAFE_S)
        await_end([*family, *self._orphans])
        eventually(lambda: self.events[-1]["event"] == "stopped", "the last event", log=self.errors)
        return code

    def check(self) -> None:
        """No message was lost, doubled or reordered; each firing of the schedule was published once, in order."""
        check_counts(self._client, "out", self.published)
        firings = [int(firing) for _, (_, _, _, firing) in self._client.execute("XRANGE", "ticks", "-", "+")]
        assert {after - before for before, after in pairwise(firings)} <= {PERIOD_MS}, firings
