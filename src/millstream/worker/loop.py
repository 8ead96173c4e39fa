"""The reading loop: from the stream through the handler to committed effects, until it is told to stop.

The spine is `ReadingLoop.run`. Five threads share one `InFlight`: the reader takes entries, the runner runs them, the
settler commits what came of them, the keeper makes its rounds, and the guard runs what others may have died of. The
mover and the scout have nothing to do with it: they move delayed messages, and look for new streams.
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
from millstream.worker.handler_steps import HandlerSteps, MakePipeline
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
_ALONE_WAIT_S = 0.005
_BACK_OFF_MS = (50.0, 1_000.0)
_LOOKING_SHARE = 20


class ReadingLoop:
    """Runs one handler on its streams, as one of any number of workers. Use `run` and `stop`, once each.

    * `consumer`: this worker's name, unique among those that live at the same time; after a restart with the same
      name it goes on with what it held
    * `start`: where a handler begins on a stream that it has done nothing on
    * `pipeline`: makes the steps that a message goes through, `HandlerSteps` or a subclass
    * `metrics`, `health`: who is told how it is doing
    * `quiet`: shared by the loops of one process, so that what may have killed one runs while no other's messages do
    """

    def __init__(
        self,
        handler: Handler,
        url: str,
        *,
        consumer: str,
        policy: WorkerPolicy | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        pipeline: MakePipeline = HandlerSteps,
        metrics: Metrics = NOBODY,
        health: Health | None = None,
        quiet: ProcessIsolation | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.handler = handler
        self.report = LoopMetrics(handler.label, time_limit_ms=handler.time_limit_ms, metrics=metrics, health=health)
        self._policy = policy = policy or WorkerPolicy()
        self._clock = clock
        self._consumer = consumer
        self._start = start
        self._pipeline = pipeline(handler)
        # A read that waits keeps its connection busy: it has one of its own.
        self._client = Client(url, clock=clock)
        self._reading = Client(url, timeout_ms=policy.block_ms + _TIMEOUT_SLACK_MS, clock=clock)
        # So does one that walks all keys for those of a pattern.
        self._looking = Client(url, clock=clock)
        self._hand = InFlight(policy, _at_once(handler))
        self._stopping, self._over = threading.Event(), threading.Event()
        self._failures: list[BaseException] = []
        self._left_out: set[str] = set()
        self._deadline_ms = float("inf")
        self._runner = self._make_runner()
        self._hand.nudge = self._runner.nudge
        self._quiet = quiet = quiet or ProcessIsolation()
        self._guard = PoisonIsolation(
            handler, self._hand, self._runner, self._stopping, quiet, clock=clock,
            incarnation=Incarnation(
                self._client, clock, app=handler.app, consumer=consumer, name=quiet.incarnation
            ),
        )  # fmt: skip
        means = WorkerContext(
            handler=handler, pipeline=self._pipeline, hand=self._hand, report=self.report, clock=clock, policy=policy,
            consumer=consumer, start=start, url=url, client=self._client, reading=self._reading,
            suspect=self._guard.suspect, break_off=self._runner.break_off, give_up=self._is_over,
        )  # fmt: skip
        self._side = _side_of(means)

    def _make_runner(self) -> Runner:
        means = self._pipeline, self._hand, self.report, self._clock
        if self.handler.is_async:
            return AsyncBatchRunner(*means) if self.handler.in_batches else AsyncRunner(*means)
        threads = self._policy.threads
        return ThreadBatchRunner(*means, threads) if self.handler.in_batches else ThreadRunner(*means, threads)

    # The spine

    def run(self) -> list[Delivery]:
        """Work until `stop`; return what was still running then, which others will do again.

        What waits is handed back at once and counts no attempt. Raises what made it end before: StaleOwner when a
        run on Spark has taken over, HandlerStuck, ConfigError, and RedisError but for Unavailable, which it waits out.
        """
        self._again(self._discover)
        settler = self._thread("settler", self._side.settler.run)
        runner = self._thread("runner", self._runner.run)
        guard = self._thread("guard", self._guard.run)
        rounds = [
            self._thread("reader", self._read),
            self._thread("mover", self._move_delayed),
            self._thread("scout", self._look_for_streams),
        ]
        for name, work in self._side.rounds().items():
            rounds.append(self._thread(name, partial(work, self._stopping)))
        keepers = [
            self._thread("keeper", self._keep),
            self._thread("watch", self._watch),
        ]
        self._stopping.wait()
        self._guard.suspect(None)
        # What has not begun is given up, so that others need not wait for what has.
        self._side.hand_back(self._hand.drop_waiting())
        self._wait_for(rounds)
        self._side.hand_back(self._hand.drop_waiting())
        self._hand.buffer.put(None)
        self._runner.nudge()
        self._wait_for_runs(runner, guard)
        self._over.set()
        self._wait_for(keepers)
        self._runner.cancel()
        self._hand.outbox.end()
        self._wait_for([settler])
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
        """Have `run` end: what runs may go on until `deadline_ms` of the clock, by default for `stop_ms` from now."""
        if not self._stopping.is_set():
            default_ms = self._clock.monotonic_ms() + self._policy.stop_ms
            self._deadline_ms = default_ms if deadline_ms is None else deadline_ms
            self._stopping.set()
            self._hand.freed.set()

    # Its parts

    def _discover(self) -> None:
        """Join the workers of every stream that is new, and take what this one held there in its last life."""
        for name in self._side.find(self._looking):
            if name not in self._side.streams and name not in self._left_out:
                try:
                    self._side.join(name)
                except ConfigError as error:
                    if self.handler.streams:
                        raise
                    # One stream that somebody has added must not end the work on all others.
                    self._left_out.add(name)
                    logger.warning("%s leaves a stream out that fits its pattern: %s", self.handler.label, error)

    def _look_for_streams(self) -> None:
        """Find the new streams of a pattern, however many keys there are: the more, the less often; and partitions."""
        wait_ms: float = self._policy.sweep_ms
        may_come = self.handler.pattern or self.handler.partitions or self.handler.order == "stream"
        while may_come and not self._stopping.wait(wait_ms / 1000):
            began_ms = self._clock.monotonic_ms()
            try:
                self._discover()
            except Unavailable as error:
                logger.debug("no streams are looked for while Redis is away: %s", error)
            wait_ms = max(self._policy.sweep_ms, _LOOKING_SHARE * (self._clock.monotonic_ms() - began_ms))

    def _read(self) -> None:
        """Take new entries as long as there is room for them."""
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
                # What was delivered when the connection broke is pending, and nobody has seen it.
                self._again(self._take_unseen if isinstance(error, Unavailable) else self._rejoin)
                # Other commands may well be answered, and the next read be refused all the same.
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
        except HandlerStuck as error:  # what else runs may still come to its end
            self._failures.append(error)
            self.stop()
        self._side.keeper.hold(self._over)

    def _watch(self) -> None:
        try:
            self._side.keeper.watch(self._over)
        except HandlerStuck as error:  # an orderly end would take longer than the lease lasts
            self._quiet.end_process(error)
            raise

    def _move_delayed(self) -> None:
        """Add to the streams the delayed messages that are due."""
        said = False
        has_many = self.handler.order == "stream"
        is_watched = has_many or self.handler.pattern is not None
        delayed = _watched_delays(self._client, self._clock) if is_watched else DelayedMessages(self._client)
        while not self._stopping.is_set():
            try:
                delayed.keep_moving(
                    lambda: [name for name, one in list(self._side.streams.items()) if not one.leaving],
                    self._stopping,
                    every_ms=self._policy.sweep_ms,
                    on_moved=self.report.moved,
                )
            except AccessDenied as error:  # those of the others were moved
                if not has_many or not concerns_one_stream(error):
                    raise
                if not said:
                    logger.warning("delayed messages of a stream of %s are not moved: %s", self.handler.label, error)
                said = True
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
        """Wait for what still runs; but a run that hangs, and was given up for it, keeps its thread for ever."""
        while any(one.running for one in self._hand.deliveries) and not self._is_over():
            if not any(thread.is_alive() for thread in threads):
                return
            time.sleep(_ALONE_WAIT_S)

    def _wait_for(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            thread.join(max(0.0, self._deadline_ms - self._clock.monotonic_ms()) / 1000)


def _watched_delays(client: Client, clock: Clock) -> DelayedMessages:
    from millstream.worker.delayed_mover import WatchedDelays

    return WatchedDelays(client, clock)


def _side_of(means: WorkerContext) -> Ordering:
    """What only some kinds of handlers need is imported for them."""
    if means.handler.partitions:
        from millstream.worker.ordering.by_partition import ByPartition

        return ByPartition(means)
    if means.handler.order == "stream":
        from millstream.worker.ordering.by_stream import ByStream

        return ByStream(means)
    return Unordered(means) if means.handler.key is None else ByKey(means)


def _at_once(handler: Handler) -> int:
    if handler.in_batches:
        return handler.batch_size
    return handler.concurrency if handler.is_async else 1
