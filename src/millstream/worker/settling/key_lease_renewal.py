"""Keeps leases on lines, and sees to it that nothing runs on after its lease."""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseRelease, lease_of
from millstream.delivery.reliable_stream import Delivery, ReliableStream
from millstream.errors import HandlerStuck
from millstream.handlers.attempt import DeadLettered, Done, RetryLater, overdue
from millstream.worker.settling.claim_renewal import ClaimRenewal
from millstream.worker.stream_exclusion import exclude_on_error

logger = logging.getLogger(__name__)

_WATCH_S = 0.1
_MARGIN = 0.1
_LEAST_MARGIN_MS = 200.0


class KeyLeaseRenewal(ClaimRenewal):
    """A Keeper for handlers with a key. Lines that others have let go of come with the next lease, from `take`.

    `break_off` is told what must not run any longer.
    """

    def __init__(self, *means: Any, break_off: Callable[[Delivery], None], **options: Any) -> None:
        super().__init__(*means, **options)
        self._break_off = break_off

    def recover(self, stream: ReliableStream) -> None:
        """Let others have the lines that an earlier life of this worker held, or that it never heard it was given."""
        assert isinstance(stream, KeyedStream)
        known = [lease for lease in self._hand.leases.copy() if lease.stream is stream]
        earlier, unheard = stream.recover(known, self._policy.batch)
        self._report.adopted_some(earlier + unheard)

    def round(self) -> None:
        """See Keeper. Lines that were taken while runs were shorter, and wait, are given back: others may have time."""
        surplus: dict[KeyedStream, list[KeyLease]] = defaultdict(list)
        for lease in self._hand.drop_surplus():
            surplus[lease.stream].append(lease)
        for stream, some in surplus.items():
            with exclude_on_error(stream):
                lost = stream.release([LeaseRelease(lease, "first") for lease in some])
                self._report.handed_back_some(sum(one.given for one in some) - sum(one.given for one in lost))
        super().round()

    def watch(self, over: threading.Event) -> None:
        """Until it is over, see to it that no handler runs beyond its lease, though Redis may be away.

        The server may give the line to another worker then. Raises HandlerStuck if one cannot be broken off. This holds as
        long as the process is scheduled (M. Kleppmann, "How to do distributed locking": a lease needs a fence as well).
        """
        margin_ms = max(_LEAST_MARGIN_MS, _MARGIN * self._policy.claim_ms)
        broken_off: list[Delivery] = []
        while not over.wait(_WATCH_S):
            if any(not one.ran for one in broken_off):
                raise HandlerStuck(
                    f"{self._pipeline.handler.label} still runs on message {broken_off[0].id.decode()} of "
                    f"{broken_off[0].stream.stream} though its lease ends, and another worker may begin it"
                )
            late_ms = self._clock.monotonic_ms() + margin_ms
            broken_off = self._let_go(
                [
                    lease
                    for lease in self._hand.leases.copy()
                    if (lease.lost or lease.until_ms < late_ms) and not lease.ending
                ]
            )

    def _let_go(self, leases: Sequence[KeyLease]) -> list[Delivery]:
        """Have lines be run no more; return what still runs of them, and was told to end."""
        rest: list[Delivery] = []
        for lease in leases:
            lease.lost = True
            rest += self._hand.end_lease(lease)
        self._report.refused_some(len(rest))
        running = [one for one in rest if one.running and not one.ran]
        for delivery in running:
            self._break_off(delivery)
        for stream, count in Counter(one.stream.stream for one in rest).items():
            logger.warning(
                "the leases of this worker on %d messages of %s end: they could not be extended, as Redis was away or this "
                "process stood still", count, stream,
            )  # fmt: skip
        return running

    # What is different for lines

    def _adopt(self) -> bool:
        return False

    def _take_stuck(self, stream: ReliableStream) -> None:
        """Leases are not extended beyond the time limit, however healthy their worker is."""

    def _note(self, stream: ReliableStream) -> bool:
        """Nothing has to be noted: what is not committed is in a line."""
        return True

    def _extend(self, stream: ReliableStream) -> None:
        assert isinstance(stream, KeyedStream)
        mine = [one for one in self._hand.leases.copy() if one.stream is stream and not (one.ending or one.lost)]
        if not mine:
            return
        now_ms = self._clock.monotonic_ms()
        lost: list[Delivery] = []
        for lease in stream.extend_leases(mine, self._policy.claim_ms, now_ms):
            if not lease.ending:
                lost += self._hand.end_lease(lease)
        if lost:
            self._report.refused_some(len(lost))
            logger.warning("%d messages of %s are not this worker's any more", len(lost), stream.stream)

    def _give_up(self, delivery: Delivery) -> None:
        """Note the failed attempt. The line stays leased as long as the run goes on, that is, until the process has ended."""
        lease = lease_of(delivery)
        message = self._pipeline.decode(delivery)
        assert message is not None
        lease.ending = True
        outcome = overdue(self._pipeline.handler, message)
        if isinstance(outcome, DeadLettered):
            if not lease.stream.commit([self._pipeline.commit_turn(lease, [(delivery, outcome)])]):
                self._report.committed_some([delivery], [outcome.reason], 0.0)
        elif isinstance(outcome, RetryLater):
            lease.stream.note_failures([delivery])
            self._report.retried_some(1)
            lease.stream.end_isolation([delivery])
        elif not isinstance(outcome, Done):
            lease.stream.release([LeaseRelease(lease, "park", f"{outcome.reason}: {outcome.error}", delivery.attempt)])
        self._hand.end_lease(lease)
