"""Runs handlers that take lists: gathers what waits in the buffer to batches, and says what became of each message.

A message that has failed is run by itself, so that only the guilty one of a batch dies.
"""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from queue import Empty

from millstream.clock import Clock
from millstream.delivery.reliable_stream import Delivery
from millstream.handlers.attempt import NOTHING, BatchOutcome, Done, Outcome
from millstream.model import Message
from millstream.worker.completion_queue import Ran
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.running.runner import GATE_S, AsyncRunner, ThreadRunner


class _BatchBuilder:
    """A batch in the making: entries of one stream that have not failed yet, or a single one that has.

    A batch of two streams could not be committed in one step. `aside` are those that do not belong.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.batch: list[Delivery] = []
        self.aside: list[Delivery] = []
        self.is_cut_off = False

    @property
    def is_complete(self) -> bool:
        """True if nothing more can be added."""
        return self.is_cut_off or len(self.batch) >= self._size or any(one.attempt > 1 for one in self.batch[:1])

    def offer(self, delivery: Delivery | None) -> None:
        """Take an entry into the batch, or aside; None is the buffer's end."""
        if delivery is None:
            self.is_cut_off = True
        elif not self.batch or (delivery.stream is self.batch[0].stream and delivery.attempt == 1):
            self.batch.append(delivery)
        else:
            self.aside.append(delivery)


class _Batch:
    """A batch that is run: `messages` are those of its entries that are meant for the handler."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ran: list[Ran] = []
        self._deliveries: list[Delivery] = []
        self.messages: list[Message] = []

    def add(self, delivery: Delivery, message: Message | None) -> None:
        """Add an entry that has begun; without a message, it was redriven for another handler."""
        if message is None:
            delivery.ran = True
            self._ran.append(((delivery,), NOTHING))
        else:
            self._deliveries.append(delivery)
            self.messages.append(message)
            self._deliveries[0].in_batch = delivery.in_batch = len(self.messages) > 1

    def end(self, judged: BatchOutcome) -> list[Ran]:
        """What became of each; those with outputs in common stand together."""
        dead, outcome = judged
        together: list[Delivery] = []
        for delivery, refusal in zip(self._deliveries, dead, strict=True):
            # A share of the time, so that the times of all messages add up to that of the handler.
            delivery.took_ms = (self._clock.monotonic_ms() - delivery.since_ms) / len(dead)
            delivery.ran = True
            if refusal is None and isinstance(outcome, Done) and outcome.outputs:
                together.append(delivery)
            else:
                self._ran.append(((delivery,), refusal or outcome))
        if together:
            self._ran.append((together, outcome))
        return self._ran


class ThreadBatchRunner(ThreadRunner):
    """Threads as of ThreadRunner, each of which gathers a batch and runs it. One gathers at a time."""

    def __init__(self, pipeline: HandlerSteps, hand: InFlight, report: LoopMetrics, clock: Clock, most: int) -> None:
        super().__init__(pipeline, hand, report, clock, most)
        self._gathering = threading.Lock()

    def _run_next(self) -> bool:
        if not (batch := self._gather()):
            return False
        while (begun := self._begin_all(batch)) is None:
            self._hand.gate.wait()
        for ran in self._run_batch(begun):
            self._hand.outbox.put(ran)
        self._took_ms += sum([one.took_ms for one in begun])
        self._finished += 1
        return True

    def _gather(self) -> list[Delivery]:
        """Wait for a batch; [] when nothing is to be run any more."""
        handler, buffer = self._pipeline.handler, self._hand.buffer
        with self._gathering:
            gathering = _BatchBuilder(handler.batch_size)
            gathering.offer(self._next())
            until_ms = self._clock.monotonic_ms() + handler.batch_wait_ms
            while not gathering.is_complete:
                wait_ms = max(0.0, until_ms - self._clock.monotonic_ms())
                try:
                    gathering.offer(buffer.get(timeout=wait_ms / 1000))
                except Empty:
                    break
            for one in gathering.aside:
                buffer.put(one)
        return [] if gathering.is_cut_off else gathering.batch

    def _run_batch(self, deliveries: Sequence[Delivery]) -> list[Ran]:
        batch = _Batch(self._clock)
        for delivery in deliveries:
            batch.add(delivery, self._pipeline.decode(delivery))
        return batch.end(self._pipeline.run_batch(batch.messages) if batch.messages else ([], NOTHING))

    def _outcome(self, delivery: Delivery) -> Outcome:
        return self._run_batch([delivery])[0][1]


class AsyncBatchRunner(AsyncRunner):
    """An event loop as of AsyncRunner, in which as many batches as the handler's `concurrency` are run at once."""

    async def _serve(self) -> None:
        slots = asyncio.Semaphore(self._pipeline.handler.concurrency)
        async with asyncio.TaskGroup() as group:
            await slots.acquire()
            while batch := await self._gather():
                group.create_task(self._run_one_batch(batch, slots))
                del batch  # nothing holds on to it while more is waited for
                await slots.acquire()

    async def _gather(self) -> list[Delivery]:
        """Wait for a batch; [] when nothing is to be run any more."""
        handler, buffer = self._pipeline.handler, self._hand.buffer
        gathering = _BatchBuilder(handler.batch_size)
        until_ms = float("inf")
        while True:
            self._nudged.clear()
            while not gathering.is_complete and not buffer.empty():
                gathering.offer(buffer.get_nowait())
            if gathering.batch:
                until_ms = min(until_ms, self._clock.monotonic_ms() + handler.batch_wait_ms)
            wait_ms = until_ms - self._clock.monotonic_ms()
            if gathering.is_complete or wait_ms <= 0:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000 if gathering.batch else None):
                    await self._nudged.wait()
        for one in gathering.aside:
            buffer.put(one)
        return [] if gathering.is_cut_off else gathering.batch

    async def _run_one_batch(self, deliveries: Sequence[Delivery], slots: asyncio.Semaphore) -> None:
        while (begun := self._begin_all(deliveries)) is None:  # noqa: ASYNC110 - another thread's doing, and rare
            await asyncio.sleep(GATE_S)
        for ran in await self._run_batch(begun):
            if not self._cancelled:
                self._hand.outbox.put(ran)
        slots.release()

    async def _run_batch(self, deliveries: Sequence[Delivery]) -> list[Ran]:
        batch = _Batch(self._clock)
        for delivery in deliveries:
            batch.add(delivery, self._pipeline.decode(delivery))
        return batch.end(await self._pipeline.run_batch_async(batch.messages) if batch.messages else ([], NOTHING))

    async def _outcome(self, delivery: Delivery) -> Outcome:
        return (await self._run_batch([delivery]))[0][1]
