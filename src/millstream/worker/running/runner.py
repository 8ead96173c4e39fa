"""Runners: run buffered messages, plain handlers in threads and async ones in an event loop.

Both pause before their next message while the gate is closed: then a poison-pill suspect runs alone, so that a crash
counts against no other message.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol

from millstream.clock import Clock
from millstream.delivery.reliable_stream import Delivery
from millstream.handlers.attempt import Outcome
from millstream.handlers.live_traceback import live_traceback
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.running.run_permits import RunPermits


class Runner(Protocol):
    """The part of a reading loop that runs messages."""

    def run(self) -> None:
        """Run messages until the end of the buffer; called in a thread of its own."""

    def notify(self) -> None:
        """Check the buffer: a message was added, or waits there. Called often."""

    @property
    def is_waking(self) -> bool:
        """True if messages wait in the buffer for a thread that is idle: it has been notified, and has not run since."""

    def run_isolated(self, delivery: Delivery) -> Outcome | None:
        """Run one message while nothing else runs; None if it must not run any more. Called from another thread."""

    def permitted(self, delivery: Delivery) -> AbstractContextManager[Outcome | None]:
        """Hold the permit of a message for its run within the block; the outcome of the message if its limit refuses it.

        Called from another thread.
        """

    def give_back_permits(self) -> None:
        """Return all permits of the handler's limit but those of messages that run. Called from another thread."""

    def cancel_run(self, delivery: Delivery) -> None:
        """Cancel the run of one message, if that is possible; its outcome must be ignored."""

    def cancel_all(self) -> None:
        """Cancel all runs, if that is possible."""

    def traceback_of_run(self, delivery: Delivery) -> TracebackType | None:
        """Return where the handler is in its run of a message; None if that is not known. Called from another thread."""


class _Start:
    """Start and end of a run, for both runners."""

    def __init__(self, steps: HandlerSteps, in_flight: InFlight, loop_metrics: LoopMetrics, clock: Clock) -> None:
        self._steps = steps
        self._in_flight = in_flight
        self._loop_metrics = loop_metrics
        self._clock = clock
        self._permits = RunPermits.of(steps.handler, clock)

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

    def _start_list(self, first: Delivery, most: int) -> list[Delivery] | None:
        started = self._in_flight.start_list(first, most, self._clock.monotonic_ms())
        for _ in started or ():
            self._loop_metrics.on_run_started()
        return started

    @contextmanager
    def permitted(self, delivery: Delivery) -> Iterator[Outcome | None]:
        """See Runner."""
        message = None if self._permits is None else self._steps.decode(delivery)
        if self._permits is None or message is None or self._steps.canceled(delivery):
            yield None
            return
        refusal = self._permits.reserve(delivery, message)
        try:
            yield refusal
        finally:
            self._permits.give_back_reserved(delivery)

    def give_back_permits(self) -> None:
        """See Runner."""
        if self._permits is not None:
            self._permits.give_back_kept()

    def traceback_of_run(self, delivery: Delivery) -> TracebackType | None:
        """See Runner."""
        return live_traceback(delivery.stream.stream, delivery.id.decode(), self._live_tasks())

    def _live_tasks(self) -> Iterable[asyncio.Task[Any]]:
        """The tasks that may run messages."""
        return ()

    def _finish(self, delivery: Delivery) -> None:
        """Note that a run has ended. Only the first call counts: what comes after it is no part of the run."""
        if delivery.finished:
            return
        delivery.attempt_ms = self._clock.monotonic_ms() - delivery.state_since_ms
        delivery.finished = True
