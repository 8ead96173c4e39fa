"""Release of key leases whose entries were dropped from flight before they had begun."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from millstream.delivery.keyed_stream import KeyedStream, KeyLease, LeaseRelease
from millstream.worker.loop_metrics import LoopMetrics

Guard = Callable[[KeyedStream, Sequence[KeyLease]], AbstractContextManager[None]]
"""Handles errors that are raised while these leases on a stream are released."""


def release_leases(leases: Iterable[KeyLease], loop_metrics: LoopMetrics, *, guard: Guard) -> None:
    """Return keys untouched to their queues, so that other workers get them. Raises what `guard` lets pass.

    A lease that cannot be released expires.
    """
    by_stream: dict[KeyedStream, list[KeyLease]] = defaultdict(list)
    for lease in leases:
        by_stream[lease.stream].append(lease)
    for stream, some in by_stream.items():
        with guard(stream, some):
            stream.end_isolation([one for lease in some for one in lease.entries])
            lost = stream.release_leases([LeaseRelease(lease, "return") for lease in some])
            loop_metrics.count_released(_entry_count(some) - _entry_count(lost))


def _entry_count(leases: Iterable[KeyLease]) -> int:
    return sum(lease.in_flight_count for lease in leases)
