"""`millstream worker` in processes of its own, which a test may kill, and expectations of their messages."""

import json
import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil

from millstream.errors import RedisError
from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.replies import mapping_of
from millstream.testing.history import Event, Report, check, read_events
from tests.support.apps.worker_app import GATE
from tests.support.commandline import PROGRAM
from tests.support.drivers import APPS
from tests.support.fields import text_fields
from tests.support.processes import await_end, end, lives
from tests.support.quick_programs import Program
from tests.support.waiting import FAIL_SAFE_S, eventually

_PUBLISHED_AT_ONCE = 500

PrintFigures = Callable[..., None]


CLAIM_S = 2.0
"""For tests in which a claim or lease has to expire: no shorter, as a worker without processor time loses it, too."""


class RunningWorkers:
    """One supervisor and its worker processes, on `url`. A context manager, at whose end all of them are gone.

    Logs, and the events that the handlers write, are in `folder`. With the default `claim_s` no claim and no lease
    expires, however slow the machine is.
    """

    def __init__(
        self, url: str, folder: Path, *options: str, app: str = "app", processes: int = 2, claim_s: float = 600.0
    ) -> None:
        self.reports: list[dict[str, Any]] = []
        self._log = folder / f"log.{time.monotonic_ns()}"
        self._folder = folder
        self._command = [*PROGRAM, "worker", f"{APPS}/worker_app.py:{app}"]
        self._command += ["--url", url, "--json", "--processes", str(processes)]
        self._command += ["--claim", str(claim_s), *options]
        self._processes = processes
        self._started: list[psutil.Process] = []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the supervisor, which starts the workers."""
        with self._log.open("ab") as log:
            self._process = Program(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "MILLSTREAM_TEST_FOLDER": str(self._folder)},
            )
        self._started.append(psutil.Process(self._process.pid))
        threading.Thread(target=self._read_reports, args=(self._process,), daemon=True).start()
        return self

    def _read_reports(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as out:
            for line in out:
                if line.endswith(b"}\n"):  # a killed supervisor leaves half a line
                    self.reports.append(json.loads(line))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.children()  # adds them to the processes to kill
        for process in self._started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await_end(self._started)
        self.supervisor.wait(FAIL_SAFE_S)

    @property
    def supervisor(self) -> subprocess.Popen[bytes]:
        """The supervisor process that was started last."""
        assert self._process is not None
        return self._process

    def children(self) -> list[psutil.Process]:
        """Return the worker processes that are alive."""
        try:
            found = [one for one in psutil.Process(self.supervisor.pid).children() if lives(one)]
        except psutil.NoSuchProcess:
            return []
        self._started += [one for one in found if one not in self._started]
        return found

    def ready(self) -> Self:
        """Wait until every worker has reported figures."""

        def have_reported() -> bool:
            reported = {line["worker"] for line in list(self.reports) if line["event"] == "figures"}
            return len(reported) >= self._processes

        eventually(have_reported, "all workers to start", log=self.log)
        return self

    def at_work(self, expectations: "Expectations") -> psutil.Process:
        """Wait for a worker process that has run messages; publishes some more if needed.

        For a kill at random take `random_process`, a moment later: else a new process is killed in its first run, again
        and again in that of the same message, and none while it starts.
        """

        def have_run() -> list[psutil.Process]:
            found = [one for one in self.children() if (self._folder / f"events.{one.pid}").exists()]
            if not found and (not expectations.enqueued or expectations.is_idle()):
                expectations.publish_more()
            return found

        return eventually(have_run, "a worker that runs messages", log=self.log)[0]

    def replace_supervisor(self) -> None:
        """Send SIGKILL to the supervisor alone, and start another; the workers end by themselves."""
        self.supervisor.kill()
        self.supervisor.wait()
        self.start()

    def log(self) -> str:
        """Return the log of the supervisor and its workers."""
        return self._log.read_text(errors="replace")

    def figures(self) -> Counter[str]:
        """Return the counts that the workers have reported, summed over all processes there were."""
        total: Counter[str] = Counter()
        last: dict[str, Counter[str]] = {}
        for line in list(self.reports):
            if line["event"] == "figures":
                now = Counter(line["handlers"]["work"])
                known = last.get(line["worker"], Counter())
                if now["read"] + now["claimed"] < known["read"] + known["claimed"]:
                    total += known
                last[line["worker"]] = now
        return sum(last.values(), total)

    def eventually_refused(self, *, beyond: int = 0) -> int:
        """Wait until more than `beyond` late commits were refused; return how many were."""
        return eventually(
            lambda: found if (found := self.figures()["refused"]) > beyond else 0, "a refused commit", log=self.log
        )

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        return end(self.supervisor)

    def kill_all(self) -> None:
        """Send SIGKILL to the supervisor and its workers: their names stay taken until they expire."""
        children = self.children()
        self.supervisor.kill()
        for child in children:
            kill(child)  # one that sees the end of its supervisor first ends by itself
        await_end(children)
        self.supervisor.wait(FAIL_SAFE_S)


def random_process(chance: random.Random, fleets: Sequence[RunningWorkers]) -> psutil.Process | None:
    """Return one of the worker processes of these fleets that are alive, at work or not; None while none is.

    Each has the same chance, the same one with the same seed.
    """
    children = [child for fleet in fleets for child in fleet.children()]
    return chance.choice(children) if children else None


def kill(process: psutil.Process) -> bool:
    """Send SIGKILL to a process; return whether it was still alive."""
    if not lives(process):
        return False
    with suppress(psutil.NoSuchProcess):
        process.kill()
        return True
    return False


def kill_random(chance: random.Random, fleets: Sequence[RunningWorkers]) -> int:
    """Kill a `random_process`; return how many were killed: 0 while none is alive."""
    victim = random_process(chance, fleets)
    return int(victim is not None and kill(victim))


def suspend(process: psutil.Process, stopped: list[psutil.Process]) -> None:
    """Stop a process, if it is still there, and add it to those that `resume_all` resumes."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        stopped.append(process)


def resume_all(stopped: list[psutil.Process]) -> None:
    """Resume stopped processes; their supervisor may have killed some."""
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()
    stopped.clear()


class Expectations:
    """Expectations of one app: the messages published to its handler `work`, and the effects they must have."""

    def __init__(self, client: Client, folder: Path, *, app: str = "steady") -> None:
        self.client = client
        self.keys = HandlerKeys(app, "work", "in")
        self.enqueued: list[str] = []
        self._folder = folder

    def publish(self, count: int, **fields: str | int) -> list[str]:
        """Add messages to the stream; return their ids."""
        items = [part for pair in fields.items() for part in pair]
        return self._publish(count, lambda n: items)

    def publish_more(self) -> None:
        """Add some messages that take no time."""
        self.publish(20)

    def open_gate(self) -> None:
        """Let messages published with `do="wait"` finish."""
        (self._folder / GATE).touch()

    @contextmanager
    def gate_open(self) -> Iterator[None]:
        """Let them finish during the block."""
        self.open_gate()
        try:
            yield
        finally:
            (self._folder / GATE).unlink()

    def _publish(self, count: int, items_of: Callable[[int], Sequence[str | int]]) -> list[str]:
        ids: list[str] = []
        while len(ids) < count:
            some = range(len(ids), min(count, len(ids) + _PUBLISHED_AT_ONCE))
            replies = self.client.pipeline([("XADD", "in", "*", "n", n, *items_of(n)) for n in some])
            for reply in replies:
                assert isinstance(reply, bytes), reply
                ids.append(reply.decode())
        self.enqueued += ids
        return ids

    def runs(self) -> list[Event]:
        """Return the events that the handlers wrote, from all processes."""
        return list(read_events(*self._folder.glob("events.*")))

    def outputs(self) -> list[dict[str, str]]:
        """Return the entries of the output stream."""
        found, after = [], "-"
        while entries := self._ask("XRANGE", "out", after, "+", "COUNT", 5_000):
            for _, pairs in entries:
                found.append(text_fields(pairs))
            after = "(" + entries[-1][0].decode()
        return found

    def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters."""
        return [DeadLetter.parse(*entry) for entry in self._ask("XRANGE", self.keys.dead_letters, "-", "+")]

    def effect_count(self) -> int:
        """Return the number of effects."""
        return int(self._ask("XLEN", "out")) + int(self._ask("XLEN", self.keys.dead_letters))

    def pending(self) -> int:
        """Return the number of pending messages."""
        return int(self._ask("XPENDING", "in", self.keys.group)[0])

    def in_flight(self) -> bool:
        """Return whether messages are pending; publishes some more once all are processed."""
        if self.drained():
            self.publish_more()
        return self.pending() > 0

    def drained(self) -> bool:
        """Return whether nothing is left to do: where an app sets timers, its subclass also waits for those."""
        return self.is_idle()

    def is_idle(self) -> bool:
        """Return whether nothing is pending and nothing is left to read."""
        return self.all_read() and not self.pending()

    def all_read(self) -> bool:
        """Return whether nothing is left to read."""
        try:
            groups = self._ask("XINFO", "GROUPS", "in")
            last = self._ask("XINFO", "STREAM", "in")
        except RedisError:
            return False
        newest = mapping_of(last)
        for group in groups:
            found = mapping_of(group)
            if found[b"name"].decode() == self.keys.group:
                return bool(found[b"last-delivered-id"] == newest[b"last-generated-id"])
        return False

    def check(
        self, *, dead: Mapping[str, str] | None = None, gone: Sequence[str] = (), log: Callable[[], str] = str
    ) -> Report:
        """Wait for the drain, then check the history: each message, except those in `gone`, has one effect.

        `dead`: the messages that must end as dead letters, and the reason; no other may.
        """
        eventually(self.drained, "the drain", log=lambda: self._progress() + log())
        lost = set(gone)
        enqueued = [Event(kind="enqueued", stream="in", id=one) for one in self.enqueued if one not in lost]
        effects = [
            Event(kind="committed", stream="in", id=row["id"], handler="work", position=at)
            for at, row in enumerate(self.outputs())
            if row["id"] not in lost
        ]
        effects += [Event(kind="dead", stream="in", id=one.id, handler="work") for one in self.dead_letters()]
        runs = [event for event in self.runs() if event.id not in lost]
        report = check([*enqueued, *runs, *effects], handlers={"in": ["work"]})
        report.raise_if_bad()
        assert {letter.id: letter.reason for letter in self.dead_letters()} == (dead or {})
        assert {event.id for event in effects if event.kind == "committed"} <= {event.id for event in runs}
        assert not self._ask("EXISTS", self.keys.crashes), self._ask("HGETALL", self.keys.crashes)
        return report

    def _progress(self) -> str:
        return f"{self.effect_count()} of {len(self.enqueued)} done, {self.pending()} pending\n"

    def _ask(self, *command: str | int) -> Any:
        return self.client.retry_while_unavailable(
            lambda: self.client.execute(*command), what="test", limit_ms=1000 * FAIL_SAFE_S
        )


class StandstillWatch:
    """Watches the arrival of effects; `longest_s` is the longest time without one while some were due."""

    def __init__(self, expectations: Expectations) -> None:
        self._expectations = expectations
        self._over = threading.Event()
        self._client = Client(expectations.client.url)
        self.longest_s = 0.0

    def watch(self) -> None:
        """Check every 100 ms, until `end`: what is watched needs the processor."""
        seen, since = -1, time.monotonic()
        while not self._over.wait(0.1):
            with suppress(RedisError):
                commands = [("XLEN", "out"), ("XLEN", self._expectations.keys.dead_letters)]
                done = sum(int(reply) for reply in self._client.pipeline(commands))
                now = time.monotonic()
                if seen >= 0 and seen < len(self._expectations.enqueued):
                    self.longest_s = max(self.longest_s, now - since)
                if done != seen or done >= len(self._expectations.enqueued):
                    seen, since = done, now
        self._client.close()

    def end(self) -> None:
        """Stop watching."""
        self._over.set()


@contextmanager
def watched(expectations: Expectations) -> Iterator[StandstillWatch]:
    """Watch for standstills during the block."""
    watch = StandstillWatch(expectations)
    thread = threading.Thread(target=watch.watch)
    thread.start()
    try:
        yield watch
    finally:
        watch.end()
        thread.join()
