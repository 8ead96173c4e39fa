"""`millstream worker`: runs an app's handlers on low-latency workers."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import typer

from millstream import __version__
from millstream.admin.redis_metrics import places_of
from millstream.admin.server_checks import warn_of_data_loss
from millstream.admin.time_inputs import Duration
from millstream.app import App, load_app
from millstream.cli.alerts import AlertCommand, AlertUrl, FigureAlerts
from millstream.cli.log_output import finish_logging
from millstream.cli.log_output import settings as log_settings
from millstream.cli.metrics_option import new_recorder, print_started, serve_metrics
from millstream.cli.options import Json, MetricsAddress, Url, duration
from millstream.cli.signals import OrderlyStop, orderly_stop
from millstream.cli.terminal import print_json, print_message, with_time
from millstream.cli.unmatched_patterns import unmatched_patterns_shown
from millstream.cli.worker_child import WorkerJob
from millstream.cli.worker_once import stopped_when_drained
from millstream.delivery.running_code import code_of
from millstream.handlers.handler import Handler
from millstream.observability.dead_letter_alerts import DeadLetterAlerts
from millstream.observability.metrics import Recorder
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.formats import pluralize
from millstream.worker.policy import WorkerPolicy
from millstream.worker.process.process_reports import ProcessReports
from millstream.worker.process.supervisor import Launch, Program, Supervisor
from millstream.worker.process.worker_process import WorkerProcess, WorkerSettings
from millstream.worker.static_membership import StaticMembership

Target = Annotated[str, typer.Argument(help="The app: module:app or path/to/file.py:app", metavar="APP")]
Processes = Annotated[int, typer.Option(help="Number of worker processes; each runs all handlers.", min=1)]
Name = Annotated[str, typer.Option(help="Name of this worker in the groups; default: the host's name.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="Run only this handler; repeatable.", metavar="NAME")]
Start = Annotated[Literal["earliest", "latest"], typer.Option(help="Where a handler that never ran starts.")]
Threads = Annotated[int, typer.Option(help="Messages that a plain handler processes at once.", min=1)]
Prefetch = Annotated[int, typer.Option(help="Maximum number of messages in flight, per handler and process.", min=1)]
PrefetchMb = Annotated[
    float, typer.Option(help="Maximum megabytes of messages in flight, per handler and process.", min=0.001)
]
LookAhead = Annotated[int, typer.Option(help="Maximum number of messages of a stream in its key queues.", min=1)]
Claim = Annotated[Duration, duration("--claim", "Time after which a silent worker's messages are claimed.", least="1s")]
FrozenAfter = Annotated[
    Duration | None,
    duration(
        "--frozen-after",
        "Time after which a process is killed in which a handler keeps the interpreter busy; default: two thirds of "
        "--claim, or the longest time limit.",
        least="1s",
    ),
]
StopTimeout = Annotated[Duration, duration("--stop-timeout", "Time that a stop waits for running messages.")]
Once = Annotated[bool, typer.Option("--once", help="Process what is there, then end.")]
Trim = Annotated[bool, typer.Option("--trim", help="Trim entries that no consumer group needs any more.")]
_LINE_INTERVAL_S = 5.0
_TIMEOUT_MS = 3_000


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
    claim: Claim = Duration("30s"),
    frozen_after: FrozenAfter = None,
    stop_timeout: StopTimeout = Duration("25s"),
    trim: Trim = False,
    once: Once = False,
    alert_url: AlertUrl = "",
    alert_command: AlertCommand = "",
    metrics_address: MetricsAddress = "",
    as_json: Json = False,
) -> None:
    """Run an app's handlers on low-latency workers. Other workers claim the messages of one that dies."""
    policy = WorkerPolicy(
        threads=threads,
        prefetch=prefetch,
        prefetch_bytes=round(prefetch_mb * 2**20),
        trim=trim,
        look_ahead=look_ahead,
        claim_ms=claim.ms,
        stop_ms=stop_timeout.ms,
        frozen_ms=None if frozen_after is None else frozen_after.ms,
    )
    settings = WorkerSettings(url=url, consumer="check", only=tuple(only or ()), start=start, policy=policy)
    app, zeros = _load(target), Recorder()
    checked = WorkerProcess(app, settings, metrics=zeros)  # reports errors of the app here, once
    lines = _SupervisorOutput(as_json=as_json)
    recorder = new_recorder("worker")
    reports = ProcessReports(recorder, zeros.snapshot())
    handlers = [one for one in app.handlers.values() if not only or one.name in only]
    places = partial(places_of, handlers=handlers)
    running = code_of(handlers, engine="workers", version=__version__)
    with (
        serve_metrics(metrics_address, url, places, recorder, health=reports, more=[reports]) as metrics,
        Client(url, timeout_ms=_TIMEOUT_MS) as client,
        DeadLetterAlerts(alert_url or None, alert_command or None) as alerts,
    ):
        names = StaticMembership(client, app.name, name or None, handlers=running)
        supervisor = Supervisor(
            names,
            partial(_program, target, settings, metrics is not None),
            stop_ms=policy.stop_ms,
            frozen_after_ms=checked.frozen_after_ms,
            on_line=partial(_on_figures, lines, FigureAlerts(app.name, alerts)),
            reports=reports,
        )
        with orderly_stop(at_second=supervisor.kill) as stopping:
            client.retry_while_unavailable(lambda: names.acquire(processes), what=app.name, give_up=stopping.is_set)
            _warn(app, client)
            with _watched(url, handlers, stopping, once=once), lines.shown(app.name, processes, metrics):
                supervisor.run(stopping)


def _load(target: str) -> App:
    app = load_app(target)
    finish_logging()
    return app


def _warn(app: App, client: Client) -> None:
    """Warn of settings of this Redis that may lose data, and of stages, which no worker runs."""
    warn_of_data_loss(client)
    if app.stages:
        print_message(f"not run: the stages {', '.join(app.stages)} need Spark; use `millstream run`")


@contextmanager
def _watched(url: str, handlers: Sequence[Handler], stopping: OrderlyStop, *, once: bool) -> Iterator[None]:
    """Watch the streams of the handlers beside the block: whether any is there, and with `once` whether all is processed."""
    with (
        stopped_when_drained(url, handlers, stopping, once=once),
        unmatched_patterns_shown(url, handlers, stopping, once=once),
    ):
        yield


def _program(target: str, settings: WorkerSettings, reports: bool, launch: Launch) -> Program:
    """One worker process. Its settings are not in its arguments: any user of the machine may read those."""
    job = WorkerJob(
        target=target,
        settings=replace(settings, consumer=launch.name, incarnation=launch.incarnation),
        reports=reports,
        report_to=launch.report_to,
        heartbeat_to=launch.heartbeat_to,
        log=replace(log_settings(), worker=launch.name),
    )
    # -P: the process finds modules where this one does, and not first in the working folder.
    return Program(
        arguments=(sys.executable, "-P", "-m", "millstream.cli.child", "worker_child", launch.name),
        first_line=msgspec.json.encode(job),
    )


def _on_figures(lines: "_SupervisorOutput", alerts: FigureAlerts, name: str, line: Any) -> bool:
    """Pass on the figures of a worker process; return whether it has committed any message."""
    alerts.add(name, line["pid"], line["handlers"])
    return lines.add_figures(name, line)


class _SupervisorOutput:
    """The supervisor's output: lines of JSON, or a summary line every few seconds if something has changed."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        self._figures: dict[str, Counter[str]] = {}
        self._ended_totals: Counter[str] = Counter()
        self._shown = ""
        self._timer = threading.Timer(_LINE_INTERVAL_S, self._tick)
        self._timer.daemon = True

    @contextmanager
    def shown(self, app: str, processes: int, metrics_url: str | None) -> Iterator[None]:
        """Print that the supervisor has started, and where its metrics are served; then that all processes have ended.

        If the block raises, the supervisor has ended in another way: the error is printed instead.
        """
        text = f"{app} runs on {processes} worker{'s' if processes > 1 else ''}; Ctrl-C stops"
        print_started(text, metrics_url, as_json=self._as_json, app=app, processes=processes)
        if not self._as_json:
            self._timer.start()
        yield
        self._timer.cancel()
        if self._as_json:
            print_json({"event": "stopped"}, flush=True)
        else:
            self._print_totals()
            print_message("stopped")

    def add_figures(self, name: str, line: Any) -> bool:
        """Add the figures of a worker process; return whether it has committed any message."""
        with self._lock:
            now = _summed(line["handlers"])
            if self._pids.get(name) != line["pid"]:  # the process was restarted, and counts from 0
                self._pids[name] = line["pid"]
                self._ended_totals += self._figures.get(name, Counter())
            self._figures[name] = now
        if self._as_json:
            print_json({**line, "worker": name}, flush=True)
        return now["committed"] > 0

    def _tick(self) -> None:
        self._print_totals()
        self._timer = threading.Timer(_LINE_INTERVAL_S, self._tick)
        self._timer.daemon = True
        self._timer.start()

    def _print_totals(self) -> None:
        with self._lock:
            totals = sum(self._figures.values(), self._ended_totals)
        # What is committed is shown by its parts: processed, or a dead letter.
        line = "  ".join(
            pluralize(count, "dead letter") if name == "dead" else f"{count:,} {name.replace('_', ' ')}"
            for name, count in totals.items()
            if count and name != "committed"
        )
        if line and line != self._shown:
            self._shown = line
            print_message(with_time(line))


def _summed(handlers: Mapping[str, Mapping[str, int]]) -> Counter[str]:
    return sum(map(Counter, handlers.values()), Counter())
