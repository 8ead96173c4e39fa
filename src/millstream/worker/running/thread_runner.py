"""Runs plain handlers in threads, as many as they keep busy."""

import logging
import threading
import time
from queue import Empty
from typing import NamedTuple

from millstream.clock import Clock
from millstream.delivery.reliable_stream import Delivery, LeasedKey
from millstream.handlers.attempt import NO_EFFECTS, Outcome
from millstream.model import Message
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.running.run_permits import RunPermit
from millstream.worker.running.runner import _Start

logger = logging.getLogger(__name__)

_SAMPLE_MS = 5.0
_LONG_MS = 50.0
_BUSY_SHARE = 0.7
_SHORT_MS = 0.2


class LoadSample(NamedTuple):
    """A sample of the load of a ThreadRunner, to compare with an earlier one.

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
        self._has_refused_thread = False
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
        """See Runner. Adds a thread if messages have waited for a while though the process had time to run them.

        If the system refuses a thread, the existing threads go on: at least one.
        """
        now_ms, before = self._clock.monotonic_ms(), self._last_sample
        if self._idle_threads or self._in_flight.buffer.empty() or before.starved != self._starved:
            self._last_sample = self._sample(now_ms, now_ms)
        elif now_ms - before.at_ms >= _SAMPLE_MS:
            sample = self._sample(now_ms, before.stalled_since_ms if self._finished == before.finished else now_ms)
            self._last_sample = sample
            if sample.needs_thread(before) and len(self._threads) < self._max_threads - 1:
                self._add_thread()

    @property
    def is_waking(self) -> bool:
        """See Runner."""
        return bool(self._idle_threads) and not self._in_flight.buffer.empty()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._thread_main, name="millstream-handler", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit of threads or memory: others may end, so it is tried again
            if not self._has_refused_thread:
                self._has_refused_thread = True
                logger.warning(
                    "%s: cannot start one more thread: %s; running messages in the %d it has. Raise the limit of "
                    "threads of this process, or start the worker with fewer --threads",
                    self._steps.handler.label,
                    error,
                    len(self._threads) + 1,
                )
        else:
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
        except BaseException as error:  # noqa: BLE001 - `run` raises it, after the other threads have ended
            self._failure = error
        self._in_flight.buffer.put(None)  # passes the end on to the next thread

    def _run_all(self) -> None:
        try:
            while self._run_next():
                pass
        finally:
            self._return_ended()

    def _run_next(self) -> bool:
        """Wait for a message; run it and its successors of the same key. False at the end. Holds none meanwhile."""
        first = delivery = self._next_delivery()
        if first is None:
            return False
        if self._permits is None:
            return self._run_waiting(first) if first.lease is None else self._run_key(first, first.lease)
        try:
            while delivery is not None:
                while (starts := self._start(delivery)) is None:
                    self._return_ended(delivery)
                    self._in_flight.gate.wait()
                if not starts:
                    break
                outcome = self._run_message(delivery)
                self._took_ms += delivery.attempt_ms
                self._finished += 1
                delivery = self._in_flight.complete(delivery, outcome)
        finally:
            if self._permits is not None:
                self._permits.end(first)  # returned with the next question of any thread, or as soon as one is idle
        return True

    def _run_waiting(self, delivery: Delivery | None) -> bool:
        """Run a message without a key, and then those that wait in the buffer, until none does. False at the end.

        As `_run_next`, with fewer calls for each message: the end of a run is the start of the next one.
        """
        in_flight, steps, now_ms = self._in_flight, self._steps, self._clock.monotonic_ms()
        while delivery is not None:
            if (starts := in_flight.start(delivery, now_ms)) is None:
                in_flight.gate.wait()
                now_ms = self._clock.monotonic_ms()
                continue
            if starts:
                self._loop_metrics.on_run_started()
                message = steps.decode(delivery)
                outcome = NO_EFFECTS if message is None else steps.run(message)
                now_ms = self._clock.monotonic_ms()
                delivery.attempt_ms = now_ms - delivery.state_since_ms
                delivery.finished = True
                self._took_ms += delivery.attempt_ms
                self._finished += 1
                in_flight.completions.put(((delivery,), outcome), urgent=in_flight.buffer.empty())
            try:
                delivery = in_flight.buffer.get_nowait()
            except Empty:
                return True
        return False

    def _run_key(self, first: Delivery, lease: LeasedKey) -> bool:
        """Run a message, and those of its key that are leased with it, as `_run_waiting` does. Returns True."""
        in_flight, steps, now_ms = self._in_flight, self._steps, self._clock.monotonic_ms()
        delivery: Delivery | None = first
        while delivery is not None:
            if (starts := in_flight.start(delivery, now_ms)) is None:
                in_flight.gate.wait()
                now_ms = self._clock.monotonic_ms()
                continue
            if not starts:
                break
            self._loop_metrics.on_run_started()
            message = steps.decode(delivery)
            if message is None:
                outcome: Outcome = NO_EFFECTS
            else:
                outcome = steps.canceled(delivery) or steps.run(message, lease.state)
                steps.cancel_rest(delivery, outcome)
            now_ms = self._clock.monotonic_ms()
            delivery.attempt_ms = now_ms - delivery.state_since_ms
            delivery.finished = True
            self._took_ms += delivery.attempt_ms
            self._finished += 1
            delivery = in_flight.complete(delivery, outcome)
        return True

    def _next_delivery(self) -> Delivery | None:
        try:
            return self._in_flight.buffer.get_nowait()
        except Empty:
            self._return_ended()
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
            outcome = self._steps.canceled(delivery) or self._run_leased(delivery, message, delivery.lease.state)
            self._steps.cancel_rest(delivery, outcome)
        self._finish(delivery)
        return outcome

    def _run_leased(self, delivery: Delivery, message: Message, state: bytes) -> Outcome:
        if self._permits is None:
            return self._steps.run(message, state)
        permit = self._permits.continued(delivery, message) or self._permits.take(delivery, message)
        if not isinstance(permit, RunPermit):
            return permit
        try:
            return self._steps.run(message, state)
        finally:
            self._finish(delivery)
            self._permits.keep(delivery, permit)

    def _return_ended(self, delivery: Delivery | None = None) -> None:
        """Return the permits that have ended, and that of the key of `delivery`: this thread may not ask for long."""
        if self._permits is None:
            return
        if delivery is not None:
            self._permits.end(delivery)
        self._permits.give_back_all()
