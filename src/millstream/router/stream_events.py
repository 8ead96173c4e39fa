"""What a subscription hands out beside messages, and why it may end. No I/O."""

from dataclasses import dataclass
from typing import Literal

from millstream.errors import MillstreamError
from millstream.model import Message

Reason = Literal["trimmed", "recreated", "rewound"]
"""Why entries are missing."""

WhenFull = Literal["wait", "drop-oldest", "disconnect"]
"""What becomes of a subscriber that is slower than its stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Entries are missing between the message before this notice and the one after it.

    * `after`: the id up to which the subscription had got
    * `reason`: "trimmed": the oldest entries were removed before they were read; "recreated": the stream was deleted
      and made anew, and the subscription goes on from its new beginning; "rewound": Redis lost the end of the stream,
      as in a failover, and the subscription goes on from the end that it has now
    * `missed`: how many; None where nobody can know
    """

    stream: str
    after: str
    reason: Reason
    missed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """`count` messages were dropped here, since the subscriber was too slow and had asked for that."""

    stream: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The subscription, which was to begin at the stream's end, begins after the id `after`: resume there."""

    stream: str
    after: str


Item = Message | Gap | Dropped | Start
"""What a subscription hands out."""


class TooSlow(MillstreamError):
    """The subscriber's buffer was full, and it had asked to be disconnected then. Resume after the id `after`."""

    def __init__(self, stream: str, after: str) -> None:
        super().__init__(f"the subscriber of {stream} is too slow and was disconnected; resume after {after}")
        self.stream = stream
        self.after = after
