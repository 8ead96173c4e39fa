"""RunPermits: a runner takes a permit of the handler's limit for each message before it runs, and returns it after.

A round trip to Redis costs more than the run of a short handler. So messages of one key that follow each other run under
one permit, for some milliseconds; and a permit that has ended is returned together with the next question, or at once if
there is none.
"""

import contextlib
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from millstream.clock import Clock
from millstream.delivery.keyed_stream import KeyedStream, KeyLease, lease_of
from millstream.delivery.permits import UNANSWERED_MS, Permits
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import Unavailable
from millstream.handlers.attempt import DeadLettered, RetryLater, check_key
from millstream.handlers.handler import Handler
from millstream.handlers.limits import Share
from millstream.model import Message

logger = logging.getLogger(__name__)

KEPT_MS = 50.0
"""How long after it was granted a permit may be kept for the next message of its key, in milliseconds: other keys may wait
for it."""


class RunPermit(NamedTuple):
    """A permit: the message that has asked for it, its share of the limit, and when it was granted, by the worker's clock."""

    holder: Delivery
    share: Share
    granted_ms: float


Question = tuple[Delivery, Message]
"""A message for which a permit is asked."""
Answer = RunPermit | RetryLater | DeadLettered
"""The permit of a message that may run, else the outcome of the message."""


class RunPermits:
    """Takes and returns the permits of one handler with a limit; any thread may call it.

    `take_all`, `give_back_all`, and what calls them, are one round trip for each stream; the others are none.
    """

    def __init__(self, permits: Permits, handler: Handler, clock: Clock) -> None:
        self._permits = permits
        self._handler = handler
        self._clock = clock
        self._reserved: dict[Delivery, RunPermit] = {}
        self._kept: dict[KeyLease, RunPermit] = {}
        self._ended: deque[RunPermit] = deque()
        self._exchange_lock = threading.Lock()

    @classmethod
    def of(cls, handler: Handler, clock: Clock) -> "RunPermits | None":
        """Return those of a handler; None if it has no limit of single messages."""
        permits = Permits.of(handler)
        return None if permits is None else cls(permits, handler, clock)

    # Taking

    def take(self, delivery: Delivery, message: Message) -> Answer:
        """Take a permit for one message; see `take_all`."""
        (answer,) = self.take_all([(delivery, message)])
        return answer

    def take_all(self, questions: Sequence[Question]) -> list[Answer]:
        """Take a permit for each of these messages; return it if the message may run, else the outcome of the message.

        Their runs begin when this returns: the question counts for no time limit. With `at_once`, a reserved permit is
        asked for again: it may have ended meanwhile, since Redis keeps none for longer than a run lasts. Permits that
        have ended are returned before.
        """
        for delivery, _ in questions:
            delivery.asks = True
        try:
            answers = self._answer_all(questions)
        finally:
            now_ms = self._clock.monotonic_ms()
            for delivery, _ in questions:
                delivery.state_since_ms = now_ms
                delivery.asks = False
        # The watchdog first ends the lease, then looks whether the run asks; this is the opposite order, so that one of
        # the two sees the other.
        return [self._unless_expired(answer) if isinstance(answer, RunPermit) else answer for answer in answers]

    def _answer_all(self, questions: Sequence[Question]) -> list[Answer]:
        found = [self._unasked(*question) for question in questions]
        asked = [
            (delivery, share) for (delivery, _), share in zip(questions, found, strict=True) if isinstance(share, Share)
        ]
        answers = dict(self._exchange(asked))
        return [
            answers[delivery] if isinstance(one, Share) else one
            for (delivery, _), one in zip(questions, found, strict=True)
        ]

    def _unasked(self, delivery: Delivery, message: Message) -> Share | Answer:
        """Return the answer to a question that is known without Redis, else what it asks for."""
        reserved = self._reserved.pop(delivery, None)
        if reserved is not None and self._permits.limit.at_once is None:
            return reserved  # of the rate alone, which no other message gets back
        if (refusal := check_key(self._handler, message)) is not None:
            return refusal
        share = self._permits.share_of(message)
        if isinstance(share, Share) and lease_of(delivery).expired:
            # While it waited for a thread: another worker may run the key by now.
            if reserved is not None:
                self._end(reserved)
            return self._permits.refusal_of(share, UNANSWERED_MS)
        return share

    def _answer(self, delivery: Delivery, share: Share, wait_ms: float) -> Answer:
        if wait_ms == 0:
            return RunPermit(delivery, share, self._clock.monotonic_ms())
        return self._permits.refusal_of(share, wait_ms)

    def _unless_expired(self, permit: RunPermit) -> Answer:
        if not lease_of(permit.holder).expired:
            return permit
        self._end(permit)
        return self._permits.refusal_of(permit.share, UNANSWERED_MS)

    # Between two messages of a key

    def keep(self, delivery: Delivery, permit: RunPermit) -> None:
        """Keep the permit of a message whose run is over for the next one of its key, until `continued` or `end`."""
        self._kept[lease_of(delivery)] = permit

    def continued(self, delivery: Delivery, message: Message) -> RunPermit | None:
        """Return the permit of the message before this one in its key, if this one may run under it; else end that one.

        A rate counts each message, so each asks.
        """
        permit = self._kept.pop(lease_of(delivery), None)
        if permit is None:
            return None
        is_recent = self._clock.monotonic_ms() < permit.granted_ms + KEPT_MS
        if is_recent and self._permits.limit.rate is None and self._permits.share_of(message) == permit.share:
            return permit
        self._end(permit)
        return None

    def end(self, delivery: Delivery) -> None:
        """End the permit that is kept for the next message of a key, if there is one: it is returned soon."""
        if (permit := self._kept.get(lease_of(delivery))) is not None:
            self._end(permit)  # first: `give_back_kept` must find it in one of the two. It may be returned twice.
            self._kept.pop(lease_of(delivery), None)

    def _end(self, permit: RunPermit) -> None:
        if self._permits.limit.at_once is not None:
            self._ended.append(permit)

    # Of messages that do not run when they get their permits

    def reserve(self, delivery: Delivery, message: Message) -> RetryLater | DeadLettered | None:
        """Take a permit for a message that runs later; return None if it may, else the outcome of the message."""
        permit = self.take(delivery, message)
        if not isinstance(permit, RunPermit):
            return permit
        self._reserved[delivery] = permit
        return None

    def give_back_reserved(self, delivery: Delivery) -> None:
        """Return the permit of a message that was reserved, whether it has run or not."""
        if (permit := self._reserved.pop(delivery, None)) is not None:
            self._end(permit)
        self.end(delivery)
        self.give_back_all()

    def unanswered(self, message: Message) -> RetryLater | DeadLettered:
        """Return the outcome of a message whose run was cancelled before its permit was granted: it waits for another."""
        share = self._permits.share_of(message)
        return share if isinstance(share, DeadLettered) else self._permits.refusal_of(share, UNANSWERED_MS)

    def give_back_granted(self, asked: Future[Answer]) -> None:
        """Return the permit that a run was granted though it was cancelled meanwhile. `asked` is over."""
        if not asked.cancelled() and asked.exception() is None and isinstance(permit := asked.result(), RunPermit):
            self._end(permit)
        self.give_back_all()

    # Round trips

    @property
    def has_ended(self) -> bool:
        """True if permits have ended that are not returned yet."""
        return bool(self._ended)

    def give_back_all(self) -> None:
        """Return the permits that have ended. If Redis does not answer, the next round trip returns them again."""
        if self._ended:
            self._exchange(())

    def give_back_kept(self) -> None:
        """Return all permits but those of messages that run; a message that follows one of those asks for its own."""
        with contextlib.suppress(KeyError):
            while True:
                self._end(self._kept.popitem()[1])
        self._exchange(())  # waits for a round trip that is under way

    def _exchange(self, asked: Sequence[tuple[Delivery, Share]]) -> list[tuple[Delivery, Answer]]:
        """Return the permits that have ended, and take these; return each of these messages with its answer."""
        with self._exchange_lock:
            return self._exchange_locked(asked)

    def _exchange_locked(self, asked: Sequence[tuple[Delivery, Share]]) -> list[tuple[Delivery, Answer]]:
        by_stream: dict[KeyedStream, tuple[list[RunPermit], list[tuple[Delivery, Share]]]]
        by_stream = defaultdict(lambda: ([], []))
        with contextlib.suppress(IndexError):
            while True:
                permit = self._ended.popleft()
                by_stream[lease_of(permit.holder).stream][0].append(permit)
        for delivery, share in asked:
            by_stream[lease_of(delivery).stream][1].append((delivery, share))
        answers: list[tuple[Delivery, Answer]] = []
        for stream, (returned, some) in by_stream.items():
            try:
                waits = stream.exchange_permits(self._permits, [permit[:2] for permit in returned], some)
            # As if they were refused: the release of their leases is repeated until Redis answers.
            except Unavailable as error:
                text = "permits of %s: %s; %d messages ask again, %d permits are returned later, or end with leases"
                logger.debug(text, stream.stream, error, len(some), len(returned))
                self._ended.extend(returned)  # their keys may go on under leases that last
                waits = [UNANSWERED_MS] * len(some)
            answers += [
                (one, self._answer(one, share, wait_ms)) for (one, share), wait_ms in zip(some, waits, strict=True)
            ]
        return answers
