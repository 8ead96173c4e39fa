"""Fair shares: divides limited batches among streams. No I/O."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping

MAX_PARTIAL_STREAMS = 200
"""About how many streams contribute only a part of their backlog: to find the end of the part costs Redis commands."""


def divide(backlogs: Mapping[str, int], limit: int, last_served: str = "") -> dict[str, int]:
    """Return each stream's share, in entries, of a batch of at most `limit`; backlogs are at least 1.

    The shares of up to 200 streams are in proportion to their backlogs, at least one entry each while the limit allows.
    More streams are served round robin, in alphabetical order after `last_served`: each with its whole backlog, at most
    a 200th of the batch. If all are served and the batch has room, those with a larger backlog share it.
    """
    if sum(backlogs.values()) <= limit:
        return dict(backlogs)
    if len(backlogs) < min(limit, MAX_PARTIAL_STREAMS + 1):
        return _in_proportion(backlogs, limit)
    largest = _largest_share(limit)
    shares: dict[str, int] = {}
    for name in round_robin(backlogs, last_served):
        if not limit:
            return shares
        shares[name] = min(backlogs[name], largest, limit)
        limit -= shares[name]
    rest = {name: backlogs[name] - share for name, share in shares.items() if backlogs[name] > share}
    return shares | {name: shares[name] + more for name, more in divide(rest, limit).items()}


def round_robin(names: Iterable[str], last_served: str) -> list[str]:
    """Return `names` in round-robin order: alphabetical, those after `last_served` first."""
    ordered = sorted(names)
    following = bisect_right(ordered, last_served)
    return ordered[following:] + ordered[:following]


class Rotation:
    """Divides one batch after the other, so that each of many streams is served before one is served again."""

    def __init__(self) -> None:
        self._last_served = ""

    def order(self, names: Iterable[str]) -> list[str]:
        """Return `names` in the order in which the next batch serves them."""
        return round_robin(names, self._last_served)

    def divide(self, backlogs: Mapping[str, int], limit: int, *, are_all: bool = True) -> dict[str, int]:
        """Return each stream's share of a batch, as `divide`. `are_all`: no other stream has a backlog."""
        shares = divide(backlogs, limit, self._last_served)
        self._last_served = "" if are_all and len(shares) == len(backlogs) else list(shares)[-1]
        return shares


def _largest_share(limit: int) -> int:
    return max(1, limit // MAX_PARTIAL_STREAMS)


class FairFill:
    """Decides whether the first streams in round-robin order fill a batch of `limit`, so that `divide` would skip the
    others.

    The batch is not full before `min_known` entries are known, and never without a limit.
    """

    def __init__(self, limit: int | None, min_known: int = 0) -> None:
        self._limit = limit
        self._min_known = min_known
        self._max_share = _largest_share(limit or 0)
        self._streams = self._known = self._share_total = 0

    def add(self, backlog: int) -> None:
        """Count a stream with `backlog` entries."""
        self._streams += 1
        self._known += backlog
        self._share_total += min(backlog, self._max_share)

    @property
    def is_full(self) -> bool:
        """True if the other streams would get no share."""
        if self._limit is None or self._share_total < self._limit:
            return False
        return self._streams > MAX_PARTIAL_STREAMS and self._known > max(self._limit, self._min_known)


def _in_proportion(backlogs: Mapping[str, int], limit: int) -> dict[str, int]:
    total = sum(backlogs.values())
    names = sorted(backlogs)
    shares = {name: max(1, backlogs[name] * limit // total) for name in names}
    spare = limit - sum(shares.values())
    short = [name for name in names if shares[name] * total < backlogs[name] * limit]
    for name in sorted(short, key=lambda name: shares[name] * total - backlogs[name] * limit)[: max(spare, 0)]:
        shares[name] += 1  # the remainder of rounding goes to those that lost most by it
    for name in sorted(names, key=lambda name: -shares[name]):
        if spare >= 0:
            break
        back = min(-spare, shares[name] - 1)  # the smallest shares were rounded up, at the expense of the greatest
        shares[name] -= back
        spare += back
    return shares
