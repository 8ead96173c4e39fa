"""The reading loop: from the stream through the handler to committed effects, until it is told to stop.

The spine is `ReadingLoop.run`. Five threads share one `Hand`: the reader takes entries, the runner runs them, the
settler commits what came of them, the keeper makes its rounds, and the guard runs what others may have died of.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Literal

from millstream.client import Client
from millstream.clock import SYSTEM_CLOCK, Clock
from millstream.delayed import DelayedMessages
from millstream.errors import GroupMissing, MillstreamError, Unavailable
from millstream.groups import Consumer
from millstream.handlers import Handler
from millstream.health import Health
from millstream.lifecycle import Dead
from millstream.metrics import NOBODY, Metrics
from millstream.reliable import Delivery, ReliableStream
from millstream.worker.allowance import Allowance
from millstream.worker.batches import AsyncBatchRunner, PlainBatchRunner
from millstream.worker.hand import Hand
from millstream.worker.keeping import Keeper
from millstream.worker.pipeline import MakePipeline, Pipeline
from millstream.worker.policy import WorkerPolicy
from millstream.worker.report import Report
from millstream.worker.runners import AsyncRunner, PlainRunner, Runner
from millstream.worker.settling import Settler

logger = logging.getLogger(__name__)

_TIMEOUT_SLACK_MS = 10_000
_FULL_WAIT_S = 0.02
_IDLE_WAIT_MS = 20.0
_ALONE_WAIT_S = 0.005


class ReadingLoop:
    """Runs one handler on its streams, as one of any number of workers. Use `run` and `stop`, once each.

    * `consumer`: this worker's name, unique among those that live at the same time; after a restart with the same
      name it goes on with what it held
    * `start`: where a handler begins on a stream that it has done nothing on
    * `pipeline`: makes the steps that a message goes through, `Pipeline` or a subclass
    * `metrics`, `health`: who is told how it is doing
    """

    def __init__(
        self,
        handler: Handler,
        url: str,
        *,
        consumer: str,
        policy: WorkerPolicy | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        pipeline: MakePipeline = Pipeline,
        metrics: Metrics = NOBODY,
        health: Health | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.handler = handler
        self.report = Report(handler.label, time_limit_ms=handler.time_limit_ms, metrics=metrics, health=health)
        self._policy = policy = policy or WorkerPolicy()
        self._clock = clock
        self._consumer = consumer
        self._start = start
        self._pipeline = pipeline(handler)
        # A read that waits keeps its connection busy: it has one of its own.
        self._client = Client(url, clock=clock)
        self._reading = Client(url, timeout_ms=policy.block_ms + _TIMEOUT_SLACK_MS, clock=clock)
        self._hand = Hand(policy, _at_once(handler))
        self._gate = threading.Event()
        self._gate.set()
        self._stopping = threading.Event()
        self._suspects: SimpleQueue[Delivery | None] = SimpleQueue()
        self._failures: list[BaseException] = []
        self._streams: dict[str, ReliableStream] = {}
        self._deadline_ms = float("inf")
        self._allowance = Allowance(handler.rate, clock)
        self._runner = self._make_runner()
        self._hand.nudge = self._runner.nudge
        self._settler = Settler(
            self._pipeline, self._hand, self._client, self.report, clock, batch=policy.batch, give_up=self._is_over
        )
        self._keeper = Keeper(
            self._pipeline, self._hand, self.report, clock, policy,
            streams=self._streams, discover=self._discover, on_suspect=self._suspects.put,
        )  # fmt: skip

    def _make_runner(self) -> Runner:
        means = self._pipeline, self._hand, self.report, self._gate, self._clock
        if self.handler.is_async:
            return AsyncBatchRunner(*means) if self.handler.in_batches else AsyncRunner(*means)
        threads = self._policy.threads
        return PlainBatchRunner(*means, threads) if self.handler.in_batches else PlainRunner(*means, threads)

    # The spine

    def run(self) -> list[Delivery]:
        """Work until `stop`; return what was still running then, which others will do again.

        What waits is handed back at once and counts no attempt. Raises what made it end before: StaleOwner when a
        run on Spark has taken over, HandlerStuck, ConfigError, and RedisError but for Unavailable, which it waits out.
        """
        self._again(self._discover)
        settler = self._thread("settler", self._settler.run)
        runner = self._thread("runner", self._runner.run)
        guard = self._thread("guard", self._run_suspects)
        rounds = [
            self._thread("reader", self._read),
            self._thread("keeper", lambda: self._keeper.run(self._stopping)),
            self._thread("mover", self._move_delayed),
        ]
        self._stopping.wait()
        self._suspects.put(None)
        self._hand_back_waiting()
        self._wait_for(rounds)
        self._hand_back_waiting()
        self._hand.buffer.put(None)
        self._runner.nudge()
        self._wait_for_runs(runner, guard)
        self._runner.cancel()
        self._hand.outbox.put(None)
        self._wait_for([settler])
        leftovers = self._hand.deliveries
        self._hand_back(leftovers)
        self._client.close()
        self._reading.close()
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
        names = self.handler.streams or self._client.scan_streams(self.handler.pattern or "*")
        for name in names:
            if name not in self._streams:
                stream = self._reliable(name)
                stream.join()
                stream.look()
                self._keeper.recover(stream)
                self._streams[name] = stream

    def _reliable(self, name: str) -> ReliableStream:
        handler = self.handler
        return ReliableStream(
            self._client, name, app=handler.app, handler=handler.name, consumer=self._consumer,
            into=handler.into, into_maxlen=handler.into_maxlen, start=self._start,
        )  # fmt: skip

    def _read(self) -> None:
        """Take new entries as long as there is room for them."""
        consumers: list[Consumer] = []
        away = False
        while not self._stopping.is_set():
            self._runner.nudge()
            if self._keeper.missed.is_set():
                self._keeper.missed.clear()
                self._again(self._take_unseen)
            room = min(self._hand.room(), self._policy.batch)
            if room <= 0:
                self._hand.freed.wait(_FULL_WAIT_S)
                self._hand.freed.clear()
                continue
            try:
                allowed = self._allowance.ask([one for one in self._keeper.streams if not one.paused])
                consumers = self._consumers(consumers, allowed.streams)
                if not self._take_new(consumers, min(room, allowed.count), allowed.until_ms):
                    wait_ms = _IDLE_WAIT_MS if consumers else self._policy.sweep_ms
                    self._stopping.wait(min(wait_ms, allowed.until_ms) / 1000)
                if away:
                    away = False
                    self.report.redis_is_back()
            except GroupMissing:
                self._again(self._rejoin)
            except Unavailable as error:
                away = True
                self.report.redis_failed(error)
                # What was delivered when the connection broke is pending, and nobody has seen it.
                self._again(self._take_unseen)

    def _consumers(self, known: list[Consumer], names: list[str]) -> list[Consumer]:
        """One that reads all these streams at once; on Redis Cluster, where that takes one hash slot, one for each."""
        if not names or names == [name for consumer in known for name in consumer.streams]:
            return known if names else []
        together = [[name] for name in names] if self._reading.is_cluster else [names]
        group = self._streams[names[0]].group
        return [Consumer(self._reading, group=group, name=self._consumer, streams=some) for some in together]

    def _take_new(self, consumers: Sequence[Consumer], room: int, until_ms: float) -> bool:
        """Read once through each consumer; False if there was nothing and nothing was waited for."""
        if not consumers:
            return False
        block_ms = math.ceil(min(self._policy.block_ms, until_ms)) if len(consumers) == 1 else 0
        found = 0
        self.report.polling()
        for consumer in consumers:
            for batch in consumer.read_new(count=room, block_ms=block_ms):
                self._allowance.spend(batch.stream, len(batch))
                deliveries = self._streams[batch.stream].delivered([batch])
                self._hand.take(deliveries, self._clock.monotonic_ms())
                found += len(batch)
        self._hand.found(found, room)
        self.report.polled(found)
        return bool(found or block_ms)

    def _rejoin(self) -> None:
        for stream in self._keeper.streams:
            stream.join()

    def _take_unseen(self) -> None:
        for stream in self._keeper.streams:
            self._keeper.recover(stream)

    def _run_suspects(self) -> None:
        """Run what may have killed others one by one, and while nothing else runs, so that only it is blamed."""
        handler = self.handler
        while (delivery := self._suspects.get()) is not None and not self._stopping.is_set():
            self._gate.clear()
            try:
                while any(one.running for one in self._hand.deliveries) and not self._stopping.is_set():
                    self._stopping.wait(_ALONE_WAIT_S)
                if self._stopping.is_set():
                    return
                before = self._client.patiently(
                    lambda: delivery.stream.strike(delivery), what=handler.label, give_up=self._stopping.is_set
                )
                if before >= max(1, handler.retry.attempts - 2):
                    delivery.attempt = before + 2
                    text = f"the process ended each of the {before + 2} times that this message was tried"
                    self._hand.outbox.put(((delivery,), Dead("crashed", text)))
                else:
                    self._hand.outbox.put(((delivery,), self._runner.alone(delivery)))
                while delivery in self._hand and delivery.running and not self._stopping.is_set():
                    self._stopping.wait(_ALONE_WAIT_S)
            finally:
                self._gate.set()

    def _move_delayed(self) -> None:
        """Add to the streams the delayed messages that are due."""
        DelayedMessages(self._client).keep_moving(
            lambda: list(self._streams), self._stopping, every_ms=self._policy.sweep_ms, on_moved=self.report.moved
        )

    def _hand_back_waiting(self) -> None:
        """Give up what has not begun, so that others need not wait for what has."""
        self._hand.empty_buffer()
        waiting = [one for one in self._hand.deliveries if not one.running]
        self._hand.drop(waiting)
        self._hand_back(waiting)

    def _hand_back(self, deliveries: Sequence[Delivery]) -> None:
        for stream in {one.stream for one in deliveries}:
            ids = [one.id for one in deliveries if one.stream is stream]
            try:
                lost = stream.hand_back(ids)
            except MillstreamError as error:
                logger.warning("%d messages could not be handed back, others adopt them later: %s", len(ids), error)
            else:
                self.report.handed_back_some(len(ids) - len(lost))

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


def _at_once(handler: Handler) -> int:
    if handler.in_batches:
        return handler.batch_size
    return handler.concurrency if handler.is_async else 1
