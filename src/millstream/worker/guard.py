"""Runs what may have killed a worker before, by itself and while nothing else runs, so that only it is blamed if it does again."""

import contextlib
import logging
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from millstream.errors import Unavailable
from millstream.handlers import Handler
from millstream.lifecycle import Dead, Outcome, given_up
from millstream.reliable import Delivery
from millstream.worker.hand import Hand
from millstream.worker.runners import Runner

logger = logging.getLogger(__name__)

_ALONE_WAIT_S = 0.005
_ASIDE_S = 0.5


class Quiet:
    """What all loops of a process share: only one suspect runs at a time, and nothing else in the process meanwhile."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.hands: list[Hand] = []


class Guard:
    """Takes suspects, entries in hand that do not go through its buffer, one after another. `run` is for one thread."""

    def __init__(self, handler: Handler, hand: Hand, runner: Runner, stopping: threading.Event, quiet: Quiet) -> None:
        self._handler = handler
        self._hand = hand
        self._runner = runner
        self._stopping = stopping
        self._quiet = quiet
        quiet.hands.append(hand)
        self._suspects: SimpleQueue[Delivery | None] = SimpleQueue()

    def suspect(self, delivery: Delivery | None) -> None:
        """Have an entry run when its turn has come; None has `run` end."""
        self._suspects.put(delivery)

    def run(self) -> None:
        """Run suspects until told to end."""
        while (delivery := self._suspects.get()) is not None and not self._stopping.is_set():
            try:
                with self._quiet.turn:
                    self._run_in_quiet(delivery)
            except Unavailable as error:
                logger.debug("a message that may have killed others waits: %s", error)
                self._suspects.put(delivery)
                self._stopping.wait(_ASIDE_S)

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

    def _wait_for_others(self, hands: Sequence[Hand]) -> bool:
        """Until nothing runs: if the process ended now, the suspect would be blamed. False if there is no time for it."""
        while any(one.running and not one.ran for hand in hands for one in hand.deliveries):
            if self._stopping.wait(_ALONE_WAIT_S):
                return False
        return True

    def _run_alone(self, delivery: Delivery) -> None:
        before = delivery.stream.strike(delivery)
        if before >= max(1, self._handler.retry.attempts - 2):
            delivery.attempt = before + 2
            delivery.struck = None  # not to be forgiven
            dead = Dead("crashed", f"the process ended each of the {before + 2} times that this message was tried")
            outcome: Outcome | None = dead if delivery.lease is None else given_up(self._handler, dead)
        else:
            outcome = self._runner.alone(delivery)
            if outcome is not None:
                with contextlib.suppress(Unavailable):  # a commit will do it as well
                    delivery.stream.forgive([delivery])
        if outcome is not None:
            self._hand.conclude(delivery, outcome)
