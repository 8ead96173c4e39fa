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
    rest = limit - len(names)
    wanted = sum(backlogs.values()) - len(names)
    if wanted <= rest:
        return dict(backlogs)
    shares = {name: 1 + (backlogs[name] - 1) * rest // wanted for name in names}
    spare = limit - sum(shares.values())
    # What rounding left over goes to those it took most from.
    unlucky = sorted(names, key=lambda name: -((backlogs[name] - 1) * rest % wanted))
    for name in unlucky[:spare]:
        shares[name] += 1
    return shares
