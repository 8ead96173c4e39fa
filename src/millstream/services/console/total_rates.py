"""Rates of totals, by two reads of the console."""

from typing import NamedTuple

_LEAST_MS, _MOST_MS = 2_000.0, 300_000.0


class TotalRead(NamedTuple):
    """A total at a time of the monotonic clock, and how much it has grown a second since the read before; None: unknown."""

    at_ms: float
    total: int
    rate: float | None


def next_read(last: TotalRead | None, total: int, read_ms: float, *, is_another: bool = False) -> TotalRead:
    """The read of a total at this time; the last one if that was less than 2 seconds before.

    The rate is known where the last read was at most 5 minutes before. `is_another`: the total counts other things now.
    """
    if last is not None and read_ms - last.at_ms < _LEAST_MS:
        return last
    if last is None or read_ms - last.at_ms > _MOST_MS or total < last.total or is_another:
        return TotalRead(read_ms, total, None)
    return TotalRead(read_ms, total, (total - last.total) * 1000 / (read_ms - last.at_ms))
