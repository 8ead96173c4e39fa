"""Handlers and stages as data, and single attempts of handlers: without I/O, except for `sql_inbox`."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.handlers.sql_inbox import Inbox
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.handlers.sql_inbox": ("Inbox",),
        },
    )

__all__ = ["Inbox"]
