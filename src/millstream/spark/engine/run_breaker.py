"""RunBreaker: decides on the driver, from the tasks' reports, whether a handler is paused, and waits while it is.

A task stops at once, as its batch may be the whole backlog; its batch stays uncommitted. The driver pauses the handler
and waits. After the resume it runs the batch again: what is committed is left out, as in any repetition.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.pause import Pause, pause_of
from millstream.errors import HandlerPaused, Unfinished
from millstream.handlers.breaker_window import BreakerWindow, Trip
from millstream.model import Breaker
from millstream.redis_client.client import Client
from millstream.spark.engine.task import Job
from millstream.spark.engine.task_breaker import Causes
from millstream.spark.engine.task_metrics import sum_counters

logger = logging.getLogger(__name__)

_POLL_MS = 500.0

Rows = Sequence[Mapping[str, Any]]
"""The reports of the tasks of a job, by stream."""


class RunBreaker:
    """The breaker of one handler in one run on Spark. One thread calls `run`; another may call `check` meanwhile.

    * `streams`: returns the handler's streams, all of which it pauses
    * `give_up`: returns True once waiting is pointless; `once`: do not wait for a resume, but end the run
    * `on_pause`: called with a pause that begins, or with None when it ends; and with the counters of the work before
    """

    def __init__(
        self,
        job: Job,
        client: Client,
        *,
        streams: Callable[[], Sequence[str]],
        give_up: Callable[[], bool],
        once: bool = False,
        on_pause: Callable[[Pause | None, Mapping[str, int]], None] = lambda pause, counters: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._job = job
        self._client = client
        self._store = CommitStore(client, app=job.handler.app, handler=job.handler.name, token=job.token)
        self._streams = streams
        self._give_up = give_up
        self._once = once
        self._on_pause = on_pause
        self._clock = clock
        self._policy = job.handler.breaker or Breaker()
        self._window = BreakerWindow(self._policy)
        self._window_lock = threading.Lock()
        self._may_be_paused = True  # by the breaker of an earlier run, whose batch this one repeats

    def run(self, run_tasks: Callable[[Job], Rows]) -> Rows:
        """Run the tasks of a batch until none has stopped early. Raises HandlerPaused, Unfinished, RedisError."""
        job, earlier = self._job, list[Mapping[str, Any]]()
        if job.handler.breaker is None:
            return run_tasks(job)
        while True:
            self._wait_until_resumed()
            rows = run_tasks(job)
            has_stopped = any(row["trip"] for row in rows)
            trip = None if job.handler.breaker is None else self._judge(rows)
            counted = [*earlier, *({**row, "messages": 0} for row in rows)]
            if trip is not None:
                self._pause(trip, sum_counters(counted) if has_stopped else {})
            if not has_stopped:
                return [*earlier, *rows]
            # A stop for which the whole batch gives no reason, such as one bad key: this batch goes on without it.
            earlier = [] if trip else counted
            job = self._job if trip else replace(job, handler=replace(job.handler, breaker=None))

    def check(self, rows: Rows) -> None:
        """Pause the handler if a job of deferred keys gives reason to. Raises RedisError."""
        if self._job.handler.breaker is not None and (trip := self._judge(rows)) is not None:
            self._pause(trip, {})

    def _judge(self, rows: Rows) -> Trip | None:
        causes: Causes = {}
        processed = 0
        for row in rows:
            processed += row["committed"] - row["dead"]
            for cause, (count, error) in msgspec.json.decode(row["causes"], type=Causes).items():
                causes[cause] = causes.get(cause, (0, error))[0] + count, error
        tripped = [msgspec.json.decode(row["trip"], type=Trip) for row in rows if row["trip"]]
        if not tripped:
            with self._window_lock:
                return self._window.on_mixed(processed, causes)
        if self._job.handler.key is None:  # its messages are in stream order
            return tripped[0]
        # A task has its keys one after another, and one bad key is not a bad deployment.
        total = processed + sum(count for count, _ in causes.values())
        for trip in tripped:
            count, error = causes.get(trip.cause, (0, ""))
            if count >= max(self._policy.first, self._policy.share * total):
                return Trip(trip.cause, count, total, error)
        return None

    def _pause(self, trip: Trip, counters: Mapping[str, int]) -> None:
        label = self._job.handler.label
        pause = pause_of(self._policy, trip, "spark")
        logger.error("%s is %s", label, pause.describe(label))

        def store() -> None:
            streams = list(self._streams())
            paused = self._store.paused_streams(streams)  # one by an operator stays as it is
            self._store.set_paused([one for one in streams if one not in paused], paused=True, why=pause)

        try:
            self._client.retry_while_unavailable(store, what=label, give_up=self._give_up)
        # Not before: a batch that reads the pauses meanwhile has to read them again; an error may store only some.
        finally:
            self._may_be_paused = True
        self._on_pause(pause, Counter(counters))

    def _wait_until_resumed(self) -> None:
        was_paused = False
        while self._may_be_paused:
            pause = self._client.retry_while_unavailable(
                self._stored, what=self._job.handler.label, give_up=self._give_up
            )
            if pause is None:
                with self._window_lock:
                    self._window = BreakerWindow(self._policy)
                if was_paused:
                    was_paused = False
                    self._on_pause(None, {})
            elif self._once:
                raise HandlerPaused(f"it is {pause.describe(self._job.handler.label)}")
            elif self._give_up():
                raise Unfinished(f"{self._job.handler.label} was stopped while its breaker paused it")
            else:
                was_paused = True
                self._clock.sleep_ms(_POLL_MS)

    def _stored(self) -> Pause | None:
        """The pause of a breaker on one of the streams."""
        self._may_be_paused = False  # before the read: a pause that the other thread stores after it counts
        pauses = self._store.paused_streams(list(self._streams())).values()
        found = next((one for one in pauses if one.by == "breaker"), None)
        if found is not None:
            self._may_be_paused = True
        return found
