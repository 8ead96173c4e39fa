"""The router: one process follows 100,000 streams over a handful of connections ([docs/router.md])."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.groups.entries import BEGINNING, END
    from millstream.router.policy import PoolPolicy, ReadPolicy
    from millstream.router.router import Router, RouterFigures
    from millstream.router.stream_events import Dropped, Gap, Item, Start, TooSlow, WhenFull
    from millstream.router.subscription import Subscription
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.groups.entries": ("BEGINNING", "END"),
            "millstream.router.stream_events": ("Dropped", "Gap", "Item", "Start", "TooSlow", "WhenFull"),
            "millstream.router.policy": ("PoolPolicy", "ReadPolicy"),
            "millstream.router.router": ("Router", "RouterFigures"),
            "millstream.router.subscription": ("Subscription",),
        },
    )

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
