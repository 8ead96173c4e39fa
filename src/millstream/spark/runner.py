"""Runs an app as Spark pipelines: one streaming query per handler, and a supervisor that keeps them going.

The spine is `Runner.run`: start a query per handler, watch them, start a failed one again with back-off, and stop
all of them when asked to, or when something failed that trying again cannot mend.
"""

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millstream.app import App
from millstream.client import Client, raise_if_error
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delayed import DelayedMessages
from millstream.errors import AccessDenied, ConfigError, PipelineFailed, RedisError, StaleOwner, Unavailable
from millstream.handlers import Handler
from millstream.ledger import Ledger
from millstream.naming import HandlerKeys
from millstream.spark.behind import behind
from millstream.spark.engine import BatchDone, Engine
from millstream.spark.failures import Failure, failure_of
from millstream.spark.preparing import Start, StartAt, check_runnable, check_slots, prepare_new
from millstream.spark.session import checkpoint_begun, java_has_ended
from millstream.spark.task import Job

logger = logging.getLogger(__name__)

Event = Mapping[str, Any]

_WATCH_S = 0.2
_FIRST_WORD_MS, _MOST_WORDS_APART_MS = 10_000.0, 300_000.0
_STOP_MS = 25_000.0
_MOST_FAILURES, _MOST_FAILURES_ONCE, _MOST_FAILURES_AT_FIRST = 10, 5, 2
_JAVA_GONE_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How an app is run on Spark.

    * `url`: where Redis is
    * `checkpoint`: folder (any Hadoop file system) for Spark's checkpoints, one sub-folder per handler
    * `max_per_batch`: most entries that a micro-batch takes
    * `interval_ms`: least time between the starts of two micro-batches; 0 = as fast as they come
    * `once`: process what is there now, then end
    * `start`: what to do when the checkpoint is new but a frontier exists: `resume` refuses, `from-frontier`
      goes on where the handler's commits end, `reprocess` forgets frontier and keyed state and begins anew
    * `start_at`: where a handler that never ran begins
    * `fail_on_data_loss`: stop if entries were trimmed or deleted before they were processed; else count them
    """

    url: str
    checkpoint: str
    max_per_batch: int = 50_000
    interval_ms: int = 0
    once: bool = False
    start: Start = "resume"
    start_at: StartAt = "earliest"
    fail_on_data_loss: bool = True

    def __post_init__(self) -> None:
        if self.max_per_batch < 1 or self.interval_ms < 0:
            raise ConfigError("max_per_batch must be at least 1 and interval_ms at least 0")


class _BatchFailed(Exception):
    """Ends a batch for Spark, which searches the texts of errors, and chokes on long ones."""


@dataclass(slots=True)
class _Batch:
    """The batch that is running now, and when to say so next."""

    number: int
    began_ms: float
    next_word_ms: float


@dataclass(slots=True)
class _Pipeline:
    """One handler's query and its standing with the supervisor."""

    handler: Handler
    query: StreamingQuery | None = None
    batch: _Batch | None = None
    error: Exception | None = None
    resumed: bool = False
    began: bool = False
    failures: int = 0
    committed: int = 0
    retry_at_ms: float = 0.0
    done: bool = False


class Runner:
    """Runs every handler of `app` on `spark` until stopped.

    `on_event` is told, as mappings with an `event` name, of what happens: started, batch (finished), running (a
    batch that takes long), restarting, stopped.
    `on_watch` is called a few times a second with the number of entries that wait, or None while it is unknown.
    Setting `stopping` has the effect of `stop`. Raises ConfigError for a handler that only workers can run.
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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_runnable(app.handlers.values())
        self._spark = spark
        self._settings = settings
        self._on_event = on_event
        self._on_watch = on_watch
        self._clock = clock
        self._client = Client(settings.url)
        self._stopping = stopping or threading.Event()
        self._over = threading.Event()
        self._pipelines = [_Pipeline(handler) for handler in app.handlers.values()]

    def stop(self) -> None:
        """Ask `run` to end; safe to call from a signal handler. What is not committed is done by the next run."""
        self._stopping.set()

    def run(self) -> None:
        """Process until stopped, or, with `once`, until all that was there is processed.

        Raises ConfigError for what must be changed first, AccessDenied, and PipelineFailed when going on needs a
        person.
        """
        try:
            for pipeline in self._pipelines:
                self._wait_for(functools.partial(self._prepare, pipeline), pipeline.handler)
            threading.Thread(target=self._move_delayed, name="millstream-mover", daemon=True).start()
            while not self._stopping.is_set() and not all(p.done for p in self._pipelines):
                for pipeline in self._pipelines:
                    self._tend(pipeline)
                    self._watch(pipeline)
                self._on_watch(self.lag())
                self._stopping.wait(_WATCH_S)
        except Unavailable:
            if not self._stopping.is_set():
                raise
        except (Py4JError, PySparkException, ConnectionError) as error:
            if not java_has_ended(self._spark, within_s=_JAVA_GONE_S):
                raise
            # A signal that is meant to stop all may reach the Java process first.
            if not self._stopping.wait(_JAVA_GONE_S):
                raise PipelineFailed(
                    "Spark's Java process has ended: killed, or out of memory. Run the same again: what is committed "
                    "is not done twice"
                ) from error
        finally:
            self._over.set()
            self._stop_queries()
            self._client.close()

    def _move_delayed(self) -> None:
        """Add to the streams the delayed messages that are due."""
        with Client(self._settings.url) as client:
            try:
                DelayedMessages(client).keep_moving(
                    lambda: sorted({name for p in self._pipelines for name in self._streams(p.handler)}), self._over
                )
            except (RedisError, ConfigError) as error:
                logger.warning("delayed messages are not moved by this pipeline: %s", error)

    def _stop_queries(self) -> None:
        """Stop all at once, since each waits for its batch; what does not stop in time ends with the session."""
        queries = [pipeline.query for pipeline in self._pipelines if pipeline.query is not None]
        stops = [threading.Thread(target=_stop, args=(query,), daemon=True) for query in queries]
        deadline_ms = self._clock.monotonic_ms() + _STOP_MS
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join(max(0.0, deadline_ms - self._clock.monotonic_ms()) / 1000)
        if queries:
            self._on_event({"event": "stopped"})

    def lag(self) -> int | None:
        """Entries that wait to be processed, over all handlers; None until that is known."""
        total: int | None = None
        for pipeline in self._pipelines:
            progress = pipeline.query.lastProgress if pipeline.query is not None else None
            for source in progress.sources if progress is not None else ():
                counts = list(behind(source.endOffset, source.latestOffset).values())
                known = [count for count in counts if count is not None]
                if counts and len(known) == len(counts):
                    total = (total or 0) + sum(known)
        return total

    def _wait_for(self, operation: Callable[[], T], handler: Handler) -> T:
        return self._client.patiently(operation, what=handler.label, give_up=self._stopping.is_set)

    # One handler

    def _prepare(self, pipeline: _Pipeline) -> None:
        handler, path = pipeline.handler, self._checkpoint(pipeline.handler)
        streams = self._streams(handler)
        if self._client.is_cluster:
            check_slots(handler, streams)
        pipeline.resumed = checkpoint_begun(self._spark, path)
        settings = self._settings
        if not pipeline.resumed:
            prepare_new(self._client, handler, streams, path, start=settings.start, start_at=settings.start_at)
        elif settings.start == "reprocess":
            raise ConfigError(f"reprocessing {handler.label} needs a new --checkpoint: this one says what is done")

    def _streams(self, handler: Handler) -> list[str]:
        return list(handler.streams) or self._client.scan_streams(handler.pattern or "*")

    def _checkpoint(self, handler: Handler) -> str:
        return f"{self._settings.checkpoint.rstrip('/')}/{handler.app}/{handler.name}"

    def _tend(self, pipeline: _Pipeline) -> None:
        """Start, restart or finish one handler's query as its standing asks."""
        query = pipeline.query
        if pipeline.done or (query is not None and query.isActive):
            return
        error = query.exception() if query is not None else None
        if error is not None:
            self._failed(pipeline, failure_of(pipeline.error or error))
        elif query is not None:
            pipeline.done = self._settings.once
            if not pipeline.done:
                self._stopping.set()  # stopped from outside, by the session
        elif self._clock.monotonic_ms() >= pipeline.retry_at_ms:
            try:
                pipeline.query = self._start(pipeline)
            except (PySparkException, Py4JJavaError, StaleOwner, AccessDenied) as refusal:
                self._failed(pipeline, failure_of(refusal))
            else:
                self._on_event({"event": "started", "handler": pipeline.handler.name})

    def _failed(self, pipeline: _Pipeline, failure: Failure) -> None:
        handler = pipeline.handler
        if failure.final:
            kind = AccessDenied if failure.kind is AccessDenied else PipelineFailed
            raise kind(f"{handler.label} stopped: {failure.reason}")
        committed = self._wait_for(functools.partial(self._committed, handler), handler)
        pipeline.failures = pipeline.failures + 1 if committed == pipeline.committed else 1
        pipeline.committed = committed
        self._give_up(pipeline, failure)
        wait_ms = min(500.0 * 2 ** min(pipeline.failures, 6), 30_000.0)
        pipeline.query = None
        pipeline.retry_at_ms = self._clock.monotonic_ms() + wait_ms
        logger.warning("%s failed and starts again in %.0f s: %s", handler.label, wait_ms / 1000, failure.reason)
        self._on_event({"event": "restarting", "handler": handler.name, "reason": failure.reason})

    def _give_up(self, pipeline: _Pipeline, failure: Failure) -> None:
        """Raise PipelineFailed once it has failed too often for the next time to be different."""
        most = _MOST_FAILURES_ONCE if self._settings.once else _MOST_FAILURES
        label, checkpoint = pipeline.handler.label, self._checkpoint(pipeline.handler)
        if pipeline.resumed and not pipeline.began and pipeline.failures > _MOST_FAILURES_AT_FIRST:
            raise PipelineFailed(
                f"{label} cannot go on from its checkpoint: {failure.reason}. If {checkpoint!r} is damaged, use a new "
                "--checkpoint and --from-frontier"
            )
        if pipeline.failures > most:
            raise PipelineFailed(
                f"{label} failed {pipeline.failures} times in a row with nothing committed in between: {failure.reason}"
            )

    def _committed(self, handler: Handler) -> int:
        """How many messages the handler has ever committed."""
        keys = [HandlerKeys(handler.app, handler.name, stream).meta for stream in self._streams(handler)]
        replies = self._client.pipeline([("HGET", key, "committed") for key in keys])
        return sum(int(raise_if_error(reply) or 0) for reply in replies)

    def _watch(self, pipeline: _Pipeline) -> None:
        """Say that a batch is running, at ever longer intervals."""
        batch = pipeline.batch
        if batch is None:
            return
        taken_ms = self._clock.monotonic_ms() - batch.began_ms
        if taken_ms >= batch.next_word_ms:
            batch.next_word_ms += min(batch.next_word_ms, _MOST_WORDS_APART_MS)
            self._on_event(
                {
                    "event": "running",
                    "handler": pipeline.handler.name,
                    "batch": batch.number,
                    "seconds": round(taken_ms / 1000),
                }
            )

    def _processing(self, pipeline: _Pipeline, engine: Engine) -> Callable[[DataFrame, int], None]:
        """What Spark calls for each batch: `engine`, under the eyes of the supervisor."""

        def process(frame: DataFrame, number: int) -> None:
            pipeline.began = True
            pipeline.batch = _Batch(number, self._clock.monotonic_ms(), _FIRST_WORD_MS)
            try:
                engine(frame, number)
            except Exception as error:  # noqa: BLE001 - whatever it is ends the query; the supervisor judges it
                pipeline.error = error
                raise _BatchFailed(failure_of(error).reason) from None
            finally:
                pipeline.batch = None

        return process

    def _take_over(self, handler: Handler) -> int:
        """Begin a run of `handler`, and return its token. Where workers were before, it goes on after them."""
        ledger, streams = Ledger(self._client, app=handler.app, handler=handler.name), self._streams(handler)
        token = ledger.new_token(streams)
        # Before the query plans: of what workers have done it knows only the frontier that this leaves behind.
        ledger.renewed(token).begin(streams)
        return token

    def _start(self, pipeline: _Pipeline) -> StreamingQuery:
        handler, settings = pipeline.handler, self._settings
        pipeline.error = None
        token = self._wait_for(functools.partial(self._take_over, handler), handler)

        def batch_done(batch: BatchDone) -> None:
            pipeline.failures = 0
            self._on_event({"event": "batch", **asdict(batch)})

        options = {
            "url": settings.url,
            "layout": "packed",
            "frontierApp": handler.app,
            "frontierHandler": handler.name,
            "group": HandlerKeys(handler.app, handler.name, "").group,
            "startingOffsets": "frontier",
            "maxOffsetsPerTrigger": settings.max_per_batch,
            "failOnDataLoss": settings.fail_on_data_loss,
            **({"keyField": handler.key_field} if handler.key_field else {}),
            **({"subscribe": ",".join(handler.streams)} if handler.streams else {"subscribePattern": handler.pattern}),
        }
        engine = Engine(
            Job(handler=handler, url=settings.url, token=token),
            partitions=self._spark.sparkContext.defaultParallelism,
            on_batch=batch_done,
        )
        writer = (
            self._spark.readStream.format("redis-streams")
            .options(**options)
            .load()
            .writeStream.queryName(handler.label)
            .option("checkpointLocation", self._checkpoint(handler))
            .foreachBatch(self._processing(pipeline, engine))
        )
        if settings.once:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{settings.interval_ms} milliseconds").start()


def _stop(query: StreamingQuery) -> None:
    try:
        query.stop()
    except (PySparkException, Py4JError, OSError) as error:
        logger.debug("a query did not stop: %s", error)
