"""A day's load curve in minutes, on `millstream auto`: latency and CPU of each phase, and the effects counted.

The day has three bursts, published at their rates by this process, and quiet hours around them. It passes twice: the
second time, longer, a random process of each engine is killed once the engine has processed messages. The handler uses
a millisecond of CPU, so that a burst is more than its one worker process does, on any machine. It has a key and a state,
so the outputs show what was lost, doubled or reordered. Latency: from a message's entry to its output's, by the server's
clock. CPU: of the command and all its descendants, per 1,000 messages processed meanwhile; so the start of an engine
counts in the phase in which it happens. `ratio`: the CPU that a message costs on Spark, its starts included, over that
on the workers, without kills.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.workers import RAW_COUNT, server
from millstream import App, Message, State
from millstream.redis_client.client import Client

KEYS = 500
STREAM, OUT = "in", "out"
SPARK_ABOVE, WORKERS_BELOW = 5_000, 200
_ROOT = Path(__file__).parents[1]
_TICK_S = 0.05
_WORK_NS = 1_000_000
_NO_PROGRESS_S = 600.0
_EFFECTS_BEFORE_KILL = 200


@dataclass(frozen=True)
class Phase:
    """A part of the day: messages per second at its start and its end, for so many seconds."""

    name: str
    seconds: float
    first_rate: float
    last_rate: float


DAY = (
    Phase("night", 30, 20, 20),
    Phase("morning", 20, 1_500, 1_500),
    Phase("forenoon", 50, 100, 100),
    Phase("noon", 20, 1_500, 1_500),
    Phase("afternoon", 50, 100, 200),
    Phase("evening", 20, 1_500, 1_500),
    Phase("late", 50, 200, 20),
)

app = App("day")


@app.handler(STREAM, key="key", into=OUT)
def count(message: Message, state: State) -> dict[str, object]:
    """Use a millisecond of CPU, and count the messages of a key."""
    until_ns = time.thread_time_ns() + _WORK_NS
    while time.thread_time_ns() < until_ns:
        pass
    state["count"] = state.get("count", 0) + 1
    return {"key": message.fields["key"], "n": message.fields["n"], "count": state["count"]}


def run(*, minutes: float = 4.0, minutes_with_kills: float = 5.0, seed: int = 7) -> dict[str, Any]:
    """Publish a day in so many minutes, and again with kills; each time wait until all messages have had their effect."""
    plain = _day(minutes)
    costs = [plain["engines"].get(engine, {}).get("cpu_s_per_1000") for engine in ("spark", "workers")]
    return {
        "name": "auto",
        "ratio": round(costs[0] / costs[1], 2) if all(costs) else None,
        **plain,
        "with_kills": _day(minutes_with_kills, random.Random(seed)),
    }


def _day(minutes: float, choice: random.Random | None = None) -> dict[str, Any]:
    """The figures of one day; with kills if there is a choice."""
    factor = minutes * 60 / sum(phase.seconds for phase in DAY)
    with ExitStack() as stack:
        client = stack.enter_context(server())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        command = stack.enter_context(_automatic(client, Path(folder)))
        killer = stack.enter_context(_Killer(command, client.url, choice)) if choice is not None else None
        published, began_ms = _publish_day(client, factor)
        _await_effects(client, len(published))
        effects = _effects(client)
        ends_ms = [*began_ms[1:], time.time() * 1000]
        return {
            "messages": len(published),
            **_wrong(effects, len(published)),
            "changes": _changes(effects, command),
            "killed": killer.killed if killer else [],
            "engines": _by_engine(effects, command),
            "phases": [
                _figures(name, published, effects, command, (start_ms, end_ms))
                for name, start_ms, end_ms in zip((*(p.name for p in DAY), "drain"), began_ms, ends_ms, strict=True)
            ],
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

    def started(self) -> int:
        """How many engines have been started, without those that took the place of a dead one."""
        return sum(one["event"] in ("started", "changed") for one in list(self.events))

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
def _automatic(client: Client, folder: Path) -> Iterator[_Automatic]:
    """`millstream auto`, whose first engine has started to process messages."""
    command = [sys.executable, "-m", "millstream.cli.main", "auto", f"{__file__}:app", "--json", "--url", client.url]
    command += ["--spark-above", str(SPARK_ABOVE), "--workers-below", str(WORKERS_BELOW), "--minimum", "5s"]
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


class _Killer:
    """Kills a random process of each engine, once the engine has processed messages. A context manager."""

    def __init__(self, command: _Automatic, url: str, choice: random.Random) -> None:
        self.killed: list[tuple[str, str]] = []  # the engine, and the name of the process
        self._command = command
        self._url = url
        self._choice = choice
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._kills = self._pool.submit(self._kill_each)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._kills.result()  # raises what has ended the kills too soon

    def _kill_each(self) -> None:
        with Client(self._url) as client:
            while self._wait(lambda: self._command.started() > len(self.killed)):
                least = int(client.execute("XLEN", OUT)) + _EFFECTS_BEFORE_KILL
                if not self._wait(partial(_has_effects, client, least)):
                    return
                self._kill_one()

    def _kill_one(self) -> None:
        engine = self._command.engine(time.time() * 1000)
        while not self._ended.wait(_TICK_S):
            family = self._command.process.children(recursive=True)
            try:
                victim = self._choice.choice([one for one in family if one.status() != psutil.STATUS_ZOMBIE])
                name = victim.name()
                victim.kill()
            except (psutil.NoSuchProcess, IndexError):  # it has just ended, or the next engine is just being started
                continue
            self.killed.append((engine, name))
            return

    def _wait(self, holds: Callable[[], bool]) -> bool:
        """Wait until it holds; False if the day has ended before."""
        while not holds():
            if self._ended.wait(_TICK_S):
                return False
        return True


def _has_effects(client: Client, least: int) -> bool:
    return int(client.execute("XLEN", OUT)) >= least


def _publish_day(client: Client, factor: float) -> tuple[Sequence[str], list[float]]:
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
            due = int(passed * mean) - sent
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


def _changes(effects: Sequence[_Effect], command: _Automatic) -> list[dict[str, Any]]:
    """Each change: the new engine, and after how many seconds the one before had stopped and the new one had an effect."""
    found = []
    for decided, changed in pairwise(one for one in command.events if one["event"] in ("change", "changed")):
        if changed["event"] == "changed":
            first_ms = min((one.at_ms for one in effects if one.at_ms >= changed["at_ms"]), default=None)
            found.append(
                {
                    "engine": changed["engine"],
                    "stopped_after_s": changed["stop_seconds"],
                    "first_effect_after_s": first_ms and round((first_ms - decided["at_ms"]) / 1000, 1),
                }
            )
    return found


def _by_engine(effects: Sequence[_Effect], command: _Automatic) -> dict[str, dict[str, Any]]:
    """What each engine processed, in how many seconds from its start on, and the CPU of that time: its starts included."""
    begins = [(one["engine"], one["at_ms"]) for one in command.events if one["event"] in ("started", "changed")]
    engines = Counter(command.engine(one.at_ms) for one in effects)
    seconds, cpu_s = defaultdict[str, float](float), defaultdict[str, float](float)
    for (engine, start_ms), (_, end_ms) in pairwise([*begins, ("", max(one.at_ms for one in effects))]):
        seconds[engine] += (end_ms - start_ms) / 1000
        cpu_s[engine] += command.cpu_s(end_ms) - command.cpu_s(start_ms)
    return {
        engine: {
            "messages": processed,
            "seconds": round(seconds[engine], 1),
            "cpu_s_per_1000": round(cpu_s[engine] / processed * 1000, 2),
        }
        for engine, processed in engines.items()
    }


def _wait(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(_TICK_S)


if __name__ == "__main__":
    print(json.dumps(run()))
