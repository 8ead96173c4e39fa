"""LeaseWatchdog: cancels runs whose key lease is about to expire, also while Redis is unavailable."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

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
        self._margin_ms = max(_MIN_MARGIN_MS, _MARGIN_SHARE * context.policy.claim_ms)

    @property
    def stop_by_ms(self) -> float:
        """When a stop has to be over for the process to end in order, before this ends it because of a run given up.

        In milliseconds of the clock; infinity if no run was given up.
        """
        ends_ms = min([lease.expires_ms for lease in self._in_flight.given_up.copy()], default=inf)
        return ends_ms - 2 * self._margin_ms

    def run(self, over: threading.Event) -> None:
        """Until `over` is set, cancel each run whose lease is about to expire, also while Redis is unavailable.

        Redis may lease the key to another worker after that. Raises HandlerStuck if a run cannot be cancelled. This
        holds as long as the process is scheduled (M. Kleppmann, "How to do distributed locking": a lease needs a fence
        as well).
        """
        cancelled: list[Delivery] = []
        while not over.wait(_WATCH_S):
            self._check_ended(cancelled)
            self._check_hung()
            cancelled = self._drop_expiring(
                [one for one in self._expiring(self._in_flight.leases.copy()) if not one.releasing]
            )
        if cancelled:  # a stop waits for no run that was dropped
            time.sleep(_WATCH_S)
            self._check_ended(cancelled)

    def run_on(self) -> None:
        """Watch the runs that were given up beyond the end of their loop, until they have ended. Raises as `run`.

        The process goes on for a while: other loops end their runs.
        """
        while any(_runs_of(lease) for lease in self._in_flight.given_up.copy()):
            self._check_hung()
            time.sleep(_WATCH_S)

    def _expiring(self, leases: Iterable[KeyLease]) -> list[KeyLease]:
        late_ms = self._clock.monotonic_ms() + self._margin_ms
        return [lease for lease in leases if lease.expired or lease.expires_ms < late_ms]

    def _check_hung(self) -> None:
        """Raise HandlerStuck if a lease is about to expire whose run was given up: that cannot be cancelled."""
        for lease in self._expiring(self._in_flight.given_up.copy()):
            self._check_ended(_runs_of(lease))

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


def _runs_of(lease: KeyLease) -> list[Delivery]:
    return [one for one in lease.entries if one.running and _goes_on(one)]


def _goes_on(delivery: Delivery) -> bool:
    """Whether a run has not ended. One that still asks for its permit has not begun, and does not begin (RunPermits)."""
    return not delivery.finished and not delivery.asks
