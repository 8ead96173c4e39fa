"""Divides a limited batch among streams. No I/O."""

from collections.abc import Mapping


def divide(backlogs: Mapping[str, int], limit: int, last_served: str = "") -> dict[str, int]:
    """Return how many entries each stream may give to a batch of at most `limit`.

    Proportional to the backlogs, all of them at least 1; every stream gets at least one while the limit allows. If
    there are more streams than that, those that follow `last_served` in alphabetical order have their turn.
    """
    names = sorted(backlogs)
    if len(names) >= limit:
        following = [name for name in names if name > last_served]
        return dict.fromkeys([*following, *names][:limit], 1)
    total = sum(backlogs.values())
    if total <= limit:
        return dict(backlogs)
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
