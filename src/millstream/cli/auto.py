"""`millstream auto`: runs an app on workers or on Spark, whichever fits its lag."""

import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream.admin.time_inputs import Duration
from millstream.admin.waiting_messages import WaitingMessages
from millstream.app import App, load_app
from millstream.cli.config_file import chosen_file
from millstream.cli.engine_policy import Engine, EnginePolicy
from millstream.cli.engine_supervisor import NAMES, EngineSupervisor
from millstream.cli.log_output import finish_logging
from millstream.cli.log_output import settings as log_settings
from millstream.cli.options import Json, Url, duration
from millstream.cli.run import check_installed
from millstream.cli.signals import orderly_stop
from millstream.cli.terminal import print_json, print_message
from millstream.errors import ConfigError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.formats import pluralize
from millstream.worker.process.worker_process import WorkerProcess, WorkerSettings

Target = Annotated[str, typer.Argument(help="The app: module:app or path/to/file.py:app", metavar="APP")]
SparkAbove = Annotated[int, typer.Option(help="Spark takes over above so many waiting messages.", min=1)]
WorkersBelow = Annotated[int, typer.Option(help="The workers take over below so many waiting messages.", min=1)]
Minimum = Annotated[Duration, duration("--minimum", "Minimum time for which an engine runs before it is changed.")]
Poll = Annotated[Duration, duration("--poll", "Interval at which the lag is read.", least="100ms")]
Only = Annotated[list[str] | None, typer.Option("--only", help="Run only this handler; repeatable.", metavar="NAME")]
Checkpoint = Annotated[
    str, typer.Option(help="Folder for Spark's checkpoints: a new one in it for each start of Spark.")
]
WorkerOptions = Annotated[str, typer.Option(help="Options of `millstream worker`, such as '--processes 4'.")]
RunOptions = Annotated[str, typer.Option(help="Options of `millstream run`, such as '--max-per-batch 20000'.")]
StopTimeout = Annotated[
    Duration, duration("--stop-timeout", "Time that an engine may take to stop, then it is killed.")
]
_TIMEOUT_MS = 15_000
_CHOSEN = {"MILLSTREAM_WORKER_ONCE": "false", "MILLSTREAM_RUN_ONCE": "false", "MILLSTREAM_RUN_REPROCESS": "false"}
"""What the environment and the file of the children must not set, as `millstream auto` chooses it."""
_REFUSED = ("--once", "--reprocess", "--from-committed", "--checkpoint", "--only", "--url")


def auto(
    context: typer.Context,
    target: Target,
    url: Url = DEFAULT_URL,
    spark_above: SparkAbove = EnginePolicy.spark_above,
    workers_below: WorkersBelow = EnginePolicy.workers_below,
    minimum: Minimum = Duration(EnginePolicy.minimum_ms / 1000),
    poll: Poll = Duration("5s"),
    only: Only = None,
    checkpoint: Checkpoint = ".millstream/auto-checkpoints",
    worker_options: WorkerOptions = "",
    run_options: RunOptions = "",
    stop_timeout: StopTimeout = Duration("60s"),
    as_json: Json = False,
) -> None:
    """Run an app on workers while few messages wait, and on Spark while many do. Run one of it for an app."""
    policy = EnginePolicy(spark_above=spark_above, workers_below=workers_below, minimum_ms=minimum.ms)
    more: Mapping[Engine, Sequence[str]] = {
        "workers": _words("--worker-options", worker_options),
        "spark": _words("--run-options", run_options),
    }
    app = load_app(target).only(only or ())
    finish_logging()
    check_served_by_both(app, url)
    chosen = [word for name in app.handlers for word in ("--only", name)]  # all whose messages count, and no other
    client = Client(url, timeout_ms=_TIMEOUT_MS)  # not closed: that would wait for its thread while Redis hangs
    with _checkpoints(checkpoint) as new_checkpoint:

        def arguments(engine: Engine) -> Sequence[str]:
            if engine == "workers":
                return ["worker", target, *chosen, *more[engine]]
            return ["run", target, "--checkpoint", new_checkpoint(), "--from-committed", *chosen, *more[engine]]

        supervisor = EngineSupervisor(
            policy,
            partial(WaitingMessages(client, app.handlers.values()).count, policy.counted),
            arguments,
            environment={**_environment(url), **chosen_file(context)},
            stop_ms=stop_timeout.ms,
            poll_ms=poll.ms,
            on_event=partial(_show, app.name, as_json=as_json),
        )
        with orderly_stop(at_second=supervisor.kill) as stopping:
            supervisor.run(stopping)


def check_served_by_both(app: App, url: str) -> None:
    """Raise ConfigError if one of the engines does not run a part of the app, or Spark is not installed."""
    if app.stages:
        raise ConfigError(
            f"only Spark runs the stages {', '.join(app.stages)}: run them with `millstream run --only`, and name the "
            "handlers here with --only"
        )
    WorkerProcess(app, WorkerSettings(url=url, consumer="check"))  # reports errors of the app here, once
    check_installed()


def _words(option: str, text: str) -> Sequence[str]:
    """The options for the command of an engine. Raises ConfigError for those that this command gives it."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error
    for word in words:
        if (name := word.partition("=")[0]) in _REFUSED:
            raise ConfigError(f"{option} must not have {name}: `millstream auto` chooses it")
    return words


def _environment(url: str) -> Mapping[str, str]:
    """The environment of the children: any user of the machine may read arguments, and a URL may have a password."""
    log = log_settings()
    chosen = {"MILLSTREAM_LOG_LEVEL": log.level, "MILLSTREAM_LOG_FORMAT": log.format}
    return {**os.environ, **_CHOSEN, "MILLSTREAM_URL": url, **{name: value for name, value in chosen.items() if value}}


@contextmanager
def _checkpoints(folder: str) -> Iterator[Callable[[], str]]:
    """A function that returns a new checkpoint in `folder`, and removes the one before if this machine has it.

    Progress and state are in Redis. A checkpoint of an earlier run would take what workers have processed and trimmed
    since for lost.
    """
    last: list[str] = []

    def remove() -> None:
        while last:
            shutil.rmtree(last.pop(), ignore_errors=True)

    def new() -> str:
        name = f"auto-{time.time_ns()}"
        if "://" in folder:
            return f"{folder.rstrip('/')}/{name}"
        remove()
        last.append(str(Path(folder).resolve() / name))
        return last[-1]

    try:
        yield new
    finally:
        remove()


def _show(app: str, event: Mapping[str, Any], *, as_json: bool) -> None:
    """Print an event: as JSON, or as a line for people if it has one."""
    if as_json:
        print_json({**event, "at_ms": time.time_ns() // 1_000_000}, flush=True)
        return
    match event["event"]:
        case "started":
            count = f"{'' if event['lag_exact'] else 'at least '}{pluralize(event['lag'], 'message')}"
            print_message(f"{app} runs on {NAMES[event['engine']]}: {count} wait; Ctrl-C stops")
        case "change":
            print_message(event["cause"])
        case "stopped":
            print_message(f"stopped: the engine has changed {pluralize(event['changes'], 'time')}")
