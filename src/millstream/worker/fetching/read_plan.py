"""Read plan: which streams to read next, and how many entries of each, so that no more come than there is room for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """One read: up to `count` entries of each of `streams`; `may_wait` allows it to block."""

    streams: Sequence[str]
    count: int
    may_wait: bool


class ReadScheduler:
    """Shares the room for new entries among streams. Redis applies `count` to each stream by itself, so it is a share.

    After a read of all streams, those that may have more are read by themselves. With less room than streams, as many
    streams as there is room for are read, round robin; only when all were found empty does one read block on all of
    them, and then one entry of each may come. Used by one thread.
    """

    def __init__(self) -> None:
        self._with_more: list[str] = []
        self._position = 0
        self._empty_reads = 0

    def next_plan(self, streams: Sequence[str], room: int, most: int) -> ReadPlan:
        """Return the next read of `streams` (one or more), with `room` for one entry or more; `most`: of one stream."""
        known = set(streams)
        busy = [name for name in self._with_more if name in known][:room]
        self._with_more = []
        if busy and len(busy) < len(streams):
            return ReadPlan(busy, min(most, room // len(busy)), may_wait=False)
        if room >= len(streams):
            return ReadPlan(streams, min(most, room // len(streams)), may_wait=True)
        if self._empty_reads >= len(streams):
            return ReadPlan(streams, 1, may_wait=True)
        at = self._position % len(streams)
        self._position = at + room
        return ReadPlan([*streams[at:], *streams[:at]][:room], 1, may_wait=False)

    def on_read(self, plan: ReadPlan, counts: Mapping[str, int]) -> None:
        """Note how many entries a read returned, of each stream that had some."""
        self._empty_reads = 0 if counts else self._empty_reads + len(plan.streams)
        if plan.may_wait:
            self._with_more = [name for name, count in counts.items() if count >= plan.count]
