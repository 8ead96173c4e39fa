"""The demo's run: publish, process, kill on request, then check and report."""

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.demo.audit import audit, read_results
from millstream.demo.chart import draw_chart, require_matplotlib
from millstream.demo.environment import clean, embedded_server, find_example, fresh_folder, require_unused
from millstream.demo.flights import Flights, load_flights
from millstream.demo.pipeline import RunProcess
from millstream.demo.progress import ProgressView, RunProgress, read_progress
from millstream.demo.publish import FlightPublisher
from millstream.demo.reference import expected_results
from millstream.demo.report import Kill, Outcome, Sample
from millstream.errors import ConfigError, PipelineFailed
from millstream.redis_client.client import Client
from millstream.redis_client.gc_pause import gc_paused
from millstream.redis_client.redaction import redact_url

_POLL_MS = 20
_SHOW_MS = 200
_STALL_MS = 300_000
_KILL_WORKER_AT, _KILL_DRIVER_AT = 1 / 3, 2 / 3
_HOLD_AT = 5 / 6


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Settings of the demo.

    * `flights`: number of flights, the first ones in order of departure; None = all
    * `kill`: kill a Python worker and, later, the driver with SIGKILL in mid-run
    * `url`: URL of a Redis to use; None starts one for the demo
    * `data_dir`: folder for everything the demo writes; emptied first if an earlier demo created it
    * `keep`: keep the data in Redis and the checkpoints at the end
    """

    flights: int | None = None
    kill: bool = False
    url: str | None = field(default=None, repr=False)
    data_dir: Path = Path(".millstream/demo")
    keep: bool = False

    def __post_init__(self) -> None:
        if self.flights is not None and self.flights < 1:
            raise ConfigError("--flights must be at least 1")


def run_demo(settings: DemoSettings, console: Console, *, clock: Clock = SYSTEM_CLOCK) -> Outcome:
    """Run the demo and print its progress to `console`; every process that it started has ended when this returns.

    Raises ConfigError for a wrong setting, PipelineFailed if the pipeline stops by itself, RedisError, ServerError, and
    KeyboardInterrupt on Ctrl-C and SIGTERM.
    """
    with ExitStack() as stack:
        stack.enter_context(_interrupt_once())
        require_matplotlib()
        target = f"{find_example()}:app"
        data_dir = stack.enter_context(fresh_folder(settings.data_dir))
        flights = load_flights(settings.flights)
        console.print(f"{len(flights):,} flights that left New York in 2013")
        if settings.url:
            url, program = settings.url, ""
        else:
            server = stack.enter_context(embedded_server(data_dir, keep=settings.keep))
            url, program = server.url, f", {server.program}"
        client = stack.enter_context(Client(url))
        require_unused(client)
        if settings.url and not settings.keep:
            stack.callback(clean, client)
        console.print(f"Redis: {redact_url(url)}{program}", markup=False, highlight=False)
        checkpoint = data_dir / "checkpoint"
        if not settings.keep:
            stack.callback(shutil.rmtree, checkpoint, ignore_errors=True)
        pipeline = RunProcess(target, url=url, checkpoint=checkpoint, log_path=data_dir / "run.log")
        run = _Run(settings, console, clock, client, pipeline, url, flights)
        finished = run.run_to_end()
        console.print("checking every flight")
        with gc_paused():
            results = read_results(client)
            verdict = audit(expected_results(flights), results)
        chart = data_dir / "departures.png"
        draw_chart(chart, results.departures, run.samples, run.kills)
        return Outcome(
            audit=verdict,
            departures=results.departures,
            seconds=finished.at_s,
            startup_seconds=run.startup_s,
            batches=pipeline.batches,
            samples=run.samples,
            kills=run.kills,
            chart=chart,
        )


class _Run:
    """Runs the pipeline until all flights are committed. Times count from the first publication."""

    def __init__(
        self,
        settings: DemoSettings,
        console: Console,
        clock: Clock,
        client: Client,
        pipeline: RunProcess,
        url: str,
        flights: Flights,
    ) -> None:
        self._console = console
        self._clock = clock
        self._client = client
        self._pipeline = pipeline
        self._total = len(flights)
        hold_at = int(self._total * _HOLD_AT) if settings.kill else None
        self._publisher = FlightPublisher(url, flights, hold_at=hold_at)
        due = ((_KILL_WORKER_AT, self._kill_worker), (_KILL_DRIVER_AT, self._kill_driver)) if settings.kill else ()
        self._kills_to_come = [(int(self._total * share), kill) for share, kill in due]
        self._began_ms = clock.monotonic_ms()
        self._progress, self._progress_ms = 0, self._began_ms
        self.startup_s = 0.0
        self.samples: list[Sample] = []
        self.kills: list[Kill] = []

    def run_to_end(self) -> Sample:
        """Process all flights; return the sample taken when everything was committed."""
        try:
            self._start_pipeline()
            self._began_ms = self._clock.monotonic_ms()
            self._publisher.start()
            with ProgressView(self._console, self._total) as view:
                return self._watch(view)
        finally:
            self._publisher.stop()
            self._pipeline.stop()

    def _start_pipeline(self) -> None:
        """Start the pipeline and wait until it consumes, so that flights are published while it does."""
        from millstream.spark.run.spark_home import has_class_archive  # what needs no Spark imports nothing of it

        self._console.print("starting millstream run")
        self._began_ms = self._clock.monotonic_ms()
        with self._console.status("Spark is starting"):
            self._pipeline.start()
            while not self._pipeline.consuming:
                self._pipeline.check()
                self._check_progress(0)
                self._clock.sleep_ms(_POLL_MS)
        self.startup_s = self._elapsed_s()
        self._console.print(f"the pipeline consumes after {self.startup_s:.1f} s; publishing the flights")
        if not has_class_archive():
            self._console.print("millstream class-archive makes later starts of Spark quicker")

    def _watch(self, view: ProgressView) -> Sample:
        shown_ms = 0.0
        while True:
            published = self._publisher.check()
            self._pipeline.check()
            progress = read_progress(self._client)
            self._check_progress(progress.published + progress.done)
            sample = self._sample(progress)
            is_finished = published and progress.caught_up
            if is_finished or self._clock.monotonic_ms() - shown_ms >= _SHOW_MS:
                shown_ms = self._clock.monotonic_ms()
                self.samples.append(sample)
                view.show(sample, progress, self._pipeline.batches)
            if is_finished:
                return sample
            if self._kills_to_come and progress.done >= self._kills_to_come[0][0]:
                self._kill()
            self._clock.sleep_ms(_POLL_MS)

    def _check_progress(self, progress: int) -> None:
        now_ms = self._clock.monotonic_ms()
        if progress != self._progress:
            self._progress, self._progress_ms = progress, now_ms
        elif now_ms - self._progress_ms > _STALL_MS:
            raise PipelineFailed(f"no progress for {_STALL_MS / 60_000:.0f} minutes; see {self._pipeline.log_path}")

    def _sample(self, progress: RunProgress) -> Sample:
        return Sample(at_s=self._elapsed_s(), published=progress.published, done=progress.done)

    def _elapsed_s(self) -> float:
        return (self._clock.monotonic_ms() - self._began_ms) / 1000

    def _kill(self) -> None:
        """Make the next kill; the flights that wait for the last one are published then."""
        _, kill = self._kills_to_come[0]
        if not kill():
            return  # there is nothing to kill yet: `_watch` tries again
        self._kills_to_come.pop(0)
        if not self._kills_to_come:
            self._publisher.release()

    def _kill_worker(self) -> bool:
        """Kill a Python worker, whose task Spark repeats; False while Spark is about to start one."""
        worker = self._pipeline.kill_worker()
        if worker is not None:
            self._record_kills("a Python worker of Spark", [worker])
        return worker is not None

    def _kill_driver(self) -> bool:
        """Kill the driver, and restart the pipeline from its checkpoint."""
        self._record_kills("the driver, Python and JVM", self._pipeline.kill_driver())
        self._pipeline.start()
        self._console.print("restarting millstream run with the same checkpoint")
        return True

    def _record_kills(self, what: str, pids: list[int]) -> None:
        sample = self._sample(read_progress(self._client))
        for pid in pids:
            self.kills.append(Kill(at_s=sample.at_s, what=what, pid=pid, done=sample.done))
        numbers = " ".join(map(str, pids))
        self._console.print(f"{sample.at_s:6.1f} s  kill -9 {numbers}: {what}; {sample.done:,} done", style="yellow")


@contextmanager
def _interrupt_once() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first Ctrl-C or SIGTERM in the block; ignore later ones, so cleanup finishes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in ours]

    def interrupt(*_: object) -> None:
        for number in ours:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in zip(ours, before, strict=True):
            signal.signal(number, handler)
