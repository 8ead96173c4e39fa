"""The reading loop: fetches entries of a handler's streams, runs the handler and commits its effects, until stopped.

`ReadingLoop.run` is the spine. Five threads share one `InFlight`: the fetcher fetches entries, the runner runs the
handler, the committer commits the outcomes, the renewal thread renews claims and claims idle entries, and the isolation
thread re-runs suspected poison pills one at a time. Two more threads work beside it: the delayed mover moves delayed
messages that are due, and discovery looks for new streams.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delivery.delayed_messages import DelayedMessages
from millstream.delivery.reliable_stream import Delivery, ReliableStream, leave_all
from millstream.errors import AccessDenied, ConfigError, GroupMissing, HandlerStuck, Unavailable
from millstream.handlers.handler import Handler
from millstream.observability.health import Health
from millstream.observability.metrics import NOBODY, Metrics
from millstream.redis_client.client import Client
from millstream.worker.handler_steps import HandlerSteps, MakeHandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.incarnations import Incarnation
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.ordering.ordering import ByKey, Ordering, Unordered, WorkerContext
from millstream.worker.policy import WorkerPolicy
from millstream.worker.running.batch_runners import AsyncBatchRunner, ThreadBatchRunner
from millstream.worker.running.poison_isolation import PoisonIsolation, ProcessIsolation
from millstream.worker.running.runner import AsyncRunner, Runner, ThreadRunner
from millstream.worker.stream_exclusion import concerns_one_stream, exclude_on_error

logger = logging.getLogger(__name__)

_TIMEOUT_SLACK_MS = 10_000
_FULL_WAIT_S = 0.02
_POLL_S = 0.005
_BACK_OFF_MS = (50.0, 1_000.0)
_DISCOVERY_SHARE = 20


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
        metrics: Metrics = NOBODY,
        health: Health | None = None,
        isolation: ProcessIsolation | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.handler = handler
        self.report = LoopMetrics(handler.label, time_limit_ms=handler.time_limit_ms, metrics=metrics, health=health)
        self._policy = policy = policy or WorkerPolicy()
        self._clock = clock
        self._consumer = consumer
        self._start = start
        self._pipeline = steps(handler)
        # A blocking read keeps its connection busy, so it has a connection of its own.
        self._client = Client(url, clock=clock)
        self._reading = Client(url, timeout_ms=policy.block_ms + _TIMEOUT_SLACK_MS, clock=clock)
        # The SCAN of all keys for those that match a pattern has one, too.
        self._looking = Client(url, clock=clock)
        self._hand = InFlight(policy, _concurrency_of(handler))
        self._stopping, self._over = threading.Event(), threading.Event()
        self._failures: list[BaseException] = []
        self._left_out: set[str] = set()
        self._deadline_ms = float("inf")
        self._runner = self._make_runner()
        self._hand.nudge = self._runner.nudge
        self._quiet = isolation = isolation or ProcessIsolation()
        self._guard = PoisonIsolation(
            handler, self._hand, self._runner, self._stopping, isolation, clock=clock,
            incarnation=Incarnation(
                self._client, clock, app=handler.app, consumer=consumer, name=isolation.incarnation
            ),
        )  # fmt: skip
        context = WorkerContext(
            handler=handler, steps=self._pipeline, in_flight=self._hand, loop_metrics=self.report, clock=clock,
            policy=policy, consumer=consumer, start=start, url=url, client=self._client, blocking_client=self._reading,
            on_suspect=self._guard.suspect, cancel_run=self._runner.break_off, give_up=self._is_over,
        )  # fmt: skip
        self._side = _make_ordering(context)

    def _make_runner(self) -> Runner:
        args = self._pipeline, self._hand, self.report, self._clock
        if self.handler.is_async:
            return AsyncBatchRunner(*args) if self.handler.in_batches else AsyncRunner(*args)
        threads = self._policy.threads
        return ThreadBatchRunner(*args, threads) if self.handler.in_batches else ThreadRunner(*args, threads)

    # The spine

    def run(self) -> list[Delivery]:
        """Work until `stop`; return the deliveries that were still running then, which other workers will run again.

        Entries that have not started are released at once and count no attempt. Raises the error that ended the loop
        before `stop`: StaleOwner when a run on Spark took the handler over, HandlerStuck, ConfigError, and RedisError
        except Unavailable, which the loop waits out.
        """
        self._again(self._discover)
        committer = self._thread("committer", self._side.settler.run)
        runner = self._thread("runner", self._runner.run)
        isolation = self._thread("isolation", self._guard.run)
        fetching = [
            self._thread("fetcher", self._read),
            self._thread("delayed-mover", self._move_delayed),
            self._thread("discovery", self._look_for_streams),
        ]
        for name, work in self._side.rounds().items():
            fetching.append(self._thread(name, partial(work, self._stopping)))
        renewals = [
            self._thread("renewal", self._keep),
            self._thread("lease-watchdog", self._watch),
        ]
        self._stopping.wait()
        self._guard.suspect(None)
        # Entries that have not started are released first: other workers need not wait for the running ones to end.
        self._side.hand_back(self._hand.drop_waiting())
        self._wait_for(fetching)
        self._side.hand_back(self._hand.drop_waiting())
        self._hand.buffer.put(None)
        self._runner.nudge()
        self._wait_for_runs(runner, isolation)
        self._over.set()
        self._wait_for(renewals)
        self._runner.cancel()
        self._hand.outbox.end()
        self._wait_for([committer])
        leftovers = self._hand.deliveries
        self._hand.drop(leftovers)
        self._side.hand_back(leftovers)
        if not self._is_over():
            leave_all(self._client, self._side.streams.values())
        self._side.close()
        for client in (self._client, self._reading, self._looking):
            client.close()
        if self._failures:
            raise self._failures[0]
        return [one for one in leftovers if one.running]

    def stop(self, deadline_ms: float | None = None) -> None:
        """Make `run` end. Running messages may finish until `deadline_ms` of the clock; default: `stop_ms` from now."""
        if not self._stopping.is_set():
            default_ms = self._clock.monotonic_ms() + self._policy.stop_ms
            self._deadline_ms = default_ms if deadline_ms is None else deadline_ms
            self._stopping.set()
            self._hand.freed.set()

    # The loops of its threads

    def _discover(self) -> None:
        """Join the workers of every new stream, and recover entries that this worker held there before a restart."""
        for name in self._side.find(self._looking):
            if name not in self._side.streams and name not in self._left_out:
                try:
                    self._side.join(name)
                except ConfigError as error:
                    if self.handler.streams:
                        raise
                    # One unusable stream among those of a pattern must not end the work on all others.
                    self._left_out.add(name)
                    logger.warning(
                        "handler %s cannot process a stream that matches its pattern: %s; skipping it until a restart",
                        self.handler.label, error,
                    )  # fmt: skip

    def _look_for_streams(self) -> None:
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

    def _read(self) -> None:
        """Fetch new entries while there is room for them."""
        wait_ms, away = _BACK_OFF_MS[0], False
        while not self._stopping.is_set():
            self._runner.nudge()
            if self._side.keeper.missed.is_set():
                self._side.keeper.missed.clear()
                self._again(self._take_unseen)
            room = min(self._hand.room(), self._policy.batch)
            self.report.holds(self._hand.bytes, self._policy.prefetch_bytes, at_budget=self._hand.at_budget)
            if room <= 0:
                self.report.resting()
                self._hand.freed.wait(_FULL_WAIT_S)
                self._hand.freed.clear()
                continue
            try:
                self._side.taker.take(room, self._stopping)
            except (GroupMissing, Unavailable) as error:
                if isinstance(error, Unavailable):
                    away = True
                    self.report.redis_failed(error)
                # Entries delivered when the connection broke are pending, and no worker has seen them.
                self._again(self._take_unseen if isinstance(error, Unavailable) else self._rejoin)
                # Redis may answer other commands and still refuse the next read: wait in any case.
                self._stopping.wait(wait_ms / 1000)
                wait_ms = min(2 * wait_ms, _BACK_OFF_MS[1])
            else:
                wait_ms = _BACK_OFF_MS[0]
                if away:
                    away = False
                    self.report.redis_is_back()

    def _rejoin(self) -> None:
        self._with_each(lambda stream: stream.join())

    def _take_unseen(self) -> None:
        self._with_each(self._side.keeper.recover)

    def _with_each(self, step: Callable[[ReliableStream], None]) -> None:
        for stream in self._side.keeper.streams:
            if not stream.leaving:
                with exclude_on_error(stream):
                    step(stream)
        self._side.taker.look_again()

    def _keep(self) -> None:
        try:
            self._side.keeper.run(self._stopping)
        except HandlerStuck as error:  # other running messages may still finish
            self._failures.append(error)
            self.stop()
        self._side.keeper.hold(self._over)

    def _watch(self) -> None:
        try:
            self._side.keeper.watch(self._over)
        except HandlerStuck as error:  # an orderly stop would take longer than the lease lasts
            self._quiet.end_process(error)
            raise

    def _move_delayed(self) -> None:
        """Add delayed messages that are due to their streams."""
        has_warned = False
        has_many = self.handler.order == "stream"
        is_watched = has_many or self.handler.pattern is not None
        delayed = _tracked_delayed_messages(self._client, self._clock) if is_watched else DelayedMessages(self._client)
        while not self._stopping.is_set():
            try:
                delayed.keep_moving(
                    lambda: [name for name, one in list(self._side.streams.items()) if not one.leaving],
                    self._stopping,
                    every_ms=self._policy.sweep_ms,
                    on_moved=self.report.moved,
                )
            except AccessDenied as error:  # the messages of the other streams were moved
                if not has_many or not concerns_one_stream(error):
                    raise
                if not has_warned:
                    logger.warning(
                        "cannot move delayed messages of a stream of %s: %s; moving those of its other streams",
                        self.handler.label, error,
                    )  # fmt: skip
                has_warned = True
                self._stopping.wait(self._policy.sweep_ms / 1000)

    def _again(self, operation: Callable[[], object]) -> None:
        try:
            self._client.patiently(operation, what=self.handler.label, give_up=self._stopping.is_set)
        except Unavailable:
            if not self._stopping.is_set():
                raise

    def _is_over(self) -> bool:
        return self._stopping.is_set() and self._clock.monotonic_ms() >= self._deadline_ms

    # Threads

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - `run` raises it
                self._failures.append(error)
                self.stop()

        thread = threading.Thread(target=guarded, name=f"millstream-{name}", daemon=True)
        thread.start()
        return thread

    def _wait_for_runs(self, *threads: threading.Thread) -> None:
        """Wait for running messages; return early if all `threads` ended, as a run given up for a hang never ends."""
        while any(one.running for one in self._hand.deliveries) and not self._is_over():
            if not any(thread.is_alive() for thread in threads):
                return
            time.sleep(_POLL_S)

    def _wait_for(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            thread.join(max(0.0, self._deadline_ms - self._clock.monotonic_ms()) / 1000)


def _tracked_delayed_messages(client: Client, clock: Clock) -> DelayedMessages:
    from millstream.worker.delayed_mover import WatchedDelays

    return WatchedDelays(client, clock)


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
    if handler.in_batches:
        return handler.batch_size
    return handler.concurrency if handler.is_async else 1
