"""Runs async handlers in an event loop."""

import asyncio
import contextlib
import select
import selectors
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from millstream.clock import Clock
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import Unfinished
from millstream.handlers.attempt import NO_EFFECTS, Outcome
from millstream.handlers.deadlines import deadlines_of
from millstream.model import Message
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.running.run_permits import Answer, RunPermit, RunPermits
from millstream.worker.running.runner import _Start

GATE_POLL_S = 0.01
PERMIT_THREAD = "millstream-permit"
"""Name of the thread that takes and returns permits."""
_ITERATION_MS = 1.0
_FD_SETSIZE = 1024


class _FineSelector(selectors.EpollSelector):
    """Waits to the microsecond. epoll rounds up to milliseconds, which slows down handlers that wait for a few."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See selectors.BaseSelector."""
        if timeout is not None and timeout > 0 and self.fileno() < _FD_SETSIZE:
            select.select((self.fileno(),), (), (), timeout)
            timeout = 0
        return super().select(timeout)


class AsyncRunner(_Start):
    """An event loop that runs up to the handler's `concurrency` messages at once, each in a task and context of its own.

    The messages of one key that are leased together share both. So do messages that follow each other and do not wait
    for anything, while none leaves a trace in either: a task costs more than such a message. They share it within one
    iteration of the loop, for a millisecond. A message that waits is the last of its task.
    """

    def __init__(self, steps: HandlerSteps, in_flight: InFlight, loop_metrics: LoopMetrics, clock: Clock) -> None:
        super().__init__(steps, in_flight, loop_metrics, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_started = threading.Event()
        self._notified = asyncio.Event()
        self._free_slots = steps.handler.concurrency
        self._is_at_end = self._is_stopped = self._is_cancelled = self._is_idle = False
        self._main_task: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[Any], Delivery] = {}
        """What each task runs, or has run last."""
        self._context = copy_context()
        self._iteration = 0
        self._iteration_until_ms = 0.0
        self._in_iteration = self._has_entered_iteration = False
        self._runs_wait = False  # the last run that ended has waited for something
        # Not a thread of the loop's own: a handler may keep all of those busy, and the permits that it holds with them.
        self._permit_thread = ThreadPoolExecutor(1, thread_name_prefix=PERMIT_THREAD)
        self._questions: SimpleQueue[tuple[Delivery, Message, Future[Answer]]] = SimpleQueue()
        self._is_exchange_due = False
        self._failure: BaseException | None = None

    def run(self) -> None:
        """See Runner."""
        self._loop = loop = asyncio.SelectorEventLoop(_FineSelector())
        asyncio.set_event_loop(loop)
        self._steps.deadlines = deadlines_of(loop, self._steps.handler.time_limit_ms / 1000)
        self._main_task = loop.create_task(self._serve())
        self._loop_started.set()
        try:
            loop.run_until_complete(self._main_task)
        except asyncio.CancelledError as error:
            if self._failure is not None:
                raise self._failure from None
            if not self._is_stopped:
                raise Unfinished(
                    f"{self._steps.handler.label} has cancelled all tasks of its event loop, the worker's own among "
                    "them; cancel only tasks that the handler has made"
                ) from error
        else:
            if self._failure is not None:
                raise self._failure
        finally:
            # Tasks that other threads started and wait for end with the loop.
            for task in asyncio.all_tasks(loop):
                task.cancel()
                loop.run_until_complete(asyncio.wait((task,)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            self._permit_thread.shutdown(wait=False)

    def notify(self) -> None:
        """See Runner. With no slot free, the next run that ends checks the buffer."""
        if self._free_slots and not self._in_flight.buffer.empty():
            self._call_soon(self._notified.set)

    @property
    def is_waking(self) -> bool:
        """See Runner."""
        return self._is_idle and not self._in_flight.buffer.empty()

    def run_isolated(self, delivery: Delivery) -> Outcome | None:
        """See Runner."""
        self._loop_started.wait()
        assert self._loop is not None
        run = self._run_cancellable(delivery)
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
        self._call_soon(lambda: self._cancel(delivery))

    def cancel_all(self) -> None:
        """See Runner."""
        self._is_stopped = self._is_cancelled = True
        if self._main_task is not None:
            self._call_soon(self._main_task.cancel)

    def _cancel(self, delivery: Delivery) -> None:
        # Looked up in the loop's thread, where no task is amidst a step: it may have gone on to another message.
        for task, running in self._tasks.items():
            if running is delivery:
                task.cancel()

    def _live_tasks(self) -> Iterable[asyncio.Task[Any]]:
        return () if self._loop is None else asyncio.all_tasks(self._loop)

    def _call_soon(self, callback: Callable[[], object]) -> None:
        # Before the loop runs there is nothing to wake: it checks the buffer first.
        with contextlib.suppress(RuntimeError):  # the loop was closed at this moment
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            with self._cancelling_all():
                await self._run_buffered(group)

    @contextlib.contextmanager
    def _cancelling_all(self) -> Iterator[None]:
        """If the block fails, ignore the outcomes of all runs: the group cancels them, and they have not failed."""
        try:
            yield
        except BaseException:  # of any kind: an outcome of a cancelled run would count an attempt
            self._is_cancelled = True
            raise

    async def _run_buffered(self, group: asyncio.TaskGroup) -> None:
        """Run messages in the group until the end of the buffer."""
        while not self._is_at_end:
            self._start_tasks(group)
            self._is_idle = self._free_slots > 0
            await self._notified.wait()
            self._is_idle = False
            self._notified.clear()

    def _start_tasks(self, group: asyncio.TaskGroup) -> None:
        """Start as many messages as there are free slots; each that ends starts the next.

        While runs do not wait, start one: its task takes those after it, and the end of the iteration starts others.
        """
        while (self._runs_wait or not self._in_iteration) and self._free_slots:
            if (delivery := self._take()) is None:
                return
            self._free_slots -= 1
            self._in_iteration = True
            # In a context of its own: the task that makes it has run another message, which may have set variables.
            group.create_task(self._run_in_slot(delivery, group), context=self._context.copy())

    def _take(self) -> Delivery | None:
        """Take the next message from the buffer; None if there is none, or if none may start now."""
        if self._is_at_end:
            return None
        if self._in_flight.is_gate_closed:
            asyncio.get_running_loop().call_later(GATE_POLL_S, self._notified.set)
            return None
        try:
            delivery = self._in_flight.buffer.get_nowait()
        except Empty:
            return None
        if delivery is None:
            self._is_at_end = True
            self._notified.set()
        return delivery

    async def _run_in_slot(self, delivery: Delivery, group: asyncio.TaskGroup) -> None:
        task = asyncio.current_task()
        assert task is not None
        is_keyless = delivery.lease is None and self._permits is None
        try:
            await (self._run_keyless if is_keyless else self._run_one)(delivery, task, self._enter_iteration())
        finally:
            self._tasks.pop(task, None)
        if not self._is_cancelled:
            self._free_slots += 1
            self._start_tasks(group)

    async def _run_keyless(self, delivery: Delivery, task: asyncio.Task[Any], iteration: int) -> None:
        """Run a message without a key and a limit; then others of this iteration, while the task is as new.

        As `_run_one`, with fewer calls for each message: the end of a run is the start of the next one.
        """
        in_flight, steps = self._in_flight, self._steps
        self._tasks[task] = delivery
        references = sys.getrefcount(task)
        now_ms = self._clock.monotonic_ms()
        while not self._is_cancelled:
            if (starts := in_flight.start(delivery, now_ms)) is None:
                starts = await self._start_later(delivery)
            elif starts:
                self._loop_metrics.on_run_started()
            if not starts:
                return
            message = steps.decode(delivery)
            outcome = NO_EFFECTS if message is None else await steps.run_async(message)
            now_ms = self._clock.monotonic_ms()
            delivery.attempt_ms = now_ms - delivery.state_since_ms
            delivery.finished = True
            if self._is_cancelled:
                return
            self._runs_wait = waited = iteration != self._iteration
            # What has kept the task may cancel it later, and must not cancel another message.
            shares = not waited and now_ms < self._iteration_until_ms and sys.getrefcount(task) == references
            following = self._take() if shares and self._is_context_new() else None
            in_flight.completions.put(((delivery,), outcome), urgent=following is None and in_flight.buffer.empty())
            if following is None:
                return
            self._tasks[task] = delivery = following

    async def _run_one(self, delivery: Delivery, task: asyncio.Task[Any], iteration: int) -> None:
        """Run a message and its successors of the same key; then others of this iteration, while the task is as new."""
        self._tasks[task] = delivery
        references = sys.getrefcount(task)
        following: Delivery | None = delivery
        try:
            while following is not None and not self._is_cancelled:
                self._tasks[task] = delivery = following
                if (starts := self._start(delivery)) is None:
                    starts = await self._start_later(delivery)
                outcome = await self._run_message(delivery) if starts else None
                if outcome is None or self._is_cancelled:
                    break
                following = self._in_flight.complete(delivery, outcome)
                self._runs_wait = iteration != self._iteration
                # What has kept the task may cancel it later, and must not cancel another message.
                if following is None and sys.getrefcount(task) == references and self._may_share(delivery):
                    self._end_permit(delivery)
                    following = self._take()
        finally:
            self._end_permit(delivery)

    # An iteration ends with a callback of the loop that the first task of it makes before it runs its message. A task that
    # waits goes on after that callback, so it finds another iteration.

    def _enter_iteration(self) -> int:
        """Begin an iteration, unless this is part of one; return its number."""
        if not self._has_entered_iteration:
            self._has_entered_iteration = True
            self._iteration_until_ms = self._clock.monotonic_ms() + _ITERATION_MS
            asyncio.get_running_loop().call_soon(self._end_iteration)
        return self._iteration

    def _end_iteration(self) -> None:
        self._iteration += 1
        self._in_iteration = self._has_entered_iteration = False
        if self._free_slots and not self._in_flight.buffer.empty():
            self._notified.set()

    def _may_share(self, ended: Delivery) -> bool:
        """True if the run that has just ended leaves its task and context to the next message."""
        if self._runs_wait or ended.state_since_ms + ended.attempt_ms >= self._iteration_until_ms:
            return False
        return self._is_context_new()

    def _is_context_new(self) -> bool:
        """True if the context has the variables that it had before its first message."""
        context = copy_context()
        if len(context) != len(self._context):
            return False
        # Most are empty: then there is nothing to go through.
        return not context or all(context.get(variable, self) is value for variable, value in self._context.items())

    async def _run_cancellable(self, delivery: Delivery) -> Outcome | None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = delivery
        try:
            return await self._run_message(delivery) if self._start(delivery, ignore_gate=True) else None
        finally:
            del self._tasks[task]

    async def _start_later(self, delivery: Delivery) -> bool:
        """Wait until the gate is open; True if the message was started."""
        while (starts := self._start(delivery)) is None:
            self._end_permit(delivery)
            await asyncio.sleep(GATE_POLL_S)
        return starts

    async def _run_message(self, delivery: Delivery) -> Outcome:
        message = self._steps.decode(delivery)
        if message is None:
            outcome: Outcome = NO_EFFECTS
        elif delivery.lease is None:
            outcome = await self._steps.run_async(message)
        else:
            run = (
                self._steps.run_async
                if self._permits is None
                else partial(self._run_permitted, self._permits, delivery)
            )
            outcome = self._steps.canceled(delivery) or await run(message, delivery.lease.state)
            self._steps.cancel_rest(delivery, outcome)
        self._finish(delivery)
        return outcome

    async def _run_permitted(self, permits: RunPermits, delivery: Delivery, message: Message, state: bytes) -> Outcome:
        permit = permits.continued(delivery, message) or await self._ask(permits, delivery, message)
        if not isinstance(permit, RunPermit):
            return permit
        try:
            return await self._steps.run_async(message, state)
        finally:
            self._finish(delivery)
            permits.keep(delivery, permit)

    # Permits: a thread asks for them, so that the loop does not wait for Redis. What is asked and returned during one of
    # its round trips shares the next one.

    async def _ask(self, permits: RunPermits, delivery: Delivery, message: Message) -> Answer:
        delivery.asks = True  # also while it waits for the thread
        asked: Future[Answer] = Future()
        self._questions.put((delivery, message, asked))
        self._exchange_soon()
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            # The thread may be asking, and be granted the permit: without this it would be held as long as the lease.
            delivery.asks = delivery.asks and not asked.cancelled()
            self._permit_thread.submit(permits.give_back_granted, asked).add_done_callback(self._on_exchanged)
            _end_cancellation()
            return permits.unanswered(message)

    def _end_permit(self, delivery: Delivery) -> None:
        """Return the permit of the key of an entry, if one is kept for its next message."""
        if self._permits is not None:
            self._permits.end(delivery)
            if self._permits.has_ended:
                self._exchange_soon()

    def _exchange_soon(self) -> None:
        if not self._is_exchange_due:
            self._is_exchange_due = True
            self._permit_thread.submit(self._exchange_permits).add_done_callback(self._on_exchanged)

    def _exchange_permits(self) -> None:
        """Answer all that was asked, and return the permits that have ended."""
        assert self._permits is not None
        self._is_exchange_due = False  # first: what comes after it has an exchange of its own
        asked: list[tuple[Delivery, Message, Future[Answer]]] = []
        with contextlib.suppress(Empty):
            while True:
                question = self._questions.get_nowait()
                if question[2].set_running_or_notify_cancel():
                    asked.append(question)
        try:
            answers = self._permits.take_all([(delivery, message) for delivery, message, _ in asked])
        except BaseException as error:
            if not asked:
                raise
            self._fail(error)  # first: it cancels the runs, so that each of them neither raises this nor starts another
            for _, _, future in asked:
                future.set_exception(error)
        else:
            for (_, _, future), answer in zip(asked, answers, strict=True):
                future.set_result(answer)

    def _on_exchanged(self, exchange: Future[None]) -> None:
        """End the event loop if permits could not be returned, for a reason that lasts: no run waits for that."""
        if (error := exchange.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure, self._is_cancelled = error, True
        if self._main_task is not None:
            self._call_soon(self._main_task.cancel)


def _end_cancellation() -> None:
    """Let the current task go on after it was cancelled: with the next message of the key, or to its end."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
