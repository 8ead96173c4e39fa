"""Poison isolation: re-runs suspected poison pills while nothing else runs: a crash then counts against the suspect."""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from math import inf
from queue import Empty, SimpleQueue

from millstream.clock import Clock, Every
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import HandlerStuck, Unavailable
from millstream.handlers.attempt import DeadLettered, Outcome, outcome_after_last_attempt
from millstream.handlers.handler import Handler
from millstream.redis_client.formats import format_run_time, pluralize
from millstream.worker.due_times import DelayQueue
from millstream.worker.in_flight import InFlight
from millstream.worker.incarnations import ALIVE, Incarnation, ProcessEnd
from millstream.worker.running.losses import crashes_allowed, isolated_after, loss_retry
from millstream.worker.running.runner import Runner
from millstream.worker.stream_exclusion import exclude_on_error

logger = logging.getLogger(__name__)

_POLL_S = 0.005
_RECHECK_S = 0.5
_LINE_MS = 10_000.0


class ProcessIsolation:
    """Shared by all loops of a process: one suspect runs at a time, and nothing else in the process meanwhile.

    * `incarnation`: the name under which the process's supervisor records how it ended; "" without a supervisor
    * `end_process`: ends the process at once, because a handler cannot be ended without it. It may return, where others
      use the process, too: then the loop ends as soon as it can
    """

    def __init__(
        self, incarnation: str = "", end_process: Callable[[HandlerStuck], object] = lambda error: None
    ) -> None:
        self.incarnation = incarnation
        self.end_process = end_process
        self.lock = threading.Lock()
        self.all_in_flight: list[InFlight] = []


class PoisonIsolation:
    """Runs suspects one after another: entries in flight that bypass the buffer. `run` is for one thread.

    Before it runs a suspect, the process writes its mark beside the entry. A worker that finds the mark of another
    process looks up how that process ended. A crash counts against the message, which then waits as after a failed
    attempt; after too many crashes it is dead-lettered, after one more if the last may not have been one. A process
    that is alive, was stopped, or ended because Redis was unavailable counts for nothing.
    """

    def __init__(
        self,
        handler: Handler,
        in_flight: InFlight,
        runner: Runner,
        stopping: threading.Event,
        process_isolation: ProcessIsolation,
        *,
        incarnation: Incarnation,
        clock: Clock,
    ) -> None:
        self._handler = handler
        self._in_flight = in_flight
        self._runner = runner
        self._stopping = stopping
        self._process_isolation = process_isolation
        self._incarnation = incarnation
        self._clock = clock
        process_isolation.all_in_flight.append(in_flight)
        self._suspects: SimpleQueue[Delivery | None] = SimpleQueue()
        self._delayed = DelayQueue[Delivery]()
        self._still_marked: list[Delivery] = []
        self._is_line_due = Every(_LINE_MS)
        self._unreported = 0

    def add_suspect(self, delivery: Delivery | None) -> None:
        """Queue an entry to be run in isolation; None ends `run`."""
        self._suspects.put(delivery)

    def run(self) -> None:
        """Run suspects until `add_suspect(None)` or the stop."""
        while (delivery := self._next_suspect()) is not None and not self._stopping.is_set():
            try:
                with exclude_on_error(delivery.stream):
                    if delivery in self._in_flight:  # it may have been given up while it was queued here
                        self._run_or_give_up(delivery)
                    continue
            except Unavailable as error:
                logger.debug("cannot run a poison-pill suspect, Redis is unavailable: %s; retrying", error)
            # Also after an error of its stream alone: while the suspect is in flight, its stream is not tried again.
            self._delay(delivery, _RECHECK_S * 1000)

    def _next_suspect(self) -> Delivery | None:
        """Return the next suspect: one whose wait is over before new ones; None at the end."""
        while True:
            self._unmark()
            now_ms = self._clock.monotonic_ms()
            for delivery in self._delayed.pop_due(now_ms, 1):
                return delivery
            wait_ms = self._delayed.wait_ms(now_ms)
            if self._still_marked:
                wait_ms = min(wait_ms, 1000 * _RECHECK_S)
            with contextlib.suppress(Empty):
                return self._suspects.get(timeout=None if wait_ms == inf else min(_RECHECK_S, wait_ms / 1000))

    def _delay(self, delivery: Delivery, wait_ms: float) -> None:
        delivery.due_ms = self._clock.monotonic_ms() + wait_ms
        self._delayed.put(delivery, delivery.due_ms)

    def _run_or_give_up(self, delivery: Delivery) -> None:
        """Run a suspect, make it wait if another process crashed on it, or give it up if too many have."""
        deaths, mark = delivery.stream.isolation_state(delivery)
        if not (mark or delivery.due_ms or delivery.lease):  # the key of an entry with a lease has waited in Redis
            self._delay(delivery, loss_retry(self._handler.retry).delay_after(delivery.deliveries - 1))
            return
        end = self._incarnation.end_of(mark) if mark else ALIVE
        # One suspect for each process that has died waits here: others have its room meanwhile.
        self._in_flight.set_suspect_waiting(delivery, waits=end is None or end.died)
        if end is None:
            self._delay(delivery, _RECHECK_S * 1000)
        elif not end.died:
            with self._process_isolation.lock, self._runner.permitted(delivery) as refusal:
                if refusal is None:
                    self._run_isolated(delivery)
                else:
                    self._in_flight.complete(delivery, refusal)
        elif deaths + 1 < crashes_allowed(self._handler.retry) + (not end.certain):
            delivery.stream.record_deaths(delivery, deaths + 1)
            wait_ms = self._handler.retry.delay_after(deaths + 1)
            logger.warning(
                "%s: message %s of %s %s its process, which %s while no other message ran; retrying in %s",
                self._handler.label,
                delivery.id.decode(),
                delivery.stream.stream,
                "crashed" if end.certain else "may have crashed",
                end.cause,
                format_run_time(wait_ms),
            )
            self._delay(delivery, wait_ms)
        else:
            self._give_up(delivery, deaths + 1, end)

    def _give_up(self, delivery: Delivery, deaths: int, last: ProcessEnd) -> None:
        delivery.attempt = deaths + isolated_after(self._handler.retry)
        crashed = "crashed" if last.certain else "crashed, or were paused,"
        dead = DeadLettered(
            "crashed",
            f"{deaths} processes {crashed} while they ran this message and nothing else; the last {last.cause}",
        )
        outcome: Outcome = dead if delivery.lease is None else outcome_after_last_attempt(self._handler, dead)
        self._in_flight.complete(delivery, outcome)

    def _run_isolated(self, delivery: Delivery) -> None:
        all_in_flight = list(self._process_isolation.all_in_flight)
        for in_flight in all_in_flight:
            in_flight.close_gate()
        try:
            if self._wait_for_others(all_in_flight) and delivery in self._in_flight:
                self._run_marked(delivery)
        finally:
            for in_flight in all_in_flight:
                in_flight.open_gate()

    def _wait_for_others(self, all_in_flight: Sequence[InFlight]) -> bool:
        """Wait until nothing runs, as a crash now would count against the suspect. False if the stop comes first."""
        while any(in_flight.runs for in_flight in all_in_flight):
            if self._stopping.wait(_POLL_S):
                return False
        return True

    def _run_marked(self, delivery: Delivery) -> None:
        self._report(delivery)
        delivery.stream.begin_isolation(delivery, self._incarnation.mark)
        outcome = self._runner.run_isolated(delivery)
        self._still_marked.append(delivery)
        self._unmark()
        if outcome is not None:
            self._in_flight.complete(delivery, outcome)

    def _report(self, delivery: Delivery) -> None:
        """Log a run: after the end of one process there may be thousands, of which a line names one."""
        waiting = self._suspects.qsize() + len(self._delayed)
        more = f"; {pluralize(self._unreported, 'more message')} ran so since the last such line" * bool(
            self._unreported
        )
        is_due = self._is_line_due.is_due(self._clock.monotonic_ms())
        logger.log(
            logging.WARNING if is_due else logging.DEBUG,
            "%s: message %s of %s may have ended its process: it runs in isolation; this process starts no other "
            "message until that run has ended%s%s",
            self._handler.label,
            delivery.id.decode(),
            delivery.stream.stream,
            more,
            f"; {pluralize(waiting, 'more message')} may run so next" * bool(waiting),
        )
        self._unreported = 0 if is_due else self._unreported + 1

    def _unmark(self) -> None:
        """Remove the marks of runs that have ended: a later death of this process is not the fault of their messages.

        A commit removes them as well; but a run that was cancelled, as Redis was unavailable, commits nothing.
        """
        while self._still_marked:
            try:
                with exclude_on_error(self._still_marked[0].stream):
                    self._still_marked[0].stream.end_isolation(self._still_marked[:1])
            except Unavailable as error:
                logger.debug("cannot record the end of a run in isolation, Redis is unavailable: %s; retrying", error)
                return
            del self._still_marked[0]
