"""Runs what was set aside, between and beside the batches: jobs of their own, of the lines that may be run by now.

A key that has a line is left alone by batches, so the two never run one key at the same time.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import Row, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.deferral import RunnableKeys, runnable_keys
from millstream.errors import Unfinished
from millstream.redis_client.client import shared_client
from millstream.spark.engine.entry_points import run_deferred
from millstream.spark.engine.task import Job
from millstream.spark.engine.task_metrics import TALLY_SCHEMA, Totals, sums

logger = logging.getLogger(__name__)

MOST_LINES = 1_000
"""Lines that one job runs at most."""
LOOK_AHEAD = 250_000
"""Entries of a stream that may wait in lines before batches wait, too."""

_ROOM_MS = 500.0
_LOOK_MS, _LOOKING_SHARE = 150.0, 20
_SCHEMA = "stream string, line binary"


class _Seen(NamedTuple):
    """What was found on a stream, and when; `times`: how often one had been told of it by then."""

    times: int
    ready: RunnableKeys
    at_ms: float


class DeferredJobs:
    """What of one handler was set aside on `streams`, and on those of which it is told.

    `give_up` says that waiting for Redis has no point any more. One thread calls
    `run`, others the rest. Methods raise StaleOwner if a newer run has begun, and RedisError.
    """

    def __init__(
        self, job: Job, spark: SparkSession, *, streams: Iterable[str], give_up: Callable[[], bool],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self._job = job
        self._spark = spark
        self._give_up = give_up
        self._clock = clock
        self._client = shared_client(job.url)
        self._ledger = CommitStore(self._client, app=job.handler.app, handler=job.handler.name, token=job.token)
        self._told = Counter(streams)  # how often, as what is told while somebody looks must not be forgotten
        self._seen: dict[str, _Seen] = {}
        self._all_due_ms = 0.0
        self._lock = threading.Lock()

    def tell(self, rows: Iterable[Row]) -> None:
        """Take note of the streams on which, as tasks report, there are lines."""
        self.look_at([row["stream"] for row in rows if row["lines"]])

    def look_at(self, streams: Sequence[str]) -> None:
        """Take note of streams on which lines may be run by now."""
        with self._lock:
            self._told.update(streams)

    def streams(self) -> list[str]:
        """The streams on which, as far as is known, there are lines."""
        with self._lock:
            return sorted(self._told)

    def run(self) -> Totals | None:
        """Run lines that may be run, some of each; None if there were none. Also raises what makes a job fail.

        What it tells has no `messages`, as they were read before.
        """
        began_ms = self._clock.monotonic_ms()
        found = _in_turns(self._unpaused(self._look()))[:MOST_LINES]
        if not found:
            return None
        rows = self._work_off(found)
        self.tell(rows)
        return Totals(
            handler=self._job.handler.name, seconds=(self._clock.monotonic_ms() - began_ms) / 1000, **sums(rows)
        )

    def is_settled(self) -> bool:
        """Whether nothing more becomes of what was set aside by itself, but that it is tried for ever, or is paused."""
        waits = self._job.handler.retry.then != "block"
        found = self._unpaused(self._look(at_all=True))
        return not any(ready.lines or ready.moving or (waits and ready.wait_ms is not None) for _, ready in found)

    def wait_for_room(self) -> None:
        """Wait until so few entries are set aside that a batch may set aside more. Raises Unfinished if it is told to give up."""
        said = False
        # Where keys move, what waits for them is in batches to come.
        while full := [stream for stream, ready in self._look() if ready.entries >= LOOK_AHEAD and not ready.moving]:
            if not said:
                said = True
                logger.warning(
                    "%s: %d or more entries of %s are set aside: nothing more is read until there are fewer; see: millstream keys",
                    self._job.handler.label, LOOK_AHEAD, ", ".join(full[:10]),
                )  # fmt: skip
            if self._give_up():
                raise Unfinished(f"{self._job.handler.label} was stopped while its batch waited for room")
            self._clock.sleep_ms(_ROOM_MS)

    def _look(self, *, at_all: bool = False) -> list[tuple[str, RunnableKeys]]:
        """What is known of each stream, which is asked for where it may be otherwise by now, or `at_all` of them."""
        now_ms = self._clock.monotonic_ms()
        at_all = at_all or now_ms >= self._all_due_ms
        with self._lock:
            told = sorted(self._told.items())
            asked = {stream: times for stream, times in told if at_all or self._is_due(stream, times, now_ms)}
        found = self._ready(list(asked))
        then_ms = self._clock.monotonic_ms()
        if at_all:  # where a person has unparked something, nobody tells
            self._all_due_ms = then_ms + max(_LOOK_MS, _LOOKING_SHARE * (then_ms - now_ms))
        with self._lock:
            for stream, ready in found.items():
                self._seen[stream] = _Seen(asked[stream], ready, now_ms)
                if not ready.any and self._told[stream] in (0, asked[stream]):  # 0: another thread has seen it, too
                    del self._told[stream], self._seen[stream]
            return [(stream, self._seen[stream].ready) for stream, _ in told if stream in self._seen]

    def _unpaused(self, found: Sequence[tuple[str, RunnableKeys]]) -> list[tuple[str, RunnableKeys]]:
        """Those on which the handler is not paused."""
        some = [stream for stream, ready in found if ready.any]
        ask = partial(self._ledger.paused, some)
        paused = self._client.patiently(ask, what=self._job.handler.label, give_up=self._give_up) if some else set()
        return [(stream, ready) for stream, ready in found if stream not in paused]

    def _is_due(self, stream: str, times: int, now_ms: float) -> bool:
        seen = self._seen.get(stream)
        if seen is None or seen.times != times or seen.ready.lines or seen.ready.entries >= LOOK_AHEAD:
            return True
        return seen.ready.wait_ms is not None and now_ms >= seen.at_ms + seen.ready.wait_ms

    def _ready(self, streams: Sequence[str]) -> dict[str, RunnableKeys]:
        return self._client.patiently(
            lambda: runnable_keys(self._ledger, streams, MOST_LINES),
            what=self._job.handler.label,
            give_up=self._give_up,
        )

    def _work_off(self, lines: Sequence[tuple[str, bytes]]) -> list[Row]:
        job = self._job

        def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return run_deferred(job, batches)

        tasks = min(self._spark.sparkContext.defaultParallelism, len(lines))
        frame = self._spark.createDataFrame(lines, _SCHEMA).repartition(tasks)
        return frame.mapInArrow(run, from_arrow_schema(TALLY_SCHEMA)).collect()


def _in_turns(found: Iterable[tuple[str, RunnableKeys]]) -> list[tuple[str, bytes]]:
    """The lines of all streams, one of each in turn, so that those of one cannot keep all others waiting."""
    rows = zip_longest(*([(stream, line) for line in ready.lines] for stream, ready in found))
    return [one for row in rows for one in row if one is not None]
