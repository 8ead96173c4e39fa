"""HandlerQuery: a handler's query, with the engine in Spark's foreachBatch and a fencing token for each start."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import ClassVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from millstream.admin.key_queues import count_parked
from millstream.admin.redis_metrics import streams_of
from millstream.clock import wait_after
from millstream.delivery.commit_store import CommittedPosition
from millstream.delivery.output_check import check_output
from millstream.delivery.pause import Pause
from millstream.errors import MillstreamError, StaleOwner, Unavailable
from millstream.handlers.handler import Handler
from millstream.observability.failure_log import FailureLog
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import call_all
from millstream.spark.engine.deferred_jobs import DeferredJobs
from millstream.spark.engine.key_migration import keep_migrating, partition_maps_of
from millstream.spark.engine.micro_batch import Engine
from millstream.spark.engine.run_breaker import RunBreaker
from millstream.spark.engine.task import Job
from millstream.spark.engine.task_metrics import COUNTERS, BatchTotals
from millstream.spark.key_blocks import bucket_count
from millstream.spark.run.failures import failure_of
from millstream.spark.run.first_start import check_slots, commit_store_of, prepare_new
from millstream.spark.run.owner_check import OwnerCheck
from millstream.spark.run.query import MAX_FAILURES, WAITS_MS, Batch, RunContext, SupervisedQuery
from millstream.spark.run.service_membership import ServiceMembership
from millstream.spark.run.session import is_cluster

logger = logging.getLogger(__name__)

_WATCH_S, _MIGRATION_WAIT_S = 0.2, 3.0
_OWNER_CHECK_S = 1.0


class _BatchFailed(Exception):
    """Fails a batch with a short text: Spark searches the texts of errors, and fails on very long ones."""


class HandlerQuery(SupervisedQuery):
    """Runs one handler (see `micro_batch.py`) and, in background threads, its deferred keys and key migration.

    A thread of its own notices a newer run.
    """

    kind: ClassVar[str] = "handler"

    def __init__(self, context: RunContext, handler: Handler) -> None:
        super().__init__(context, handler.app, handler.name)
        self._handler = handler
        self._commit_store = commit_store_of(context.client, handler)
        self._deferred_jobs: DeferredJobs | None = None
        self._owner_check: OwnerCheck | None = None
        self._membership: ServiceMembership | None = None
        self._deferred_thread: threading.Thread | None = None
        self._failure_log = FailureLog(handler, clock=context.clock)
        self._messages: dict[int, int] = {}

    def streams(self) -> list[str]:
        """The streams that it names, that match its pattern, its partitions, or the announced ones, as of now."""
        handler, client = self._handler, self._context.client
        if handler.partitions is not None:  # created here, unless they exist
            return [stream for base in partition_maps_of(client, handler) for stream in base.streams]
        return list(streams_of(client, handler))

    @property
    def group(self) -> str:
        """See SupervisedQuery."""
        return HandlerKeys(self._handler.app, self._handler.name, "").group

    def join(self) -> None:
        """Join the service that its streams are announced to, as a consumer."""
        if self._handler.announced is not None:
            self._membership = self._membership or ServiceMembership(
                self._context.client, self._handler, on_ended=self._on_background_error
            )
            self._membership.join()

    def leave(self) -> None:
        """Leave the service."""
        if self._membership is not None:
            self._membership.close()

    def prepare(self) -> None:
        """Compare the checkpoint with the committed offsets, and record where a new checkpoint starts."""
        client, settings, streams = self._context.client, self._context.settings, self.streams()
        check_output(client, self._handler)
        if client.is_cluster:
            check_slots(self._handler, streams)
        self._check_checkpoint("offsets")
        if not self.resumed:
            start, start_at = settings.start, settings.start_at
            prepare_new(client, self._handler, streams, self.checkpoint, start=start, start_at=start_at)

    def start_background(self) -> None:
        """Start the threads that run deferred keys, check for a newer run, and migrate keys."""
        self._deferred_thread = self._start_thread(self._run_deferred, "millstream-deferred-jobs")
        self._start_thread(self._check_owner, "millstream-owner-check")
        if self._handler.partitions is not None:
            self._start_thread(self._migrate_keys, "millstream-key-migration")

    def drain(self, within_s: float) -> None:
        """Wait for the deferred keys' thread, so that its last event is emitted."""
        if self._deferred_thread is not None:
            self._deferred_thread.join(within_s)
        self._failure_log.close()

    def watch(self) -> None:
        """See SupervisedQuery. Also logs how many failures the log has left out."""
        super().watch()
        self._failure_log.report_omitted()

    def is_finished(self) -> bool:
        """Whether no deferred key will make progress by itself."""
        return self._deferred_jobs is not None and self._deferred_jobs.is_finished()

    def progress_count(self) -> int:
        """How many messages the handler has committed in total."""
        keys = [HandlerKeys(self._handler.app, self.name, stream).meta for stream in self.streams()]
        replies = call_all(self._context.client, [("HGET", key, "committed") for key in keys])
        return sum(int(reply or 0) for reply in replies)

    def pause(self) -> Pause | None:
        """See SupervisedQuery."""
        return next(iter(self._commit_store.paused_streams(self.streams()).values()), None)

    def count_parked(self, client: Client) -> tuple[int, int]:
        """See SupervisedQuery."""
        streams = [] if self._deferred_jobs is None else self._deferred_jobs.streams()
        return count_parked(client, [HandlerKeys(self._handler.app, self.name, stream) for stream in streams])

    def start(self) -> StreamingQuery:
        """Take over from any earlier run of the handler, and start the query."""
        handler, context = self._handler, self._context
        self.error = self._deferred_jobs = self._owner_check = None
        token, positions = context.retry_while_unavailable(self._take_over, self.label)
        options = {
            **self._source_options(),
            **_subscription(handler),
            "layout": "packed",
            "committedApp": handler.app,
            "committedHandler": handler.name,
            "group": self.group,
            "startingOffsets": "committed",
            **self._key_options(),
        }
        job = Job(handler=handler, url=context.settings.url, token=token)
        deferred = [stream for stream, position in positions.items() if position.has_queues]
        breaker = RunBreaker(
            job,
            context.client,
            streams=self.streams,
            give_up=context.ended.is_set,
            once=context.settings.once,
            on_pause=self._on_pause,
            clock=context.clock,
        )
        self._deferred_jobs = DeferredJobs(
            job,
            context.spark,
            streams=deferred,
            give_up=context.ended.is_set,
            failures=self._failure_log,
            breaker=breaker,
            clock=context.clock,
        )
        self._owner_check = OwnerCheck(self._commit_store.with_token(token), list(positions))
        engine = Engine(
            job,
            on_batch=self._on_batch,
            deferred_jobs=self._deferred_jobs,
            failures=self._failure_log,
            breaker=breaker,
            give_up=context.ended.is_set,
        )
        frame = context.spark.readStream.format("redis-streams").options(**options).load()
        return self._start_query(frame.writeStream.foreachBatch(self._batch_function(engine)))

    def _key_options(self) -> dict[str, str | int]:
        """The source options for the key; of a function the source knows nothing."""
        if not self._handler.key_field:
            return {}
        spark = self._context.spark.sparkContext
        buckets = bucket_count(spark.defaultParallelism, may_grow=is_cluster(str(spark.master)))
        return {"keyField": self._handler.key_field, "buckets": buckets}

    def _take_over(self) -> tuple[int, dict[str, CommittedPosition]]:
        """Begin a run; return its token and its streams' committed positions. It continues after workers' commits."""
        streams = self.streams()
        token = self._commit_store.new_token(streams)
        # Before the query plans: the source sees of workers' commits only the committed offset that `begin_run` writes.
        return token, self._commit_store.with_token(token).begin_run(streams)

    def _on_batch(self, batch: BatchTotals) -> None:
        self.failures = 0
        # Spark reports a batch after its end, perhaps once the next one has ended.
        self._messages = {**dict(list(self._messages.items())[-1:]), batch.batch: batch.messages}
        self._context.on_event({"event": "batch", **asdict(batch)})

    def _rows_of(self, progress: StreamingQueryProgress) -> int:
        """How many messages a batch had: Spark counts their blocks."""
        return self._messages.get(progress.batchId, 0)

    def _on_pause(self, pause: Pause | None, counters: Mapping[str, int]) -> None:
        if pause is None:
            self.emit("resumed")
        else:
            self.emit("paused", reason=pause.describe(self.label), **{name: counters.get(name, 0) for name in COUNTERS})

    def _batch_function(self, engine: Engine) -> Callable[[DataFrame, int], None]:
        """Return the function that Spark calls for each batch: `engine`, with bookkeeping for the supervisor."""

        def process(frame: DataFrame, number: int) -> None:
            self.batch_started = True
            self.batch = Batch(number, self._context.clock.monotonic_ms())
            try:
                engine(frame, number)
            except Exception as error:  # noqa: BLE001 - any error ends the query; the supervisor classifies it
                self.error = error
                raise _BatchFailed(failure_of(error).reason) from None
            finally:
                self.batch = None

        return process

    # --- Background threads ---

    def _start_thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - without this thread, a run must not look healthy
                self._on_background_error(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _run_deferred(self) -> None:
        """Run deferred keys once they are runnable."""
        ended, wait_s, failures = self._context.ended, _WATCH_S, 0
        while not ended.wait(wait_s):
            wait_s, deferred_jobs = _WATCH_S, self._deferred_jobs  # each start of the query has its own
            if deferred_jobs is None:
                continue
            try:
                totals = deferred_jobs.run()
            except (MillstreamError, PySparkException, Py4JError, OSError) as error:
                if ended.is_set() or self._context.stopping.is_set():
                    return
                if deferred_jobs is not self._deferred_jobs:
                    continue  # its query has ended, and the restarted one has taken over
                failure, failures = failure_of(error), failures + 1
                if failure.is_final or failures > MAX_FAILURES:
                    self._on_background_error(error)
                    return
                wait_s = wait_after(failures, *WAITS_MS) / 1000
                logger.warning(
                    "%s cannot run its deferred messages: %s; retrying in %.1f s", self.label, failure.reason, wait_s
                )
            else:
                failures = 0
                if totals:
                    wait_s = 0.0
                    self._context.on_event({"event": "caught-up", **asdict(totals)})

    def _check_owner(self) -> None:
        """Raise StaleOwner once a newer run has taken over: a run without a commit to be refused would not stop."""
        while not self._context.ended.wait(_OWNER_CHECK_S):
            owner_check = self._owner_check  # each start of the query has its own
            try:
                if owner_check is not None:
                    owner_check.check_next()
            except Unavailable as error:
                logger.debug("cannot check the owner of %s, Redis is unavailable: %s; retrying", self.label, error)
            except StaleOwner:
                if owner_check is self._owner_check:  # else its query has ended, and the restarted one has taken over
                    raise

    def _on_background_error(self, error: Exception) -> None:
        self.background_failure = failure_of(error)

    def _migrate_keys(self) -> None:
        """Import the keys that migrate between the handler's partitions."""

        def on_runnable(streams: Sequence[str]) -> None:
            if self._deferred_jobs is not None:
                self._deferred_jobs.add_streams(streams)

        ended = self._context.ended
        with Client(self._context.settings.url) as client:
            while not ended.wait(_WATCH_S):
                try:
                    keep_migrating(client, self._handler, ended, on_runnable)
                except MillstreamError as error:
                    if failure_of(error).is_final:
                        raise
                    wait_s = _MIGRATION_WAIT_S
                    logger.warning("cannot migrate keys of %s: %s; retrying in %.0f s", self.label, error, wait_s)
                    ended.wait(wait_s)


def _subscription(handler: Handler) -> dict[str, str | None]:
    """The source options that select the handler's streams."""
    if handler.announced is not None:
        return {"subscribeAnnounced": handler.announced}
    if handler.partitions is not None:
        return {"subscribePartitions": ",".join(handler.streams)}
    return {"subscribe": ",".join(handler.streams)} if handler.streams else {"subscribePattern": handler.pattern}
