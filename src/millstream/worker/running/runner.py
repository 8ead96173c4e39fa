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
from millstream.handlers.attempt import NO_EFFECTS, Outcome
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics

_SAMPLE_MS = 5.0
_LONG_MS = 50.0
_BUSY_SHARE = 0.7
_SHORT_MS = 0.2
GATE_POLL_S = 0.01
_FD_SETSIZE = 1024


class Runner(Protocol):
    """The part of a reading loop that runs messages."""

    def run(self) -> None:
        """Run messages until the end of the buffer; called in a thread of its own."""

    def notify(self) -> None:
        """Check the buffer: a message was added, or waits there. Called often."""

    def run_isolated(self, delivery: Delivery) -> Outcome | None:
        """Run one message while nothing else runs; None if it must not run any more. Called from another thread."""

    def cancel_run(self, delivery: Delivery) -> None:
        """Cancel the run of one message, if that is possible; its outcome must be ignored."""

    def cancel_all(self) -> None:
        """Cancel all runs, if that is possible."""


class _Start:
    """Start and end of a run, for both runners."""

    def __init__(self, steps: HandlerSteps, in_flight: InFlight, loop_metrics: LoopMetrics, clock: Clock) -> None:
        self._steps = steps
        self._in_flight = in_flight
        self._loop_metrics = loop_metrics
        self._clock = clock

    def _start(self, delivery: Delivery, *, ignore_gate: bool = False) -> bool | None:
        starts = self._in_flight.start(delivery, self._clock.monotonic_ms(), ignore_gate=ignore_gate)
        if starts:
            self._loop_metrics.on_run_started()
        return starts

    def _start_all(self, deliveries: Sequence[Delivery]) -> list[Delivery] | None:
        started = self._in_flight.start_all(deliveries, self._clock.monotonic_ms())
        for _ in started or ():
            self._loop_metrics.on_run_started()
        return started

    def _finish(self, delivery: Delivery) -> None:
        delivery.attempt_ms = self._clock.monotonic_ms() - delivery.state_since_ms
        delivery.finished = True


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
    stalled_since_ms: float

    def needs_thread(self, before: "LoadSample") -> bool:
        """True if another thread would have been useful since `before`."""
        ended = self.finished - before.finished
        are_short = ended and self.took_ms - before.took_ms < _SHORT_MS * ended
        is_busy = self.cpu_ms - before.cpu_ms >= _BUSY_SHARE * (self.at_ms - before.at_ms)
        return self.at_ms - self.stalled_since_ms > _LONG_MS or not (are_short or is_busy)


class ThreadRunner(_Start):
    """Threads that fetch a message from the buffer and run it: one at first, more while messages wait for blocked runs.

    Where the process is busy, more threads would only compete: one at a time has the interpreter. A run that computes
    outside of the interpreter shows in that no run ends for long.
    """

    def __init__(
        self, steps: HandlerSteps, in_flight: InFlight, loop_metrics: LoopMetrics, clock: Clock, max_threads: int
    ) -> None:
        super().__init__(steps, in_flight, loop_metrics, clock)
        self._max_threads = max_threads
        self._threads: list[threading.Thread] = []
        self._finished = self._starved = 0
        self._took_ms = 0.0
        self._idle_threads: set[int] = set()
        now_ms = clock.monotonic_ms()
        self._last_sample = self._sample(now_ms, now_ms)
        self._failure: BaseException | None = None

    def run(self) -> None:
        """See Runner."""
        self._thread_main()
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def notify(self) -> None:
        """See Runner. Adds a thread if messages have waited for a while though the process had time to run them."""
        now_ms, before = self._clock.monotonic_ms(), self._last_sample
        if self._idle_threads or self._in_flight.buffer.empty() or before.starved != self._starved:
            self._last_sample = self._sample(now_ms, now_ms)
        elif now_ms - before.at_ms >= _SAMPLE_MS:
            sample = self._sample(now_ms, before.stalled_since_ms if self._finished == before.finished else now_ms)
            self._last_sample = sample
            if sample.needs_thread(before) and len(self._threads) < self._max_threads - 1:
                thread = threading.Thread(target=self._thread_main, name="millstream-handler", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _sample(self, now_ms: float, since_ms: float) -> "LoadSample":
        return LoadSample(self._starved, self._finished, self._took_ms, now_ms, time.process_time() * 1000, since_ms)

    def run_isolated(self, delivery: Delivery) -> Outcome | None:
        """See Runner."""
        return self._run_message(delivery) if self._start(delivery, ignore_gate=True) else None

    def cancel_run(self, delivery: Delivery) -> None:
        """See Runner. A thread cannot be stopped."""

    def cancel_all(self) -> None:
        """See Runner. A thread cannot be stopped: a run that goes on ends with the process."""

    def _thread_main(self) -> None:
        try:
            self._run_all()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._failure = error
        self._in_flight.buffer.put(None)  # passes the end on to the next thread

    def _run_all(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a message; run it and its successors of the same key. False at the end. Holds none meanwhile."""
        following = self._next_delivery()
        if following is None:
            return False
        while following is not None:
            following = self._run_one(following)
        self._finished += 1
        return True

    def _run_one(self, delivery: Delivery) -> Delivery | None:
        """Run a message; return the next of its key."""
        while (starts := self._start(delivery)) is None:
            self._in_flight.gate.wait()
        if not starts:
            return None
        outcome = self._run_message(delivery)
        self._took_ms += delivery.attempt_ms
        return self._in_flight.complete(delivery, outcome)

    def _next_delivery(self) -> Delivery | None:
        try:
            return self._in_flight.buffer.get_nowait()
        except Empty:
            self._starved += 1
            self._idle_threads.add(threading.get_ident())
            delivery = self._in_flight.buffer.get()
            self._idle_threads.discard(threading.get_ident())
            return delivery

    def _run_message(self, delivery: Delivery) -> Outcome:
        message = self._steps.decode(delivery)
        if message is None:
            outcome: Outcome = NO_EFFECTS
        elif delivery.lease is None:
            outcome = self._steps.run(message)
        else:
            outcome = self._steps.run(message, delivery.lease.state)
        self._finish(delivery)
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
        self._loop_started = threading.Event()
        self._notified = asyncio.Event()
        self._free_slots = steps.handler.concurrency
        self._is_at_end = self._is_cancelled = False
        self._main_task: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def run(self) -> None:
        """See Runner."""
        self._loop = loop = asyncio.SelectorEventLoop(_FineSelector())
        asyncio.set_event_loop(loop)
        self._main_task = loop.create_task(self._serve())
        self._loop_started.set()
        try:
            loop.run_until_complete(self._main_task)
        except asyncio.CancelledError as error:
            if not self._is_cancelled:
                raise Unfinished(
                    f"{self._steps.handler.label} has cancelled all tasks of its event loop, the worker's own among "
                    "them; cancel only tasks that the handler has made"
                ) from error
        finally:
            # Tasks that other threads started and wait for end with the loop.
            for task in asyncio.all_tasks(loop):
                task.cancel()
                loop.run_until_complete(asyncio.wait((task,)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def notify(self) -> None:
        """See Runner. With no slot free, the next run that ends checks the buffer."""
        if self._free_slots and not self._in_flight.buffer.empty():
            self._call_soon(self._notified.set)

    def run_isolated(self, delivery: Delivery) -> Outcome | None:
        """See Runner."""
        self._loop_started.wait()
        assert self._loop is not None
        run = self._start_and_run(delivery, ignore_gate=True)
        try:
            return asyncio.run_coroutine_threadsafe(run, self._loop).result()
        except CancelledError:
            return None
        except RuntimeError:
            run.close()
            if not self._loop.is_closed():
                raise
            return None

    def cancel_run(self, delivery: Delivery) -> None:
        """See Runner."""
        task = self._tasks.get(id(delivery))
        if task is not None:
            self._call_soon(task.cancel)

    def cancel_all(self) -> None:
        """See Runner."""
        self._is_cancelled = True
        if self._main_task is not None:
            self._call_soon(self._main_task.cancel)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        # Before the loop runs there is nothing to wake: it checks the buffer first.
        with contextlib.suppress(RuntimeError):  # the loop was closed at this moment
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self._is_at_end:
                self._start_tasks(group)
                await self._notified.wait()
                self._notified.clear()

    def _start_tasks(self, group: asyncio.TaskGroup) -> None:
        """Start as many messages as there are free slots; each that ends starts the next."""
        while self._free_slots and not self._is_at_end:
            if not self._in_flight.gate.is_set():
                asyncio.get_running_loop().call_later(GATE_POLL_S, self._notified.set)
                return
            try:
                delivery = self._in_flight.buffer.get_nowait()
            except Empty:
                return
            if delivery is None:
                self._is_at_end = True
                self._notified.set()
            else:
                self._free_slots -= 1
                group.create_task(self._run_one(delivery, group))

    async def _run_one(self, delivery: Delivery, group: asyncio.TaskGroup) -> None:
        following: Delivery | None = delivery
        while following is not None and not self._is_cancelled:
            task = asyncio.current_task()
            assert task is not None
            self._tasks[id(following)] = task
            outcome = await self._start_and_run(following)
            del self._tasks[id(following)]
            if outcome is None or self._is_cancelled:
                break
            following = self._in_flight.complete(following, outcome)
        if not self._is_cancelled:
            self._free_slots += 1
            self._start_tasks(group)

    async def _start_and_run(self, delivery: Delivery, *, ignore_gate: bool = False) -> Outcome | None:
        while (starts := self._start(delivery, ignore_gate=ignore_gate)) is None:  # noqa: ASYNC110 - rare
            await asyncio.sleep(GATE_POLL_S)
        return await self._run_message(delivery) if starts else None

    async def _run_message(self, delivery: Delivery) -> Outcome:
        message = self._steps.decode(delivery)
        if message is None:
            outcome: Outcome = NO_EFFECTS
        elif delivery.lease is None:
            outcome = await self._steps.run_async(message)
        else:
            outcome = await self._steps.run_async(message, delivery.lease.state)
        self._finish(delivery)
        return outcome
