"""DeferredJobs: runs deferred keys in Spark jobs of their own, between and beside the batches.

Batches skip a key that has deferred messages, so a job and a batch never run one key at the same time.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.deferral import RunnableKeys, runnable_keys
from millstream.errors import Unfinished
from millstream.observability.failure_log import FailureLog
from millstream.redis_client.client import shared_client
from millstream.spark.engine.entry_points import run_deferred
from millstream.spark.engine.run_breaker import Rows, RunBreaker
from millstream.spark.engine.task import Job
from millstream.spark.engine.task_metrics import METRICS_SCHEMA, Totals, log_failures, sum_counters
from millstream.spark.versions import spark_schema

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_KEYS_PER_JOB = 1_000
"""Keys that one job runs at most."""
MAX_DEFERRED_ENTRIES = 250_000
"""Deferred entries of a stream above which batches wait, too."""

_CAPACITY_POLL_MS = 500.0
_REFRESH_MS, _REFRESH_SHARE = 150.0, 20
_SCHEMA = "stream string, queue binary"


class _Snapshot(NamedTuple):
    """The deferred keys of a stream as read at `at_ms`; `notified`: how often the stream had been notified by then."""

    notified: int
    runnable: RunnableKeys
    at_ms: float


class DeferredJobs:
    """The deferred keys of one handler, on `streams` and on the streams it is notified of.

    `give_up` returns True once waiting for Redis is pointless; `failures` logs failed attempts. One thread calls `run`;
    any thread may call the rest. Methods raise StaleOwner if a newer run has begun, and RedisError: Unavailable only
    once `give_up()` is true.
    """

    def __init__(
        self,
        job: Job,
        spark: SparkSession,
        *,
        streams: Iterable[str],
        give_up: Callable[[], bool],
        failures: FailureLog | None = None,
        breaker: RunBreaker | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._job = job
        self._failures = failures or FailureLog(job.handler)
        self._breaker = breaker
        self._spark = spark
        self._give_up = give_up
        self._clock = clock
        self._client = shared_client(job.url)
        self._commit_store = CommitStore(self._client, app=job.handler.app, handler=job.handler.name, token=job.token)
        self._notified = Counter(streams)  # counted: a notification during a refresh must not be lost
        self._snapshots: dict[str, _Snapshot] = {}
        self._full_refresh_at_ms = 0.0
        self._lock = threading.Lock()

    def notify(self, rows: Rows) -> None:
        """Add the streams that, by the tasks' reports in `rows`, have deferred keys."""
        self.add_streams([row["stream"] for row in rows if row["has_queues"]])

    def add_streams(self, streams: Sequence[str]) -> None:
        """Add streams whose deferred keys may be runnable by now."""
        with self._lock:
            self._notified.update(streams)

    def streams(self) -> list[str]:
        """The streams that, as far as is known, have deferred keys."""
        with self._lock:
            return sorted(self._notified)

    def run(self) -> Totals | None:
        """Run the head of each runnable key queue in one job; None if there is none. Also raises what fails the job.

        The totals count no `messages`: the batch that read them has counted them.
        """
        began_ms = self._clock.monotonic_ms()
        queues = _round_robin(self._retry(self._fetch_unpaused))[:MAX_KEYS_PER_JOB]
        if not queues:
            return None
        rows = self._run_job(queues)
        log_failures(self._failures, rows)
        self.notify(rows)
        if self._breaker is not None:
            self._breaker.check(rows)
        return Totals(
            handler=self._job.handler.name, seconds=(self._clock.monotonic_ms() - began_ms) / 1000, **sum_counters(rows)
        )

    def is_finished(self) -> bool:
        """Whether no deferred key will make progress by itself: each is parked, paused, or retried without end.

        Raises Unavailable at once: its caller repeats it, and knows when that is pointless.
        """
        is_bounded = self._job.handler.retry.then != "block"
        found = self._fetch_unpaused(refresh_all=True)
        return not any(
            ready.queues or ready.awaiting or (is_bounded and ready.wait_ms is not None) for _, ready in found
        )

    def wait_for_capacity(self) -> None:
        """Wait until few enough entries are deferred for another batch. Raises Unfinished once `give_up()` is true."""
        is_logged = False
        # While keys migrate, the entries that their deferred keys wait for are in later batches.
        while full := [
            stream
            for stream, ready in self._retry(self._refresh)
            if ready.entry_count >= MAX_DEFERRED_ENTRIES and not ready.awaiting
        ]:
            if not is_logged:
                is_logged = True
                logger.warning(
                    "%s: %d or more entries of %s are deferred; reading no more until they are fewer, see: "
                    "millstream key list",
                    self._job.handler.label,
                    MAX_DEFERRED_ENTRIES,
                    ", ".join(full[:10]),
                )
            if self._give_up():
                raise Unfinished(
                    f"{self._job.handler.label} was stopped before its batch ran: too many entries are deferred"
                )
            self._clock.sleep_ms(_CAPACITY_POLL_MS)

    def _refresh(self, *, refresh_all: bool = False) -> list[tuple[str, RunnableKeys]]:
        """Return the deferred keys of each stream, re-read where they may have changed, or all with `refresh_all`."""
        now_ms = self._clock.monotonic_ms()
        refresh_all = refresh_all or now_ms >= self._full_refresh_at_ms
        with self._lock:
            notified = sorted(self._notified.items())
            refreshed = {
                stream: times for stream, times in notified if refresh_all or self._needs_refresh(stream, times, now_ms)
            }
        found = runnable_keys(self._commit_store, list(refreshed), MAX_KEYS_PER_JOB)
        then_ms = self._clock.monotonic_ms()
        if refresh_all:  # an operator's unpark notifies no stream, so all are refreshed now and then
            self._full_refresh_at_ms = then_ms + max(_REFRESH_MS, _REFRESH_SHARE * (then_ms - now_ms))
        with self._lock:
            for stream, ready in found.items():
                self._snapshots[stream] = _Snapshot(refreshed[stream], ready, now_ms)
                if not ready.has_queues and self._notified[stream] in (
                    0,
                    refreshed[stream],
                ):  # 0: another thread removed it
                    del self._notified[stream], self._snapshots[stream]
            return [(stream, self._snapshots[stream].runnable) for stream, _ in notified if stream in self._snapshots]

    def _fetch_unpaused(self, *, refresh_all: bool = False) -> list[tuple[str, RunnableKeys]]:
        """`_refresh`, without the streams on which the handler is paused."""
        found = self._refresh(refresh_all=refresh_all)
        some = [stream for stream, ready in found if ready.has_queues]
        paused = self._commit_store.paused_streams(some) if some else {}
        return [(stream, ready) for stream, ready in found if stream not in paused]

    def _needs_refresh(self, stream: str, times: int, now_ms: float) -> bool:
        seen = self._snapshots.get(stream)
        if (
            seen is None
            or seen.notified != times
            or seen.runnable.queues
            or seen.runnable.entry_count >= MAX_DEFERRED_ENTRIES
        ):
            return True
        return seen.runnable.wait_ms is not None and now_ms >= seen.at_ms + seen.runnable.wait_ms

    def _retry(self, operation: Callable[[], T]) -> T:
        return self._client.retry_while_unavailable(operation, what=self._job.handler.label, give_up=self._give_up)

    def _run_job(self, queues: Sequence[tuple[str, bytes]]) -> Rows:
        job = self._job

        def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return run_deferred(job, batches)

        tasks = min(self._spark.sparkContext.defaultParallelism, len(queues))
        frame = self._spark.createDataFrame(queues, _SCHEMA).repartition(tasks)
        return [row.asDict() for row in frame.mapInArrow(run, spark_schema(METRICS_SCHEMA)).collect()]


def _round_robin(found: Iterable[tuple[str, RunnableKeys]]) -> list[tuple[str, bytes]]:
    """The runnable key queues of all streams, round robin, so that one stream cannot starve the others."""
    rows = zip_longest(*([(stream, queue) for queue in ready.queues] for stream, ready in found))
    return [one for row in rows for one in row if one is not None]
