"""Runs an app as Spark pipelines: one streaming query per handler, and a supervisor that keeps them going.

The spine is `Runner.run`: start a query per handler, watch them, start a failed one again with back-off, and stop
all of them when asked to, or when something failed that trying again cannot mend.
"""

import functools
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millstream.app import App
from millstream.client import Client, raise_if_error
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.errors import ConfigError, PipelineFailed, Unavailable
from millstream.handlers import Handler
from millstream.ledger import Ledger
from millstream.model import EntryId
from millstream.naming import HandlerKeys, hash_tag
from millstream.spark.engine import BatchDone, Engine
from millstream.spark.session import path_has_files
from millstream.spark.task import Job

logger = logging.getLogger(__name__)

Start = Literal["resume", "from-frontier", "reprocess"]
Event = Mapping[str, Any]

_FINAL = ("StaleOwner", "DataLoss", "ConfigError", "AccessDenied")
_OUR_ERROR = re.compile(r"millstream\.errors\.(\w+): (.*)")
_ANY_ERROR = re.compile(r"^[\s|]*((?:\w+\.)*\w*(?:Error|Exception)): (.*)", re.MULTILINE)
_WATCH_S = 0.2
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
    start_at: Literal["earliest", "latest"] = "earliest"
    fail_on_data_loss: bool = True

    def __post_init__(self) -> None:
        if self.max_per_batch < 1 or self.interval_ms < 0:
            raise ConfigError("max_per_batch must be at least 1 and interval_ms at least 0")


@dataclass(slots=True)
class _Pipeline:
    """One handler's query and its standing with the supervisor."""

    handler: Handler
    query: StreamingQuery | None = None
    failures: int = 0
    retry_at_ms: float = 0.0
    done: bool = False


class Runner:
    """Runs every handler of `app` on `spark` until stopped.

    `on_event` is told, as mappings with an `event` name, of what happens: started, batch, restarting, stopped.
    `on_watch` is called a few times a second with the number of entries that wait, or None while it is unknown.
    """

    def __init__(
        self,
        app: App,
        spark: SparkSession,
        settings: RunSettings,
        *,
        on_event: Callable[[Event], None],
        on_watch: Callable[[int | None], None] = lambda lag: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._on_event = on_event
        self._on_watch = on_watch
        self._clock = clock
        self._client = Client(settings.url)
        self._stopping = threading.Event()
        self._pipelines = [_Pipeline(handler) for handler in app.handlers.values()]

    def stop(self) -> None:
        """Ask `run` to end; safe to call from a signal handler. What is not committed is done by the next run."""
        self._stopping.set()

    def run(self) -> None:
        """Process until stopped, or, with `once`, until all that was there is processed.

        Raises ConfigError for what must be changed first, and PipelineFailed when going on needs a person.
        """
        try:
            for pipeline in self._pipelines:
                self._wait_for(functools.partial(self._prepare, pipeline.handler), pipeline.handler)
            while not self._stopping.is_set() and not all(p.done for p in self._pipelines):
                for pipeline in self._pipelines:
                    self._tend(pipeline)
                self._on_watch(self.lag())
                self._stopping.wait(_WATCH_S)
        except Unavailable:
            if not self._stopping.is_set():
                raise
        finally:
            for pipeline in self._pipelines:
                if pipeline.query is not None:
                    pipeline.query.stop()
            self._client.close()
            self._on_event({"event": "stopped"})

    def lag(self) -> int | None:
        """Entries that wait to be processed, over all handlers; None until that is known."""
        total: int | None = None
        for pipeline in self._pipelines:
            progress = pipeline.query.lastProgress if pipeline.query is not None else None
            for source in progress.sources if progress is not None else ():
                waiting = _waiting(source.endOffset, source.latestOffset)
                total = total if waiting is None else (total or 0) + waiting
        return total

    def _wait_for(self, operation: Callable[[], T], handler: Handler) -> T:
        return self._client.patiently(operation, what=handler.label, give_up=self._stopping.is_set)

    # One handler

    def _prepare(self, handler: Handler) -> None:
        """Check what can be checked before the first batch, and forget what is to be processed anew."""
        ledger = Ledger(self._client, app=handler.app, handler=handler.name)
        streams = self._streams(handler)
        if self._client.is_cluster and handler.into:
            for stream in streams:
                if hash_tag(stream) != hash_tag(handler.into):
                    raise ConfigError(
                        f"{handler.label}: on Redis Cluster into={handler.into!r} must share the hash slot of "
                        f"{stream!r}; name it like '{{{hash_tag(stream)}}}{handler.into}'"
                    )
        if path_has_files(self._spark, f"{self._checkpoint(handler)}/offsets"):
            if self._settings.start == "reprocess":
                raise ConfigError(f"reprocessing {handler.label} needs a new --checkpoint: this one says what is done")
            return
        if self._settings.start == "reprocess":
            newer = ledger.renewed(ledger.new_token(streams))
            newer.begin(streams)
            newer.forget(streams)
        elif self._settings.start == "resume":
            for stream in ledger.begun(streams):
                frontier = ledger.frontiers([stream]).get(stream, "the middle of its first batch")
                raise ConfigError(
                    f"{handler.label} has processed {stream!r} up to {frontier}, but the checkpoint "
                    f"{self._checkpoint(handler)!r} is new: use --from-frontier to go on there, --reprocess to forget "
                    "it and begin anew, or give the old --checkpoint"
                )
        if self._settings.start_at == "latest":
            known = ledger.frontiers(streams)
            self._begin_at_latest(ledger, [stream for stream in streams if stream not in known])

    def _begin_at_latest(self, ledger: Ledger, streams: list[str]) -> None:
        """Write down where each stream ends now: a start that is only looked up would move on if the first batch fails."""
        tails = self._client.pipeline([("XREVRANGE", stream, "+", "-", "COUNT", 1) for stream in streams])
        ends = {
            stream: EntryId.parse(tail[0][0])
            for stream, tail in zip(streams, tails, strict=True)
            if raise_if_error(tail)
        }
        new = ledger.renewed(ledger.new_token(streams))
        new.begin(list(ends))
        new.advance(ends)

    def _streams(self, handler: Handler) -> list[str]:
        return list(handler.streams) or self._client.scan_streams(handler.pattern or "*")

    def _checkpoint(self, handler: Handler) -> str:
        return f"{self._settings.checkpoint.rstrip('/')}/{handler.app}/{handler.name}"

    def _tend(self, pipeline: _Pipeline) -> None:
        """Start, restart or finish one handler's query as its standing asks."""
        query = pipeline.query
        if pipeline.done or (query is not None and query.isActive):
            return
        failure = query.exception() if query is not None else None
        if failure is not None:
            self._failed(pipeline, str(failure))
        elif query is not None:
            pipeline.done = self._settings.once
            if not pipeline.done:
                self._stopping.set()  # stopped from outside, by the session
        elif self._clock.monotonic_ms() >= pipeline.retry_at_ms:
            pipeline.query = self._start(pipeline)
            self._on_event({"event": "started", "handler": pipeline.handler.name})

    def _failed(self, pipeline: _Pipeline, text: str) -> None:
        found = _OUR_ERROR.findall(text) or _ANY_ERROR.findall(text)
        kind, reason = found[-1] if found else ("", text.strip().partition("\n")[0])
        reason = reason[:500]
        if kind in _FINAL:
            raise PipelineFailed(f"{pipeline.handler.label} stopped: {reason}")
        pipeline.failures += 1
        if self._settings.once and pipeline.failures > 5:
            raise PipelineFailed(f"{pipeline.handler.label} failed {pipeline.failures} times in a row: {reason}")
        wait_ms = min(500.0 * 2 ** min(pipeline.failures, 6), 30_000.0)
        pipeline.query = None
        pipeline.retry_at_ms = self._clock.monotonic_ms() + wait_ms
        logger.warning("%s failed and starts again in %.0f s: %s", pipeline.handler.label, wait_ms / 1000, reason)
        self._on_event({"event": "restarting", "handler": pipeline.handler.name, "reason": reason})

    def _start(self, pipeline: _Pipeline) -> StreamingQuery:
        handler, settings = pipeline.handler, self._settings
        ledger = Ledger(self._client, app=handler.app, handler=handler.name)
        token = self._wait_for(lambda: ledger.new_token(self._streams(handler)), handler)

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
            .foreachBatch(engine)
        )
        if settings.once:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{settings.interval_ms} milliseconds").start()


def _waiting(end_json: str | None, latest_json: str | None) -> int | None:
    """Entries between two offsets of the source, {stream: [id, number]}; None where they are not known (yet)."""
    end, latest = json.loads(end_json or "null"), json.loads(latest_json or "null")
    if not end or not latest:
        return None
    total = 0
    for stream, (_, number) in latest.items():
        done = end[stream][1] if stream in end else 0
        if number is None or done is None:
            return None
        total += max(0, number - done)
    return total
