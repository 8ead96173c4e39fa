"""A handler's query: the engine behind Spark's foreachBatch, under a token that makes it the newest run."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import ClassVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from millstream.delivery.commit_store import CommittedPosition
from millstream.delivery.key_queues import count_parked
from millstream.errors import MillstreamError
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import HandlerKeys
from millstream.spark.engine.deferred_jobs import DeferredJobs
from millstream.spark.engine.key_migration import keep_moving, partitions_of
from millstream.spark.engine.micro_batch import Engine
from millstream.spark.engine.task import Job
from millstream.spark.engine.task_metrics import BatchTotals
from millstream.spark.run.failures import failure_of
from millstream.spark.run.first_start import check_slots, commit_store_of, prepare_new
from millstream.spark.run.query import MOST_FAILURES, Batch, RunContext, SupervisedQuery
from millstream.spark.run.service_membership import ServiceMembership, announced_streams

logger = logging.getLogger(__name__)

_WATCH_S, _MOST_WAIT_S = 0.2, 30.0


class _BatchFailed(Exception):
    """Ends a batch for Spark, which searches the texts of errors, and chokes on long ones."""


class HandlerQuery(SupervisedQuery):
    """Runs one handler: see `engine.py`; and, beside it, what it has set aside and the keys that move to it."""

    kind: ClassVar[str] = "handler"

    def __init__(self, around: RunContext, handler: Handler) -> None:
        super().__init__(around, handler.app, handler.name)
        self._handler = handler
        self._ledger = commit_store_of(around.client, handler)
        self._catch_up: DeferredJobs | None = None
        self._membership: ServiceMembership | None = None
        self._keeping_up: threading.Thread | None = None

    def streams(self) -> list[str]:
        """Those it names, or that fit its pattern, are its partitions, or were announced, as of now."""
        handler, client = self._handler, self._around.client
        if handler.announced is not None:
            return announced_streams(client, handler.announced)
        if handler.partitions is not None:
            return [stream for layout in partitions_of(client, handler) for stream in layout.streams]
        return list(handler.streams) or client.scan_streams(handler.pattern or "*")

    def join(self) -> None:
        """Become a consumer of the service that its streams are announced to."""
        if self._handler.announced is not None:
            self._membership = self._membership or ServiceMembership(
                self._around.client, self._handler, on_ended=self._break
            )
            self._membership.join()

    def leave(self) -> None:
        """Leave the service."""
        if self._membership is not None:
            self._membership.close()

    def prepare(self) -> None:
        """Compare the checkpoint with what is committed, and write down where a new one begins."""
        client, settings, streams = self._around.client, self._around.settings, self.streams()
        if client.is_cluster:
            check_slots(self._handler, streams)
        self._look_at_checkpoint("offsets")
        if not self.resumed:
            start, start_at = settings.start, settings.start_at
            prepare_new(client, self._handler, streams, self.checkpoint, start=start, start_at=start_at)

    def begin(self) -> None:
        """Run what is set aside, and bring in keys that move."""
        self._keeping_up = self._beside(self._keep_up, "millstream-lines")
        if self._handler.partitions is not None:
            self._beside(self._move_keys, "millstream-keys")

    def wind_up(self, within_s: float) -> None:
        """Have what was run of it be told of before the end."""
        if self._keeping_up is not None:
            self._keeping_up.join(within_s)

    def is_settled(self) -> bool:
        """Whether nothing that was set aside will be run by itself."""
        return self._catch_up is not None and self._catch_up.is_settled()

    def achieved(self) -> int:
        """How many messages the handler has ever committed."""
        keys = [HandlerKeys(self._handler.app, self.name, stream).meta for stream in self.streams()]
        replies = self._around.client.pipeline([("HGET", key, "committed") for key in keys])
        return sum(int(raise_if_error(reply) or 0) for reply in replies)

    def parked(self, client: Client) -> tuple[int, int]:
        """See Pipeline."""
        streams = [] if self._catch_up is None else self._catch_up.streams()
        return count_parked(client, [HandlerKeys(self._handler.app, self.name, stream) for stream in streams])

    def start(self) -> StreamingQuery:
        """Take over from whoever ran the handler before, and start."""
        handler, around = self._handler, self._around
        self.error = self._catch_up = None
        token, standings = around.wait_for(self._take_over, self.label)
        options = {
            **self._source(),
            **_subscription(handler),
            "layout": "packed",
            "frontierApp": handler.app,
            "frontierHandler": handler.name,
            "group": HandlerKeys(handler.app, handler.name, "").group,
            "startingOffsets": "frontier",
            **({"keyField": handler.key_field} if handler.key_field else {}),
        }
        job = Job(handler=handler, url=around.settings.url, token=token)
        aside = [name for name, standing in standings.items() if standing.lines]
        self._catch_up = DeferredJobs(job, around.spark, streams=aside, give_up=around.over.is_set, clock=around.clock)
        engine = Engine(job, on_batch=self._batch_done, deferred_jobs=self._catch_up)
        frame = around.spark.readStream.format("redis-streams").options(**options).load()
        return self._started(frame.writeStream.foreachBatch(self._processing(engine)))

    def _take_over(self) -> tuple[int, dict[str, CommittedPosition]]:
        """Begin a run; return its token, and where its streams stand. Where workers were before, it goes on after them."""
        streams = self.streams()
        token = self._ledger.new_token(streams)
        # Before the query plans: of what workers have done it knows only the frontier that this leaves behind.
        return token, self._ledger.renewed(token).begin(streams)

    def _batch_done(self, batch: BatchTotals) -> None:
        self.failures = 0
        self._around.on_event({"event": "batch", **asdict(batch)})

    def _processing(self, engine: Engine) -> Callable[[DataFrame, int], None]:
        """What Spark calls for each batch: `engine`, under the eyes of the supervisor."""

        def process(frame: DataFrame, number: int) -> None:
            self.began = True
            self.batch = Batch(number, self._around.clock.monotonic_ms())
            try:
                engine(frame, number)
            except Exception as error:  # noqa: BLE001 - whatever it is ends the query; the supervisor judges it
                self.error = error
                raise _BatchFailed(failure_of(error).reason) from None
            finally:
                self.batch = None

        return process

    # --- Beside the query ---

    def _beside(self, work: Callable[[], None], name: str) -> threading.Thread:
        def done() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever it is, a run without it must not look healthy
                self._break(error)

        thread = threading.Thread(target=done, name=name, daemon=True)
        thread.start()
        return thread

    def _keep_up(self) -> None:
        """Run what was set aside, when it may be run."""
        over, wait_s, failures = self._around.over, _WATCH_S, 0
        while not over.wait(wait_s):
            wait_s, catch_up = _WATCH_S, self._catch_up  # each query has its own, under its own token
            if catch_up is None:
                continue
            try:
                done = catch_up.run()
            except (MillstreamError, PySparkException, Py4JError, OSError) as error:
                if over.is_set() or self._around.stopping.is_set():
                    return
                if catch_up is not self._catch_up:
                    continue  # its query has ended; what begins anew has taken over from it
                failure, failures = failure_of(error), failures + 1
                if failure.final or failures > MOST_FAILURES:
                    self._break(error)
                    return
                wait_s = min(0.5 * 2**failures, _MOST_WAIT_S)
                logger.warning("%s cannot run what was set aside: %s", self.label, failure.reason)
            else:
                failures = 0
                if done:
                    wait_s = 0.0
                    self._around.on_event({"event": "caught-up", **asdict(done)})

    def _break(self, error: Exception) -> None:
        self.broken = failure_of(error)

    def _move_keys(self) -> None:
        """Bring in the keys that move between the handler's partitions."""

        def tell(streams: Sequence[str]) -> None:
            if self._catch_up is not None:
                self._catch_up.look_at(streams)

        over = self._around.over
        with Client(self._around.settings.url) as client:
            while not over.wait(_WATCH_S):
                try:
                    keep_moving(client, self._handler, over, tell)
                except MillstreamError as error:
                    logger.warning("keys of %s do not move for now: %s", self.label, error)
                    over.wait(_MOST_WAIT_S / 10)


def _subscription(handler: Handler) -> dict[str, str | None]:
    """The options of the source that say which streams."""
    if handler.announced is not None:
        return {"subscribeAnnounced": handler.announced}
    if handler.partitions is not None:
        return {"subscribePartitions": ",".join(handler.streams)}
    return {"subscribe": ",".join(handler.streams)} if handler.streams else {"subscribePattern": handler.pattern}
