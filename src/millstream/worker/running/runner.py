"""Runners: run buffered messages, plain handlers in threads and async ones in an event loop.

Both pause before their next message while the gate is closed: then a poison-pill suspect runs alone, so that a crash is
blamed on no other message.
"""

import asyncio
import contextlib
import select
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from queue import Empty
from typing import NamedTuple, Protocol

from millstream.clock import Clock
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import Unfinished
from millstream.handlers.attempt import NOTHING, Outcome
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics

_SAMPLE_MS = 5.0
_LONG_MS = 50.0
_BUSY_SHARE = 0.7
_SHORT_MS = 0.2
GATE_S = 0.01
_FD_SETSIZE = 1024


class Runner(Protocol):
    """The part of a reading loop that runs messages."""

    def run(self) -> None:
        """Run messages until the end of the buffer; called in a thread of its own."""

    def nudge(self) -> None:
        """Check the buffer: a message was added, or waits there. Called often."""

    def alone(self, delivery: Delivery) -> Outcome | None:
        """Run one message while nothing else runs; None if it must not run any more. Called from another thread."""

    def break_off(self, delivery: Delivery) -> None:
        """Cancel the run of one message, if that is possible; its outcome must be ignored."""

    def cancel(self) -> None:
        """Cancel all runs, if that is possible."""


class _Start:
    """Start and end of a run, for both runners."""

    def __init__(self, steps: HandlerSteps, in_flight: InFlight, loop_metrics: LoopMetrics, clock: Clock) -> None:
        self._pipeline = steps
        self._hand = in_flight
        self._report = loop_metrics
        self._clock = clock

    def _begin(self, delivery: Delivery, *, ignore_gate: bool = False) -> bool | None:
        starts = self._hand.begin(delivery, self._clock.monotonic_ms(), ignore_gate=ignore_gate)
        if starts:
            self._report.began()
        return starts

    def _begin_all(self, deliveries: Sequence[Delivery]) -> list[Delivery] | None:
        started = self._hand.begin_all(deliveries, self._clock.monotonic_ms())
        for _ in started or ():
            self._report.began()
        return started

    def _end(self, delivery: Delivery) -> None:
        delivery.took_ms = self._clock.monotonic_ms() - delivery.since_ms
        delivery.ran = True


class LoadSample(NamedTuple):
    """One look at the load of a ThreadRunner, to compare with an earlier one.

    * `starved`: how often a thread found the buffer empty
    * `finished`, `took_ms`: the runs that ended, and how long they took in total
    * `at_ms`, `cpu_ms`: the time of the sample, and the processor time of the process
    * `stalled_since_ms`: since when no run has ended
    """

    starved: int
    finished: int
    took_ms: float
    at_ms: float
    cpu_ms: float
    since_ms: float

    def asks_for_more(self, before: "LoadSample") -> bool:
        """True if another thread would have been useful since `before`."""
        ended = self.finished - before.finished
        are_short = ended and self.took_ms - before.took_ms < _SHORT_MS * ended
        is_busy = self.cpu_ms - before.cpu_ms >= _BUSY_SHARE * (self.at_ms - before.at_ms)
        return self.at_ms - self.since_ms > _LONG_MS or not (are_short or is_busy)


class ThreadRunner(_Start):
    """Threads that fetch a message from the buffer and run it: one at first, more while messages wait for blocked runs.

    Where the process is busy, more threads would only compete: one at a time has the interpreter. A run that computes
    outside of the interpreter shows in that no run ends for long.
    """

    def __init__(
        self, steps: HandlerSteps, in_flight: InFlight, loop_metrics: LoopMetrics, clock: Clock, max_threads: int
    ) -> None:
        super().__init__(steps, in_flight, loop_metrics, clock)
        self._most = max_threads
        self._threads: list[threading.Thread] = []
        self._finished = self._starved = 0
        self._took_ms = 0.0
        self._idle: set[int] = set()
        now_ms = clock.monotonic_ms()
        self._looked = self._look(now_ms, now_ms)
        self._failure: BaseException | None = None

    def run(self) -> None:
        """See Runner."""
        self._serve()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def nudge(self) -> None:
        """See Runner. Adds a thread if messages have waited for a while though the process had time to run them."""
        now_ms, before = self._clock.monotonic_ms(), self._looked
        if self._idle or self._hand.buffer.empty() or before.starved != self._starved:
            self._looked = self._look(now_ms, now_ms)
        elif now_ms - before.at_ms >= _SAMPLE_MS:
            sample = self._look(now_ms, before.since_ms if self._finished == before.finished else now_ms)
            self._looked = sample
            if sample.asks_for_more(before) and len(self._threads) < self._most - 1:
                thread = threading.Thread(target=self._serve, name="millstream-handler", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _look(self, now_ms: float, since_ms: float) -> "LoadSample":
        return LoadSample(self._starved, self._finished, self._took_ms, now_ms, time.process_time() * 1000, since_ms)

    def alone(self, delivery: Delivery) -> Outcome | None:
        """See Runner."""
        return self._outcome(delivery) if self._begin(delivery, ignore_gate=True) else None

    def break_off(self, delivery: Delivery) -> None:
        """See Runner. A thread cannot be stopped."""

    def cancel(self) -> None:
        """See Runner. A thread cannot be stopped: a run that goes on ends with the process."""

    def _serve(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._failure = error
        self._hand.buffer.put(None)  # passes the end on to the next thread

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a message; run it and its successors of the same key. False at the end. Holds none meanwhile."""
        following = self._next()
        if following is None:
            return False
        while following is not None:
            following = self._run_one(following)
        self._finished += 1
        return True

    def _run_one(self, delivery: Delivery) -> Delivery | None:
        """Run a message; return the next of its key."""
        while (starts := self._begin(delivery)) is None:
            self._hand.gate.wait()
        if not starts:
            return None
        outcome = self._outcome(delivery)
        self._took_ms += delivery.took_ms
        return self._hand.conclude(delivery, outcome)

    def _next(self) -> Delivery | None:
        try:
            return self._hand.buffer.get_nowait()
        except Empty:
            self._starved += 1
            self._idle.add(threading.get_ident())
            delivery = self._hand.buffer.get()
            self._idle.discard(threading.get_ident())
            return delivery

    def _outcome(self, delivery: Delivery) -> Outcome:
        message = self._pipeline.decode(delivery)
        if message is None:
            outcome: Outcome = NOTHING
        elif delivery.lease is None:
            outcome = self._pipeline.run(message)
        else:
            outcome = self._pipeline.run(message, delivery.lease.state)
        self._end(delivery)
        return outcome


class _FineSelector(selectors.EpollSelector):
    """Waits to the microsecond. epoll rounds up to milliseconds, which slows down handlers that wait for a few."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See selectors.BaseSelector."""
        if timeout is not None and timeout > 0 and self.fileno() < _FD_SETSIZE:
            select.select((self.fileno(),), (), (), timeout)
            timeout = 0
        return super().select(timeout)


class AsyncRunner(_Start):
    """An event loop that runs up to the handler's `concurrency` messages at once, each in its own task."""

    def __init__(self, steps: HandlerSteps, in_flight: InFlight, loop_metrics: LoopMetrics, clock: Clock) -> None:
        super().__init__(steps, in_flight, loop_metrics, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._nudged = asyncio.Event()
        self._free = steps.handler.concurrency
        self._ended = self._cancelled = False
        self._main: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def run(self) -> None:
        """See Runner."""
        self._loop = loop = asyncio.SelectorEventLoop(_FineSelector())
        asyncio.set_event_loop(loop)
        self._main = loop.create_task(self._serve())
        self._begun.set()
        try:
            loop.run_until_complete(self._main)
        except asyncio.CancelledError as error:
            if not self._cancelled:
                raise Unfinished(
                    f"{self._pipeline.handler.label} has cancelled all tasks of its event loop, the worker's own among "
                    "them; cancel only tasks that the handler has made"
                ) from error
        finally:
            # Tasks that other threads started and wait for end with the loop.
            for task in asyncio.all_tasks(loop):
                task.cancel()
                loop.run_until_complete(asyncio.wait((task,)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def nudge(self) -> None:
        """See Runner. With no slot free, the next run that ends checks the buffer."""
        if self._free and not self._hand.buffer.empty():
            self._tell(self._nudged.set)

    def alone(self, delivery: Delivery) -> Outcome | None:
        """See Runner."""
        self._begun.wait()
        assert self._loop is not None
        run = self._outcome_if_it_begins(delivery, ignore_gate=True)
        try:
            return asyncio.run_coroutine_threadsafe(run, self._loop).result()
        except CancelledError:
            return None
        except RuntimeError:
            run.close()
            if not self._loop.is_closed():
                raise
            return None

    def break_off(self, delivery: Delivery) -> None:
        """See Runner."""
        task = self._tasks.get(id(delivery))
        if task is not None:
            self._tell(task.cancel)

    def cancel(self) -> None:
        """See Runner."""
        self._cancelled = True
        if self._main is not None:
            self._tell(self._main.cancel)

    def _tell(self, callback: Callable[[], object]) -> None:
        # Before the loop runs there is nothing to wake: it checks the buffer first.
        with contextlib.suppress(RuntimeError):  # the loop was closed at this moment
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self._ended:
                self._fill(group)
                await self._nudged.wait()
                self._nudged.clear()

    def _fill(self, group: asyncio.TaskGroup) -> None:
        """Start as many messages as there are free slots; each that ends starts the next."""
        while self._free and not self._ended:
            if not self._hand.gate.is_set():
                asyncio.get_running_loop().call_later(GATE_S, self._nudged.set)
                return
            try:
                delivery = self._hand.buffer.get_nowait()
            except Empty:
                return
            if delivery is None:
                self._ended = True
                self._nudged.set()
            else:
                self._free -= 1
                group.create_task(self._run_one(delivery, group))

    async def _run_one(self, delivery: Delivery, group: asyncio.TaskGroup) -> None:
        following: Delivery | None = delivery
        while following is not None and not self._cancelled:
            task = asyncio.current_task()
            assert task is not None
            self._tasks[id(following)] = task
            outcome = await self._outcome_if_it_begins(following)
            del self._tasks[id(following)]
            if outcome is None or self._cancelled:
                break
            following = self._hand.conclude(following, outcome)
        if not self._cancelled:
            self._free += 1
            self._fill(group)

    async def _outcome_if_it_begins(self, delivery: Delivery, *, ignore_gate: bool = False) -> Outcome | None:
        while (starts := self._begin(delivery, ignore_gate=ignore_gate)) is None:  # noqa: ASYNC110 - rare
            await asyncio.sleep(GATE_S)
        return await self._outcome(delivery) if starts else None

    async def _outcome(self, delivery: Delivery) -> Outcome:
        message = self._pipeline.decode(delivery)
        if message is None:
            outcome: Outcome = NOTHING
        elif delivery.lease is None:
            outcome = await self._pipeline.run_async(message)
        else:
            outcome = await self._pipeline.run_async(message, delivery.lease.state)
        self._end(delivery)
        return outcome
