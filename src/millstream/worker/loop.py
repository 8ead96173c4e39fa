"""The reading loop: fetches entries of a handler's streams, runs the handler and commits its effects, until stopped.

`ReadingLoop.run` starts and ends its threads. They share one `InFlight`: the fetcher fetches entries, the runner runs
the handler, the committer commits the outcomes, the renewal thread renews claims and claims idle entries, the isolation
thread re-runs suspected poison pills one at a time, the lease watchdog ends runs beyond their key lease, and timers add
claimed entries whose back-off is over. Two more threads work beside it: the delayed mover moves delayed messages that
are due, and discovery looks for new streams.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from millstream.clock import SYSTEM_CLOCK, Backoff, Clock
from millstream.delivery.consumer_removal import remove_consumers
from millstream.delivery.delayed_messages import DelayedMessages
from millstream.delivery.output_check import check_output
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import (
    ConfigError,
    GroupMissing,
    HandlerStuck,
    Incompatible,
    MillstreamError,
    Unavailable,
)
from millstream.handlers.handler import Handler
from millstream.observability.health import Health
from millstream.observability.metrics import NO_METRICS, Metrics
from millstream.redis_client.client import Client
from millstream.worker.breaker import HandlerBreaker
from millstream.worker.context import WorkerContext
from millstream.worker.fetch_outage import FetchOutage
from millstream.worker.handler_steps import HandlerSteps, MakeHandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.incarnations import Incarnation
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.ordering.by_key import ByKey
from millstream.worker.ordering.ordering import Ordering, names_to_work_on
from millstream.worker.ordering.unordered import Unordered
from millstream.worker.policy import WorkerPolicy
from millstream.worker.running.async_runner import AsyncRunner
from millstream.worker.running.batch_runners import AsyncBatchRunner, ThreadBatchRunner
from millstream.worker.running.key_list_runners import AsyncKeyListRunner, ThreadKeyListRunner
from millstream.worker.running.poison_isolation import PoisonIsolation, ProcessIsolation
from millstream.worker.running.runner import Runner
from millstream.worker.running.thread_runner import ThreadRunner
from millstream.worker.stream_exclusion import concerns_one_stream, exclude_on_error

if TYPE_CHECKING:
    from millstream.worker.delayed_mover import TrackedDelayedMessages

logger = logging.getLogger(__name__)

_TIMEOUT_SLACK_MS = 10_000
_FULL_WAIT_S = 0.02
_POLL_S = 0.005
_RUNNER_END_S = 1.0
_YIELD_S = 0.00005
"""How long the fetcher leaves the interpreter to a runner that it has woken for `_FEW` messages at most, in seconds."""
_FEW = 16
_WAITS_MS = (50.0, 1_000.0)
_DISCOVERY_SHARE = 20
_EXCLUDED_MS = 60_000.0
_LAST_CALLS_MS = 2_000.0
"""How long after its deadline a stop waits for Redis to answer its last calls: less than a supervisor waits."""


class ReadingLoop:
    """Runs one handler on its streams, as one of any number of workers. Call `run` and `stop` once each.

    * `consumer`: this worker's name, unique among the workers alive at the same time; after a restart under the same
      name the worker resumes with the entries it held
    * `start`: where the handler begins on a stream on which it has processed nothing yet
    * `steps`: makes the steps of a message, `HandlerSteps` or a subclass
    * `metrics`, `health`: receive the loop's figures and its progress
    * `isolation`: shared by the loops of one process, so that a poison-pill suspect of one loop runs while no message
      of another loop does
    """

    def __init__(
        self,
        handler: Handler,
        url: str,
        *,
        consumer: str,
        policy: WorkerPolicy | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        steps: MakeHandlerSteps = HandlerSteps,
        metrics: Metrics = NO_METRICS,
        health: Health | None = None,
        isolation: ProcessIsolation | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.handler = handler
        self.loop_metrics = LoopMetrics(
            handler.label, time_limit_ms=handler.time_limit_ms, metrics=metrics, health=health
        )
        self._policy = policy = policy or WorkerPolicy()
        self.loop_metrics.set_run_limit(_run_limit_of(handler, policy))
        self._clock = clock
        self._fetch_outage = FetchOutage(handler.label, self.loop_metrics, clock)
        self._steps = steps(handler)
        # A blocking read keeps its connection busy, so it has a connection of its own.
        self._client = Client(url, clock=clock)
        self._blocking_client = Client(url, timeout_ms=policy.block_ms + _TIMEOUT_SLACK_MS, clock=clock)
        # The SCAN of all keys for those that match a pattern has one, too.
        self._scan_client = Client(url, clock=clock)
        list_size = handler.batch_size if handler.in_batches and handler.key is not None else 0
        self._in_flight = InFlight(policy, _concurrency_of(handler), list_size=list_size)
        self._stopping, self._runs_ended = threading.Event(), threading.Event()
        self._failures: list[BaseException] = []
        self._excluded: dict[str, float] = {}
        """Streams that cannot be joined: when they are tried again, in milliseconds of the clock."""
        self._deadline_ms = self._last_calls_until_ms = float("inf")
        self._is_redis_silent = False
        self._runner = self._make_runner()
        self._in_flight.on_buffered = self._runner.notify
        self._process_isolation = isolation = isolation or ProcessIsolation()
        self._isolation = PoisonIsolation(
            handler,
            self._in_flight,
            self._runner,
            self._stopping,
            isolation,
            clock=clock,
            incarnation=Incarnation(
                self._client, clock, app=handler.app, consumer=consumer, name=isolation.incarnation
            ),
        )
        self._ordering = _make_ordering(self._make_context(url, consumer, start))

    def _make_context(self, url: str, consumer: str, start: Literal["earliest", "latest"]) -> WorkerContext:
        return WorkerContext(
            handler=self.handler,
            steps=self._steps,
            in_flight=self._in_flight,
            loop_metrics=self.loop_metrics,
            clock=self._clock,
            policy=self._policy,
            consumer=consumer,
            start=start,
            url=url,
            client=self._client,
            blocking_client=self._blocking_client,
            on_suspect=self._isolation.add_suspect,
            cancel_run=self._runner.cancel_run,
            traceback_of_run=self._runner.traceback_of_run,
            give_up=self._is_past_deadline,
            breaker=HandlerBreaker(self.handler, consumer),
            fetch_outage=self._fetch_outage,
        )

    def _make_runner(self) -> Runner:
        args = self._steps, self._in_flight, self.loop_metrics, self._clock
        threads = self._policy.threads
        if not self.handler.in_batches:
            return AsyncRunner(*args) if self.handler.is_async else ThreadRunner(*args, threads)
        if self.handler.key is not None:
            return AsyncKeyListRunner(*args) if self.handler.is_async else ThreadKeyListRunner(*args, threads)
        return AsyncBatchRunner(*args) if self.handler.is_async else ThreadBatchRunner(*args, threads)

    # Run and stop

    def run(self) -> list[Delivery]:
        """Work until `stop`; return the deliveries that were still running then, which other workers will run again.

        Entries that have not started are released at once and count no attempt. Raises the error that ended the loop
        before `stop`: StaleOwner when a run on Spark took the handler over, HandlerStuck, ConfigError, and RedisError
        except Unavailable, which the loop waits out. If Redis does not answer, `run` returns two seconds after the
        deadline at the latest, and what was not released expires.
        """
        try:
            leftovers = self._run()
        finally:
            self.stop()  # it was not called if a first step has failed
            self._call_while_stopping("closing", self._close)
            self._steps.failures.close()
        if self._failures:
            raise self._failures[0]
        return [one for one in leftovers if one.running]

    def _run(self) -> list[Delivery]:
        """Work until `stop`; return the deliveries that were in flight to the end."""
        self._retry_while_unavailable(partial(check_output, self._client, self.handler))
        self._retry_while_unavailable(self._discover)
        committer = self._start_thread("committer", self._ordering.committer.run)
        runner = self._start_thread("runner", self._runner.run)
        isolation = self._start_thread("isolation", self._isolation.run)
        fetching = [
            self._start_thread("fetcher", self._run_fetcher),
            self._start_thread("delayed-mover", self._run_delayed_mover),
            self._start_thread("discovery", self._run_discovery),
        ]
        for name, work in self._ordering.background_loops().items():
            fetching.append(self._start_thread(name, partial(work, self._stopping)))
        renewals = [self._start_thread("renewal", self._run_maintenance)]
        watchdog = self._ordering.lease_watchdog
        if watchdog is not None:
            renewals.append(
                self._start_thread("lease-watchdog", partial(self._watch, partial(watchdog.run, self._runs_ended)))
            )
        self._stopping.wait()
        self._isolation.add_suspect(None)
        # Entries that have not started are released first: other workers need not wait for the running ones to end.
        self._release(self._in_flight.remove_waiting())
        self._join_threads(fetching)
        self._release(self._in_flight.remove_waiting())
        self._in_flight.buffer.put(None)
        self._runner.notify()
        self._wait_for_runs(runner, isolation)
        self._runs_ended.set()
        self._join_threads(renewals)
        if watchdog is not None and self._in_flight.given_up:
            self._start_thread("lease-watchdog", partial(self._watch, watchdog.run_on))
        self._runner.cancel_all()
        self._join_threads([runner], most_s=_RUNNER_END_S)  # what ended it must not be missed; one that hangs is left
        self._in_flight.completions.close()
        self._join_threads([committer])
        if self.handler.limit is not None and not self._is_redis_silent:
            # Of the last runs, which no later question takes along: keys of other workers may wait for them.
            self._call_while_stopping("permits", self._runner.give_back_permits)
        leftovers = self._in_flight.deliveries
        self._in_flight.remove(leftovers)
        self._release(leftovers)
        if not self._is_redis_silent:
            self._call_while_stopping(
                "removal", lambda: remove_consumers(self._client, self._ordering.streams.values())
            )
        if not self._is_redis_silent:
            self._call_while_stopping("reports", self._ordering.maintenance.remove_reports)
        return leftovers

    def stop(self, deadline_ms: float | None = None) -> None:
        """Make `run` end. Running messages may finish until `deadline_ms` of the clock; default: `stop_ms` from now.

        The deadline is earlier if a run was given up: its process has to end before its lease does. A further call may
        bring it forward only.
        """
        now_ms, watchdog = self._clock.monotonic_ms(), self._ordering.lease_watchdog
        if deadline_ms is None:
            deadline_ms = self._deadline_ms if self._stopping.is_set() else now_ms + self._policy.stop_ms
        if watchdog is not None:
            deadline_ms = min(deadline_ms, watchdog.stop_by_ms)
        if deadline_ms < self._deadline_ms:
            self._deadline_ms = deadline_ms
            self._last_calls_until_ms = max(now_ms, deadline_ms) + _LAST_CALLS_MS
        if not self._stopping.is_set():
            self._in_flight.stop_fetching()
            self._stopping.set()

    @property
    def deadline_ms(self) -> float:
        """Until when a stop that has begun waits for running messages, by the clock; infinity while the loop works."""
        return self._deadline_ms

    def _release(self, deliveries: Sequence[Delivery]) -> None:
        """Release entries that were dropped from flight, so that other workers get them."""
        if deliveries and not self._is_redis_silent:
            self._call_while_stopping("release", partial(self._ordering.release, deliveries))

    def _close(self) -> None:
        self._ordering.close()
        for client in (self._client, self._blocking_client, self._scan_client):
            client.close()

    def _call_while_stopping(self, name: str, work: Callable[[], None]) -> None:
        """Call Redis, and wait for it no longer than a stop may take: a server that hangs keeps a call for long."""
        thread = self._start_thread(name, work)
        thread.join(max(0.0, self._last_calls_until_ms - self._clock.monotonic_ms()) / 1000)
        self._is_redis_silent |= thread.is_alive()

    # The loops of its threads

    def _discover(self) -> None:
        """Join the workers of every new stream, and recover entries that this worker held there before a restart."""
        now_ms = self._clock.monotonic_ms()
        for name in self._ordering.discover(self._scan_client):
            if name not in self._ordering.streams and now_ms >= self._excluded.get(name, now_ms):
                try:
                    self._ordering.join(name)
                except ConfigError as error:
                    if self.handler.streams or isinstance(error, Incompatible):
                        raise
                    # One unusable stream among those of a pattern must not end the work on all others.
                    if name not in self._excluded:
                        logger.warning(
                            "handler %s cannot process a stream that matches its pattern: %s; "
                            "skipping it, and trying again every %d s",
                            self.handler.label,
                            error,
                            _EXCLUDED_MS / 1000,
                        )
                    self._excluded[name] = now_ms + _EXCLUDED_MS
                else:
                    self._excluded.pop(name, None)

    def _run_discovery(self) -> None:
        """Discover new streams of a pattern, and new partitions. The longer one scan takes, the rarer they are."""
        wait_ms: float = self._policy.sweep_ms
        may_come = self.handler.pattern or self.handler.partitions or self.handler.order == "stream"
        while may_come and not self._stopping.wait(wait_ms / 1000):
            began_ms = self._clock.monotonic_ms()
            try:
                self._discover()
            except Unavailable as error:
                logger.debug("stream discovery failed, Redis is unavailable: %s; retrying", error)
            wait_ms = max(self._policy.sweep_ms, _DISCOVERY_SHARE * (self._clock.monotonic_ms() - began_ms))

    def _run_fetcher(self) -> None:
        """Fetch new entries while there is room for them."""
        backoff, outage = Backoff(*_WAITS_MS), self._fetch_outage
        while not self._stopping.is_set():
            self._runner.notify()
            if self._ordering.maintenance.reread_pending.is_set():
                self._ordering.maintenance.reread_pending.clear()
                self._retry_while_unavailable(self._recover_pending)
            room = min(self._in_flight.free_slots(), self._policy.batch)
            self.loop_metrics.set_bytes_in_flight(
                self._in_flight.bytes, self._policy.prefetch_bytes, at_budget=self._in_flight.at_budget
            )
            if room <= 0:
                self.loop_metrics.on_idle()
                self._in_flight.room_freed.wait(_FULL_WAIT_S)
                self._in_flight.room_freed.clear()
                continue
            try:
                self._ordering.fetcher.fetch(room, self._stopping)
            except (GroupMissing, Unavailable) as error:
                if isinstance(error, Unavailable):
                    outage.on_refused(error)
                # Entries delivered when the connection broke are pending, and no worker has seen them.
                self._retry_while_unavailable(
                    self._recover_pending if isinstance(error, Unavailable) else self._rejoin_streams
                )
                # Redis may answer other commands and still refuse the next read: wait in any case.
                self._stopping.wait(backoff.next_ms() / 1000)
            else:
                backoff.reset()
                outage.on_fetched()
                # With few in flight their latency counts: what comes before the next read would delay them.
                if len(self._in_flight) <= _FEW and self._runner.is_waking:
                    time.sleep(_YIELD_S)

    def _rejoin_streams(self) -> None:
        for stream in list(self._ordering.streams.values()):
            if not stream.leaving:
                with exclude_on_error(stream):
                    stream.join()
        self._ordering.fetcher.refresh()

    def _recover_pending(self) -> None:
        self._ordering.maintenance.recover()
        self._ordering.fetcher.refresh()

    def _run_maintenance(self) -> None:
        try:
            self._ordering.maintenance.run(self._stopping)
        # Broad, as below this the claims of running messages must be renewed until their runs have ended.
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self._failures.append(error)
            self.stop()
        self._ordering.maintenance.run_until_ended(self._runs_ended)

    def _watch(self, watch: Callable[[], None]) -> None:
        try:
            watch()
        except HandlerStuck as error:  # an orderly stop would take longer than the lease lasts
            self._process_isolation.end_process(error)
            self.stop(self._clock.monotonic_ms())  # it may return
            raise

    def _run_delayed_mover(self) -> None:
        """Add delayed messages that are due to their streams."""
        if self.handler.order == "stream" or self.handler.pattern is not None:
            with contextlib.closing(_tracked_delayed_messages(self._client, self._clock)) as delayed:
                self._move_delayed(delayed)
        else:
            self._move_delayed(DelayedMessages(self._client))

    def _move_delayed(self, delayed: DelayedMessages) -> None:
        has_warned = False
        has_many = self.handler.order == "stream"

        def on_refused(error: MillstreamError) -> None:
            nonlocal has_warned
            if not has_many or not concerns_one_stream(error):
                raise error
            if not has_warned:
                logger.warning(
                    "cannot move delayed messages of a stream of %s: %s; moving those of its other streams",
                    self.handler.label,
                    error,
                )
            has_warned = True

        delayed.move_until_stopped(
            lambda: names_to_work_on(self._ordering.streams),
            self._stopping,
            every_ms=self._policy.sweep_ms,
            on_moved=self.loop_metrics.count_delayed_moved,
            on_refused=on_refused,
        )

    def _retry_while_unavailable(self, operation: Callable[[], object]) -> None:
        refusal: Unavailable | None = None

        def attempt() -> None:
            nonlocal refusal
            # The stop has begun in the wait since the last attempt. To return would pass for an answer of Redis.
            if refusal is not None and self._stopping.is_set():
                raise refusal
            try:
                operation()
            except Unavailable as error:
                refusal = error
                raise

        try:
            self._client.retry_while_unavailable(attempt, what=self.handler.label, give_up=self._stopping.is_set)
        except Unavailable:
            if not self._stopping.is_set():
                raise

    def _is_past_deadline(self) -> bool:
        return self._stopping.is_set() and self._clock.monotonic_ms() >= self._deadline_ms

    # Threads

    def _start_thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - `run` raises it; no thread may end without a stop
                if not (
                    isinstance(error, Unavailable) and self._is_past_deadline()
                ):  # a stop waits no longer for Redis
                    self._failures.append(error)
                self.stop()

        thread = threading.Thread(target=guarded, name=f"millstream-{name}", daemon=True)
        thread.start()
        return thread

    def _wait_for_runs(self, *threads: threading.Thread) -> None:
        """Wait for running messages; return early if all `threads` ended, as a run given up for a hang never ends."""
        while any(one.running for one in self._in_flight.deliveries) and not self._is_past_deadline():
            if not any(thread.is_alive() for thread in threads):
                return
            time.sleep(_POLL_S)

    def _join_threads(self, threads: Sequence[threading.Thread], most_s: float = float("inf")) -> None:
        for thread in threads:
            thread.join(min(most_s, max(0.0, self._deadline_ms - self._clock.monotonic_ms()) / 1000))


def _tracked_delayed_messages(client: Client, clock: Clock) -> "TrackedDelayedMessages":
    from millstream.worker.delayed_mover import TrackedDelayedMessages

    return TrackedDelayedMessages(client, clock)


def _make_ordering(context: WorkerContext) -> Ordering:
    """Make the ordering that fits the handler. Imports modules here that only some kinds of handlers need."""
    if context.handler.partitions:
        from millstream.worker.ordering.by_partition import ByPartition

        return ByPartition(context)
    if context.handler.order == "stream":
        from millstream.worker.ordering.by_stream import ByStream

        return ByStream(context)
    return Unordered(context) if context.handler.key is None else ByKey(context)


def _concurrency_of(handler: Handler) -> int:
    if handler.in_batches and handler.key is None:
        return handler.batch_size
    return handler.concurrency if handler.is_async else 1


def _run_limit_of(handler: Handler, policy: WorkerPolicy) -> int:
    """How many messages run at once, at most."""
    runs = handler.concurrency if handler.is_async else policy.threads
    return runs * handler.batch_size if handler.in_batches else runs
