"""RunPermits: a runner takes a permit of the handler's limit for each message before it runs, and returns it after."""

import logging
from concurrent.futures import Future

from millstream.clock import Clock
from millstream.delivery.keyed_stream import lease_of
from millstream.delivery.permits import Permits
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import OutOfMemory, StaleOwner, Unavailable
from millstream.handlers.attempt import DeadLettered, RetryLater, check_key
from millstream.handlers.handler import Handler
from millstream.handlers.limits import Share
from millstream.model import Message

logger = logging.getLogger(__name__)

_RETRY_MS = 1_000.0


class RunPermits:
    """Takes and returns the permits of one handler with a limit; any thread may call it. A call is one round trip."""

    def __init__(self, permits: Permits, handler: Handler, clock: Clock) -> None:
        self._permits = permits
        self._handler = handler
        self._clock = clock
        self._reserved: dict[Delivery, Share] = {}

    @classmethod
    def of(cls, handler: Handler, clock: Clock) -> "RunPermits | None":
        """Return those of a handler; None if it has no limit of single messages."""
        permits = Permits.of(handler)
        return None if permits is None else cls(permits, handler, clock)

    def take(self, delivery: Delivery, message: Message) -> Share | RetryLater | DeadLettered:
        """Take a permit for a message; return its share if it may run, else the outcome of the message.

        Its run begins when this returns: the question counts for no time limit. With `at_once`, a reserved permit is
        asked for again: it may have ended meanwhile, since Redis keeps none for longer than a run lasts.
        """
        delivery.asks = True
        try:
            permit = self._take(delivery, message)
        finally:
            delivery.state_since_ms = self._clock.monotonic_ms()
            delivery.asks = False
        # The watchdog first ends the lease, then looks whether the run asks; this is the opposite order, so that one of
        # the two sees the other.
        if not isinstance(permit, Share) or not lease_of(delivery).expired:
            return permit
        delivery.asks = True
        try:
            self.give_back(delivery, permit)
        finally:
            delivery.asks = False
        return self._permits.refusal_of(permit, _RETRY_MS)

    def _take(self, delivery: Delivery, message: Message) -> Share | RetryLater | DeadLettered:
        reserved = self._reserved.pop(delivery, None)
        if reserved is not None and self._permits.limit.at_once is None:
            return reserved  # of the rate alone, which no other message gets back
        if (refusal := check_key(self._handler, message)) is not None:
            return refusal
        share = self._permits.share_of(message)
        if isinstance(share, DeadLettered):
            return share
        if lease_of(delivery).expired:  # while it waited for a thread: another worker may run the key by now
            return self._permits.refusal_of(share, _RETRY_MS)
        return self._ask(delivery, message, share)

    def reserve(self, delivery: Delivery, message: Message) -> RetryLater | DeadLettered | None:
        """Take a permit for a message that runs later; return None if it may, else the outcome of the message."""
        permit = self.take(delivery, message)
        if not isinstance(permit, Share):
            return permit
        self._reserved[delivery] = permit
        return None

    def drop_reserved(self, delivery: Delivery) -> None:
        """Return the reserved permit of a message that has not run after all."""
        if (share := self._reserved.pop(delivery, None)) is not None:
            self.give_back(delivery, share)

    def unanswered(self, message: Message) -> RetryLater | DeadLettered:
        """Return the outcome of a message whose run was cancelled before its permit was granted: it waits for another."""
        share = self._permits.share_of(message)
        return share if isinstance(share, DeadLettered) else self._permits.refusal_of(share, _RETRY_MS)

    def give_back_granted(self, delivery: Delivery, asked: Future[Share | RetryLater | DeadLettered]) -> None:
        """Wait for `take` of a run that was cancelled meanwhile, and return the permit if it was granted."""
        if not asked.cancelled() and asked.exception() is None and isinstance(share := asked.result(), Share):
            self.give_back(delivery, share)

    def _ask(self, delivery: Delivery, message: Message, share: Share) -> Share | RetryLater:
        try:
            wait_ms = lease_of(delivery).stream.take_permit(delivery, self._permits, share)
        # Waits as if it was refused: the release of its lease is repeated until Redis answers, or raises the error.
        except (OutOfMemory, StaleOwner, Unavailable) as error:
            logger.debug("no permit for %s of %s: %s; retrying", delivery.id.decode(), message.stream, error)
            wait_ms = _RETRY_MS
        return share if wait_ms == 0 else self._permits.refusal_of(share, wait_ms)

    def give_back(self, delivery: Delivery, share: Share) -> None:
        """Return the permit of a message whose run is over. If Redis does not answer, it ends with the lease."""
        try:
            lease_of(delivery).stream.return_permit(delivery, self._permits, share)
        except (OutOfMemory, Unavailable) as error:
            logger.debug("permit of %s not returned: %s; it ends with its lease", delivery.id.decode(), error)
