"""A day's load curve in minutes, on `millstream auto`: latency and CPU of each phase, and the effects counted.

Phases: night, a morning burst, a plateau, a peak, and a decline, published at their rates by this process. The handler
computes for about a millisecond, so that the burst is more than its one worker process does. It has a key and a state,
so the outputs show what was lost, doubled or reordered. Latency: from a message's entry to its
output's, by the server's clock. CPU: of the command and all its descendants, per 1,000 messages processed meanwhile; so
the start of an engine counts in the phase in which it happens. `ratio`: the CPU that a message costs while Spark runs,
over that while the workers do.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.workers import RAW_COUNT, server
from millstream import App, Message, State
from millstream.redis_client.client import Client

KEYS = 500
STREAM, OUT = "in", "out"
SPARK_ABOVE, WORKERS_BELOW = 5_000, 200
_ROOT = Path(__file__).parents[1]
_TICK_S = 0.05
_WORK = 8_000
_NO_PROGRESS_S = 600.0


@dataclass(frozen=True)
class Phase:
    """A part of the day: messages per second at its start and its end, for so many seconds."""

    name: str
    seconds: float
    first_rate: float
    last_rate: float


DAY = (
    Phase("night", 40, 20, 20),
    Phase("burst", 20, 1_500, 1_500),
    Phase("plateau", 70, 100, 100),
    Phase("peak", 40, 400, 400),
    Phase("decline", 70, 200, 20),
)

app = App("day")


@app.handler(STREAM, key="key", into=OUT)
def count(message: Message, state: State) -> dict[str, object]:
    """Compute, and count the messages of a key."""
    sum(n * n for n in range(_WORK))
    state["count"] = state.get("count", 0) + 1
    return {"key": message.fields["key"], "n": message.fields["n"], "count": state["count"]}


def run(*, minutes: float = 4.0, scale: float = 1.0) -> dict[str, Any]:
    """Publish a day in `minutes`, and wait until all messages have had their effect.

    `scale`: factor of all rates and of the limits at which the engine changes.
    """
    factor = minutes * 60 / sum(phase.seconds for phase in DAY)
    with (
        server() as client,
        tempfile.TemporaryDirectory() as folder,
        _automatic(client, Path(folder), scale) as command,
    ):
        published, began_ms = _publish_day(client, factor, scale)
        _await_effects(client, len(published))
        effects = _effects(client)
        wrong = _wrong(effects, len(published))
        ends_ms = [*began_ms[1:], time.time() * 1000]
        rows = [
            _figures(name, published, effects, command, (start_ms, end_ms))
            for name, start_ms, end_ms in zip((*(p.name for p in DAY), "drain"), began_ms, ends_ms, strict=True)
        ]
    costs = {one: _cost(rows, one) for one in ("workers", "spark")}
    return {
        "name": "auto",
        "ratio": round(costs["spark"] / costs["workers"], 2) if all(costs.values()) else None,
        "messages": len(published),
        **wrong,
        "changes": [(one["engine"], one["stop_seconds"]) for one in command.events if one["event"] == "changed"],
        "phases": rows,
    }


class _Automatic:
    """The command's events, and the CPU seconds that its processes had used at each moment."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.events: list[dict[str, Any]] = []
        self.process = psutil.Process(process.pid)
        self._pipe = process.stdout
        self._used: dict[psutil.Process, float] = {}
        self._samples = [(time.time() * 1000, 0.0)]
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=one) for one in (self._listen, self._sample)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def cpu_s(self, at_ms: float) -> float:
        """CPU seconds used until then."""
        return max(used for sampled_ms, used in self._samples if sampled_ms <= at_ms)

    def engine(self, at_ms: float) -> str:
        """The engine that ran then."""
        started = [one for one in self.events if one["event"] in ("started", "changed") and one["at_ms"] <= at_ms]
        return str(started[-1]["engine"])

    def _listen(self) -> None:
        assert self._pipe is not None
        for line in self._pipe:
            self.events.append(json.loads(line))

    def _sample(self) -> None:
        while not self._ended.wait(0.2):
            try:
                family = [self.process, *self.process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for one in family:
                try:
                    times = one.cpu_times()
                except psutil.Error:  # it has just ended
                    continue
                self._used[one] = times.user + times.system
            self._samples.append((time.time() * 1000, sum(self._used.values())))


@contextmanager
def _automatic(client: Client, folder: Path, scale: float) -> Iterator[_Automatic]:
    """`millstream auto`, whose first engine has started to process messages."""
    command = [sys.executable, "-m", "millstream.cli.main", "auto", f"{__file__}:app", "--json", "--url", client.url]
    limits = [str(round(scale * one)) for one in (SPARK_ABOVE, WORKERS_BELOW)]
    command += ["--spark-above", limits[0], "--workers-below", limits[1], "--minimum", "5s"]
    command += ["--poll", "500ms", "--checkpoint", str(folder / "checkpoints")]
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            command, cwd=_ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        automatic = _Automatic(process)
        automatic.start()
        try:
            _wait(lambda: len(automatic.events) > 0 and len(client.execute("KEYS", "*day.count*")) > 0)
            yield automatic
        finally:
            process.terminate()
            process.wait()
            automatic.join()


def _publish_day(client: Client, factor: float, scale: float) -> tuple[Sequence[str], list[float]]:
    """Publish the day; return the phase of each message, and when each phase began and the last one ended."""
    phases: list[str] = []
    began_ms: list[float] = []
    for phase in DAY:
        seconds = phase.seconds * factor
        began_ms.append(time.time() * 1000)
        began = time.monotonic()
        sent = 0
        while (passed := time.monotonic() - began) < seconds:
            mean = phase.first_rate + (phase.last_rate - phase.first_rate) * passed / seconds / 2
            due = int(passed * mean * scale) - sent
            for at in range(0, due, RAW_COUNT):
                first = len(phases)
                numbers = range(first, first + min(RAW_COUNT, due - at))
                client.pipeline([("XADD", STREAM, "*", "key", f"k{n % KEYS}", "n", n) for n in numbers])
                phases += [phase.name] * len(numbers)
            sent += due
            time.sleep(_TICK_S)
    return phases, [*began_ms, time.time() * 1000]


@dataclass(frozen=True)
class _Effect:
    n: int
    key: str
    count: int
    at_ms: int
    latency_ms: int


def _await_effects(client: Client, messages: int) -> None:
    """Wait for so many effects, and a second longer for doubled ones; or until there is no more progress."""
    done, changed = -1, time.monotonic()
    while done < messages and time.monotonic() < changed + _NO_PROGRESS_S:
        if (now := int(client.execute("XLEN", OUT))) != done:
            done, changed = now, time.monotonic()
        time.sleep(_TICK_S)
    time.sleep(1)


def _entries(client: Client, stream: str) -> Iterator[tuple[int, dict[bytes, bytes]]]:
    """The time of each entry by the server's clock, which is that of this machine, and its fields."""
    for entry_id, pairs in client.execute("XRANGE", stream, "-", "+"):
        yield int(entry_id.partition(b"-")[0]), dict(zip(pairs[::2], pairs[1::2], strict=True))


def _effects(client: Client) -> list[_Effect]:
    published_ms = {int(fields[b"n"]): at_ms for at_ms, fields in _entries(client, STREAM)}
    return [
        _Effect(n := int(one[b"n"]), one[b"key"].decode(), int(one[b"count"]), at_ms, at_ms - published_ms[n])
        for at_ms, one in _entries(client, OUT)
    ]


def _wrong(effects: Sequence[_Effect], messages: int) -> dict[str, int]:
    """How many messages had no effect, had more than one, or came after a later one or on another's state."""
    times = Counter(effect.n for effect in effects)
    reordered = 0
    last: dict[str, _Effect] = {}
    for effect in effects:
        before = last.get(effect.key)
        reordered += (effect.n, effect.count) != ((before.n + KEYS, before.count + 1) if before else (effect.n, 1))
        last[effect.key] = effect
    return {
        "lost": messages - len(times),
        "doubled": sum(number - 1 for number in times.values()),
        "reordered": reordered,
    }


def _figures(
    name: str,
    published: Sequence[str],
    effects: Sequence[_Effect],
    command: _Automatic,
    window_ms: tuple[float, float],
) -> dict[str, Any]:
    """Latencies of the messages published in a phase; engines, effects and CPU of the time that it lasted."""
    start_ms, end_ms = window_ms
    latencies = sorted(one.latency_ms for one in effects if published[one.n] == name)
    engines = Counter(command.engine(one.at_ms) for one in effects if start_ms <= one.at_ms < end_ms)
    cpu_s, processed = command.cpu_s(end_ms) - command.cpu_s(start_ms), sum(engines.values())
    return {
        "phase": name,
        "seconds": round((end_ms - start_ms) / 1000, 1),
        "messages": len(latencies),
        "p50_ms": latencies[len(latencies) // 2] if latencies else None,
        "p99_ms": latencies[int(len(latencies) * 0.99)] if latencies else None,
        "processed_by": dict(engines),
        "cpu_s": round(cpu_s, 1),
        "cpu_s_per_1000": round(cpu_s / processed * 1000, 2) if processed else None,
    }


def _cost(rows: Sequence[dict[str, Any]], engine: str) -> float:
    """CPU seconds per message in the phases in which this engine alone processed messages; 0 if there are none."""
    alone = [row for row in rows if [*row["processed_by"]] == [engine]]
    processed = sum(row["processed_by"][engine] for row in alone)
    return sum(row["cpu_s"] for row in alone) / processed if processed else 0.0


def _wait(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(_TICK_S)


if __name__ == "__main__":
    print(json.dumps(run()))
