"""One query of an app, a handler's or a stage's, and its standing with the supervisor."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event as Flag
from typing import Any, ClassVar, Literal, TypeVar

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millstream.clock import Clock
from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from millstream.spark.run.failures import Failure
from millstream.spark.run.first_start import Start, StartAt
from millstream.spark.run.session import checkpoint_begun, clear_unfinished, has_executors, is_cluster

Event = Mapping[str, Any]
T = TypeVar("T")

MOST_FAILURES = 10
"""In a row, and in vain, before a person is asked for."""

_FIRST_WORD_MS, _MOST_WORDS_APART_MS = 10_000.0, 300_000.0


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How an app is run on Spark.

    * `url`: where Redis is
    * `checkpoint`: folder (any Hadoop file system) for Spark's checkpoints, one sub-folder per handler and stage
    * `max_per_batch`: most entries that a micro-batch takes
    * `interval_ms`: least time between the starts of two micro-batches; 0 = as fast as they come
    * `once`: process what is there now, then end
    * `start`: what to do when the checkpoint is new but something was done before: `resume` refuses, `from-frontier`
      goes on where the handler's commits end, or where the stage's group stands, `reprocess` forgets frontier and
      keyed state and begins anew
    * `start_at`: where a handler or stage that never ran begins
    * `read_from`: tasks read entries from replicas that have what the primary has, or from the primary only
    * `fail_on_data_loss`: stop if entries were trimmed or deleted before they were processed; else count them
    """

    url: str = field(repr=False)
    checkpoint: str
    max_per_batch: int = 50_000
    interval_ms: int = 0
    once: bool = False
    start: Start = "resume"
    start_at: StartAt = "earliest"
    read_from: Literal["primary", "replica"] = "primary"
    fail_on_data_loss: bool = True

    def __post_init__(self) -> None:
        if self.max_per_batch < 1 or self.interval_ms < 0:
            raise ConfigError("max_per_batch must be at least 1 and interval_ms at least 0")


_NOBODY = "no executor has come to the master yet: are workers running, with enough free cores and memory?"


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What every pipeline of a run works with. `stopping` ends all waiting, `over` what goes on beside the queries."""

    spark: SparkSession
    settings: RunSettings
    client: Client
    clock: Clock
    stopping: Flag
    over: Flag
    on_event: Callable[[Event], None]

    def wait_for(self, operation: Callable[[], T], what: str) -> T:
        """Do `operation`, again and again while Redis is away. Raises Unavailable when the run is to stop."""
        return self.client.patiently(operation, what=what, give_up=self.stopping.is_set)


@dataclass(slots=True)
class Batch:
    """The batch that is running now, and when to say so next. `number` is None if it is not known."""

    number: int | None
    began_ms: float
    next_word_ms: float = field(default_factory=lambda: _FIRST_WORD_MS)


class SupervisedQuery(ABC):
    """A query that the supervisor starts, watches, and starts again. `name` is that of the handler or stage.

    * `error`: what ended a batch, if that is known better than Spark tells it
    * `broken`: what ended the work beside the query, without which it cannot go on
    * `has_started`: its query has been started in this run
    * `resumed`, `began`: it goes on from a checkpoint; it has begun a batch in this run
    * `failures`: in a row, with nothing achieved in between
    """

    kind: ClassVar[str]

    def __init__(self, around: RunContext, app: str, name: str) -> None:
        self.name = name
        self.label = f"{app}.{name}"
        self.checkpoint = f"{around.settings.checkpoint.rstrip('/')}/{app}/{name}"
        self.query: StreamingQuery | None = None
        self.batch: Batch | None = None
        self.error: Exception | None = None
        self.broken: Failure | None = None
        self.has_started = False
        self.resumed = False
        self.began = False
        self.failures = 0
        self.before = 0
        self.retry_at_ms = 0.0
        self.done = False
        self._around = around

    @abstractmethod
    def streams(self) -> list[str]:
        """The streams that it reads, as far as they are known now."""

    def join(self) -> None:
        """Take part in what it has to be a part of, before it is prepared. Raises ConfigError, RedisError."""
        return

    @abstractmethod
    def prepare(self) -> None:
        """Check, and write down, what has to be before its first start; may be repeated. Raises ConfigError."""

    @abstractmethod
    def start(self) -> StreamingQuery:
        """Start its query. Raises what pyspark does, StaleOwner, AccessDenied or ConfigError."""

    @abstractmethod
    def achieved(self) -> int:
        """A number that has grown if anything was done since it was asked for the last time."""

    def begin(self) -> None:
        """Begin, in threads, with what has to be done beside its query until the run is over."""
        return

    def is_settled(self) -> bool:
        """Whether nothing is left to be done, its query being at its end."""
        return True

    def parked(self, client: Client) -> tuple[int, int]:
        """How many keys are parked, and how many messages wait in them, as asked of `client`. Raises RedisError."""
        return 0, 0

    def wind_up(self, within_s: float) -> None:
        """The run is over: wait, for so many seconds at most, for the last word of what `begin` began."""
        return

    def leave(self) -> None:
        """End what `join` began."""
        return

    def watch(self) -> None:
        """Say that a batch is running, at ever longer intervals."""
        batch = self.batch
        if batch is None:
            return
        taken_ms = self._around.clock.monotonic_ms() - batch.began_ms
        if taken_ms >= batch.next_word_ms:
            batch.next_word_ms += min(batch.next_word_ms, _MOST_WORDS_APART_MS)
            numbered = {} if batch.number is None else {"batch": batch.number}
            idle = {} if has_executors(self._around.spark) else {"reason": _NOBODY}
            self.tell("running", **numbered, seconds=round(taken_ms / 1000), **idle)

    def tell(self, event: str, **more: Any) -> None:
        """Tell of an event of this pipeline."""
        self._around.on_event({"event": event, self.kind: self.name, **more})

    def _look_at_checkpoint(self, sign: str) -> None:
        """Find out whether it goes on from its checkpoint, by what a query leaves there as soon as it has begun."""
        self.resumed = checkpoint_begun(self._around.spark, self.checkpoint, sign)
        if self.resumed and self._around.settings.start == "reprocess":
            raise ConfigError(f"reprocessing {self.label} needs a new --checkpoint: this one says what is done")

    def _source(self) -> dict[str, Any]:
        """The options of the source that are the same for handlers and stages."""
        settings, context = self._around.settings, self._around.spark.sparkContext
        return {
            "url": settings.url,
            "maxOffsetsPerTrigger": settings.max_per_batch,
            "failOnDataLoss": settings.fail_on_data_loss,
            "readFrom": settings.read_from,
            # Of a cluster the source sees but the driver's own cores.
            **({"minPartitions": context.defaultParallelism} if is_cluster(str(context.master)) else {}),
        }

    def _started(self, writer: DataStreamWriter) -> StreamingQuery:
        """Start the query of `writer` under our name, with our checkpoint, at the pace of the settings."""
        settings = self._around.settings
        writer = writer.queryName(self.label).option("checkpointLocation", self.checkpoint)
        if settings.once:
            writer = writer.trigger(availableNow=True)
        elif settings.interval_ms:
            writer = writer.trigger(processingTime=f"{settings.interval_ms} milliseconds")
        clear_unfinished(self._around.spark, self.checkpoint)
        query = writer.start()
        self.has_started = True
        return query
