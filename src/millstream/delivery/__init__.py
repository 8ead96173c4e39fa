"""The protocol of reliable delivery: commits, pending entries, keyed queues, deferral, dead letters and delays."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.delivery.commit_store import CommitStore
    from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue
    from millstream.delivery.delayed_messages import DelayedMessages
    from millstream.delivery.keyed_stream import KeyedStream
    from millstream.delivery.reliable_stream import ReliableStream
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.delivery.commit_store": ("CommitStore",),
            "millstream.delivery.dead_letter_queue": (
                "DeadLetterFilter",
                "DeadLetterQueue",
            ),
            "millstream.delivery.delayed_messages": ("DelayedMessages",),
            "millstream.delivery.keyed_stream": ("KeyedStream",),
            "millstream.delivery.reliable_stream": ("ReliableStream",),
        },
    )

__all__ = ["CommitStore", "DeadLetterFilter", "DeadLetterQueue", "DelayedMessages", "KeyedStream", "ReliableStream"]
