"""LeaseWatchdog: cancels runs whose key lease is about to expire, also while Redis is unavailable."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence

from millstream.delivery.keyed_stream import KeyLease
from millstream.delivery.reliable_stream import Delivery
from millstream.errors import HandlerStuck
from millstream.worker.context import WorkerContext

logger = logging.getLogger(__name__)

_WATCH_S = 0.1
_MARGIN_SHARE = 0.1
_MIN_MARGIN_MS = 200.0


class LeaseWatchdog:
    """Watches the leases of the keys in flight, in a thread of its own that waits neither for Redis nor for a handler."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._in_flight = context.in_flight
        self._clock = context.clock

    def run(self, over: threading.Event) -> None:
        """Until `over` is set, cancel each run whose lease is about to expire, also while Redis is unavailable.

        Redis may lease the key to another worker after that. Raises HandlerStuck if a run cannot be cancelled. This
        holds as long as the process is scheduled (M. Kleppmann, "How to do distributed locking": a lease needs a fence
        as well).
        """
        margin_ms = max(_MIN_MARGIN_MS, _MARGIN_SHARE * self._context.policy.claim_ms)
        cancelled: list[Delivery] = []
        while not over.wait(_WATCH_S):
            self._check_ended(cancelled)
            late_ms = self._clock.monotonic_ms() + margin_ms
            cancelled = self._drop_expiring(
                [
                    lease
                    for lease in self._in_flight.leases.copy()
                    if (lease.expired or lease.expires_ms < late_ms) and not lease.releasing
                ]
            )
        if cancelled:  # a stop waits for no run that was dropped
            time.sleep(_WATCH_S)
            self._check_ended(cancelled)

    def _check_ended(self, cancelled: Sequence[Delivery]) -> None:
        if any(_goes_on(one) for one in cancelled):
            raise HandlerStuck(
                f"{self._context.handler.label} still runs on message {cancelled[0].id.decode()} of "
                f"{cancelled[0].stream.stream} though its lease is about to expire; another worker may run it then"
            )

    def _drop_expiring(self, leases: Sequence[KeyLease]) -> list[Delivery]:
        """Drop leased keys; return their entries that are still running, whose runs it has tried to cancel."""
        dropped: list[Delivery] = []
        for lease in leases:
            lease.expired = True
            dropped += self._in_flight.remove_lease(lease)
        self._context.loop_metrics.count_refused(len(dropped))
        running = [one for one in dropped if one.running and _goes_on(one)]
        for delivery in running:
            self._context.cancel_run(delivery)
        for stream, count in Counter(one.stream.stream for one in dropped).items():
            logger.warning(
                "%s: leases on %d messages of %s expire: they were not renewed, as Redis was unavailable or this "
                "process was not scheduled; cancelling their runs",
                self._context.handler.label,
                count,
                stream,
            )
        return running


def _goes_on(delivery: Delivery) -> bool:
    """Whether a run has not ended. One that still asks for its permit has not begun, and does not begin (RunPermits)."""
    return not delivery.finished and not delivery.asks
