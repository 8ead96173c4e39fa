"""millstream: Redis Streams processed reliably, in order per key, on workers and on Apache Spark."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.app import App, load_app
    from millstream.errors import MillstreamError, Reject
    from millstream.handlers.key_timers import After, Cancel
    from millstream.handlers.stage import Rows
    from millstream.model import Breaker, EntryId, Limit, Message, Retry, State
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.app": ("App", "load_app"),
            "millstream.errors": ("MillstreamError", "Reject"),
            "millstream.model": ("Breaker", "EntryId", "Limit", "Message", "Retry", "State"),
            "millstream.handlers.stage": ("Rows",),
            "millstream.handlers.key_timers": ("After", "Cancel"),
        },
    )

__all__ = [
    "After",
    "App",
    "Breaker",
    "Cancel",
    "EntryId",
    "Limit",
    "Message",
    "MillstreamError",
    "Reject",
    "Retry",
    "Rows",
    "State",
    "load_app",
]
__version__ = "0.1.0"
