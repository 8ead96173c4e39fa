"""One worker process. Its supervisor starts it without the command line's parser, so that it starts fast.

The process reads its job, a line of JSON, from standard input. The input stays open as long as the supervisor lives.
"""

import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import msgspec

from millstream.app import load_app
from millstream.cli.held_gc import release_gc
from millstream.cli.log_output import LogSettings, finish_logging, start_logging
from millstream.cli.signals import stopping_at_signals
from millstream.cli.terminal import print_message, print_message_text, redact_uncaught_exceptions
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import HandlerStuck, MillstreamError
from millstream.observability.health import Health
from millstream.observability.metrics import NO_METRICS, Recorder
from millstream.worker.process.heartbeat import Heartbeat
from millstream.worker.process.process_reports import ProcessReport, make_report
from millstream.worker.process.supervisor import (
    FINAL_CODE,
    ORPHAN_END_MS,
    ORPHAN_MS,
    SOFTWARE_ERROR_CODE,
    STUCK_CODE,
    exit_with_parent,
)
from millstream.worker.process.worker_process import WorkerProcess, WorkerSettings, describe_leftover, tune_gc


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """The settings of one worker process.

    * `target`: the app, as on the command line
    * `reports`: it reports its metrics and its health to the supervisor
    * `report_to`, `heartbeat_to`: inherited file descriptors of its reports and of its heartbeat
    * `log`: its logging
    """

    target: str
    settings: WorkerSettings = field(repr=False)
    reports: bool
    report_to: int
    heartbeat_to: int
    log: LogSettings


def main() -> NoReturn:
    """Run the worker process; its exit code tells the supervisor whether to restart it."""
    redact_uncaught_exceptions()
    line = sys.stdin.buffer.readline()
    if not line:  # the supervisor has died: there is nothing to do, and no process to report to
        _end(STUCK_CODE)
    job = msgspec.json.decode(line, type=WorkerJob)
    start_logging(job.log)
    try:
        leftovers = _run(job)
    except HandlerStuck as error:
        _end_stuck(error)
    except MillstreamError as error:
        print_message(f"error: {error}")
        _end(FINAL_CODE)
    except Exception:  # noqa: BLE001 - any other error is a bug in millstream: the supervisor restarts the process
        print_message_text(traceback.format_exc())
        _end(SOFTWARE_ERROR_CODE)
    for delivery in leftovers:
        print_message(describe_leftover(delivery))
    _end(0)


def _run(job: WorkerJob) -> Sequence[Delivery]:
    """Run the handlers until the supervisor ends this process."""
    stopping = stopping_at_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that the output of handlers appears at once
    os.set_inheritable(job.report_to, False)
    recorder, health = Recorder(), Health()
    release_gc()
    app = load_app(job.target)
    finish_logging()
    process = WorkerProcess(
        app,
        job.settings,
        metrics=recorder if job.reports else NO_METRICS,
        health=health if job.reports else None,
        on_figures=_figure_writer(job.report_to, partial(make_report, recorder, health) if job.reports else None),
        end_process=_end_stuck,
    )
    Heartbeat(job.heartbeat_to, cpu_limit_ms=max(ORPHAN_END_MS, process.frozen_after_ms)).start()
    exit_with_parent(stopping, sys.stdin.buffer, on_orphaned=lambda: process.stop_within(ORPHAN_MS))
    tune_gc()
    return process.run(stopping)


def _end_stuck(error: HandlerStuck) -> NoReturn:
    print_message(f"error: {error}; ending the process")
    _end(STUCK_CODE)


def _end(code: int) -> NoReturn:
    # Threads that still run a handler would keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _figure_writer(
    report_to: int, report: Callable[[], ProcessReport] | None
) -> Callable[[Mapping[str, Mapping[str, int]]], None]:
    pipe = os.fdopen(report_to, "wb")  # buffered, as one system call need not write a long line as a whole

    def write(figures: Mapping[str, Mapping[str, int]]) -> None:
        at_ms = time.time_ns() // 1_000_000
        line: dict[str, Any] = {"event": "figures", "at_ms": at_ms, "pid": os.getpid(), "handlers": figures}
        if report is not None:
            line["report"] = report()
        with suppress(BrokenPipeError):  # the supervisor has died; the end of standard input ends this process
            pipe.write(msgspec.json.encode(line) + b"\n")
            pipe.flush()

    return write
