"""Sweeps of all handlers, as the collecting console makes them, without its rests."""

from contextlib import closing

from millstream.admin.figure_history import Sample, sample_of
from millstream.admin.handler_sweep import HandlerSweep
from millstream.redis_client.client import Client


def sweep_round(sweep: HandlerSweep) -> int:
    """One round of a sweep, until nothing waits; how many handlers on streams its steps have read."""
    sweep.begin()
    count = 0
    while sweep.is_waiting:
        count += sweep.step()
    return count


def swept(client: Client, at_ms: int) -> Sample:
    """The figures of all handlers, read now, as a sample of `at_ms`."""
    with closing(HandlerSweep(client)) as sweep:
        sweep_round(sweep)
        return sample_of(sweep, at_ms)
