"""Batch runners: run handlers that take lists on batches of buffered messages, with an outcome for each message.

A message that has failed is run by itself, so that only the message at fault in a batch is dead-lettered.
"""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from queue import Empty

from millstream.clock import Clock
from millstream.delivery.reliable_stream import Delivery
from millstream.handlers.attempt import NO_EFFECTS, BatchOutcome, Done, Outcome
from millstream.model import Message
from millstream.worker.completion_queue import FinishedRun
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.running.async_runner import GATE_POLL_S, AsyncRunner
from millstream.worker.running.thread_runner import ThreadRunner


class _BatchBuilder:
    """A batch in the making: entries of one stream that have not failed yet, or a single one that has.

    Entries of two streams could not be committed in one step. `rest`: entries that belong to other batches.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.batch: list[Delivery] = []
        self.rest: list[Delivery] = []
        self.is_at_end = False

    @property
    def is_complete(self) -> bool:
        """True if nothing more can be added."""
        return self.is_at_end or len(self.batch) >= self._size or any(one.attempt > 1 for one in self.batch[:1])

    def add(self, delivery: Delivery | None) -> None:
        """Add an entry to the batch, or to the rest; None is the end of the buffer."""
        if delivery is None:
            self.is_at_end = True
        elif not self.batch or (delivery.stream is self.batch[0].stream and delivery.attempt == 1):
            self.batch.append(delivery)
        else:
            self.rest.append(delivery)


class _Batch:
    """A running batch; `messages` are those of its entries that are meant for the handler."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._finished: list[FinishedRun] = []
        self._deliveries: list[Delivery] = []
        self.messages: list[Message] = []

    def add(self, delivery: Delivery, message: Message | None) -> None:
        """Add an entry that has started; without a message, it is for another handler alone."""
        if message is None:
            delivery.finished = True
            self._finished.append(((delivery,), NO_EFFECTS))
        else:
            self._deliveries.append(delivery)
            self.messages.append(message)
            self._deliveries[0].in_batch = delivery.in_batch = len(self.messages) > 1

    def outcomes(self, batch_outcome: BatchOutcome) -> list[FinishedRun]:
        """Return the outcome of each entry; entries that share outputs have one outcome together."""
        dead, outcome = batch_outcome
        sharing: list[Delivery] = []
        for delivery, refusal in zip(self._deliveries, dead, strict=True):
            # An equal share of the time, so that the times of all messages add up to that of the handler.
            delivery.attempt_ms = (self._clock.monotonic_ms() - delivery.state_since_ms) / len(dead)
            delivery.finished = True
            if refusal is None and isinstance(outcome, Done) and outcome.outputs:
                sharing.append(delivery)
            else:
                self._finished.append(((delivery,), refusal or outcome))
        if sharing:
            self._finished.append((sharing, outcome))
        return self._finished


class ThreadBatchRunner(ThreadRunner):
    """Threads as in ThreadRunner, each of which gathers a batch and runs it. One thread gathers at a time."""

    def __init__(
        self, steps: HandlerSteps, in_flight: InFlight, loop_metrics: LoopMetrics, clock: Clock, max_threads: int
    ) -> None:
        super().__init__(steps, in_flight, loop_metrics, clock, max_threads)
        self._gather_lock = threading.Lock()

    def _run_next(self) -> bool:
        if not (batch := self._gather()):
            return False
        while (started := self._start_all(batch)) is None:
            self._in_flight.gate.wait()
        for finished in self._run_batch(started):
            self._in_flight.completions.put(finished)
        self._took_ms += sum([one.attempt_ms for one in started])
        self._finished += 1
        return True

    def _gather(self) -> list[Delivery]:
        """Wait for a batch; [] at the end of the buffer."""
        handler, buffer = self._steps.handler, self._in_flight.buffer
        with self._gather_lock:
            builder = _BatchBuilder(handler.batch_size)
            builder.add(self._next_delivery())
            until_ms = self._clock.monotonic_ms() + handler.batch_wait_ms
            while not builder.is_complete:
                wait_ms = max(0.0, until_ms - self._clock.monotonic_ms())
                try:
                    builder.add(buffer.get(timeout=wait_ms / 1000))
                except Empty:
                    break
            for one in builder.rest:
                buffer.put(one)
        return [] if builder.is_at_end else builder.batch

    def _run_batch(self, deliveries: Sequence[Delivery]) -> list[FinishedRun]:
        batch = _Batch(self._clock)
        for delivery in deliveries:
            batch.add(delivery, self._steps.decode(delivery))
        return batch.outcomes(self._steps.run_batch(batch.messages) if batch.messages else ([], NO_EFFECTS))

    def _run_message(self, delivery: Delivery) -> Outcome:
        return self._run_batch([delivery])[0][1]


class AsyncBatchRunner(AsyncRunner):
    """An event loop as of AsyncRunner, in which as many batches as the handler's `concurrency` are run at once."""

    async def _run_buffered(self, group: asyncio.TaskGroup) -> None:
        slots = asyncio.Semaphore(self._steps.handler.concurrency)
        await slots.acquire()
        while batch := await self._gather():
            group.create_task(self._run_one_batch(batch, slots))
            del batch  # so that its messages can be freed during the next wait
            await slots.acquire()

    async def _gather(self) -> list[Delivery]:
        """Wait for a batch; [] when nothing is to be run any more."""
        handler, buffer = self._steps.handler, self._in_flight.buffer
        builder = _BatchBuilder(handler.batch_size)
        until_ms = float("inf")
        while True:
            self._notified.clear()
            with contextlib.suppress(Empty):
                while not builder.is_complete:
                    builder.add(buffer.get_nowait())
            if builder.batch:
                until_ms = min(until_ms, self._clock.monotonic_ms() + handler.batch_wait_ms)
            wait_ms = until_ms - self._clock.monotonic_ms()
            if builder.is_complete or wait_ms <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000 if builder.batch else None):
                    await self._notified.wait()
        for one in builder.rest:
            buffer.put(one)
        return [] if builder.is_at_end else builder.batch

    async def _run_one_batch(self, deliveries: Sequence[Delivery], slots: asyncio.Semaphore) -> None:
        while (started := self._start_all(deliveries)) is None:  # noqa: ASYNC110 - another thread's doing, and rare
            await asyncio.sleep(GATE_POLL_S)
        for finished in await self._run_batch(started):
            if not self._is_cancelled:
                self._in_flight.completions.put(finished)
        slots.release()

    async def _run_batch(self, deliveries: Sequence[Delivery]) -> list[FinishedRun]:
        batch = _Batch(self._clock)
        for delivery in deliveries:
            batch.add(delivery, self._steps.decode(delivery))
        return batch.outcomes(await self._steps.run_batch_async(batch.messages) if batch.messages else ([], NO_EFFECTS))

    async def _run_message(self, delivery: Delivery) -> Outcome:
        return (await self._run_batch([delivery]))[0][1]
