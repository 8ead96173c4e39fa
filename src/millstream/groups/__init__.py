"""Consumer groups: every operation of Redis' groups, typed, and a reader that recovers from errors.

* `Group`: one group of one stream: create, set id, destroy, acknowledge, its consumers, its pending entries
* `Consumer`: reads new entries, and its own pending ones again, from one or several streams
* `Reader`: the loop around a consumer that survives lost connections, lost groups and lost streams
* `stream_info`, `stream_details`: the state of a stream, and of all its groups, consumers and pending entries
* `ProcessedIds`: the ids that a consumer has processed, stored on its own disk

After "Redis Streams: consumer groups v2" (S. Sanfilippo, 2018); `docs/consumer-groups.md` goes through it.
"""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.groups.consumer import Consumer
    from millstream.groups.entries import BEGINNING, END, Batch, Delivered
    from millstream.groups.events import EntriesGone, Event, GroupRecreated, Repeated, Resumed
    from millstream.groups.group import (
        ConsumerInfo,
        DeletedConsumer,
        Group,
        GroupInfo,
        consumers_of,
        delete_if_empty,
        groups_of,
    )
    from millstream.groups.pending import ClaimedIds, ClaimOptions, PendingEntry, PendingList, PendingSummary
    from millstream.groups.processed_ids import ProcessedIds
    from millstream.groups.reader import Reader, ReadPolicy
    from millstream.groups.stream import (
        ConsumerDetails,
        GroupDetails,
        HeldEntry,
        StreamDetails,
        StreamFigures,
        StreamInfo,
        stream_details,
        stream_info,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.groups.consumer": ("Consumer",),
            "millstream.groups.entries": ("BEGINNING", "END", "Batch", "Delivered"),
            "millstream.groups.events": ("EntriesGone", "Event", "GroupRecreated", "Repeated", "Resumed"),
            "millstream.groups.group": (
                "ConsumerInfo",
                "DeletedConsumer",
                "Group",
                "GroupInfo",
                "consumers_of",
                "delete_if_empty",
                "groups_of",
            ),
            "millstream.groups.pending": (
                "ClaimedIds",
                "ClaimOptions",
                "PendingEntry",
                "PendingList",
                "PendingSummary",
            ),
            "millstream.groups.processed_ids": ("ProcessedIds",),
            "millstream.groups.reader": ("Reader", "ReadPolicy"),
            "millstream.groups.stream": (
                "ConsumerDetails",
                "GroupDetails",
                "HeldEntry",
                "StreamDetails",
                "StreamFigures",
                "StreamInfo",
                "stream_details",
                "stream_info",
            ),
        },
    )

__all__ = [
    "BEGINNING",
    "END",
    "Batch",
    "ClaimOptions",
    "ClaimedIds",
    "Consumer",
    "ConsumerDetails",
    "ConsumerInfo",
    "DeletedConsumer",
    "Delivered",
    "EntriesGone",
    "Event",
    "Group",
    "GroupDetails",
    "GroupInfo",
    "GroupRecreated",
    "HeldEntry",
    "PendingEntry",
    "PendingList",
    "PendingSummary",
    "ProcessedIds",
    "ReadPolicy",
    "Reader",
    "Repeated",
    "Resumed",
    "StreamDetails",
    "StreamFigures",
    "StreamInfo",
    "consumers_of",
    "delete_if_empty",
    "groups_of",
    "stream_details",
    "stream_info",
]
