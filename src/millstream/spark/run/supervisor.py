"""Supervisor: runs an app on Spark, with one streaming query per handler and stage, and restarts failed queries.

Its main loop is `Supervisor.run`: start the queries, watch them, restart a failed one with back-off, and stop all of
them on request or after a failure that a restart cannot fix.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millstream.app import App
from millstream.clock import SYSTEM_CLOCK, Clock, wait_after
from millstream.delivery.query_progress import QueryProgress
from millstream.delivery.running_code import code_of
from millstream.errors import (
    AccessDenied,
    ConfigError,
    HandlerPaused,
    MillstreamError,
    PipelineFailed,
    RedisError,
    SessionEnded,
    StaleOwner,
    Unavailable,
)
from millstream.producer.schedule_loop import ScheduleThreads
from millstream.redis_client.client import Client
from millstream.spark.run.connect_guard import refuse_session
from millstream.spark.run.delayed_mover import move_delayed
from millstream.spark.run.failures import Failure, failure_of
from millstream.spark.run.handler_query import HandlerQuery
from millstream.spark.run.liveness import begin_run, keep_announced, withdraw_run
from millstream.spark.run.offsets_behind import entries_behind
from millstream.spark.run.query import MAX_FAILURES, WAITS_MS, Event, RunContext, RunSettings, SupervisedQuery
from millstream.spark.run.redis_lag import RedisLag
from millstream.spark.run.session import (
    JAVA_ENDED,
    has_executors,
    has_stopped,
    java_has_ended,
    make_active,
    prefill_environment,
)
from millstream.spark.run.stage_query import StageQuery
from millstream.spark.versions import HAS_LIMITS

__all__ = ["RunSettings", "Supervisor"]

logger = logging.getLogger(__name__)

_WATCH_S = 0.2
_STOP_MS, _DRAIN_MS = 25_000.0, 2_000.0
_MAX_FAILURES_ONCE, _MAX_CHECKPOINT_FAILURES = 5, 2
_JAVA_EXIT_S = 1.0
_EXECUTOR_CHECK_MS, _MAX_NO_EXECUTORS_MS = 5_000.0, 120_000.0
_MAX_STARTING, _INITIALIZING = 2, "Initializing sources"


class Supervisor:
    """Runs every handler and stage of `app` on `spark` until stopped, and publishes the firings of its schedules.

    `on_event` receives mappings with an `event` name: started, batch (finished), running (a batch takes long; with a
    `reason` if there is no executor to run it), caught-up (deferred messages were run), restarting, and stopped (with
    `parked`, if known: the number of parked keys and of messages in their queues, by handler). All but stopped name
    their `handler` or `stage`.
    `on_watch` is called a few times a second with the lag in entries, or None while it is unknown.
    Setting `stopping` has the effect of `stop`. `version`: of millstream, as it is reported. Raises ConfigError for a Spark Connect session.
    """

    def __init__(
        self,
        app: App,
        spark: SparkSession,
        settings: RunSettings,
        *,
        on_event: Callable[[Event], None],
        on_watch: Callable[[int | None], None] = lambda lag: None,
        stopping: threading.Event | None = None,
        version: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._app = app.name
        self._running = code_of(app.handlers.values(), engine="spark", version=version)
        refuse_session(spark)
        self._spark = spark
        self._settings = settings
        self._on_event = on_event
        self._paused: MillstreamError | None = None
        self._on_watch = on_watch
        self._clock = clock
        self._client = Client(settings.url)
        self._redis_lag = RedisLag(self._client, clock)
        self._stopping = stopping or threading.Event()
        self._ended = threading.Event()
        self._environment_ready = self._had_executors = False
        self._executor_check_due_ms = self._no_executors_since_ms = float("-inf")
        self._announcing: tuple[threading.Thread, int] | None = None  # and the epoch
        self._schedule_errors: list[BaseException] = []
        schedules = tuple(app.schedules.values())
        self._schedules = ScheduleThreads(settings.url, schedules, self._schedule_errors.append, clock)
        self._context = around = RunContext(
            spark=spark,
            settings=settings,
            client=self._client,
            clock=clock,
            stopping=self._stopping,
            ended=self._ended,
            on_event=on_event,
        )
        # Stages first: Spark's own errors about them are raised before a handler has processed anything.
        self._supervised: list[SupervisedQuery] = [StageQuery(around, stage) for stage in app.stages.values()]
        self._supervised += [HandlerQuery(around, handler) for handler in app.handlers.values()]

    def stop(self) -> None:
        """Make `run` end; safe to call from a signal handler. The next run repeats whatever is not committed."""
        self._stopping.set()

    def run(self) -> None:
        """Process until stopped or, with `once`, until all entries that were there at the start are processed.

        Raises ConfigError for a wrong setting, AccessDenied, SessionEnded if only a new session can continue, and
        PipelineFailed if an operator has to act.
        """
        try:
            make_active(self._spark)
            for supervised in self._supervised:
                self._context.retry_while_unavailable(supervised.join, supervised.label)
                self._context.retry_while_unavailable(supervised.prepare, supervised.label)
            threading.Thread(target=self._move_delayed, name="millstream-delayed-mover", daemon=True).start()
            self._begin_run()
            self._schedules.start()
            for supervised in self._supervised:
                supervised.start_background()
            while not self._stopping.is_set() and not all(supervised.done for supervised in self._supervised):
                for supervised in self._supervised:
                    supervised.watch()
                    self._advance_query(supervised)
                self._check_executors()
                self._check_schedules()
                self._on_watch(self.lag())
                self._stopping.wait(_WATCH_S)
            if self._paused is not None:
                raise self._paused
            if not self._stopping.is_set():
                self._check_pauses()
        except Unavailable:
            if not self._stopping.is_set():
                raise
        except (Py4JError, PySparkException, ConnectionError) as error:
            if not java_has_ended(within_s=_JAVA_EXIT_S):
                self._check_session()
                raise
            # A signal to the whole process group may reach the Java process first.
            if not self._stopping.wait(_JAVA_EXIT_S):
                raise PipelineFailed(JAVA_ENDED) from error
        finally:
            self._ended.set()
            self._schedules.stop()
            stopped_ms = self._clock.monotonic_ms()
            drain_until_ms = stopped_ms + _DRAIN_MS
            for supervised in self._supervised:
                supervised.drain(max(0.0, drain_until_ms - self._clock.monotonic_ms()) / 1000)
            have_stopped = self._stop_queries() or java_has_ended()
            self._schedules.join(stopped_ms + _STOP_MS)
            self._leave(have_stopped)
            if any(supervised.has_started for supervised in self._supervised):
                self._on_event({"event": "stopped", **self._parked_event()})
            self._client.close()

    def _move_delayed(self) -> None:
        """Move due delayed messages to their streams, until the run ends."""
        move_delayed(self._settings.url, [supervised.streams for supervised in self._supervised], self._ended)

    def _begin_run(self) -> None:
        """Announce the run in Redis from now on, for `millstream info` and for older runs of its stages."""
        begin = partial(begin_run, self._client, self._app, self._names())
        epoch = self._context.retry_while_unavailable(begin, self._app)
        if epoch is not None:
            thread = threading.Thread(target=self._announce, args=(epoch,), name="millstream-liveness", daemon=True)
            self._announcing = thread, epoch
            thread.start()

    def _leave(self, have_stopped: bool) -> None:
        """Leave the services of the handlers, and withdraw the run if all its queries `have_stopped`.

        Of a run whose query may still write the liveness keys stay until they expire.
        """
        for supervised in self._supervised:
            supervised.leave()
        if self._announcing is None or not have_stopped:
            return
        thread, epoch = self._announcing
        thread.join(_DRAIN_MS / 1000)
        if thread.is_alive():  # it may announce the run once more
            return
        names = [supervised.name for supervised in self._supervised]
        try:
            with Client(self._settings.url, timeout_ms=round(_DRAIN_MS)) as client:
                withdraw_run(client, self._app, names, epoch=epoch, running=self._running)
        except RedisError as error:
            logger.debug("cannot withdraw the run of %s: %s; it is shown until its keys expire", self._app, error)

    def _announce(self, epoch: int) -> None:
        """Keep the run announced. Ends it once a newer run has announced one of its stages."""

        def on_replaced(names: set[str]) -> None:
            for supervised in self._supervised:
                if supervised.kind == "stage" and supervised.name in names:
                    supervised.background_failure = Failure(kind=StaleOwner, reason="a newer run of it has taken over")

        keep_announced(
            self._settings.url,
            self._app,
            self._names,
            self._ended,
            epoch=epoch,
            progress=self._progress,
            running=self._running,
            on_replaced=on_replaced,
        )

    def _progress(self) -> dict[str, QueryProgress]:
        """The last micro-batch of each query that is not finished. Raises what py4j does."""
        ui = self._spark.sparkContext.uiWebUrl
        return {one.name: one.progress(ui) for one in self._supervised if not one.done}

    def _names(self) -> list[str]:
        """Return the names of the queries that are not finished."""
        return [supervised.name for supervised in self._supervised if not supervised.done]

    def _stop_queries(self) -> bool:
        """Stop all queries in parallel, since each waits for its batch; a late one ends with the session.

        Returns whether all have stopped.
        """
        queries = [supervised.query for supervised in self._supervised if supervised.query is not None]
        stopped: list[StreamingQuery] = []
        stops = [threading.Thread(target=_stop, args=(query, stopped.append), daemon=True) for query in queries]
        deadline_ms = self._clock.monotonic_ms() + _STOP_MS
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join(max(0.0, deadline_ms - self._clock.monotonic_ms()) / 1000)
        return len(stopped) == len(queries)

    def _parked_event(self) -> Event:
        """Return the parked keys and messages, for the stopped event; nothing while Redis is unavailable."""
        try:
            with Client(self._settings.url, timeout_ms=round(_DRAIN_MS)) as client:
                found = {supervised.name: supervised.count_parked(client) for supervised in self._supervised}
        except (RedisError, ConfigError) as error:
            logger.debug("parked keys are unknown: %s; omitting them from the stopped event", error)
            return {}
        return {"parked": {name: {"keys": keys, "messages": count} for name, (keys, count) in found.items() if keys}}

    def lag(self) -> int | None:
        """The lag in entries, over all handlers and stages; None until it is known."""
        if not HAS_LIMITS:
            return self._redis_lag.total((one.group, one.streams()) for one in self._supervised)
        total: int | None = None
        for supervised in self._supervised:
            progress = supervised.query.lastProgress if supervised.query is not None else None
            for source in progress.sources if progress is not None else ():
                counts = list(entries_behind(source.endOffset, source.latestOffset).values())
                known = [count for count in counts if count is not None]
                if counts and len(known) == len(counts):
                    total = (total or 0) + sum(known)
        return total

    # --- One query ---

    def _advance_query(self, supervised: SupervisedQuery) -> None:
        """Start, restart or finish one query, by its state."""
        if supervised.background_failure is not None:
            raise _ended(supervised, supervised.background_failure)
        query = supervised.query
        if supervised.done or (query is not None and query.isActive):
            return
        self._check_session()
        supervised.watch()  # its last batches
        error = query.exception() if query is not None else None
        if error is not None:
            self._on_failure(supervised, failure_of(supervised.error or error))
        elif query is not None:
            if not self._settings.once:
                self._stopping.set()  # stopped from outside, by the session
            else:
                supervised.done = self._context.retry_while_unavailable(supervised.is_finished, supervised.label)
        elif self._clock.monotonic_ms() >= supervised.retry_at_ms and self._count_starting() < _MAX_STARTING:
            try:
                if not self._environment_ready:
                    prefill_environment(self._spark)
                    self._environment_ready = True
                supervised.query = supervised.start()
            except (PySparkException, Py4JJavaError, StaleOwner, AccessDenied, ConfigError, PipelineFailed) as refusal:
                self._on_failure(supervised, failure_of(refusal))
            else:
                supervised.emit("started")

    def _check_session(self) -> None:
        """Raise SessionEnded if the session has stopped, so that no query can run."""
        if has_stopped(self._spark):
            raise SessionEnded(
                "the Spark session has ended: the cluster removed the application, or code in this process stopped it "
                "(--spark-log shows more). Run the same command again: committed messages are not repeated"
            )

    def _check_executors(self) -> None:
        """Raise SessionEnded if a batch waits for executors, and all former ones are gone for two minutes.

        A standalone master that restarts without its recovery state kills the executors of applications that it does
        not know, and assigns these no new ones.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._executor_check_due_ms:
            return
        self._executor_check_due_ms = now_ms + _EXECUTOR_CHECK_MS
        is_idle = not has_executors(self._spark)
        self._had_executors = self._had_executors or not is_idle
        if not (is_idle and self._had_executors and any(supervised.batch for supervised in self._supervised)):
            self._no_executors_since_ms = now_ms
        elif now_ms - self._no_executors_since_ms >= _MAX_NO_EXECUTORS_MS:
            raise SessionEnded(
                "all executors are gone, and the cluster assigns no new ones: the master may have restarted. "
                "Run the same command again: committed messages are not repeated"
            )

    def _check_schedules(self) -> None:
        """Raise the error that has ended the thread of a schedule."""
        if self._schedule_errors:
            raise self._schedule_errors[0]

    def _check_pauses(self) -> None:
        """Raise PipelineFailed if a handler is paused at the end of a run with `once`: it has left messages."""
        for supervised in self._supervised:
            if pause := self._context.retry_while_unavailable(supervised.pause, supervised.label):
                raise PipelineFailed(f"not all is processed: {supervised.label} is {pause.describe(supervised.label)}")

    def _count_starting(self) -> int:
        """How many queries are still starting. A start takes seconds of a core, and Spark allows it only ten."""
        queries = [supervised.query for supervised in self._supervised if supervised.query is not None]
        return sum(query.isActive and query.status["message"] == _INITIALIZING for query in queries)

    def _on_failure(self, supervised: SupervisedQuery, failure: Failure) -> None:
        if failure.kind is HandlerPaused:  # the others go on to their ends
            supervised.done, self._paused = True, _ended(supervised, failure)
            return
        if failure.is_final and (supervised.was_behind or not failure.is_behind):
            raise _ended(supervised, failure)
        supervised.was_behind = supervised.was_behind or failure.is_behind
        progress = self._context.retry_while_unavailable(supervised.progress_count, supervised.label)
        failures = supervised.failures + 1 if progress == supervised.last_progress else 1
        if failures == 1:
            supervised.failing_since_ms = time.time_ns() // 1_000_000
        supervised.failures, supervised.last_progress = failures, progress
        self._check_failures(supervised, failure)
        wait_ms = wait_after(supervised.failures, *WAITS_MS)
        supervised.query, supervised.last_failure = None, failure.reason
        supervised.retry_at_ms = self._clock.monotonic_ms() + wait_ms
        logger.warning("%s failed: %s; restarting in %.0f s", supervised.label, failure.reason, wait_ms / 1000)
        supervised.emit("restarting", reason=failure.reason)

    def _check_failures(self, supervised: SupervisedQuery, failure: Failure) -> None:
        """Raise PipelineFailed once the query has failed too often for another restart to help."""
        # If a Python worker starts too late, the machine is overloaded: the query gets all restarts, also with `once`.
        limit = _MAX_FAILURES_ONCE if self._settings.once and not failure.is_worker_late else MAX_FAILURES
        label, checkpoint = supervised.label, supervised.checkpoint
        at_first = supervised.resumed and not supervised.batch_started and failure.in_checkpoint
        if at_first and supervised.failures > _MAX_CHECKPOINT_FAILURES:
            changed = "If its stateful operators were changed, rename it. " if supervised.kind == "stage" else ""
            raise PipelineFailed(
                f"{label} cannot resume from its checkpoint: {failure.reason}. {changed}If {checkpoint!r} is damaged, "
                "use a new --checkpoint and --from-committed"
            )
        if supervised.failures > limit:
            raise PipelineFailed(
                f"{label} failed {supervised.failures} times in a row without a commit in between: {failure.reason}"
            )


def _ended(supervised: SupervisedQuery, failure: Failure) -> MillstreamError:
    kind = AccessDenied if failure.kind is AccessDenied else PipelineFailed
    return kind(f"{supervised.label} stopped: {failure.reason}")


def _stop(query: StreamingQuery, on_stopped: Callable[[StreamingQuery], None]) -> None:
    try:
        query.stop()
    except (PySparkException, Py4JError, OSError) as error:
        logger.debug("cannot stop a query: %s", error)
    else:
        on_stopped(query)
