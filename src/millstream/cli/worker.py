"""`millstream worker`: an app's handlers on low-latency workers."""

import io
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import typer

from millstream.app import load_app
from millstream.cli.options import DEFAULT_URL, Json, Url
from millstream.cli.signals import orderly_stop, stopping_at_signals
from millstream.cli.terminal import say_json, talk, talk_lines
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import HandlerStuck, MillstreamError
from millstream.observability.health import Health, HealthServer
from millstream.observability.metrics import NOBODY, Recorder
from millstream.redis_client.client import Client
from millstream.redis_client.eviction import warn_if_evicting
from millstream.worker.policy import WorkerPolicy
from millstream.worker.process.heartbeat import Heartbeat
from millstream.worker.process.supervisor import (
    FINAL_CODE,
    ORPHAN_END_MS,
    ORPHAN_MS,
    SOFTWARE_ERROR_CODE,
    STUCK_CODE,
    Launch,
    Supervisor,
    exit_with_parent,
)
from millstream.worker.process.worker_process import WorkerProcess, WorkerSettings
from millstream.worker.static_membership import StaticMembership

Target = Annotated[str, typer.Argument(help="The app: module:app or path/to/file.py:app", metavar="APP")]
Processes = Annotated[int, typer.Option(help="How many processes work, each with all handlers.", min=1)]
Name = Annotated[str, typer.Option(help="Name of this worker in the groups; default: the host's name.")]
Only = Annotated[list[str] | None, typer.Option("--handler", help="Run only this handler; may be repeated.")]
Start = Annotated[Literal["earliest", "latest"], typer.Option(help="Where a handler that never ran begins.")]
Threads = Annotated[int, typer.Option(help="Messages that a plain handler works on at once.", min=1)]
Prefetch = Annotated[int, typer.Option(help="Most messages in the hands of a process.", min=1)]
PrefetchMb = Annotated[
    float, typer.Option(help="Most megabytes of messages in hand, of each handler in a process.", min=0.001)
]
LookAhead = Annotated[int, typer.Option(help="Most messages of a stream in the lines of its keys.", min=1)]
ClaimS = Annotated[float, typer.Option(help="Seconds until a silent worker's messages are adopted.", min=1)]
StopS = Annotated[float, typer.Option(help="Seconds that a stop waits for what runs.", min=0)]
Trim = Annotated[bool, typer.Option("--trim", help="Remove entries that no consumer group needs any more.")]
HealthPort = Annotated[
    int, typer.Option(help="Serve /healthz, /readyz and /metrics on 127.0.0.1 from this port on, one a process.")
]
Child = Annotated[str, typer.Option("--as", hidden=True)]
IncarnationName = Annotated[str, typer.Option("--incarnation", hidden=True)]
Lines = Annotated[int, typer.Option("--lines", hidden=True)]
Beats = Annotated[int, typer.Option("--heartbeat", hidden=True)]

_LINE_EVERY_S = 5.0
_PATIENCE_MS = 3_000


def worker(
    target: Target,
    url: Url = DEFAULT_URL,
    processes: Processes = 1,
    name: Name = "",
    only: Only = None,
    start: Start = "earliest",
    threads: Threads = 16,
    prefetch: Prefetch = 4_000,
    prefetch_mb: PrefetchMb = 64.0,
    look_ahead: LookAhead = 250_000,
    claim_s: ClaimS = 30.0,
    stop_s: StopS = 25.0,
    trim: Trim = False,
    health_port: HealthPort = 0,
    as_json: Json = False,
    child: Child = "",
    incarnation: IncarnationName = "",
    lines_to: Lines = -1,
    heartbeat_to: Beats = -1,
) -> None:
    """Run an app's handlers on workers, in milliseconds; what a worker leaves behind another takes up."""
    policy = WorkerPolicy(
        threads=threads, prefetch=prefetch, prefetch_bytes=round(prefetch_mb * 2**20), trim=trim, look_ahead=look_ahead,
        claim_ms=round(claim_s * 1000), stop_ms=round(stop_s * 1000),
    )  # fmt: skip
    settings = WorkerSettings(
        url=url, consumer=child or "check", incarnation=incarnation, only=tuple(only or ()), start=start, policy=policy
    )
    if child:
        _work(target, settings, health_port, lines_to, heartbeat_to)
        return
    app = load_app(target)
    checked = WorkerProcess(app, settings)  # what is wrong with the app is said here, once
    lines = _Lines(as_json=as_json)
    with Client(url, timeout_ms=_PATIENCE_MS) as client:
        names = StaticMembership(client, app.name, name or None)
        supervisor = Supervisor(
            names,
            partial(_command, health_port),
            stop_ms=policy.stop_ms,
            frozen_after_ms=checked.frozen_after_ms,
            on_line=lines.take,
        )
        with orderly_stop(at_second=supervisor.kill) as stopping:
            client.patiently(lambda: names.acquire(processes), what=app.name, give_up=stopping.is_set)
            warn_if_evicting(client)
            if app.stages:
                talk(f"left out, as they need Spark: the stages {', '.join(app.stages)}; `millstream run` runs them")
            lines.started(app.name, processes)
            supervisor.run(stopping)
            lines.finished()


def _command(health_port: int, launch: Launch) -> list[str]:
    """This very command, for a process of the supervisor's."""
    port = health_port + int(launch.name.rpartition("-")[2]) if health_port else 0
    inner: dict[str, object] = {
        "--as": launch.name,
        "--incarnation": launch.incarnation,
        "--lines": launch.lines,
        "--heartbeat": launch.heartbeat,
        "--health-port": port,
    }
    own = [argument for argument in sys.argv[1:] if argument]
    options = [str(part) for option in inner.items() for part in option]
    # -P: the child finds modules where this process does, not in the working folder before all others.
    return [sys.executable, "-P", "-m", "millstream.cli.main", *own, *options]


def _work(target: str, settings: WorkerSettings, health_port: int, lines_to: int, heartbeat_to: int) -> None:
    """What a worker process does; its exit code says whether the supervisor shall begin anew."""
    try:
        leftovers = _run(target, settings, health_port, lines_to, heartbeat_to)
    except HandlerStuck as error:
        _end_stuck(error)
    except MillstreamError as error:
        talk(f"error: {error}")
        _end(FINAL_CODE)
    except Exception:  # noqa: BLE001 - a mistake of ours: the supervisor begins anew
        talk_lines(traceback.format_exc())
        _end(SOFTWARE_ERROR_CODE)
    for delivery in leftovers:
        talk(
            f"message {delivery.id.decode()} of {delivery.stream.stream} was still running; another worker does it again"
        )
    _end(0)


def _run(
    target: str, settings: WorkerSettings, health_port: int, lines_to: int, heartbeat_to: int
) -> Sequence[Delivery]:
    """Obey the supervisor, and no signal of the terminal."""
    stopping = stopping_at_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what handlers print is to be seen at once
    os.set_inheritable(lines_to, False)
    with ExitStack() as stack:
        recorder, health = (Recorder(), Health()) if health_port else (NOBODY, None)
        if health is not None and isinstance(recorder, Recorder):
            stack.enter_context(HealthServer(health, recorder, port=health_port))
        app = load_app(target)
        process = WorkerProcess(
            app, settings, metrics=recorder, health=health, on_figures=_teller(lines_to), end_process=_end_stuck
        )
        Heartbeat(heartbeat_to, cpu_limit_ms=max(ORPHAN_END_MS, process.frozen_after_ms)).start()
        exit_with_parent(stopping, sys.stdin.buffer, on_orphaned=lambda: process.stop_within(ORPHAN_MS))
        return process.run(stopping)


def _end_stuck(error: HandlerStuck) -> NoReturn:
    talk(f"error: {error}; its process is ended")
    _end(STUCK_CODE)


def _end(code: int) -> NoReturn:
    # Threads in which a handler still runs would keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _teller(lines_to: int) -> Callable[[Mapping[str, Mapping[str, int]]], None]:
    lines = os.fdopen(lines_to, "wb", buffering=0)

    def tell(figures: Mapping[str, Mapping[str, int]]) -> None:
        line = {"event": "figures", "pid": os.getpid(), "handlers": figures}
        with suppress(BrokenPipeError):  # the supervisor has died: the end of standard input says so, too
            lines.write(msgspec.json.encode(line) + b"\n")

    return tell


class _Lines:
    """What the supervisor tells: lines of JSON, or a line for people every few seconds in which something happened."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        self._figures: dict[str, Counter[str]] = {}
        self._before: Counter[str] = Counter()
        self._shown = ""
        self._clock = threading.Timer(_LINE_EVERY_S, self._tick)
        self._clock.daemon = True

    def started(self, app: str, processes: int) -> None:
        """The supervisor begins."""
        if self._as_json:
            say_json({"event": "started", "app": app, "processes": processes}, flush=True)
        else:
            talk(f"{app} runs on {processes} worker{'s' if processes > 1 else ''}; Ctrl-C stops")
            self._clock.start()

    def take(self, name: str, line: Any) -> bool:
        """The figures of a worker process; return whether it has committed anything."""
        with self._lock:
            now = _summed(line["handlers"])
            if self._pids.get(name) != line["pid"]:  # the process has begun anew, and counts from 0
                self._pids[name] = line["pid"]
                self._before += self._figures.get(name, Counter())
            self._figures[name] = now
        if self._as_json:
            say_json({**line, "worker": name}, flush=True)
        return now["committed"] > 0

    def finished(self) -> None:
        """All processes have ended."""
        self._clock.cancel()
        if self._as_json:
            say_json({"event": "stopped"}, flush=True)
        else:
            self._show()
            talk("stopped")

    def _tick(self) -> None:
        self._show()
        self._clock = threading.Timer(_LINE_EVERY_S, self._tick)
        self._clock.daemon = True
        self._clock.start()

    def _show(self) -> None:
        with self._lock:
            totals = sum(self._figures.values(), self._before)
        line = "  ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in totals.items() if count)
        if line and line != self._shown:
            self._shown = line
            talk(line)


def _summed(handlers: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    return sum(map(Counter, handlers.values()), Counter())
