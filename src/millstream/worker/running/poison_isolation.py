"""Runs in isolation what a worker may have died of: nothing else runs meanwhile, so that no other message is blamed."""

import contextlib
import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from millstream.clock import Clock
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import HandlerStuck, Unavailable
from millstream.handlers.attempt import DeadLettered, Outcome, given_up
from millstream.handlers.handler import Handler
from millstream.model import Retry
from millstream.worker.in_flight import InFlight
from millstream.worker.incarnations import NO_END, Incarnation
from millstream.worker.running.runner import Runner
from millstream.worker.stream_exclusion import exclude_on_error

logger = logging.getLogger(__name__)

_ALONE_WAIT_S = 0.005
_ASIDE_S = 0.5
_MOST_LOSSES = 2
_LEAST_DEATHS = 2


def isolated_after(retry: Retry) -> int:
    """After how many leases that ran out, or deliveries that came to nothing, a message is run in isolation.

    Before that, another message may have been the reason, or none. The fewer attempts, the sooner.
    """
    return max(1, min(_MOST_LOSSES, retry.attempts - _LEAST_DEATHS))


def deaths_allowed(retry: Retry) -> int:
    """How many processes may die of a message in isolation: at least two, as one may be chance."""
    return max(_LEAST_DEATHS, retry.attempts - _MOST_LOSSES)


class ProcessIsolation:
    """What all loops of a process share: only one suspect runs at a time, and nothing else in the process meanwhile.

    * `incarnation`: under which name the process's supervisor notes how it ended; "" if there is none
    * `end_process`: ends the process at once, because of a handler that cannot be ended without it. It may return, where
      the process belongs to others as well: then the loop ends as soon as it can
    """

    def __init__(
        self, incarnation: str = "", end_process: Callable[[HandlerStuck], object] = lambda error: None
    ) -> None:
        self.incarnation = incarnation
        self.end_process = end_process
        self.turn = threading.Lock()
        self.hands: list[InFlight] = []


class PoisonIsolation:
    """Runs suspects, entries in hand that do not go through its buffer, one after another. `run` is for one thread.

    Before a suspect runs, its process puts its mark beside it. Whoever finds a mark asks what became of that process: its
    death counts against the message, which then waits as after a failed attempt; after too many it is a dead letter. A
    process that lives, that was told to stop or that had to end because Redis was away counts for nothing.
    """

    def __init__(
        self, handler: Handler, hand: InFlight, runner: Runner, stopping: threading.Event, quiet: ProcessIsolation, *,
        incarnation: Incarnation, clock: Clock,
    ) -> None:  # fmt: skip
        self._handler = handler
        self._hand = hand
        self._runner = runner
        self._stopping = stopping
        self._quiet = quiet
        self._incarnation = incarnation
        self._clock = clock
        quiet.hands.append(hand)
        self._suspects: SimpleQueue[Delivery | None] = SimpleQueue()
        self._waiting: list[tuple[float, int, Delivery]] = []
        self._number = itertools.count()

    def suspect(self, delivery: Delivery | None) -> None:
        """Have an entry run when its turn has come; None has `run` end."""
        self._suspects.put(delivery)

    def run(self) -> None:
        """Run suspects until told to end."""
        while (delivery := self._next()) is not None and not self._stopping.is_set():
            try:
                with exclude_on_error(delivery.stream):
                    if delivery in self._hand:  # it may have been given up while it waited here
                        self._judge(delivery)
            except Unavailable as error:
                logger.debug("a message that may have killed others waits: %s", error)
                self._wait(delivery, _ASIDE_S * 1000)

    def _next(self) -> Delivery | None:
        """The next suspect, the first that is due before new ones; None at the end."""
        while True:
            wait_s = None
            if self._waiting:
                wait_s = min(_ASIDE_S, (self._waiting[0][0] - self._clock.monotonic_ms()) / 1000)
                if wait_s <= 0:
                    return heapq.heappop(self._waiting)[2]
            with contextlib.suppress(Empty):
                return self._suspects.get(timeout=wait_s)

    def _wait(self, delivery: Delivery, wait_ms: float) -> None:
        delivery.due_ms = self._clock.monotonic_ms() + wait_ms
        heapq.heappush(self._waiting, (delivery.due_ms, next(self._number), delivery))

    def _judge(self, delivery: Delivery) -> None:
        """Run a suspect, have it wait if another process has died of it, or give it up if too many have."""
        deaths, mark = delivery.stream.isolation(delivery)
        end = self._incarnation.end_of(mark) if mark else NO_END
        if end is None:
            self._wait(delivery, _ASIDE_S * 1000)
        elif not end.died:
            with self._quiet.turn:
                self._run_in_quiet(delivery)
        elif deaths + 1 < deaths_allowed(self._handler.retry):
            delivery.stream.note_deaths(delivery, deaths + 1)
            wait_ms = self._handler.retry.delay_after(deaths + 1)
            logger.warning(
                "message %s of %s ended its process, which %s while nothing else ran there: it runs again in %.1f s",
                delivery.id.decode(), delivery.stream.stream, end.cause, wait_ms / 1000,
            )  # fmt: skip
            self._wait(delivery, wait_ms)
        else:
            self._give_up(delivery, deaths + 1, end.cause)

    def _give_up(self, delivery: Delivery, deaths: int, cause: str) -> None:
        delivery.attempt = deaths + isolated_after(self._handler.retry)
        dead = DeadLettered(
            "crashed",
            f"{deaths} processes ended while they ran this message and nothing else; the last {cause}",
        )
        outcome: Outcome = dead if delivery.lease is None else given_up(self._handler, dead)
        self._hand.conclude(delivery, outcome)

    def _run_in_quiet(self, delivery: Delivery) -> None:
        hands = list(self._quiet.hands)
        for hand in hands:
            hand.close_gate()
        try:
            if self._wait_for_others(hands) and delivery in self._hand:
                self._run_alone(delivery)
        finally:
            for hand in hands:
                hand.open_gate()

    def _wait_for_others(self, hands: Sequence[InFlight]) -> bool:
        """Until nothing runs: if the process ended now, the suspect would be blamed. False if there is no time for it."""
        while any(one.running and not one.ran for hand in hands for one in hand.deliveries):
            if self._stopping.wait(_ALONE_WAIT_S):
                return False
        return True

    def _run_alone(self, delivery: Delivery) -> None:
        delivery.stream.isolate(delivery, self._incarnation.mark)
        outcome = self._runner.alone(delivery)
        with contextlib.suppress(Unavailable):  # a commit will do it as well
            delivery.stream.end_isolation([delivery])
        if outcome is not None:
            self._hand.conclude(delivery, outcome)
