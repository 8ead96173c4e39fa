"""SupervisedQuery: one query of an app, a handler's or a stage's, and its state as the supervisor sees it."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from threading import Event as Flag
from typing import Any, ClassVar, Literal, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millstream.clock import Clock
from millstream.delivery.pause import Pause
from millstream.delivery.query_progress import QueryProgress
from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from millstream.redis_client.escaping import escape
from millstream.spark.run.failures import Failure
from millstream.spark.run.first_start import Start, StartAt
from millstream.spark.run.session import checkpoint_begun, clear_unfinished, has_executors, is_cluster
from millstream.spark.versions import HAS_LIMITS

Event = Mapping[str, Any]
T = TypeVar("T")

MAX_FAILURES = 10
"""Failures in a row, without progress, that are followed by a restart; the run stops at the next one."""

WAITS_MS = (1_000.0, 30_000.0)
"""The wait after the first of these failures, and the longest, in milliseconds."""

_FIRST_REPORT_MS, _MAX_REPORT_INTERVAL_MS = 10_000.0, 300_000.0


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run on Spark.

    * `url`: the URL of Redis
    * `checkpoint`: folder (any Hadoop file system) for Spark's checkpoints, one sub-folder per handler and stage
    * `max_per_batch`: most entries of a micro-batch
    * `batch_target_ms`: how long a micro-batch should take, in milliseconds: it has fewer entries where it would take
      longer; 0 = `max_per_batch` alone decides. Without effect if there is an `interval_ms`
    * `interval_ms`: least time between the starts of two micro-batches, in milliseconds; 0 = without a pause
    * `once`: process the entries that are there now, then end
    * `start`: what to do if the checkpoint is new but the handler or stage has run before: `resume` refuses to start;
      `from-committed` starts at the handler's committed offset, or at the last id of the stage's group; `reprocess`
      deletes committed offset and keyed state, and starts from the beginning
    * `start_at`: where a handler or stage that never ran starts
    * `read_from`: tasks read entries from up-to-date replicas, or from the primary only
    * `fail_on_data_loss`: stop if entries were trimmed or deleted before they were processed; otherwise count them
    """

    url: str = field(repr=False)
    checkpoint: str
    max_per_batch: int = 100_000
    batch_target_ms: int = 0
    interval_ms: int = 0
    once: bool = False
    start: Start = "resume"
    start_at: StartAt = "earliest"
    read_from: Literal["primary", "replica"] = "primary"
    fail_on_data_loss: bool = True

    def __post_init__(self) -> None:
        if self.max_per_batch < 1 or self.interval_ms < 0 or self.batch_target_ms < 0:
            raise ConfigError("max_per_batch must be at least 1, interval_ms and batch_target_ms at least 0")


_NO_EXECUTOR = "no executor has registered with the master: check that workers run with enough free cores and memory"


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The context that all queries of a run share. `stopping` ends all waits; `ended` ends the background threads."""

    spark: SparkSession
    settings: RunSettings
    client: Client
    clock: Clock
    stopping: Flag
    ended: Flag
    on_event: Callable[[Event], None]

    def retry_while_unavailable(self, operation: Callable[[], T], what: str) -> T:
        """Run `operation`, repeating it while Redis is unavailable. Raises Unavailable once the run is stopping."""
        return self.client.retry_while_unavailable(operation, what=what, give_up=self.stopping.is_set)


@dataclass(slots=True)
class Batch:
    """The running batch, and when to report it next. `number` is None if unknown."""

    number: int | None
    began_ms: float
    next_report_ms: float = field(default_factory=lambda: _FIRST_REPORT_MS)


class SupervisedQuery(ABC):
    """A query that the supervisor starts, watches and restarts. `name` is that of the handler or stage.

    * `error`: the exception that failed a batch, if known more exactly than Spark reports it
    * `background_failure`: what ended a background thread that the query needs
    * `has_started`: the query has been started in this run
    * `resumed`, `batch_started`: it continues from a checkpoint; it has started a batch in this run
    * `failures`: failures in a row, without progress in between; `failing_since_ms`: when the first of them came (Unix
      milliseconds); `last_failure`: why it failed last in this run
    * `was_behind`: it has been restarted in this run because another run had moved its checkpoint on
    """

    kind: ClassVar[str]

    def __init__(self, context: RunContext, app: str, name: str) -> None:
        self.name = name
        self.label = f"{app}.{name}"
        self.checkpoint = f"{context.settings.checkpoint.rstrip('/')}/{app}/{name}"
        self.query: StreamingQuery | None = None
        self.batch: Batch | None = None
        self.error: Exception | None = None
        self.background_failure: Failure | None = None
        self.has_started = False
        self.resumed = False
        self.batch_started = False
        self.failures = 0
        self.failing_since_ms = 0
        self.last_failure = ""
        self.was_behind = False
        self.last_progress = 0
        self.retry_at_ms = 0.0
        self.done = False
        self._last_progress: dict[str, Any] = {}
        self._context = context

    @abstractmethod
    def streams(self) -> list[str]:
        """The streams that it reads, as known now."""

    @property
    @abstractmethod
    def group(self) -> str:
        """The consumer group that shows its progress on its streams."""

    def join(self) -> None:
        """Join the service of its streams, if any, before `prepare`. Raises ConfigError, RedisError."""
        return

    @abstractmethod
    def prepare(self) -> None:
        """Check the checkpoint and record the start position before the first start; repeatable. Raises ConfigError."""

    @abstractmethod
    def start(self) -> StreamingQuery:
        """Start its query. Raises what pyspark does, StaleOwner, AccessDenied or ConfigError."""

    @abstractmethod
    def progress_count(self) -> int:
        """A progress counter: it has grown if anything was committed since the last call."""

    def start_background(self) -> None:
        """Start the background threads that work beside the query until the run ends."""
        return

    def is_finished(self) -> bool:
        """Whether no work is left once its query has ended."""
        return True

    def pause(self) -> Pause | None:
        """Return the pause of a stream of the handler, if it has any. Raises RedisError."""
        return None

    def count_parked(self, client: Client) -> tuple[int, int]:
        """Return the number of parked keys, and of messages in their queues, read by `client`. Raises RedisError."""
        return 0, 0

    def drain(self, within_s: float) -> None:
        """Wait, after the run has ended, at most so many seconds for the background threads to report."""
        return

    def leave(self) -> None:
        """Leave the service that `join` joined."""
        return

    def watch(self) -> None:
        """Emit a `running` event for a long batch, at growing intervals."""
        batch = self.batch
        if batch is None:
            return
        elapsed_ms = self._context.clock.monotonic_ms() - batch.began_ms
        if elapsed_ms >= batch.next_report_ms:
            batch.next_report_ms += min(batch.next_report_ms, _MAX_REPORT_INTERVAL_MS)
            numbered = {} if batch.number is None else {"batch": batch.number}
            idle = {} if has_executors(self._context.spark) else {"reason": _NO_EXECUTOR}
            self.emit("running", **numbered, seconds=round(elapsed_ms / 1000), **idle)

    def progress(self, ui: str | None) -> QueryProgress:
        """Its last micro-batch with rows, as Spark reports it, for operators. `ui`: address of Spark's page. Raises Py4JError."""
        query = self.query  # the supervisor may take it away meanwhile
        found = query.lastProgress if query is not None else None
        if found is not None and "addBatch" in found.durationMs:
            rows = self._rows_of(found)
            self._last_progress = {
                "batch": found.batchId,
                "rows": rows,
                "rows_per_s": rows * 1000 / found.batchDuration if found.batchDuration else 0.0,
                "took_ms": found.batchDuration,
                "began_ms": round(datetime.fromisoformat(found.timestamp).timestamp() * 1000),
            }
        failures = self.failures  # the supervisor may set it to 0 meanwhile
        return QueryProgress(
            **self._last_progress,
            failures=failures,
            failing_since_ms=self.failing_since_ms if failures else None,
            last_failure=escape(self.last_failure),
            ui=ui,
        )

    def _rows_of(self, progress: StreamingQueryProgress) -> int:
        """How many rows a batch had."""
        return progress.numInputRows

    def emit(self, event: str, **more: Any) -> None:
        """Emit an event of this query."""
        self._context.on_event({"event": event, self.kind: self.name, **more})

    def _check_checkpoint(self, marker: str) -> None:
        """Set whether the query resumes. `marker`: the file or folder in the checkpoint of a query that has begun."""
        self.resumed = checkpoint_begun(self._context.spark, self.checkpoint, marker)
        if self.resumed and self._context.settings.start == "reprocess":
            raise ConfigError(f"reprocessing {self.label} needs a new --checkpoint: this one records what is processed")

    @property
    def _has_target(self) -> bool:
        # The source cannot distinguish the duration of a batch from the wait of the next one for its trigger.
        return bool(self._context.settings.batch_target_ms) and not self._context.settings.interval_ms

    def _source_options(self) -> dict[str, Any]:
        """The source options that handlers and stages share."""
        settings, context = self._context.settings, self._context.spark.sparkContext
        return {
            "url": settings.url,
            "maxOffsetsPerTrigger": settings.max_per_batch,
            "failOnDataLoss": settings.fail_on_data_loss,
            "readFrom": settings.read_from,
            **({"targetBatchDuration": settings.batch_target_ms} if self._has_target else {}),
            **({} if HAS_LIMITS else {"availableNow": settings.once}),
            # On a cluster the source sees only the driver's own cores.
            **({"minPartitions": context.defaultParallelism} if is_cluster(str(context.master)) else {}),
        }

    def _start_query(self, writer: DataStreamWriter) -> StreamingQuery:
        """Start the query of `writer` with the label as its name, the checkpoint, and the trigger of the settings."""
        settings = self._context.settings
        writer = writer.queryName(self.label).option("checkpointLocation", self.checkpoint)
        if settings.once and HAS_LIMITS:
            writer = writer.trigger(availableNow=True)
        elif settings.interval_ms:
            writer = writer.trigger(processingTime=f"{settings.interval_ms} milliseconds")
        clear_unfinished(self._context.spark, self.checkpoint)
        query = writer.start()
        if settings.once and not HAS_LIMITS:
            threading.Thread(target=_stop_at_end, args=(query,), name="millstream-once", daemon=True).start()
        self.has_started = True
        return query


def _stop_at_end(query: StreamingQuery) -> None:
    """Stop `query` once it has read all: with the option availableNow its sources have an end, on Spark 4.0 and 4.1."""
    with suppress(PySparkException, Py4JError, OSError):  # it has failed, which the supervisor sees, or Java has ended
        query.processAllAvailable()
        query.stop()
