"""`millstream run`: runs an app as Spark pipelines, on this machine or a cluster."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millstream import __version__
from millstream.admin.redis_metrics import places_of
from millstream.admin.time_inputs import Duration
from millstream.app import App, add_to_path, app_folder, load_app
from millstream.cli.alerts import AlertCommand, AlertUrl
from millstream.cli.log_output import finish_logging
from millstream.cli.metrics_option import new_recorder, serve_metrics
from millstream.cli.options import Json, MetricsAddress, Url, duration
from millstream.cli.signals import orderly_stop
from millstream.cli.terminal import has_message_format, print_message, with_time
from millstream.cli.unmatched_patterns import unmatched_patterns_shown
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, PipelineFailed, SessionEnded, install_hint
from millstream.observability.dead_letter_alerts import DeadLetterAlerts
from millstream.observability.health import Health
from millstream.observability.metrics import Metrics, Recorder
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.escaping import escape_line
from millstream.redis_client.formats import entry_rate, pluralize
from millstream.redis_client.redaction import redact_text

if TYPE_CHECKING:
    from millstream.spark.run.supervisor import RunSettings

logger = logging.getLogger(__name__)

_WORK = ("batch", "caught-up", "paused")
_COUNTED = ("messages", "committed", "dead", "retries")
_WATCHED_WITHIN_MS = 600_000.0
"""How long ago a healthy run last checked its queries, at most: a Spark session takes minutes to start at times."""
_MAX_SHORT_SESSIONS, _SHORT_SESSION_MS, _MAX_WAIT_S = 10, 600_000.0, 30.0


def _processed(counts: Mapping[str, int]) -> int:
    """How many messages were committed, and not as dead letters."""
    return counts["committed"] - counts["dead"]


class Progress:
    """Prints the progress of the pipelines: one live line in a terminal, a line every few seconds in a pipe.

    With `as_json`, prints each event of the supervisor as a line of JSON on stdout instead. The last event, `stopped`,
    has the totals of the run.
    """

    def __init__(self, app: str, *, as_json: bool, every_s: float = 3.0) -> None:
        from rich.console import Console  # imported here: help and completion are quick without them
        from rich.live import Live

        self._app = app
        self._as_json = as_json
        self._console = Console(stderr=True)
        self._live = (
            Live(console=self._console, auto_refresh=False)
            if self._console.is_terminal and not has_message_format()
            else None
        )
        self._every_s = 0.5 if self._live else every_s
        self._lock = threading.Lock()
        self._total = dict.fromkeys(("batches", *_COUNTED), 0)
        self._shown = dict(self._total)
        self._shown_at = time.monotonic()

    def __enter__(self) -> "Progress":
        if not self._as_json:
            if self._live:
                self._live.start()
            self._print("starting Spark")  # for seconds nothing else is shown
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and not self._as_json:
            self._live.stop()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Process one event of the supervisor."""
        with self._lock:
            if event["event"] in _WORK:
                self._total["batches"] += event["event"] == "batch"
                for name in _COUNTED:
                    self._total[name] += event.get(name, 0)
            if event["event"] == "stopped":
                event = {**event, **self._total}
            if "committed" in event:
                event = {**event, "processed": _processed(event)}
            if self._as_json:
                print(json.dumps({**event, "at_ms": time.time_ns() // 1_000_000}), flush=True)
            elif words := escape_line(redact_text(self._describe(event))):
                self._print(words)

    def on_watch(self, lag: int | None) -> None:
        """Print a line of progress if the interval has passed and something has changed."""
        now = time.monotonic()
        if self._as_json or now - self._shown_at < self._every_s:
            return
        with self._lock:
            if self._total != self._shown:
                line = self._progress_line(
                    (self._total["messages"] - self._shown["messages"]) / (now - self._shown_at), lag
                )
                if self._live:
                    self._live.update(line, refresh=True)
                else:
                    self._print(with_time(line))
            self._shown, self._shown_at = dict(self._total), now

    def _print(self, line: str) -> None:
        if has_message_format():
            print_message(line)
        else:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _progress_line(self, rate: float, lag: int | None) -> str:
        total = self._total
        left = f"  {lag / rate:,.0f} s left" if lag and rate > 0 else ""
        return (
            f"{entry_rate(rate)}  lag {'not known yet' if lag is None else format(lag, ',')}  "
            f"{pluralize(total['batches'], 'batch', 'batches')}  {_processed(total):,} processed  "
            f"{pluralize(total['dead'], 'dead letter')}  {pluralize(total['retries'], 'retry', 'retries')}{left}"
        )

    def _describe(self, event: Mapping[str, Any]) -> str:
        """An event as text; "" for events that are shown in another way."""
        name = event.get("handler") or event.get("stage")
        match event["event"]:
            case "started":
                return f"{name} started"
            case "metrics":
                return f"metrics: {event['url']}"
            case "running":
                batch = f"batch {event['batch']}" if "batch" in event else "a batch"
                why = f": {event['reason']}" if "reason" in event else ""
                return f"{name}: {batch} running for {event['seconds']:,} s{why}"
            case "paused":
                return f"{name} is {event['reason']}"
            case "resumed":
                return f"{name} is resumed"
            case "stopped":
                return self._describe_end(event)
        return ""

    def _describe_end(self, event: Mapping[str, Any]) -> str:
        done = f"stopped: {_processed(event):,} processed, {pluralize(event['dead'], 'dead letter')}"
        parked = event.get("parked", {})
        if not parked:
            return done
        keys, messages = (sum(one[what] for one in parked.values()) for what in ("keys", "messages"))
        see = ", ".join(f"millstream key list {self._app}.{name}" for name in sorted(parked))
        return (
            f"{done}, {pluralize(keys, 'key')} parked ({pluralize(messages, 'message waits', 'messages wait')}: {see})"
        )


Target = Annotated[str, typer.Argument(help="The app: module:app or path/to/file.py:app", metavar="APP")]
Checkpoint = Annotated[str, typer.Option(help="Folder for Spark's checkpoints; keep it between runs.")]
SparkMaster = Annotated[
    str, typer.Option(help="Spark's master URL; default: local[*] with task retries.", metavar="URL")
]
MaxPerBatch = Annotated[int, typer.Option(help="Maximum number of entries of a micro-batch.")]
BatchTarget = Annotated[
    Duration,
    duration("--batch-target", "How long a micro-batch should take: fewer entries if it takes longer; 0 = off."),
]
Interval = Annotated[Duration, duration("--interval", "Minimum time between the starts of two micro-batches.")]
Once = Annotated[bool, typer.Option("--once", help="Process the available entries, then end.")]
Start = Annotated[Literal["earliest", "latest"], typer.Option(help="Where a handler or stage that never ran starts.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="Run only this handler or stage; repeatable.")]
PyFiles = Annotated[
    list[str] | None, typer.Option(help="A module, folder of modules or zip for the executors; repeatable.")
]
FromCommitted = Annotated[
    bool, typer.Option("--from-committed", help="With a new checkpoint: continue after the committed entries.")
]
Reprocess = Annotated[
    bool, typer.Option("--reprocess", help="With a new checkpoint: reset all state and process all entries again.")
]
ReadFrom = Annotated[
    Literal["primary", "replica"], typer.Option(help="Servers that tasks read entries from; see docs/spark-source.md.")
]
AllowLoss = Annotated[
    bool, typer.Option("--allow-data-loss", help="Count entries that were trimmed unread instead of stopping.")
]
Conf = Annotated[list[str] | None, typer.Option(help="A Spark setting, KEY=VALUE; repeatable.")]
SparkLog = Annotated[bool, typer.Option("--spark-log", help="Show Spark's own warnings and errors.")]


def run(
    target: Target,
    url: Url = DEFAULT_URL,
    checkpoint: Checkpoint = ".millstream/checkpoints",
    spark_master: SparkMaster = "",
    max_per_batch: MaxPerBatch = 100_000,
    batch_target: BatchTarget = Duration("4s"),
    interval: Interval = Duration(0),
    once: Once = False,
    start: Start = "earliest",
    only: Only = None,
    from_committed: FromCommitted = False,
    reprocess: Reprocess = False,
    read_from: ReadFrom = "primary",
    allow_data_loss: AllowLoss = False,
    conf: Conf = None,
    py_files: PyFiles = None,
    alert_url: AlertUrl = "",
    alert_command: AlertCommand = "",
    metrics_address: MetricsAddress = "",
    as_json: Json = False,
    spark_log: SparkLog = False,
) -> None:
    """Run an app as a Spark pipeline, in order per key, each effect committed exactly once."""
    settings, app = _pairs(conf or []), _load(target, only or (), py_files or ())
    from millstream.spark.run.query_metrics import RunMetrics
    from millstream.spark.run.supervisor import RunSettings, Supervisor

    run_settings = RunSettings(
        url=url,
        checkpoint=checkpoint if "://" in checkpoint else str(Path(checkpoint).resolve()),
        max_per_batch=max_per_batch,
        batch_target_ms=batch_target.ms,
        interval_ms=interval.ms,
        once=once,
        start=_start_mode(from_committed=from_committed, reprocess=reprocess),
        start_at=start,
        read_from=read_from,
        fail_on_data_loss=not allow_data_loss,
    )
    code = _prepare(app, url, target, py_files or ())
    with (
        orderly_stop() as stopping,
        Progress(app.name, as_json=as_json) as progress,
        _serve_run(metrics_address, url, app, progress) as (recorder, on_watch),
        DeadLetterAlerts(alert_url or None, alert_command or None) as alerts,
        unmatched_patterns_shown(url, [*app.handlers.values()], stopping, once=once),
    ):
        on_event = _on_event(app, progress, alerts, recorder)
        supervise = partial(Supervisor, on_event=on_event, on_watch=on_watch, stopping=stopping, version=__version__)
        session = partial(
            _session, stopping, app, code, master=spark_master, conf=settings, checkpoint=checkpoint, verbose=spark_log
        )

        def run_on(spark: Any, chosen: RunSettings) -> None:
            if metrics_address:
                spark.streams.addListener(RunMetrics(recorder, {one.label for one in app.handlers.values()}))
            supervise(app, spark, chosen).run()

        _in_sessions(session, run_on, run_settings, stopping)


def _start_mode(*, from_committed: bool, reprocess: bool) -> Literal["resume", "from-committed", "reprocess"]:
    if from_committed and reprocess:
        raise ConfigError("--from-committed and --reprocess exclude each other: give only one")
    return "from-committed" if from_committed else "reprocess" if reprocess else "resume"


def _prepare(app: App, url: str, target: str, py_files: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """Check the app before Spark starts; return its folder and the other files that executors get."""
    from millstream.spark.run.early_checks import check_early

    check_early(app, url)
    os.environ["MILLSTREAM_URL"] = url  # the default Redis of the streams that a stage itself reads and writes
    return app_folder(target), py_files


def _load(target: str, only: Sequence[str], py_files: Sequence[str]) -> App:
    for path in py_files:
        add_to_path(path)
    app = load_app(target).only(only)
    finish_logging()
    check_installed()
    return app


def check_installed() -> None:
    """Raise ConfigError if a module that Spark needs is not installed."""
    try:
        import millstream.spark.run.query_metrics
        import millstream.spark.run.supervisor  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"Spark needs {error.name!r}; {install_hint('spark')}") from error


def _in_sessions(
    session: Callable[[], AbstractContextManager[Any]],
    run: Callable[[Any, "RunSettings"], None],
    settings: "RunSettings",
    stopping: threading.Event,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Call `run` in a Spark session, and again in a new one whenever Spark ends the session.

    Raises what `run` raises, and SessionEnded if too many sessions end soon after their start.
    """
    ended_soon = 0
    while True:
        began_ms = clock.monotonic_ms()
        try:
            with session() as spark:
                if spark is not None:
                    run(spark, settings)
        except SessionEnded as ended:
            ended_soon = ended_soon + 1 if clock.monotonic_ms() - began_ms < _SHORT_SESSION_MS else 1
            if ended_soon > _MAX_SHORT_SESSIONS:
                raise
            settings = replace(settings, start="from-committed")  # continue: only the first session may reprocess
            wait_s = min(2.0**ended_soon, _MAX_WAIT_S)
            logger.warning("%s; starting a new session in %.0f s", ended, wait_s)
            if not stopping.wait(wait_s):
                continue
        return


@contextmanager
def _serve_run(
    address: str, url: str, app: App, progress: Progress
) -> Iterator[tuple[Recorder, Callable[[int | None], None]]]:
    """Serve the metrics and the health of a run at `address`, if it is not "", within the block.

    Yields the recorder, and a callback for each check of the queries, which gets the lag.
    """
    from millstream.spark.run.query_metrics import init_run

    recorder, health = new_recorder("spark"), Health(read_within_ms=_WATCHED_WITHIN_MS)
    watched = health.progress(app.name, run_within_ms=_WATCHED_WITHIN_MS)
    init_run(recorder, app.handlers.values())

    def on_watch(lag: int | None) -> None:
        watched.on_read()
        progress.on_watch(lag)

    discover = partial(places_of, handlers=app.handlers.values())
    with serve_metrics(address, url, discover, recorder, health=health) as metrics_url:
        if metrics_url:
            progress.on_event({"event": "metrics", "url": metrics_url})
        yield recorder, on_watch
        health.on_stopping()


def _on_event(
    app: App, progress: Progress, alerts: DeadLetterAlerts, metrics: Metrics
) -> Callable[[Mapping[str, Any]], None]:
    """A callback that passes the supervisor's events to progress, metrics and alerts."""
    from millstream.spark.run.query_metrics import report_batch

    def on_event(event: Mapping[str, Any]) -> None:
        progress.on_event(event)
        if event["event"] in _WORK and "handler" in event:
            report_batch(metrics, app.handlers[event["handler"]].label, event)
            if event["dead"]:
                alerts.send({"app": app.name, "handler": event["handler"], "dead": event["dead"]})

    return on_event


@contextmanager
def _session(
    stopping: threading.Event,
    app: App,
    code: tuple[Path, Sequence[str]],
    *,
    master: str,
    conf: Mapping[str, str],
    checkpoint: str,
    verbose: bool,
) -> Iterator[Any]:
    """A Spark session within the block; None if Spark could not start because the command is stopping.

    On a cluster, executors get `code`: the folder of the app, and the files given with --py-files.
    """
    from millstream.spark.run.app_archive import ship
    from millstream.spark.run.session import check_compression, close_session, is_cluster, open_session, task_attempts
    from millstream.spark.run.warm_up import start_warm_up

    tries = task_attempts(app.handlers.values())
    master = master or f"local[*,{tries}]"
    conf = {"spark.task.maxFailures": str(tries), **conf}
    spark = None
    try:
        # On the main thread PySpark would handle Ctrl-C itself, and abort the app in the middle of its work.
        with ThreadPoolExecutor(max_workers=1) as starter:
            spark = starter.submit(
                open_session,
                app.name,
                master=master,
                conf=conf,
                checkpoint=checkpoint,
                handlers_only=not app.stages,
                verbose=verbose,
            ).result()
    except (ConfigError, PipelineFailed):
        if not stopping.is_set():  # while stopping, the signal has ended the Java process too
            raise
    try:
        if spark is not None and is_cluster(master):
            check_compression(spark)
            ship(spark, *code)
        elif spark is not None:
            start_warm_up(spark)
        yield spark
    finally:
        if spark is not None:
            close_session(spark)


def _pairs(conf: list[str]) -> dict[str, str]:
    pairs = {}
    for setting in conf:
        key, equals, value = setting.partition("=")
        if not equals or not key.startswith("spark."):
            raise ConfigError(f"--conf {setting!r}: write it as spark.some.key=value")
        pairs[key] = value
    return pairs
