"""The router: one process follows 100,000 streams over a handful of connections ([docs/router.md])."""

from millstream.groups.entries import BEGINNING, END
from millstream.router.notices import Dropped, Gap, Item, Start, TooSlow, WhenFull
from millstream.router.policy import PoolPolicy, ReadPolicy
from millstream.router.router import Router, RouterFigures
from millstream.router.subscription import Subscription

__all__ = [
    "BEGINNING",
    "END",
    "Dropped",
    "Gap",
    "Item",
    "PoolPolicy",
    "ReadPolicy",
    "Router",
    "RouterFigures",
    "Start",
    "Subscription",
    "TooSlow",
    "WhenFull",
]
