"""Divides a limited batch among streams. No I/O."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping

MOST_CUT = 200
"""About how many streams give a part of what waits there: finding where such a part ends costs Redis commands."""


def divide(backlogs: Mapping[str, int], limit: int, last_served: str = "") -> dict[str, int]:
    """Return how many entries each stream may give to a batch of at most `limit`; backlogs are at least 1.

    Up to 200 streams give in proportion to their backlogs, and at least one entry each while the limit allows. More
    than that take turns, in alphabetical order after `last_served`: each gives all that it has, at most a 200th of the
    batch. If that leaves room when all have had their turn, those with more to give share it.
    """
    if sum(backlogs.values()) <= limit:
        return dict(backlogs)
    if len(backlogs) < min(limit, MOST_CUT + 1):
        return _in_proportion(backlogs, limit)
    most = _most_in_turn(limit)
    shares: dict[str, int] = {}
    for name in in_turn(backlogs, last_served):
        if not limit:
            return shares
        shares[name] = min(backlogs[name], most, limit)
        limit -= shares[name]
    rest = {name: backlogs[name] - share for name, share in shares.items() if backlogs[name] > share}
    return shares | {name: shares[name] + more for name, more in divide(rest, limit).items()}


def in_turn(names: Iterable[str], last_served: str) -> list[str]:
    """Return `names` in the order of their turns."""
    ordered = sorted(names)
    following = bisect_right(ordered, last_served)
    return ordered[following:] + ordered[:following]


def _most_in_turn(limit: int) -> int:
    return max(1, limit // MOST_CUT)


class FairFill:
    """Whether the first streams in turn fill a batch of `limit`, so that `divide` would give the others nothing.

    It does not end before `least` entries are known, and never without a limit.
    """

    def __init__(self, limit: int | None, least: int = 0) -> None:
        self._limit = limit
        self._least = least
        self._most = _most_in_turn(limit or 0)
        self._streams = self._known = self._shared = 0

    def add(self, backlog: int) -> None:
        """Count a stream with this many entries."""
        self._streams += 1
        self._known += backlog
        self._shared += min(backlog, self._most)

    @property
    def is_full(self) -> bool:
        """True if the others need not be looked at."""
        if self._limit is None or self._shared < self._limit:
            return False
        return self._streams > MOST_CUT and self._known > max(self._limit, self._least)


def _in_proportion(backlogs: Mapping[str, int], limit: int) -> dict[str, int]:
    total = sum(backlogs.values())
    names = sorted(backlogs)
    shares = {name: max(1, backlogs[name] * limit // total) for name in names}
    spare = limit - sum(shares.values())
    short = [name for name in names if shares[name] * total < backlogs[name] * limit]
    for name in sorted(short, key=lambda name: shares[name] * total - backlogs[name] * limit)[: max(spare, 0)]:
        shares[name] += 1  # what rounding left over, for those it took most from
    for name in sorted(names, key=lambda name: -shares[name]):
        if spare >= 0:
            break
        back = min(-spare, shares[name] - 1)  # the smallest shares were rounded up: the greatest pay for them
        shares[name] -= back
        spare += back
    return shares
