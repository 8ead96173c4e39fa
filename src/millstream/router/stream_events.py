"""Stream events: the items of a subscription beside messages, and the errors that may end it. No I/O."""

from dataclasses import dataclass
from typing import Literal

from millstream.errors import MillstreamError
from millstream.model import Message

Reason = Literal["trimmed", "recreated", "rewound"]
"""Why entries are missing."""

WhenFull = Literal["wait", "drop-oldest", "disconnect"]
"""How the router treats a subscriber that is slower than its stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Entries are missing between the message before this event and the one after it.

    * `after`: the last id the subscription had reached
    * `reason`: "trimmed": the oldest entries were removed before they were read; "recreated": the stream was deleted
      and created again, and the subscription continues from its new beginning; "rewound": Redis lost the end of the
      stream, as in a failover, and the subscription continues from the end it has now
    * `missed`: how many; None: unknown
    """

    stream: str
    after: str
    reason: Reason
    missed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """`count` messages were dropped here: the subscriber was too slow, and its policy is "drop-oldest"."""

    stream: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The subscription, made with `after=END`, starts after the id `after`: resume there."""

    stream: str
    after: str


Item = Message | Gap | Dropped | Start
"""An item of a subscription."""


class TooSlow(MillstreamError):
    """The subscriber's buffer was full, and its policy is "disconnect". Resume after the id `after`."""

    def __init__(self, stream: str, after: str) -> None:
        super().__init__(f"the subscriber of {stream} was too slow and is disconnected; resume after {after}")
        self.stream = stream
        self.after = after
