"""Read plan: which streams to read next, and how many entries of each, so that no more come than there is room for."""

from collections.abc import Mapping

import msgspec


class ReadPlan(msgspec.Struct, frozen=True):
    """One read: up to `counts` entries of each stream in it; `may_wait` allows it to block."""

    counts: Mapping[str, int]
    may_wait: bool

    def used_up(self, found: Mapping[str, int]) -> list[str]:
        """Return the streams of which so many entries came: they may have more."""
        return [name for name, count in found.items() if count >= self.counts[name]]


class ReadScheduler:
    """Shares the room for new entries among streams. Redis applies `count` to each stream by itself, so it is a share.

    After a read of all streams, those that may have more are read again by themselves. With less room than streams, as
    many streams as there is room for are read, round robin; only when all were found empty does one read block on all
    of them, and then one entry of each may come. The next read blocks again, unless more streams than there is room for
    still have entries. Used by one thread.
    """

    def __init__(self) -> None:
        self._with_more: list[str] = []
        self._reads_again = False
        self._still_with_more = 0
        self._position = 0
        self._empty_reads = 0

    def next_plan(self, most: Mapping[str, int], room: int) -> ReadPlan:
        """Return the next read of these streams (one or more), with `room` for one entry or more.

        `most`: of how many entries of each stream at most (one or more).
        """
        with_more = [name for name in self._with_more if name in most]
        busy, self._with_more = with_more[:room], with_more[room:]
        self._reads_again = 0 < len(busy) < len(most)
        if self._reads_again:
            return ReadPlan(_shared({name: most[name] for name in busy}, room), may_wait=False)
        if room >= len(most):
            return ReadPlan(_shared(most, room), may_wait=True)
        if self._still_with_more > room:
            self._still_with_more = self._empty_reads = 0
        if self._empty_reads >= len(most):
            return ReadPlan(dict.fromkeys(most, 1), may_wait=True)
        streams = list(most)
        at = self._position % len(streams)
        self._position = at + room
        return ReadPlan(dict.fromkeys([*streams[at:], *streams[:at]][:room], 1), may_wait=False)

    def on_read(self, plan: ReadPlan, counts: Mapping[str, int], *, may_repeat: bool = True) -> None:
        """Note how many entries a read returned, of each stream that had some.

        `may_repeat`: all streams of the plan were read, and there is room for an entry of each.
        """
        if plan.may_wait:
            self._with_more, self._still_with_more = plan.used_up(counts), 0
        if plan.may_wait and may_repeat:
            self._empty_reads = len(plan.counts)
        elif self._reads_again:
            self._still_with_more += len(plan.used_up(counts))
        else:
            self._empty_reads = 0 if counts else self._empty_reads + len(plan.counts)


def _shared(most: Mapping[str, int], room: int) -> dict[str, int]:
    share = room // len(most)
    return {name: min(count, share) for name, count in most.items()}
